"""What the documentation shows runs as it stands there."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.interfaces import Action, Environment, Recipe
from rl_core.trainer.advantages import load_estimator

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """Its Python blocks, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def run_blocks(page: str, blocks: Sequence[str]) -> dict[str, Any]:
    """The names that they define, run one after the other."""
    names: dict[str, Any] = {"__name__": "shown"}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)
    return names


# --- plugins.md -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    return run_blocks("plugins.md", blocks_of("plugins.md"))


async def test_the_environment_plays_an_episode(shown: dict[str, Any]):
    environment = shown["RiddleEnvironment"]({"prompt": "?", "answer": "piano"}, {})
    assert isinstance(environment, Environment)
    assert await environment.reset() == "?"
    assert (await environment.step(Action(text="a piano", tokens=(), stop_reason="stop"))).reward == 1.0


def test_the_environment_passes_its_suite(shown: dict[str, Any]):
    suite = shown["TestRiddles"]()
    checks = [name for name in dir(suite) if name.startswith("test_")]
    assert len(checks) >= 5
    for check in checks:
        getattr(suite, check)()


def test_the_estimator_is_accepted_by_a_run(shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.examples.environments.shown_estimator", shown["best_of_group_advantages"], raising=False)
    path = "tests.examples.environments:shown_estimator"
    estimator = load_estimator(path, {"scale": 2.0})
    assert estimator(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), scale=2.0).tolist() == [1.0, -1.0]


def test_the_recipe_is_one(shown: dict[str, Any]):
    assert isinstance(shown["recipe"], Recipe)


def test_the_callback_stops_a_solved_run(shown: dict[str, Any]):
    callback = shown["StopWhenSolved"]()
    assert callback.on_step_end(3, {"eval/accuracy": 0.94}) is None
    assert callback.on_step_end(3, {"eval/accuracy": 0.96}).stop


# --- single_packages.md -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single_packages() -> dict[str, Any]:
    """All blocks but the last, which is a script."""
    return run_blocks("single_packages.md", blocks_of("single_packages.md")[:-1])


def rectangles(*, padded_on: str) -> dict[str, Tensor]:
    """Four sequences of two prompts in a rectangle of seven columns, with numbers in the padding too."""
    generator = torch.Generator().manual_seed(0)
    response = [[0, 0, 1, 1, 1], [0, 1], [0, 0, 0, 1, 0, 1, 1], [0, 1, 1, 1]]
    rows = [([0] * (7 - len(r)) + r) if padded_on == "left" else (r + [0] * (7 - len(r))) for r in response]
    mask_NW = torch.tensor(rows, dtype=torch.bool)
    drawn = {name: torch.randn(4, 7, generator=generator) for name in ("logprobs", "old_logprobs", "rewards", "values")}
    if padded_on == "right":  # the same numbers at the same tokens
        for values_NW in drawn.values():
            left_NW = rectangles(padded_on="left")["mask"]
            on_the_left = values_NW[left_NW].clone()
            values_NW[mask_NW] = on_the_left
    return {"mask": mask_NW, **drawn}


def slow_ppo_loss(
    logprobs: Tensor, old: Tensor, mask: Tensor, scores: Sequence[float], prompt: Sequence[int]
) -> Tensor:
    losses = []
    for row in range(len(scores)):
        group = [score for score, other in zip(scores, prompt, strict=True) if other == prompt[row]]
        advantage = (scores[row] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        for column in range(mask.shape[1]):
            if mask[row, column]:
                ratio = (logprobs[row, column] - old[row, column]).exp()
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("padded_on", ["left", "right"])
def test_the_padded_ppo_loss_and_its_gradient_are_those_of_the_formula(single_packages: dict[str, Any], padded_on: str):
    given = rectangles(padded_on=padded_on)
    scores, prompt = [1.0, 0.0, 0.5, 2.0], [7, 7, 3, 3]
    logprobs_NW = given["logprobs"].clone().requires_grad_()
    loss, loss_NW, metrics = single_packages["ppo_loss"](
        logprobs_NW, given["old_logprobs"], given["mask"], torch.tensor(scores), torch.tensor(prompt)
    )
    (gradient_NW,) = torch.autograd.grad(loss, logprobs_NW)
    slow_logprobs_NW = given["logprobs"].clone().requires_grad_()
    slow = slow_ppo_loss(slow_logprobs_NW, given["old_logprobs"], given["mask"], scores, prompt)
    (slow_gradient_NW,) = torch.autograd.grad(slow, slow_logprobs_NW)
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close(gradient_NW, slow_gradient_NW)
    assert int(slow_gradient_NW.count_nonzero()) < int(given["mask"].sum()), "some ratios are clipped"
    torch.testing.assert_close(loss_NW.sum() / given["mask"].sum(), slow)
    assert not loss_NW[~given["mask"]].any()
    assert 0 < float(metrics["clip_fraction"]) < 1


@pytest.mark.parametrize("padded_on", ["left", "right"])
def test_the_padded_advantages_of_a_critic_are_those_of_the_recursion(single_packages: dict[str, Any], padded_on: str):
    given = rectangles(padded_on=padded_on)
    mask_NW = given["mask"]
    advantages_NW, returns_NW = single_packages["gae"](given["rewards"], given["values"], mask_NW)
    expected_NW = torch.zeros(4, 7)
    for row in range(4):
        following, advantage = 0.0, 0.0
        for column in reversed(mask_NW[row].nonzero().flatten().tolist()):
            value = float(given["values"][row, column])
            advantage = float(given["rewards"][row, column]) + following - value + 0.95 * advantage
            expected_NW[row, column], following = advantage, value
    torch.testing.assert_close(returns_NW, torch.where(mask_NW, expected_NW + given["values"], 0.0))
    centred_T = expected_NW[mask_NW] - expected_NW[mask_NW].mean()
    torch.testing.assert_close(advantages_NW[mask_NW], centred_T / centred_T.square().mean().sqrt())
    assert not advantages_NW[~mask_NW].any()


def test_the_script_of_one_rank_trains_through_megatron_and_with_two_names_changed_through_fsdp(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = blocks_of("single_packages.md")[-1]
    losses = {}

    def check(name: str, output: str) -> None:
        losses[name] = [float(loss) for loss in re.findall(r"^loss (.*), gradient norm", output, flags=re.MULTILINE)]
        assert len(losses[name]) == 20
        assert losses[name][0] > 2.0 > 0.05 > losses[name][-1]
        assert list((tmp_path / "state").iterdir())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
        said = model(torch.tensor([[3, 7, 10, 4, 5]])).logits.argmax(-1)[0, :-1].tolist()
        assert said == [7, 10, 4, 5], "what was trained is what was written"

    shutil.copytree(start / "model", tmp_path / "model")
    (tmp_path / "script.py").write_text(script)
    # Megatron needs a process of its own.
    process = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    check("megatron", process.stdout)

    shutil.rmtree(tmp_path / "state")
    shutil.rmtree(tmp_path / "trained")
    script = script.replace("rl_megatron import MegatronOptions, megatron", "rl_fsdp import FsdpOptions, fsdp")
    script = script.replace("MegatronOptions()", "FsdpOptions()").replace("megatron.create", "fsdp.create")
    assert "egatron" not in script
    monkeypatch.chdir(tmp_path)
    run_blocks("single_packages.md", [script])
    check("fsdp", capsys.readouterr().out)
    # Both compute in float32; their sums differ in order.
    assert losses["megatron"] == pytest.approx(losses["fsdp"], abs=2e-3)
