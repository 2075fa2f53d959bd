"""The training loop in one file trains."""

from __future__ import annotations

import random
from pathlib import Path

from rl_examples.one_file import train


async def test_an_untrained_model_learns_in_a_few_steps_to_give_empty_answers(start: Path):
    """The right answer to every problem is the end of sequence alone, which an untrained model samples with probability
    1/24.
    """
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randrange(100):02d}+{rng.randrange(100):02d}=", "answer": ""} for _ in range(100)]
    accuracies = await train(str(start / "model"), training=rows[20:], held_out=rows[:20], steps=10)
    assert len(accuracies) == 2
    assert accuracies[0] < 0.2 < 0.9 < accuracies[1]
