"""The dry run and `rl config` refuse what a run would fail on later. Commands that play prompts without training
(`rl eval`, `rl generate`) ignore mistakes in keys that only training reads.
"""

from __future__ import annotations

import json
import re
import shutil
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core import hub
from rl_core.cli import main
from rl_core.config import Config, load
from rl_core.errors import RLError
from rl_core.trainer.before.preflight import preflight, prepare, prepare_playing

BuildConfig = Callable[..., Config]


def refused(check: Callable[[], object]) -> str:
    with pytest.raises(RLError) as raised:
        check()
    return str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer__seed": 2**63}, "trainer.seed: got 9223372036854775808; expected at most 9223372036854775807"),
        (
            {"generator__sampling_params__max_generate_length": 64},
            "generator.sampling_params.max_generate_length: got 64, but .*model takes 64 tokens, including the prompt",
        ),
        (
            {"generator__eval_sampling_params__max_generate_length": 100},
            "generator.eval_sampling_params.max_generate_length: got 100, but .* set it to at most 63",
        ),
        (
            {"generator__inference_engine__weight_sync_backend": "cuda_ipc"},
            "generator.inference_engine.weight_sync_backend: cuda_ipc shares memory of NVIDIA GPUs, but .*",
        ),
        (
            {"trainer__max_prompt_length": 1},
            r":\d+: the prompt has 6 tokens; trainer.max_prompt_length is 1",
        ),
        (
            {"trainer__max_prompt_length": 1, "data__on_long_prompt": "drop"},
            "all .* rows have too long a prompt or response: trainer.max_prompt_length is 1",
        ),
        (
            {"trainer__algorithm__policy_loss_params": {"eps_clip_low": "abc"}},
            "^trainer.algorithm.policy_loss_type: 'regular': eps_clip_low: 'abc' is not a number between 0 and 1$",
        ),
        (
            {
                "trainer__algorithm__advantage_estimator": "pass_at_k",
                "trainer__algorithm__advantage_params": {"k": 0},
            },
            "^trainer.algorithm.advantage_estimator: 'pass_at_k': k: 0 is not a positive number of samples$",
        ),
        (
            {
                "trainer__algorithm__advantage_estimator": "pass_at_k",
                "trainer__algorithm__advantage_params": {"k": "two"},
            },
            "^trainer.algorithm.advantage_estimator: 'pass_at_k' failed on made-up groups: TypeError",
        ),
        ({"environment__env_class": "gsm8k"}, r"train\.parquet:1: a gsm8k row needs reward_spec.ground_truth"),
        ({"environment__env_class": "guess"}, r"train\.parquet:1: a guess row needs a number"),
        (
            {"environment__env_class": "gsm8k_turns", "environment__options": {"max_trys": 2}},
            r"environment\.options\.max_trys: not an option of the environment 'gsm8k_turns'",
        ),
        (
            {
                "environment__env_class": "reward_functions",
                "environment__reward_functions": ("tests.rollout.test_reward_functions:needy",),
            },
            r"train\.parquet:1: the reward function needy needs 'anser'; the row has .* Did you mean 'answer'",
        ),
        (
            {"environment__env_class": "tests.environments.test_trying:NeedsAnInstance"},
            r":NeedsAnInstance': its require_row\(self, row\) cannot be called as require_row\(row\): ",
        ),
        (
            {"environment__env_class": "tests.rollout.forcing_environments:Forces"},
            "generator.inference_engine.backend: got 'local', which accepts no grammars, but the environment "
            "'tests.rollout.forcing_environments:Forces' forces some responses by a grammar .*such as vllm",
        ),
        ({"trainer__policy__fsdp_config__fsdp_size": 3}, r"trainer\.policy\.fsdp_config\.fsdp_size: "),
        (
            {"generator__inference_engine__engine_init_kwargs": {"attn_implementatoin": "eager"}},
            "Did you mean 'attn_imp",
        ),
        (
            {"trainer__policy__optimizer_config__lr": 1e9},
            "trainer.policy.optimizer_config.lr: got 1000000000.0; expected at most 10",
        ),
        (
            {"generator__n_samples_per_prompt": 2**31},
            "generator.n_samples_per_prompt: got 2147483648",
        ),
    ],
    ids=lambda value: next(iter(value)).removeprefix("trainer__") if isinstance(value, dict) else "",
)
def test_the_dry_run_refuses_what_a_run_would_fail_on(
    overrides: dict[str, Any], message: str, small_run: BuildConfig, tmp_path: Path
):
    assert re.search(message, refused(lambda: preflight(small_run(tmp_path / "run", **overrides))))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_sequences_that_would_change_the_rotary_frequencies_of_others_are_refused(
    num_sequences: int, small_run: BuildConfig, tmp_path: Path
):
    path = Path(small_run(tmp_path / "run").trainer.policy.model.path)
    model = Path(shutil.copytree(path, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    factors = [1.0] * (config["head_dim"] // 2)
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 5}
    config["rope_parameters"] = {**scaling, "short_factor": factors, "long_factor": factors}
    (model / "config.json").write_text(json.dumps(config))
    small = small_run(
        tmp_path / "run",
        trainer__policy__model__path=str(model),
        trainer__max_tokens_per_microbatch=-1,
        trainer__micro_train_batch_size_per_gpu=num_sequences,
        trainer__micro_forward_batch_size_per_gpu=1,
    )
    if num_sequences == 1:
        preflight(small)
    else:
        said = refused(lambda: preflight(small))
        assert re.search(r"policy\.model\.path: .* a sequence of more than 5 tokens changes the rotary", said)


def rows_of(path: Path, **columns: Any) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], **columns} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_row_of_another_library_is_read_with_its_own_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ours, theirs = ({"ground_truth": "3"}, {"style": "rule", "ground_truth": "3"})
    for columns in ({"reward_spec": ours}, {"reward_model": theirs}):
        file = rows_of(tmp_path / "rows.jsonl", **columns)
        preflight(load("gsm8k", [f"data.train_data=[{file}]", "data.val_data=[]"], tiny=True))
    file = rows_of(tmp_path / "rows.jsonl", solution="3")
    said = refused(lambda: preflight(load("gsm8k", [f"data.train_data=[{file}]"], tiny=True)))
    assert said.startswith(f"{file}:1: a gsm8k row needs reward_spec.ground_truth, a number; got reward_spec=None")
    assert "(the row has prompt, solution). data.on_refused_row=drop leaves out" in said


def nothing(config: Config) -> None: ...


def test_a_recipe_does_not_silently_override_the_rows_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    file = rows_of(tmp_path / "rows.jsonl", reward_spec={"ground_truth": "3"}, env_class="arithmetic", answer="3")
    data = [f"data.train_data=[{file}]", "data.val_data=[]"]
    said = refused(lambda: preflight(load("gsm8k", data, tiny=True)))
    assert said.startswith(
        "environment.env_class: 'gsm8k' applies to all rows, but 8 of 8 rows name another environment"
    )
    assert "write environment.env_class=null to play each row's own environment, or environment.env_class=gsm8k" in said
    assert not caplog.records
    chosen = load("gsm8k", [*data, "environment.env_class=gsm8k"], tiny=True)
    preflight(chosen)
    assert "8 of 8 rows name another environment" in caplog.text
    # A run checks the rows again after the recipe has created what is missing, but warns only once.
    assert chosen.recipe is not None
    makes_nothing = attrs.evolve(chosen, recipe=attrs.evolve(chosen.recipe, prepare=f"{__name__}:nothing"))
    refused(lambda: prepare(makes_nothing))
    assert caplog.text.count("name another environment") == 1


def makes_held_out_rows(config: Config) -> None:
    rows_of(Path("made.jsonl"), reward_spec={"ground_truth": "3"}, env_class="arithmetic")


def test_the_check_after_a_recipe_warns_only_of_rows_that_the_recipe_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    file = rows_of(tmp_path / "rows.jsonl", reward_spec={"ground_truth": "3"}, env_class="arithmetic")
    data = [f"data.train_data=[{file}]", "data.val_data=[made.jsonl]", "environment.env_class=gsm8k"]
    loaded = load("gsm8k", data, tiny=True)
    assert loaded.recipe is not None
    recipe = attrs.evolve(loaded.recipe, prepare=f"{__name__}:makes_held_out_rows")
    run = attrs.evolve(loaded, recipe=recipe, makes=loaded.makes | {"made.jsonl"})
    preflight(run)
    refused(lambda: prepare(run))
    said = [record.getMessage() for record in caplog.records if "name another environment" in record.getMessage()]
    assert [line.rpartition("first ")[2].partition(";")[0] for line in said] == [
        f"'arithmetic' ({place}:1)" for place in (file, "made.jsonl")
    ]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.train_batch_size=0",
        "trainer.policy_mini_batch_size=7",
        "trainer.epochs=0",
        "trainer.policy.optimizer_config.lr=-1",
        "trainer.max_tokens_per_microbatch=1",
        "trainer.algorithm.eps_clip_low=7",
        "generator.sampling_params.temperature=0",
        "generator.inference_engine.weight_verification.num_tokens=1",
        "generator.inference_engine.weight_verification.num_tokens=2000000",
        "generator.inference_engine.weight_verification.limit=0",
        "generator.inference_engine.weight_verification.limit=1",
    ],
)
def test_playing_ignores_errors_in_keys_that_only_training_uses(
    override: str, small_run: BuildConfig, tmp_path: Path, start: Path
):
    config = write_config(small_run(tmp_path / "run"), tmp_path)
    refused(lambda: preflight(load(config, [override])))
    prepare_playing(load(config, [override]), reads="data.val_data")


@pytest.mark.parametrize("override", ["generator.eval_sampling_params.top_p=2", "trainer.eval_batch_size=0"])
def test_playing_refuses_errors_in_keys_that_it_uses(override: str, small_run: BuildConfig, tmp_path: Path):
    config = write_config(small_run(tmp_path / "run"), tmp_path)
    assert override.partition("=")[0] in refused(
        lambda: prepare_playing(load(config, [override]), reads="data.val_data")
    )


def write_config(config: Config, folder: Path) -> str:
    from rl_core.config import dump_yaml

    (folder / "config.yaml").write_text(dump_yaml(config))
    return str(folder / "config.yaml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.algorithm.policy_loss_params.foo=1", "foo"),
        ("trainer.algorithm.advantage_params.foo=1", "foo"),
        ("trainer.algorithm.clip_ratio_low=0.1", "use trainer.algorithm.eps_clip_low "),
        ("trainer.algorithm.clip_ratio_high=0.3", "use trainer.algorithm.eps_clip_high "),
        ("generator.run_engines_locally=false", "the run starts the engines"),
        ("trainer.total_epochs=2", "use trainer.epochs "),
        ("data.train_files=a.parquet", "use data.train_data "),
    ],
)
def test_rl_config_refuses_unknown_settings_and_names_the_successors_of_old_keys(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", [*sys.path])  # `main` adds to it
    with pytest.raises(SystemExit) as ended:
        main(["config", "quickstart", given])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


@pytest.fixture
def broken_hub() -> Iterator[tuple[str, list[Any]]]:
    """The address of a hub that hangs up on every connection, and the connections so far."""
    connections: list[Any] = []

    class HangsUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connections.append(self.client_address)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangsUp) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", connections
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_offline", [False, True])
def test_an_unreachable_hub_is_asked_at_most_once(
    is_offline: bool,
    broken_hub: tuple[str, list[Any]],
    small_run: BuildConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Without our check, transformers would retry for 45 s."""
    address, connections = broken_hub
    monkeypatch.setattr(hub, "TIMEOUT_S", 100.0)  # the hub hangs up at once, but a busy machine may pause it
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(is_offline)))
    monkeypatch.setenv("HF_ENDPOINT", address)
    said = refused(lambda: preflight(small_run(tmp_path / "run", trainer__policy__model__path="some/mistyped-name")))
    assert len(connections) == (0 if is_offline else 1)
    assert said.startswith("trainer.policy.model.path: some/mistyped-name: there is no such directory")
    assert said.endswith("Is the name spelled correctly?")


def test_environments_named_by_rows_may_force_responses_only_if_the_engine_accepts_grammars(
    small_run: BuildConfig, tmp_path: Path
):
    forcing = "tests.rollout.forcing_environments:Forces"
    rows = rows_of(tmp_path / "rows.jsonl", prompt="1+2=", env_class=forcing)
    changes = {"environment__env_class": None, "data__train_data": [rows]}
    said = refused(lambda: preflight(small_run(tmp_path / "run", **changes)))
    assert f"got 'local', which accepts no grammars, but the environment '{forcing}'" in said
    engine = {"generator__inference_engine__backend": "vllm"}
    preflight(small_run(tmp_path / "run", **changes, **engine))
