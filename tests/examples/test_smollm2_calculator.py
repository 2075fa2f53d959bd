"""The recipe of a pretrained model with a tool: its calls, its rewards, its data, and a tiny run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.config import load
from rl_core.interfaces import Action
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.run import run_training
from rl_environments.tools import BrokenCall, Call
from rl_examples.smollm2_calculator import NUM_HELD_OUT, SmolCalculator, WrittenCalls, rows

ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "84*29?"}], "answer": "2436"}


class TestSmolCalculator(EnvironmentConformance):
    factory = SmolCalculator
    row: ClassVar[dict[str, Any]] = ROW
    rewards: ClassVar[dict[Any, float]] = {
        "2436": 1.0,
        ("calc(84*29)", "2436"): 1.0,
        ("calc(84*", "2436"): 1.0,  # a broken call gets a hint and costs nothing
        ("calc(84*29)", "calc(84*29)", "2436"): 0.0,
        "2437": 0.0,
        "": 0.0,
    }


def test_a_call_is_answered_with_the_product_in_a_tool_message():
    action = Action(text="calc(84*29)", tokens=(), stop_reason="stop")
    result = asyncio.run(SmolCalculator(ROW, {}).step(action))
    assert result.observation == [{"role": "tool", "name": "multiply", "content": "2436"}]


@pytest.mark.parametrize("text", ["calc(84*29) ", "calc(84 * 29)", "calc(84+29)", "calc(1234567*2)", "calc("])
def test_text_that_only_begins_like_a_call_is_a_broken_call(text: str):
    (read,) = WrittenCalls().read(text)
    assert isinstance(read, BrokenCall)
    assert WrittenCalls().read("calc(84*29)") == [Call(name="multiply", arguments={"left": 84, "right": 29})]
    assert not WrittenCalls().read(f"I say {text}")


def test_no_held_out_product_is_trained_on_or_shown():
    asked = [row["prompt"][-1]["content"] for row in rows()]
    assert len(set(asked)) == len(asked)
    assert not {"12*34?", "20*30?"} & set(asked[:NUM_HELD_OUT])


def test_the_tiny_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run_training(load("smollm2_calculator", [], tiny=True)).steps == 2
    assert Path("runs/smollm2_calculator_tiny/model/adapter/adapter_model.safetensors").exists()
