"""On-policy distillation on two-digit addition: a student of 52k parameters learns from a teacher of 150k.

What it does: makes both models by supervised fine-tuning (`rl_examples.sft`), the teacher until it solves nearly all
problems, the student until it solves about a tenth. Then the student answers problems, and each sampled token's
advantage is the teacher's log-prob minus the student's. No reward is used for training; the held-out accuracy shows
what was learned. Advantages are clipped at three nats, because a confident teacher's log-prob of a wrong token may be
tens of nats below the student's.
Deliberately omitted: a reward in addition to the teacher.

Run:    rl train distill
Other:  rl train distill trainer.ref.model.path=MODEL        (any teacher with the student's vocabulary)
        rl train distill trainer.ref.inference_backend=vllm  (a vLLM server computes the teacher's log-probs)
"""

from __future__ import annotations

from pathlib import Path

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart
from rl_examples.sft import DIRECTORY, HELD_OUT, TRAIN, make_fine_tuned, write_missing_data

_TEACHER = f"{DIRECTORY}/teacher_seed${{trainer.seed}}"
_STUDENT = f"{DIRECTORY}/student_seed${{trainer.seed}}"

recipe = Recipe(
    summary="on-policy distillation: a small model learns addition from a larger one's log-probs, in minutes",
    config={
        **quickstart.config,
        "trainer.run_name": "distill",
        "trainer.policy.model.path": _STUDENT,
        "trainer.ref.model.path": _TEACHER,
        "trainer.algorithm.advantage_estimator": "distillation",
        "trainer.algorithm.advantage_params": {"distillation_clip": 3.0},
        "trainer.algorithm.advantage_batch_normalize": True,
        "trainer.policy.optimizer_config.lr": 2e-3,
        "trainer.max_training_steps": 200,
        "trainer.ckpt_interval": 100,
    },
    prepare="rl_examples.distill:prepare",
    makes=(TRAIN, HELD_OUT, _TEACHER, _STUDENT),
)

TEACHER_STEPS, STUDENT_STEPS = 600, 170


def prepare(config: Config) -> None:
    """Creates the recipe's data and both models if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_model, write_small_model

    write_missing_data(config)
    made = (
        (_TEACHER, config.trainer.ref.model.path, write_model, TEACHER_STEPS),
        (_STUDENT, config.policy_model_path, write_small_model, STUDENT_STEPS),
    )
    for model, named, write, steps in made:
        directory = Path(model.replace("${trainer.seed}", str(config.trainer.seed)))
        if named == str(directory):
            make_fine_tuned(directory, write, steps=steps, seed=config.trainer.seed)
