"""The arguments and devices that an engine gets from the configuration, the memory that is planned for it, and what is
refused before a server starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest

from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import SamplingParams
from rl_rollout.local.plugin import local
from rl_rollout.vllm.engine_arguments import MAX_LORA_RANKS, engine_arguments, known_arguments
from rl_rollout.vllm.launch import cpu_environment
from rl_rollout.vllm.placement import shared_gpus
from rl_rollout.vllm.plugin import vllm
from rl_rollout.vllm.server import HTTPServer, ServerSettings
from rl_rollout.vllm.weights.stored_tensors import StoredTensor, require_matrix
from tests.rollout.vllm.servers import TOKENS, make_spec


def test_an_adapters_matrix_must_fit_its_layer():
    """The layer has 6 outputs and 4 inputs; the adapter has rank 2."""
    float32 = "float32"
    stored = {
        "model.q.weight": StoredTensor((6, 4), float32),
        "model.packed.weight": StoredTensor((6, 1), "U8"),
    }

    def require(name: str, *shape: int, dtype: str = "bfloat16") -> None:
        require_matrix(f"base_model.model.{name}.weight", StoredTensor(shape, dtype), stored, 2)

    require("model.q.lora_A", 2, 4)
    require("model.q.lora_B", 6, 2)
    require("model.packed.lora_B", 5, 2)
    require("model.unknown.lora_A", 2, 5)
    for name, shape in (("A", (1, 4)), ("A", (2, 3)), ("A", (4, 2)), ("B", (3, 2)), ("B", (12, 2)), ("B", (6, 1))):
        with pytest.raises(WeightSyncError, match=rf"lora_{name}\.weight has the shape \[\d+, \d\]; expected .*rank 2"):
            require(f"model.q.lora_{name}", *shape)
    with pytest.raises(WeightSyncError, match="has the dtype int8"):
        require("model.unknown.lora_A", 2, 5, dtype="int8")


def test_engine_arguments_come_from_the_configuration(tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, tensor_parallel_size=2, max_num_seqs=7)
    experts = make_spec(tmp_path, tmp_path, tensor_parallel_size=2, expert_parallel_size=2)
    on_gpus, on_cpus = (engine_arguments(spec, has_gpus=gpus) for gpus in (True, False))
    assert on_gpus["tensor_parallel_size"] == 2
    assert not on_gpus["enable_expert_parallel"]
    assert engine_arguments(experts, has_gpus=True)["enable_expert_parallel"]
    assert on_gpus["max_num_seqs"] == 7
    assert on_gpus["logprobs_mode"] == "processed_logprobs"
    assert on_gpus["enable_sleep_mode"]
    assert (on_gpus["enforce_eager"], on_cpus["enforce_eager"]) == (False, True)
    assert on_gpus.keys() <= known_arguments()
    assert on_cpus.keys() <= known_arguments()


def test_lora_slots_exist_only_for_adapters_sent_without_base_weights(tmp_path: Path):
    def arguments(**lora: object) -> dict[str, object]:
        chosen = engine_arguments(make_spec(tmp_path, tmp_path, lora=lora), has_gpus=False)
        names = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras")
        return {name: chosen[name] for name in names if name in chosen}

    alone = arguments(rank=9, merge_lora=False)
    assert alone.keys() <= known_arguments()
    assert list(alone.values()) == [True, 16, 1, 2, False]
    assert list(arguments(rank=1, merge_lora=False, max_loras=3, max_cpu_loras=5).values()) == [True, 1, 3, 6, False]
    assert arguments(rank=9) == {}


def test_the_allowed_adapter_ranks_are_those_of_vllm():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == MAX_LORA_RANKS


def test_experts_with_separate_adapters_are_refused_on_cpus(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    spec = make_spec(tmp_path, tmp_path, lora={"rank": 4, "merge_lora": False})
    with pytest.raises(ConfigError, match=r"merge_lora: got false, but on CPUs vLLM cannot compute a Mixture of"):
        engine_arguments(spec, has_gpus=False)
    assert engine_arguments(spec, has_gpus=True)["enable_lora"]


@pytest.mark.parametrize(
    ("lora", "engine", "message"),
    [
        ({"rank": 513}, {}, "rank: got 513, but vLLM serves adapters up to rank 512"),
        ({"rank": 4}, {"engine_init_kwargs": {"max_lora_rank": 8}}, r"set it with trainer\.policy\.model\.lora\.rank"),
    ],
)
def test_adapters_that_cannot_be_served_alone_are_refused_before_anything_starts(
    lora: dict[str, object], engine: dict[str, object], message: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        vllm.validate(make_spec(tmp_path, tmp_path, lora={**lora, "merge_lora": False}, **engine))


@pytest.mark.parametrize(
    "engine", [{"tensor_parallel_size": 2, "expert_parallel_size": 2}, {"pipeline_parallel_size": 2}]
)
def test_options_that_vllms_cpu_build_lacks_are_refused_on_cpus(engine: dict[str, object], tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, **engine)
    engine_arguments(spec, has_gpus=True)
    with pytest.raises(ConfigError, match="but on CPUs vLLM"):
        engine_arguments(spec, has_gpus=False)


def test_experts_are_not_split_over_data_parallel_engines_on_cpus(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    spec = make_spec(tmp_path, tmp_path, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"data_parallel_size: got 2, but on CPUs .* has experts: set it to 1"):
        engine_arguments(spec, has_gpus=False)
    assert engine_arguments(spec, has_gpus=True)["data_parallel_size"] == 2


@pytest.mark.parametrize(
    ("engine", "spans_nodes", "backend"),
    [
        ({}, False, None),
        ({"tensor_parallel_size": 2}, False, "mp"),
        ({"data_parallel_size": 2}, False, "mp"),
        ({"tensor_parallel_size": 2}, True, "ray"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, False, "ray"),
    ],
)
def test_an_engine_that_fits_one_machine_runs_its_ranks_as_processes(
    engine: dict[str, object], spans_nodes: bool, backend: str | None, tmp_path: Path
):
    arguments = engine_arguments(make_spec(tmp_path, tmp_path, **engine), has_gpus=True, spans_nodes=spans_nodes)
    assert arguments.get("distributed_executor_backend") == backend


def test_engines_fill_the_gpus_that_they_share_node_by_node():
    """Engines of 2 GPUs on a node with 8 and a node with 4: every GPU belongs to exactly one engine."""
    nodes = {"node:a": 8, "node:b": 4}
    places = [shared_gpus(nodes, index, 2) for index in range(6)]
    assert [(place.node, place.first) for place in places] == [
        ("node:a", 0),
        ("node:a", 2),
        ("node:a", 4),
        ("node:a", 6),
        ("node:b", 0),
        ("node:b", 2),
    ]
    with pytest.raises(ConfigError, match=r"engine 6 of 2 ranks has no GPUs left to share: nodes have \[8, 4\]"):
        shared_gpus(nodes, 6, 2)
    with pytest.raises(ConfigError, match="each engine must fit on one node"):
        shared_gpus(nodes, 0, 12)


def test_an_engine_sees_its_own_gpus_first_and_then_the_others():
    place = shared_gpus({"node:a": 4}, 1, 2)
    assert place.visible(None) == "2,3,0,1"
    assert place.visible("4,5,6,7") == "6,7,4,5"
    assert place.visible("GPU-a,GPU-b,GPU-c,GPU-d") == "GPU-c,GPU-d,GPU-a,GPU-b"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        place.visible("4,5")


def test_all_ranks_share_the_threads_of_their_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    assert cpu_environment(1)["OMP_NUM_THREADS"] == "8"
    assert cpu_environment(4)["OMP_NUM_THREADS"] == "2"
    assert cpu_environment(16)["OMP_NUM_THREADS"] == "1"


def test_a_plan_knows_that_gemma_ties_its_embeddings_by_default(tmp_path: Path):
    """Gemma's `config.json` has no `tie_word_embeddings`."""
    config = {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000}

    def weight_bytes(**fields: bool) -> list[int]:
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        spec = make_spec(tmp_path, tmp_path)
        return [plugin.plan(spec).weight_bytes for plugin in (vllm, local)]

    assert weight_bytes() == weight_bytes(tie_word_embeddings=True) < weight_bytes(tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"engine_init_kwargs": {"max_model_length": 3}}, "no such engine argument. Did you mean 'max_model_len'"),
        ({"engine_init_kwargs": {"dtype": "float32"}}, "set it with generator.inference_engine.model_dtype"),
        ({"engine_init_kwargs": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode: cannot be set, because training"),
        ({"engine_init_kwargs": {"generation_config": "auto"}}, "generation_config: cannot be set, because every req"),
        ({"engine_init_kwargs": {"override_generation_config": {"top_k": 3}}}, "because every request has its own"),
        ({"engine_init_kwargs": {"logits_processors": ["a:B"]}}, "another distribution than the one that is trained"),
        ({"engine_init_kwargs": {"watermark_config": {}}}, "another distribution than the one that is trained"),
        ({"expert_parallel_size": 3}, "expert_parallel_size: got 3.*set it to 1$"),
        ({"external_server_urls": ["10.0.0.7:8000"]}, "is not a URL"),
        ({"external_server_urls": ["http://:8000"]}, "is not a URL"),
        ({"external_server_urls": ["http://10.0.0.7:80000"]}, "is not a URL"),
        ({"external_server_urls": ["http://10.0.0.7:port"]}, "is not a URL"),
        ({"external_server_urls": ["http://a:1", "http://b:1"]}, "num_engines: got 1.*set it to 2"),
        ({"external_server_urls": ["http://a:1", "http://a:1/"]}, "external_server_urls: got http://a:1 twice"),
        ({"external_server_urls": []}, "external_server_urls: got no URL; list the servers, or set it to null"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(engine: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        vllm.validate(make_spec(tmp_path, tmp_path, **engine))


@pytest.mark.parametrize(
    ("name", "value"), [("speculative_config", {"method": "ngram"}), ("enable_batch_sharded_sampling", True)]
)
def test_truncated_samples_are_refused_where_vllm_does_not_return_what_it_kept(name: str, value: Any, tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, engine_init_kwargs={name: value})
    vllm.validate(spec)
    with pytest.raises(ConfigError, match=f"engine_init_kwargs.{name}: with it, vLLM 0.30 cannot return the tokens"):
        vllm.validate(attrs.evolve(spec, return_kept_tokens=True))


def test_a_temperature_that_vllm_would_raise_is_refused(tmp_path: Path):
    from vllm.sampling_params import SamplingParams as EngineSamplingParams

    spec = make_spec(tmp_path, tmp_path)
    low = SamplingParams(temperature=0.009)
    assert EngineSamplingParams(temperature=0.009).temperature == 0.01
    for temperature in (0.0, 0.01):
        assert EngineSamplingParams(temperature=temperature).temperature == temperature
        vllm.validate(attrs.evolve(spec, eval_sampling=SamplingParams(temperature=temperature)))
    for change, key in (({"sampling": low}, "sampling_params"), ({"eval_sampling": low}, "eval_sampling_params")):
        with pytest.raises(
            ConfigError, match=rf"generator.{key}.temperature: got 0.009, but vLLM 0.30 samples at 0.01"
        ):
            vllm.validate(attrs.evolve(spec, **change))


def test_a_package_that_adds_a_logits_processor_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vllm.validate(make_spec(tmp_path, tmp_path))
    package = tmp_path / "chatty-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[vllm.logits_processors]\nlonger = chatty:Longer\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the installed package chatty adds the logits processor 'longer'"):
        vllm.validate(make_spec(tmp_path, tmp_path))


def test_a_router_port_that_is_not_a_port_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"router_port: got 65536; expected between 0 and 65535"):
        make_spec(tmp_path, tmp_path, router_port=65536)


async def test_an_address_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("RL_ROLLOUT_SERVER", "VLLM_RPC_BASE_PATH"):  # `load` sets them for the engine's processes
        monkeypatch.setenv(name, "")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        server = HTTPServer(ServerSettings(engine_args={}, host="127.0.0.1", port=port, tokens=TOKENS, log_path=""))
        with pytest.raises(ConfigError, match=rf"the server cannot listen at 127\.0\.0\.1:{port}: .*already in use"):
            await server.load()
        await server.stop()
