"""A server whose model encodes images computes them again after a weight update."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rl_core.rank_kit.weight_buckets import pack_buckets
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.receivers import installed_receivers
from rl_rollout.vllm.engine_arguments import WORKER_EXTENSION
from rl_rollout.vllm.served_engine import ServedEngine
from rl_transformers.testing.models import character_tokenizer
from tests.rollout.vllm.servers import weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_image_model(directory: Path) -> Any:
    """Writes a random BLIP-2, whose processor needs no torchvision; returns the model."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, BlipImageProcessorPil

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "bos_token": "<eos>"})
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "opt", "vocab_size": len(tokenizer), "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 256, "word_embed_proj_dim": 64, **ends}
    config = Blip2Config(
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        qformer_config={**sizes, "encoder_hidden_size": 64, "vocab_size": 8},
        text_config=text,
        num_query_tokens=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Blip2ForConditionalGeneration(config)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    model.save_pretrained(directory)
    processor = BlipImageProcessorPil(size={"height": 28, "width": 28})
    Blip2Processor(image_processor=processor, tokenizer=tokenizer, num_query_tokens=4).save_pretrained(directory)
    return model


async def _publish(served: ServedEngine, tensors: Mapping[str, Tensor], version: int) -> None:
    transport = FilesTransport()
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    try:
        transport.sender(rendezvous, 0, 1).send(pack_buckets(tensors.items(), 1 << 16), version)
        await served.pause("keep")
        await served.update_weights(rendezvous, version, timeout_s=60.0)
        await served.resume()
    finally:
        transport.close(rendezvous)


async def _serve(directory: str) -> list[float]:
    """Log-probs of the same request with an image, after each of three weight versions."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = write_image_model(Path(directory))
    arguments = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 * 2**20}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=directory, dtype="float32", worker_extension_cls=WORKER_EXTENSION, **arguments)
    )
    served = ServedEngine(engine, None, receivers=installed_receivers())
    image = Image.new("RGB", (28, 28), (200, 30, 90))
    before = weights_of(model)
    changed = {k: v * 1.5 if k.startswith("vision_model.") else v for k, v in before.items()}
    found = []
    try:
        for version, tensors in enumerate((before, changed, before), start=1):
            await _publish(served, tensors, version)
            prompt: Any = {"prompt": "1+2=", "multi_modal_data": {"image": image}}
            params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
            async for output in engine.generate(prompt, params, request_id=str(version)):
                total = output.outputs[0].cumulative_logprob
            found.append(total)
    finally:
        engine.shutdown()
    return found


def test_images_are_encoded_with_the_new_weights_after_an_update(tmp_path: Path):
    """With caches emptied in the workers alone, the request after the second version ended the engine."""
    run = [
        sys.executable,
        "-m",
        "tests.rollout.vllm.test_encoder_caches",
        str(tmp_path / "model"),
        str(tmp_path / "found"),
    ]
    subprocess.run(run, check=True, timeout=600, cwd=Path(__file__).parents[3])
    first, second, third = json.loads((tmp_path / "found").read_text())
    assert abs(first - second) > 1e-2
    assert third == pytest.approx(first, abs=1e-4)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(_serve(sys.argv[1]))))
