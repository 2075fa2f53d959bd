"""Planned and rehearsed peak memory of a training step, for several models and FSDP meshes: the table of
docs/planning.md.

A rehearsal is `rl rehearse` of a recipe with another mesh: it runs one rank's real code at full size, on tensors
without data.

Run: python benchmarks/rehearsals.py [--model qwen2_5_7b] [--mesh "8 ranks"] (two cores: about six minutes in all)
"""

from __future__ import annotations

import time

import click

from rl_core import config as configuration
from rl_core.trainer.before.planned_run import arranged_models, longest_sequence, planned_model
from rl_core.trainer.before.rehearsed_run import planned_phase, rehearsed_model

MODELS = {
    "qwen2_5_1_5b": "Qwen2.5-1.5B",
    "qwen2_5_7b": "Qwen2.5-7B",
    "qwen3_30b_a3b_one_node": "Qwen3-30B-A3B",
}
"""Recipe → model."""
ALWAYS = ("trainer.policy.fsdp_config.cpu_offload=false",)
MESHES = {
    "8 ranks": (),
    "2 × 4 ranks, a copy on each 4": ("trainer.policy.fsdp_config.fsdp_size=4",),
    "4 ranks": ("trainer.placement.policy_num_gpus_per_node=4", "generator.inference_engine.num_engines=1"),
    "8 ranks, sequences split over 2": ("trainer.policy.fsdp_config.sequence_parallel_size=2",),
}


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="Default: all.")
@click.option("--mesh", "meshes", multiple=True, type=click.Choice(list(MESHES)), help="Default: all.")
def main(models: tuple[str, ...], meshes: tuple[str, ...]) -> None:
    """Prints the rows of the table; memory is in GiB per rank."""
    print(
        "| model | mesh | tokens | rehearsed | planned | plan is off by | seconds |\n|---|---|---:|---:|---:|---:|---:|"
    )
    for recipe in models or MODELS:
        for mesh in meshes or MESHES:
            print(f"| {MODELS[recipe]} | {mesh} | {cell(recipe, MESHES[mesh])} |", flush=True)


def cell(recipe: str, overrides: tuple[str, ...]) -> str:
    """The table cells of one mesh: micro-batch tokens, both peaks, the plan's relative error, and seconds."""
    config = configuration.load(recipe, [*ALWAYS, *overrides]).config
    model = arranged_models(config)["policy"]
    started = time.perf_counter()
    rehearsed = rehearsed_model(config, "policy", model)
    seconds = time.perf_counter() - started
    peak = sum(rehearsed.phases[0].parts.values()) / 2**30
    planned = planned_model(config, "policy", model, longest_sequence(config))
    expected = sum(planned_phase(planned, "train").values()) / 2**30
    off = expected / peak - 1
    return f"{rehearsed.micro_batch_tokens:,} | {peak:.1f} | {expected:.1f} | {off:+.1%} | {seconds:.0f}"


if __name__ == "__main__":
    main()
