"""Runs that must learn, and controls that must not: `make learn`, or a single case with `make learn CASE=lora`.

Every case runs a recipe as a user does, usually the quick start, with changed settings. The results go into
docs/learning.jsonl, from which docs/learning.md is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
import yaml

from rl_core.reports.jsonl import read_rows
from tests import rule_judge
from tests.installing import installed_in
from tests.learn.page import Result, record
from tests.workspace.imports import ROOT

pytestmark = pytest.mark.learn


@attrs.frozen(kw_only=True)
class Case:
    """A run on two CPU cores, and the limits for its results."""

    name: str
    says: str
    """What the case shows, as the page prints it."""
    overrides: tuple[str, ...] = ()
    seed: int = 0
    at_least: float = 0.0
    """The lowest allowed value of `measure` after the last step."""
    below: float = 1.01
    """An upper bound for `measure` after the last step, for a control that must not learn."""
    starts_below: float = 0.35
    """The highest allowed value of `measure` before training: a better start leaves too little to learn."""
    max_rl_seconds: float = 600.0
    """The limit for steps and evaluations together; generous, because other programs may use the cores."""
    recipe: str = "quickstart"
    measure: str = "eval/accuracy"
    """The metric that is recorded and compared; from 0 to 1."""
    exports_every: int | None = None
    """Steps between exports, for a run that samples nothing itself; `rl eval quickstart` then evaluates each export."""
    installs_backend: bool = False
    """Whether to install the backend of `tests/third_party_backend` for the case."""
    max_logprob_diff: float | None = None
    """The largest allowed difference, in nats, between engine and trainer log-probs in any step. Only tokens that were
    sampled with the trainer's current weights are compared.
    """


TP2_PP2 = (
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.policy.megatron_config.tensor_model_parallel_size=2",
    "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
)
ONE_VLLM_SERVER = ("generator.inference_engine.backend=vllm", "generator.inference_engine.num_engines=1")
PERMUTED_REWARDS = "trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages"
DEPTHS_AND_BOUNDS = ((0, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4), (8, 8))
SECONDS_OF_SMALL_RECIPES = {"code": 1800.0}  # 6,000 programs, each run in the sandbox for four tests
CASES = (
    *(
        Case(name=f"quickstart_seed{seed}", says="the quick start", seed=seed, at_least=0.85, max_rl_seconds=240.0)
        for seed in (0, 1, 2)
    ),
    Case(
        name="sft",
        says="supervised fine-tuning from nothing",
        recipe="sft",
        exports_every=150,
        at_least=0.9,
    ),
    Case(
        name="sft_control",
        says="`sft` with the answers of other problems: must not learn",
        recipe="sft",
        overrides=("data.train_data=[runs/arithmetic/shuffled_answers.parquet]",),
        exports_every=300,
        below=0.1,
    ),
    Case(
        name="dpo",
        says="DPO: right sums are preferred to sums with a wrong digit",
        recipe="dpo",
        measure="eval/pair_accuracy",
        at_least=0.65,
    ),
    Case(
        name="dpo_control",
        says="`dpo` with random preferences: must not learn",
        recipe="dpo",
        overrides=("data.train_data=[runs/arithmetic/random_pairs.parquet]",),
        measure="eval/pair_accuracy",
        below=0.6,
    ),
    Case(
        name="sft_grpo",
        says="supervised fine-tuning, then GRPO",
        recipe="sft_grpo",
        starts_below=0.5,
        at_least=0.75,
    ),
    Case(
        name="control",
        says="rewards given to another prompt's samples: must not learn",
        overrides=(PERMUTED_REWARDS,),
        below=0.5,
    ),
    *(
        Case(
            name=name,
            says=says,
            overrides=("trainer.placement.policy_num_gpus_per_node=2", *overrides),
            at_least=0.85,
        )
        for name, says, overrides in (
            ("fsdp_2_ranks", "FSDP2 on two Ray ranks", ()),
            ("fsdp1_2_ranks", "FSDP1 on two Ray ranks", ("trainer.strategy=fsdp1",)),
            (
                "ulysses_2_ranks",
                "two Ray ranks that split every sequence",
                ("trainer.policy.sequence_parallel_size=2",),
            ),
        )
    ),
    Case(
        name="muon",
        says="Muon for hidden matrices, AdamW for everything else, at the learning rate of AdamW",
        overrides=("trainer.policy.optimizer_config.name=muon",),
        at_least=0.85,
        max_rl_seconds=1200.0,  # measured 664 s while other programs used the two cores
    ),
    Case(
        name="zero3_2_ranks",
        says="DeepSpeed's ZeRO-3 on two Ray ranks",
        overrides=("trainer.placement.policy_num_gpus_per_node=2", "trainer.strategy=deepspeed"),
        at_least=0.85,
        max_rl_seconds=1200.0,  # hooks in Python gather and free every layer
    ),
    Case(
        name="third_party_2_ranks",
        says="a backend of another package (`tests/third_party_backend`) on two Ray ranks",
        overrides=(
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.strategy=plain_ddp",
            "trainer.use_sample_packing=false",
            "trainer.policy.optimizer_config.scheduler=constant_with_warmup",
        ),
        at_least=0.85,
        installs_backend=True,
    ),
    *(
        Case(name=recipe, says=says, recipe=recipe, at_least=at_least)
        for recipe, says, at_least in (
            ("dapo", "DAPO: dynamic sampling, clip-higher, overlong shaping", 0.8),
            ("ppo", "PPO: one answer per problem, advantages from a critic (GAE)", 0.85),
            ("gspo", "GSPO: one ratio per answer", 0.85),
        )
    ),
    Case(
        name="async_r3",
        says="a Qwen3-MoE, sampled while training goes on, trained with the engine's routes (router replay)",
        recipe="async_r3",
        at_least=0.8,
        max_rl_seconds=900.0,
        max_logprob_diff=1e-3,
    ),
    Case(
        name="lora",
        says="LoRA of rank 16 at four times the learning rate; the embeddings stay unchanged",
        overrides=(
            "trainer.max_training_steps=80",
            "trainer.policy.model.lora.rank=16",
            "trainer.policy.model.lora.alpha=32",
            "trainer.policy.optimizer_config.lr=4e-3",
        ),
        at_least=0.7,
    ),
    *(
        Case(
            name=name,
            says=says,
            overrides=(
                "generator.inference_engine.backend=vllm",
                "generator.inference_engine.num_engines=2",
                *overrides,
            ),
            at_least=0.85,
            max_rl_seconds=900.0,
            max_logprob_diff=1e-3,
        )
        for name, says, overrides in (
            ("vllm_2_engines", "sampled by two vLLM servers", ()),
            (
                "vllm_2_engines_async",
                "sampled by two vLLM servers while training goes on: groups are up to two versions old",
                ("trainer.max_staleness=2", "trainer.pipeline_depth=2"),
            ),
        )
    ),
    Case(
        name="streamed",
        says="groups are trained on as they finish, one update per batch",
        overrides=(
            "trainer.stream_groups=true",
            "trainer.placement.colocate_all=false",
            "trainer.update_epochs_per_batch=1",
        ),
        at_least=0.8,
    ),
    *(
        Case(
            name=f"depth_{depth}_bound_{bound}_seed{seed}",
            says=f"how far generation runs ahead: depth {depth} under bound {bound}",
            overrides=(f"trainer.pipeline_depth={depth}", f"trainer.max_staleness={bound}"),
            seed=seed,
            at_least=0.85 if depth <= 1 else 0.7,
            max_rl_seconds=1200.0,
        )
        for depth, bound, seed in (
            *((depth, bound, 0) for depth, bound in DEPTHS_AND_BOUNDS),
            *((depth, bound, seed) for depth, bound in ((0, 0), (1, 1), (1, 4)) for seed in (1, 2)),
        )
    ),
    *(
        Case(
            name=name,
            says=says,
            recipe="lora_two_servers",
            overrides=overrides,
            at_least=at_least,
            below=below,
            max_rl_seconds=900.0,
            max_logprob_diff=1e-3,
        )
        for name, says, overrides, at_least, below in (
            ("lora_two_servers", "LoRA whose adapter alone is sent to two vLLM servers", (), 0.7, 1.01),
            (
                "lora_two_servers_control",
                "`lora_two_servers` with rewards given to another prompt's samples: must not learn",
                (PERMUTED_REWARDS,),
                0.0,
                0.5,
            ),
        )
    ),
    *(
        Case(
            name=f"megatron_{name}",
            says=says,
            overrides=("trainer.strategy=megatron", *overrides),
            at_least=0.85,
            max_rl_seconds=900.0,
            max_logprob_diff=1e-3,
        )
        for name, says, overrides in (
            ("1_rank", "Megatron on one rank", ()),
            ("tp2_pp2", "Megatron on four Ray ranks: two tensor ranks in each of two pipeline stages", TP2_PP2),
            ("vllm", "Megatron on one rank, sampled by a vLLM server", ONE_VLLM_SERVER),
            (
                "tp2_pp2_vllm",
                "Megatron on four Ray ranks, sampled by a vLLM server",
                ("trainer.max_training_steps=100", *TP2_PP2, *ONE_VLLM_SERVER),
            ),
        )
    ),
    Case(
        name="megatron_moe_ep2_r3",
        says="Qwen3-MoE: its experts on two Ray ranks, which follow the engine's routes (router replay)",
        overrides=(
            "trainer.strategy=megatron",
            "trainer.policy.model.path=runs/arithmetic/start_moe_model_seed0",
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.policy.megatron_config.expert_model_parallel_size=2",
            "trainer.policy.megatron_config.moe_enable_routing_replay=true",
            "generator.inference_engine.enable_return_routed_experts=true",
        ),
        at_least=0.7,
        max_rl_seconds=900.0,
        max_logprob_diff=1e-3,
    ),
    *(
        Case(
            name=name,
            says=f"a Qwen3-MoE finds numbers in four turns, sampled by a vLLM server while training goes on: {says}",
            recipe="guess",
            overrides=(
                "trainer.policy.model.path=runs/guess_data/start_moe_model_seed0",
                "trainer.epochs=320",
                "trainer.max_staleness=1",
                *ONE_VLLM_SERVER,
                *overrides,
            ),
            at_least=0.7,
            max_rl_seconds=1200.0,
            max_logprob_diff=1e-3,
        )
        for name, says, overrides in (
            (
                "guess_moe_async_r3",
                "trained with the engine's routes (router replay)",
                (
                    "trainer.policy.fsdp_config.moe_enable_routing_replay=true",
                    "generator.inference_engine.enable_return_routed_experts=true",
                ),
            ),
            ("guess_moe_async_own", "the control, whose routers choose by themselves", ()),
        )
    ),
    *(
        Case(
            name=f"{recipe}_seed{seed}",
            says=says,
            recipe=recipe,
            seed=seed,
            at_least=0.75,
            max_rl_seconds=SECONDS_OF_SMALL_RECIPES.get(recipe, 480.0),
        )
        for recipe, says in (
            ("calculator", "a small model that cannot multiply learns to call a calculator"),
            ("look_up", "a small model learns to search documents before it answers"),
            ("second_try", "a small model corrects its sums in three tries, told which digits are wrong"),
            ("mathematics", "a small model learns to multiply fractions, judged by math-verify"),
            ("code", "a small model learns to write functions from examples; tests in a sandbox give the reward"),
            ("reasoning_gym", "a small model learns to spell words backward, scored by reasoning-gym"),
            ("gsm8k_turns", "a small model learns to solve word problems in three tries"),
            ("skyrl_gym", "a small model learns word problems in two turns of skyrl-gym's `gsm8k_multi_turn`"),
            ("judge", "a small model learns to answer correctly and in a sentence, scored by a judge behind HTTP"),
        )
        for seed in (0, 1)
    ),
    *(
        Case(
            name=f"{recipe}_control",
            says=says,
            recipe=recipe,
            overrides=(override,),
            below=0.5,
            max_rl_seconds=SECONDS_OF_SMALL_RECIPES.get(recipe, 480.0),
        )
        for recipe, says, override in (
            (
                "calculator",
                "`calculator` with a tool that answers nonsense: must not learn",
                "environment.env_class=broken_pocket_calculator",
            ),
            (
                "look_up",
                "`look_up` with searches that show a random number: must not learn",
                "environment.env_class=mixed_up_look_up",
            ),
            *(
                (
                    recipe,
                    f"`{recipe}` with rewards given to another prompt's samples: must not learn",
                    PERMUTED_REWARDS,
                )
                for recipe in (
                    "second_try",
                    "mathematics",
                    "code",
                    "reasoning_gym",
                    "gsm8k_turns",
                    "skyrl_gym",
                    "judge",
                )
            ),
        )
    ),
    *(
        Case(
            name=name,
            says=says,
            recipe="smollm2",
            starts_below=0.3,
            overrides=overrides,
            at_least=0.7,
            # Training all weights took 20 minutes on one thread.
            max_rl_seconds=7200.0,
            max_logprob_diff=1e-3,
        )
        for name, says, overrides in (
            ("smollm2", "a pretrained model of 135M parameters learns to answer briefly and correctly", ()),
            ("smollm2_lora", "`smollm2` with adapters of rank 16", ("trainer.policy.model.lora.rank=16",)),
        )
    ),
    Case(
        name="smollm2_calculator",
        says="a pretrained model of 135M parameters learns to call a calculator, with adapters of rank 16",
        recipe="smollm2_calculator",
        at_least=0.75,
        max_rl_seconds=3600.0,
        max_logprob_diff=1e-3,
    ),
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all runs; cases with the same seed share a warm-started model."""
    return tmp_path_factory.mktemp("learning")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_case_meets_its_limits(case: Case, directory: Path, tmp_path: Path):
    command = [Path(sys.executable).with_name("rl"), "train", case.recipe, f"trainer.run_dir={case.name}"]
    if case.exports_every is not None:
        command.append(f"trainer.hf_save_interval={case.exports_every}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if case.installs_backend:
        environment |= installed_in(tmp_path, ROOT / "tests" / "third_party_backend")
    command += [f"trainer.seed={case.seed}", *case.overrides]
    with rule_judge.serving() if case.recipe == "judge" else contextlib.nullcontext() as url:
        if url is not None:
            command.append(f"environment.options.url={url}")
        subprocess.run(command, cwd=directory, env=environment, check=True)
    run_dir = directory / case.name
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    if case.exports_every is None:
        curve = [(row["step"], row[case.measure]) for row in rows if case.measure in row]
    else:
        curve = curve_of_exports(directory, run_dir)
    summary |= {"accuracy_before": curve[0][1], "accuracy_after": curve[-1][1]}
    record(Result.of_run(case.name, case.says, case.overrides, summary, curve, recipe=case.recipe))
    assert summary["accuracy_before"] <= case.starts_below, "the start model is too good to show learning"
    assert case.at_least <= summary["accuracy_after"] < case.below
    assert summary["rl_seconds"] < case.max_rl_seconds
    if case.max_logprob_diff is not None:
        # A step without tokens of the current version has nothing to compare; another metric covers tokens of older
        # versions.
        compared = [row["rollout/logprob_diff_max"] for row in rows if "rollout/logprob_diff_max" in row]
        assert compared
        assert max(compared) <= case.max_logprob_diff


def rl(directory: Path, *arguments: str) -> str:
    """Runs `rl` and returns its standard output."""
    command = [str(Path(sys.executable).with_name("rl")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def played(directory: Path, model: str) -> float:
    """Greedy accuracy of an addition model on the held-out problems."""
    printed = rl(directory, "eval", "quickstart", f"trainer.policy.model.path={model}")
    return float(re.search(r"^eval/accuracy +([0-9.]+)$", printed, flags=re.MULTILINE)[1])  # pyright: ignore


def curve_of_exports(directory: Path, run_dir: Path) -> list[tuple[int, float]]:
    """Pairs of step and greedy accuracy: of the start model (step 0) and of every export."""
    start = yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["policy"]["model"]["path"]
    exports = sorted((run_dir / "model").glob("step_*"))
    models = {0: start} | {int(path.name.removeprefix("step_")): path for path in exports}
    return [(step, played(directory, str(path))) for step, path in models.items()]


def test_distillation_closes_most_of_the_gap_to_the_teacher(directory: Path):
    rl(directory, "train", "distill", "trainer.run_dir=distill")
    summary = json.loads((directory / "distill" / "summary.json").read_text())
    curve = [
        (row["step"], row["eval/accuracy"])
        for row in read_rows(directory / "distill" / "metrics.jsonl")
        if "eval/accuracy" in row
    ]
    says = "a student of 52k parameters learns from the log-probs of a teacher of 150k (`distill`)"
    record(Result.of_run("distill", says, (), summary, curve, recipe="distill"))
    teacher = played(directory, "runs/arithmetic/teacher_seed0")
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    assert before <= 0.35, "the start model is too good to show learning"
    assert teacher >= 0.9
    assert after - before >= 0.8 * (teacher - before)


def test_the_loop_in_one_file_learns(directory: Path):
    """Runs the file as a user does, and reads the accuracies from its output."""
    command = [sys.executable, "-m", "rl_examples.one_file"]
    curve, times = [], []
    with subprocess.Popen(
        command, cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if match := re.fullmatch(r"step +(\d+): held-out accuracy ([0-9.]+)\n", line):
                curve.append((int(match[1]), float(match[2])))
                times.append(time.monotonic())
    assert process.returncode == 0
    summary = {
        "accuracy_before": curve[0][1],
        "accuracy_after": curve[-1][1],
        "steps": curve[-1][0],
        "rl_seconds": round(times[-1] - times[0], 3),
    }
    record(Result.of_run("one_file", "the loop in one file, `rl_examples/one_file.py`", (), summary, curve))
    assert summary["accuracy_before"] <= 0.35, "the start model is too good to show learning"
    assert summary["accuracy_after"] >= 0.85
    assert summary["rl_seconds"] < 600
