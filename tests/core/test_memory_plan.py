"""Device and host memory of each phase, compared with numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.config import Config, from_mapping
from rl_core.errors import ConfigError
from rl_core.interfaces import EnginePlan, RankPlan
from rl_core.rank_kit.model_files import MAX_FILE_BYTES
from rl_core.trainer.before.memory_plan import PROCESS_BYTES, ModelOnRanks, Peak, peaks, require_room, serving
from rl_core.trainer.before.planned_run import arranged_models, longest_sequence
from tests.core.fake_plugins import install_backend

BUCKETS = 2 * 1000
ENGINE = EnginePlan(
    num_devices=1,
    weight_bytes=200,
    kv_bytes_per_token=2.0,
    computing_bytes=50,
    asleep_bytes=7,
    asleep_host_bytes=200,
    memory_share=0.5,
    can_sleep=True,
)


def rank(number: int = 0, **changes: Any) -> RankPlan:
    sizes = {"parameter_bytes": 10, "gradient_bytes": 20, "optimizer_bytes": 40, "activation_bytes": 80}
    return RankPlan(
        rank=number,
        data_part=number,
        layers=(0,),
        experts=(),
        place="",
        num_parameters=1,
        **{**sizes, "gathered_bytes": 3, "export_bytes": 5, **changes},
    )


def policy(*, keeps_optimizer: bool = False, **changes: Any) -> ModelOnRanks:
    ranks = (rank(0, **changes), rank(1, **{**changes, "activation_bytes": 81}))
    return ModelOnRanks(role="policy", ranks=ranks, ranks_per_node=2, keeps_optimizer=keeps_optimizer)


def config_of(**overrides: Any) -> Config:
    values = {
        "trainer.policy.model.path": "model",
        "generator.inference_engine.weight_bucket_bytes": 1000,
        "generator.inference_engine.max_num_seqs": 4,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return from_mapping(values)


def by_phase(found: tuple[Peak, ...]) -> dict[str, Peak]:
    return {peak.phase: peak for peak in found}


def test_engine_and_policy_take_turns_on_shared_devices():
    found = by_phase(peaks(config_of(), [policy()], ENGINE, context=10, device_bytes=10_000))
    processes = 2 * PROCESS_BYTES
    # 81: activations of the fuller rank. The sleeping engine keeps 7 on the device, and 200 per device on the host.
    assert found["train policy"].device_bytes == 10 + 20 + 40 + 81 + 3 + 7 + processes
    assert found["train policy"].host_bytes == 2 * 200
    assert found["step policy"].device_bytes == 10 + 20 + 40 + 7 + processes
    # During a sync the optimizer is on the host, and the engine's weights are on the device.
    assert found["sync"].device_bytes == 10 + 20 + 5 + BUCKETS + 200 + 7 + processes
    assert found["sync"].host_bytes == 2 * (40 + 200)
    # The engine takes its half of the device, even if its KV cache needs less.
    assert found["generate"].device_bytes == 5_000 + processes
    assert found["generate"].host_bytes == 2 * (10 + 40)
    assert found["save policy"].device_bytes == 10 + 20 + 40 + 5 + 2 * MAX_FILE_BYTES + 7 + processes


def test_a_sleeping_engine_uses_host_memory_even_if_it_keeps_nothing_on_the_device():
    engine = attrs.evolve(ENGINE, asleep_bytes=0)
    found = by_phase(peaks(config_of(), [policy()], engine, context=10, device_bytes=10_000))
    assert found["train policy"].host_bytes == 2 * 200
    assert found["generate"].host_bytes == 2 * (10 + 40)


def test_on_separate_devices_nothing_is_offloaded():
    config = config_of(trainer__placement__colocate_all=False)
    found = peaks(config, [policy()], ENGINE, context=10)
    train, sync = (
        next(p for p in found if p.phase == name and p.devices == "policy") for name in ("train policy", "sync")
    )
    assert train.device_bytes == 10 + 20 + 40 + 81 + 3
    assert sync.device_bytes == 10 + 20 + 40 + 5 + BUCKETS, "the optimizer's state stays on the device"
    assert train.host_bytes == sync.host_bytes == 0
    generate = next(p for p in found if p.phase == "generate")
    assert (generate.devices, generate.device_bytes) == ("engine", 200 + 50 + 4 * 10 * 2)


def test_the_engine_of_an_asynchronous_run_uses_device_memory_during_training():
    asynchronous = config_of(trainer__max_staleness=1)
    found = by_phase(peaks(asynchronous, [policy()], ENGINE, context=10, device_bytes=10_000))
    assert found["train policy"].device_bytes == 10 + 20 + 40 + 81 + 3 + 5_000 + 2 * PROCESS_BYTES
    assert "generate" not in found


def test_offloaded_and_freed_tensors_use_no_device_memory():
    on_host = policy(on_host=("parameters", "gradients", "optimizer"), frees_gradients=True)
    found = by_phase(peaks(config_of(), [on_host], None, context=10))
    assert found["train policy"].device_bytes == 81 + 3
    assert found["train policy"].host_bytes == 2 * (10 + 20 + 40)
    freed = by_phase(peaks(config_of(), [policy(frees_gradients=True)], None, context=10))
    assert "gradients" in freed["train policy"].parts
    assert "gradients" not in freed["sync"].parts


def test_an_optimizer_that_is_not_offloaded_uses_device_memory_during_generation():
    found = by_phase(peaks(config_of(), [policy(keeps_optimizer=True)], ENGINE, context=10, device_bytes=10_000))
    assert found["generate"].device_bytes == 5_000 + 40 + 2 * PROCESS_BYTES
    assert found["generate"].host_bytes == 2 * 10


def test_a_reference_on_the_same_devices_waits_in_host_memory():
    reference = ModelOnRanks(
        role="reference",
        ranks=(rank(0, gradient_bytes=0, optimizer_bytes=0), rank(1, gradient_bytes=0, optimizer_bytes=0)),
        ranks_per_node=2,
        keeps_optimizer=False,
    )
    found = by_phase(peaks(config_of(), [policy(), reference], None, context=10))
    assert found["train policy"].host_bytes == 2 * 10
    assert found["score reference"].device_bytes == 10 + 80 + 3
    assert found["score reference"].host_bytes == 2 * (10 + 40)
    apart = config_of(trainer__placement__colocate_policy_ref=False)
    assert by_phase(peaks(apart, [policy(), reference], None, context=10))["train policy"].host_bytes == 0


def test_the_longest_sequence_includes_the_prompts_of_later_turns():
    lengths = {"trainer__max_prompt_length": 500, "generator__sampling_params__max_generate_length": 100}
    assert longest_sequence(config_of(**lengths)) == 600
    later = lengths | {"generator__max_input_length": 900}
    assert longest_sequence(config_of(**later)) == 600
    assert longest_sequence(config_of(**later, generator__max_turns=3)) == 1000


def test_a_background_save_copies_the_state_on_the_host():
    plain, copied = (
        by_phase(peaks(config_of(trainer__async_save=saves), [policy()], None, context=10))["save policy"].host_bytes
        for saves in (False, True)
    )
    assert copied - plain == 2 * (10 + 40)


def test_the_kv_cache_gets_the_rest_of_the_engines_share():
    room = serving(ENGINE, config_of(), 10, 600)
    assert (room.tokens, room.sequences) == ((300 - 200 - 50) // 2, 2)
    assert serving(ENGINE, config_of(), 10, 10_000).tokens == 4 * 10, "no more than the engine can ever process at once"


def test_phases_and_kv_caches_that_do_not_fit_are_named():
    found = peaks(config_of(), [policy()], None, context=10)
    require_room(found, device_bytes=2**40, host_bytes=2**40)
    with pytest.raises(
        ConfigError, match=r"save policy \(policy\) needs 4\.0 GiB, .* 1\.0 GiB, and the largest part is buckets"
    ):
        require_room(found, device_bytes=2**30, host_bytes=None)
    with pytest.raises(ConfigError, match=r"a machine has 1\.0 GiB"):
        require_room(found, device_bytes=None, host_bytes=2**30)
    with pytest.raises(ConfigError, match="room for the keys and values of 25 tokens, but a sequence may have 100"):
        require_room(found, device_bytes=None, host_bytes=None, served=serving(ENGINE, config_of(), 100, 600))


def test_the_error_for_a_backend_that_is_no_planner_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_backend(tmp_path, monkeypatch, "toy")
    with pytest.raises(ConfigError, match=r"cannot plan the memory .*\.strategy=fsdp, .* define the backend's plan"):
        arranged_models(config_of(trainer__strategy="toy"))
