"""Random models of ten families, sensible or not. Each is refused before a rank loads it, or Megatron computes the same
as transformers. The comparison uses the full-size model, with other weights and another batch than in the proof."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rl_core.interfaces import ModelConfig, RankInfo
from rl_megatron import megatron
from rl_transformers.testing.cases import make_batch
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.megatron.models import ARCHITECTURES
from tests.megatron.proving import complaint_of, proofs, proved, spec_of

NUM_AT_ONCE, NUM_ALL = 20, 300
FAMILIES = (
    "llama",
    "qwen3",
    "deepseek_v3",
    "gemma2",
    "qwen2",
    "qwen3_moe",
    "mistral",
    "deepseek_v2",
    "olmoe",
    "mixtral",
)
ALWAYS_REFUSED = ("gemma2", "olmoe", "mixtral")
LOGPROB_TOLERANCE = 2e-5
"""Absolute, in float32, where rounding is about 2e-6."""


def draw(seed: int) -> dict[str, Any]:
    """A random `config.json`. Of the families that are not always refused, about one model in four has a setting that
    Megatron computes differently."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    is_latent = family.startswith("deepseek")
    fields = _sizes(rng) | {"rope_parameters": _rope(rng, family)} | _common(rng)
    fields |= {"qwen3_moe": _experts, "deepseek_v2": _latent_two, "deepseek_v3": _latent_three}.get(family, _none)(rng)
    if is_latent:
        fields |= {"num_key_value_heads": fields["num_attention_heads"], "head_dim": fields["qk_rope_head_dim"]}
    elif rng.random() < 0.15:
        fields |= rng.choice(_ODD_FIELDS)
    return {"model_type": family, "architectures": [ARCHITECTURES[family]], **fields}


_ODD_FIELDS: tuple[dict[str, Any], ...] = (
    {"attention_bias": True},
    {"mlp_bias": True},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    {"sliding_window": 16},
    {"partial_rotary_factor": 0.5},
    {"hidden_act": "gelu"},
    {"is_causal": False},
)


def _sizes(rng: random.Random) -> dict[str, Any]:
    heads, groups = rng.choice([(4, 2), (6, 2), (9, 3), (5, 1), (3, 3), (8, 8), (12, 4), (14, 2)])
    size = rng.choice([6, 8, 10, 16, 20])
    has_own_size = rng.random() < 0.4
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "hidden_size": heads * (rng.choice([4, 5, 7, 9]) if has_own_size else size),
        "intermediate_size": rng.randint(17, 90),
        "vocab_size": rng.randint(48, 99),
        "num_hidden_layers": rng.randint(1, 5),
        "max_position_embeddings": rng.choice([64, 256, 4096]),
    }


def _common(rng: random.Random) -> dict[str, Any]:
    return {
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": rng.choice([None, 3]),
        "sliding_window": None,
        "hidden_act": "silu",
    }


def _rope(rng: random.Random, family: str) -> dict[str, Any]:
    theta, kind = rng.choice([50.0, 1e4, 1e6]), rng.choice(["default", "default", "yarn", "yarn", "llama3", "linear"])
    if family in ("llama", "qwen2") and rng.random() < 0.15:
        kind = "dynamic"
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    if kind == "default":
        return rope
    rope |= {"factor": rng.choice([2.0, 4.0, 8.0]), "original_max_position_embeddings": rng.choice([16, 32, 64])}
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([1.0, 2.0]), "high_freq_factor": rng.choice([4.0, 8.0])}
    if kind == "yarn":
        further: list[dict[str, Any]] = [
            {},
            {},
            {"attention_factor": 1.3},
            {"mscale": 0.7, "mscale_all_dim": 1.0},
            {"mscale": 0.7},
            {"truncate": False},
            {"beta_fast": 8, "beta_slow": 2},
        ]
        rope |= rng.choice(further)
    return rope


def _none(rng: random.Random) -> dict[str, Any]:
    return {}


def _experts(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(4, 24)
    odd: list[dict[str, Any]] = [{}, {}, {}, {}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]
    return {
        "num_experts": count,
        "num_experts_per_tok": rng.randint(1, min(count, 8)),
        "moe_intermediate_size": rng.randint(5, 30),
        "norm_topk_prob": rng.random() < 0.7,
        **rng.choice(odd),
    }


def _latent(rng: random.Random) -> dict[str, Any]:
    groups, per_group = rng.choice([1, 1, 2, 4, 6]), rng.randint(2, 5)
    best = rng.randint(1, groups)
    return {
        "n_routed_experts": groups * per_group,
        "num_experts_per_tok": rng.randint(1, min(best * per_group, 8)),
        "n_group": groups,
        "topk_group": best,
        "n_shared_experts": rng.randint(1, 3),
        "moe_intermediate_size": rng.randint(5, 30),
        "first_k_dense_replace": rng.choice([0, 1, 1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 2.5, 16.0]),
        "q_lora_rank": rng.choice([None, 11, 24]),
        "kv_lora_rank": rng.choice([10, 16, 30]),
        "qk_nope_head_dim": rng.choice([6, 16]),
        "qk_rope_head_dim": rng.choice([4, 10, 16]),
        "v_head_dim": rng.choice([6, 12]),
    }


def _latent_two(rng: random.Random) -> dict[str, Any]:
    return {**_latent(rng), "topk_method": rng.choice(["greedy", "group_limited_greedy"])}


def _latent_three(rng: random.Random) -> dict[str, Any]:
    odd: list[dict[str, Any]] = [{}, {}, {}, {}, {"rope_interleave": False}, {"norm_topk_prob": False}]
    return {**_latent(rng), **rng.choice(odd)}


def judged(config: dict[str, Any]) -> tuple[str | None, float]:
    """The reason for refusing the model, or None and the largest difference in log-probs. Runs in its own process."""
    complaint = complaint_of(proved(megatron, config))
    return (complaint, 0.0) if complaint is not None else (None, log_prob_error(config))


def log_prob_error(config: dict[str, Any]) -> float:
    """The largest difference in log-probs of the full-size model on one rank, over a batch of several sequences."""
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), family=config["model_type"], **fields)
        spec = spec_of(folder, model=ModelConfig(path=folder))
        reference = ReferenceWorker(spec)
        batch = make_batch(reference)
        plan = [range(batch.num_sequences)]
        expected = reference.forward(batch, plan, temperature=1.0)["logprobs"]
        worker = megatron.create_worker(spec, RankInfo())
        found = worker.forward(batch, plan, temperature=1.0)["logprobs"]
        worker.close()
    return float((found - expected).abs().max())


@pytest.fixture(scope="module")
def pool():
    with proofs() as made:
        yield made


SOAK_SEEDS = [pytest.param(first, marks=pytest.mark.soak) for first in range(NUM_AT_ONCE, NUM_ALL, NUM_AT_ONCE)]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *SOAK_SEEDS])
def test_twenty_random_models_are_each_refused_or_right(pool, first):
    seeds = range(first, first + NUM_AT_ONCE)
    found = dict(zip(seeds, pool.map(judged, [draw(seed) for seed in seeds], chunksize=1), strict=True))
    assert {seed: error for seed, (_, error) in found.items() if not error < LOGPROB_TOLERANCE} == {}
    known = [
        complaint for seed, (complaint, _) in found.items() if FAMILIES[seed % len(FAMILIES)] not in ALWAYS_REFUSED
    ]
    num_refused = sum(complaint is not None for complaint in known)
    assert 0 < num_refused <= len(known) / 2, "some of the random models must be refused, but at most half"
