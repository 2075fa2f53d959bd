"""The local engine passes the conformance suite of engines."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_rollout.local.engine import LocalEngine
from rl_rollout.transports.files import files
from rl_transformers.testing.inference import InferenceClientConformance


class TestLocalEngine(InferenceClientConformance):
    transport = files
    returns_kept_tokens = True

    async def create_client(self, model_path):
        return await start(model_path, max_num_seqs=64)


class TestLocalEngineWithFewRows(InferenceClientConformance):
    """With few rows, most requests wait and join in the middle of other responses."""

    transport = files
    returns_kept_tokens = True

    async def create_client(self, model_path):
        return await start(model_path, max_num_seqs=3)


async def start(path, *, max_num_seqs):
    def load():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(path)

    return await LocalEngine.start(
        load, max_num_seqs=max_num_seqs, timeout_s=250, num_threads=1, return_kept_tokens=True
    )
