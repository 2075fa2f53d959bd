"""The code of docs/single_packages.md runs as printed and computes what the page says."""

from __future__ import annotations

import math
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

PAGE = Path(__file__).parents[2] / "docs/single_packages.md"
*BLOCKS, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The names that the page's code blocks define, without the last block, which is a script of its own."""
    names: dict[str, Any] = {"__name__": "shown"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def rectangles(*, padded_on: str) -> dict[str, Tensor]:
    """Four responses to two prompts, padded to 7 columns; the padding holds random numbers too."""
    generator = torch.Generator().manual_seed(0)
    response = [[0, 0, 1, 1, 1], [0, 1], [0, 0, 0, 1, 0, 1, 1], [0, 1, 1, 1]]
    rows = [([0] * (7 - len(r)) + r) if padded_on == "left" else (r + [0] * (7 - len(r))) for r in response]
    mask_NW = torch.tensor(rows, dtype=torch.bool)
    drawn = {name: torch.randn(4, 7, generator=generator) for name in ("logprobs", "old_logprobs", "rewards", "values")}
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
def test_the_padded_ppo_loss_and_its_gradient_are_those_of_the_formula(shown: dict[str, Any], padded_on: str):
    given = rectangles(padded_on=padded_on)
    scores, prompt = [1.0, 0.0, 0.5, 2.0], [7, 7, 3, 3]
    logprobs_NW = given["logprobs"].clone().requires_grad_()
    loss, loss_NW, metrics = shown["ppo_loss"](
        logprobs_NW, given["old_logprobs"], given["mask"], torch.tensor(scores), torch.tensor(prompt)
    )
    (gradient_NW,) = torch.autograd.grad(loss, logprobs_NW)
    slow_logprobs_NW = given["logprobs"].clone().requires_grad_()
    slow = slow_ppo_loss(slow_logprobs_NW, given["old_logprobs"], given["mask"], scores, prompt)
    (slow_gradient_NW,) = torch.autograd.grad(slow, slow_logprobs_NW)
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close(gradient_NW, slow_gradient_NW)
    assert int(slow_gradient_NW.count_nonzero()) < int(given["mask"].sum()), "some ratios must be clipped"
    torch.testing.assert_close(loss_NW.sum() / given["mask"].sum(), slow)
    assert not loss_NW[~given["mask"]].any()
    assert 0 < float(metrics["clip_fraction"]) < 1


def test_the_corrected_gspo_loss_of_padded_rows_equals_a_loop_over_rows(shown: dict[str, Any]):
    generator, mask_NW = torch.Generator().manual_seed(1), rectangles(padded_on="right")["mask"]
    mask_NW[1] = False
    old, noise, drift = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    rollout, reference, advantages_N = (
        old + noise,
        old + 0.3 * drift,
        torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64),
    )
    old[~mask_NW] = reference[~mask_NW] = math.nan
    rollout[3, 2] = math.nan
    losses = []
    logprobs_NW, slow_NW = ((old + 0.01 * noise).requires_grad_() for _ in range(2))
    loss = shown["corrected_gspo_loss"](logprobs_NW, old, rollout, reference, mask_NW, advantages_N)
    for row in (0, 2, 3):
        columns = [t for t in range(7) if mask_NW[row, t] and not rollout[row, t].isnan()]
        ratio = torch.stack([slow_NW[row, t] - old[row, t] for t in columns]).mean().exp()
        terms = []
        for t in columns:
            advantage = advantages_N[row] * min(float((old[row, t] - rollout[row, t]).exp()), 2.0)
            further = reference[row, t] - slow_NW[row, t]
            clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
            terms.append(0.001 * (further.exp() - 1 - further) - clipped)
        losses.append(torch.stack(terms).mean())
    slow = torch.stack(losses).mean()
    torch.testing.assert_close(loss, slow)
    gradients = [torch.autograd.grad(loss, logprobs_NW)[0], torch.autograd.grad(slow, slow_NW)[0]]
    torch.testing.assert_close(gradients[0], gradients[1].nan_to_num())


@pytest.mark.parametrize("padded_on", ["left", "right"])
def test_advantages_of_a_critic_on_padded_rows_equal_the_recursion(shown: dict[str, Any], padded_on: str):
    given = rectangles(padded_on=padded_on)
    mask_NW = given["mask"]
    advantages_NW, returns_NW = shown["gae"](given["rewards"], given["values"], mask_NW)
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


@pytest.mark.parametrize("padded_on", ["left", "right"])
def test_packed_log_probs_are_those_of_each_row_alone(shown: dict[str, Any], padded_on: str):
    generator = torch.Generator().manual_seed(0)
    lengths, table_VV = [3, 1, 6, 2], torch.randn(9, 9, generator=generator).double().requires_grad_()
    width_W = torch.arange(7)
    masks = [(width_W < n) if padded_on == "right" else (width_W >= 7 - n) for n in lengths]
    mask_NW, tokens_NW = torch.stack(masks), torch.randint(1, 9, (4, 7), generator=generator)

    def model(tokens: Tensor, positions: Tensor, boundaries: Tensor) -> Tensor:
        """Logits that depend on all earlier tokens of the segment and on the position."""
        segments = tokens.tensor_split(boundaries[1:-1])
        summed = torch.cat([table_VV[segment].cumsum(0) for segment in segments])
        return summed * (1 + positions[:, None])

    logprobs_NW, planned = torch.zeros(4, 7, dtype=torch.float64), []
    for rank in (0, 1, 2, 3, 4):
        micro_batches = shown["rows_of_micro_batches"](mask_NW, rank=rank, num_ranks=5, max_tokens=6)
        assert len(micro_batches) == 1, "every rank must have one micro-batch, even the rank without rows"
        for rows in micro_batches:
            planned.extend(rows.tolist())
            logprobs_NW = logprobs_NW + shown["packed_logprobs"](model, tokens_NW, mask_NW, rows)
    assert sorted(planned) == [0, 1, 2, 3]
    together_NW = shown["packed_logprobs"](model, tokens_NW, mask_NW, [2, 0, 3, 1])
    expected_NW = torch.zeros(4, 7, dtype=torch.float64)
    for row, columns in enumerate(mask_NW):
        tokens = tokens_NW[row, columns]
        logits = model(tokens, torch.arange(len(tokens)), torch.tensor([0, len(tokens)]))
        alone = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        expected_NW[row, columns] = torch.cat([torch.zeros(1), alone])
    torch.testing.assert_close(logprobs_NW, expected_NW)
    torch.testing.assert_close(together_NW, expected_NW)
    (gradient_VV,) = torch.autograd.grad(together_NW.sum(), table_VV, retain_graph=True)
    torch.testing.assert_close(gradient_VV, torch.autograd.grad(expected_NW.sum(), table_VV)[0])


def test_the_documented_one_rank_script_trains_with_megatron_and_fsdp(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    losses = {}

    def check(name: str, output: str) -> None:
        losses[name] = [float(loss) for loss in re.findall(r"^loss (.*), gradient norm", output, flags=re.MULTILINE)]
        assert len(losses[name]) == 20
        assert losses[name][0] > 2.0 > 0.05 > losses[name][-1]
        assert list((tmp_path / "state").iterdir())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
        said = model(torch.tensor([[3, 7, 10, 4, 5]])).logits.argmax(-1)[0, :-1].tolist()
        assert said == [7, 10, 4, 5], "the exported model must have learned the sequence"

    shutil.copytree(start / "model", tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    # Megatron must run in a process of its own.
    process = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    check("megatron", process.stdout)

    shutil.rmtree(tmp_path / "state")
    shutil.rmtree(tmp_path / "trained")
    script = SCRIPT.replace("rl_megatron import MegatronOptions, megatron", "rl_fsdp import FsdpOptions, fsdp")
    script = script.replace("MegatronOptions()", "FsdpOptions()").replace("megatron.create", "fsdp.create")
    assert "egatron" not in script
    monkeypatch.chdir(tmp_path)
    exec(compile(script, str(PAGE), "exec"), {"__name__": "shown"})
    check("fsdp", capsys.readouterr().out)
    # Both compute in float32, but add in a different order.
    assert losses["megatron"] == pytest.approx(losses["fsdp"], abs=2e-3)
