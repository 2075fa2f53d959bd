"""Router replay of conversations: the engine's answer in a later turn also has routes for the tokens of earlier turns.
Training replays the newest route of each token, whether an episode is one sequence or merged steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rl_core.batch import Batch
from rl_core.interfaces import Completion, GenerateRequest, GroupRequest, RankInfo, SamplingParams
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.update import step_merging
from rl_core.trainer.update.collate import collate, merged
from rl_examples.guess import MAX_GUESSES, write_moe_model
from rl_fsdp import FsdpOptions, FsdpWorker, fsdp
from rl_megatron import MegatronOptions
from rl_rollout import episode
from rl_rollout.chat import TokenCodec, load_tokenizer
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.backend import PRELOADED, expected_scores
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.examples.environments import Patient
from tests.forced_numbers import ForcedNumbers, require_replayed
from tests.megatron.probes import probed

PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "rl_fsdp.sharding", "rl_megatron.rank.worker"]))
PRELOADED["tests.megatron.probes"] = None
LAYERS, EXPERTS, NUM_SAMPLES = 2, 4, 3
FOLLOWING = FsdpOptions(moe_enable_routing_replay=True)
PLACES: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "fsdp": (fsdp, FOLLOWING, 1, {}),
    "fsdp, ulysses, recomputed": (
        fsdp,
        attrs.evolve(FOLLOWING, sequence_parallel_size=2),
        2,
        {"gradient_checkpointing": True},
    ),
    "megatron, cp2": (probed, MegatronOptions(moe_enable_routing_replay=True, context_parallel_size=2), 2, {}),
}


class RoutingClient(ScriptedClient):
    """Routes all tokens of a request at random in every answer, as if the weights had changed."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        rng = np.random.default_rng(len(self.exchanges))
        (completion,) = await super().generate(request)
        num_inputs = len(request.prompt_tokens) + len(completion.tokens) - 1
        routes_TLK = rng.random((num_inputs, LAYERS, EXPERTS)).argsort(-1)[..., :2].astype(np.uint8)
        completion = attrs.evolve(completion, routed_experts=routes_TLK)
        self.exchanges[-1] = attrs.evolve(self.exchanges[-1], completion=completion)
        return (completion,)


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """Games of four turns as a batch for the trainer, and the routes of the engine's last answer in each game."""

    batch: Batch
    last_routes: list[np.ndarray]
    """uint8 [T − 1, L, K] for each game."""


def play(model: Path, *, step_wise: bool) -> Played:
    tokenizer = load_tokenizer(str(model))
    rng = np.random.default_rng(0)
    client = RoutingClient(
        lambda request: [*tokenizer(str(rng.integers(10)))["input_ids"], tokenizer.eos_token_id],
        end_tokens=[tokenizer.eos_token_id],
    )
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: Patient, limits=Limits(max_turns=MAX_GUESSES), step_wise=step_wise),
    )
    request = GroupRequest(
        group_id=0,
        row={"number": 2},
        row_place="",
        num_samples=NUM_SAMPLES,
        params=SamplingParams(max_tokens=2),
        seed=0,
        start_version=0,
    )
    batch = collate(list(asyncio.run(generator.generate(request))))
    if step_wise:
        assert batch.num_sequences == NUM_SAMPLES * MAX_GUESSES
        batch, _ = merged(batch)
    assert batch.num_sequences == NUM_SAMPLES
    said = {
        exchange.request.prompt_tokens + exchange.completion.tokens: exchange.completion.routed_experts
        for exchange in client.exchanges
    }
    return Played(batch=batch, last_routes=[said[tokens] for tokens in token_rows(batch)])  # pyright: ignore[reportArgumentType]


def token_rows(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(batch["tokens"][start:end].tolist()) for start, end in pairwise(batch.offsets.tolist())]


def with_routes(batch: Batch, routes: list[np.ndarray]) -> Batch:
    """The batch with these routes, for all tokens except the last of each sequence, which was never an input."""
    columns: dict[str, list[torch.Tensor]] = {"routed_experts": [], "routed": []}
    for routes_TLK in routes:
        known_TLK = torch.from_numpy(routes_TLK)
        columns["routed_experts"].append(torch.cat([known_TLK, torch.zeros_like(known_TLK[:1])]))
        columns["routed"].append(torch.arange(len(known_TLK) + 1) < len(known_TLK))
    return batch.with_columns(**{name: torch.cat(parts) for name, parts in columns.items()})


def trainable(batch: Batch, reference: ReferenceWorker) -> Batch:
    """The batch with the columns that the loss reads; the old log-probs are near the current ones."""
    mask_T, generator = batch["loss_mask"], torch.Generator().manual_seed(1)
    logprobs_T = expected_scores(reference, batch)["logprobs"]
    noise_T, ref_noise_T, advantages_T = 0.3 * torch.randn(3, batch.num_tokens, generator=generator)
    return batch.with_columns(
        old_logprobs=logprobs_T + noise_T,
        ref_logprobs=logprobs_T + ref_noise_T,
        advantages=2 + 10 * advantages_T,
        loss_weights=mask_T.float() / int(mask_T.sum()),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "experts"
    write_moe_model(directory, seed=0)
    return directory


@contextmanager
def opened(place: str, model: Path, directory: Path) -> Iterator[Case]:
    backend, options, world_size, spec = PLACES[place]
    directory.mkdir()
    variant = Variant(world_size=world_size, options=options, spec=spec)
    with open_case(backend, options, variant, directory, checkpoint=model, timeout_s=240.0) as case:
        yield case


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_training_replays_the_newest_routes(place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, steps = play(model, step_wise=False), play(model, step_wise=True)
    monkeypatch.setattr(episode, "_newest_routes", oldest_routes)
    monkeypatch.setattr(step_merging, "ROUTE_COLUMNS", ())
    broken = [play(model, step_wise=step_wise).batch for step_wise in (False, True)]
    with opened(place, model, tmp_path / "case") as case:
        for played, broken_batch in zip((whole, steps), broken, strict=True):
            group = case.start()
            newest = with_routes(played.batch, played.last_routes)
            assert torch.equal(played.batch["routed"], newest["routed"])
            batch, reference = trainable(played.batch, case.reference), case.new_reference()
            expected = ForcedNumbers.of(reference, trainable(newest, case.reference))
            scores = require_replayed(group, batch, expected)
            if "routed_experts" in scores:  # only ranks of `probed` report the routes that they took
                routed_T = newest["routed"]
                assert torch.equal(scores["routed_experts"][routed_T], newest["routed_experts"][routed_T].short())
            # Negative control: each token keeps the routes of the first answer that contains it. In merged steps, the
            # last token of an answer then has no route.
            with pytest.raises(AssertionError, match="log-probs differ"):
                require_replayed(group, trainable(broken_batch, case.reference), expected)
            group.close()


def oldest_routes(known: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    assert new is not None
    return new if known is None else np.concatenate([known, new[len(known) :]])


@pytest.mark.parametrize("step_wise", [False, True], ids=["one sequence", "merged steps"])
def test_every_pass_sends_tokens_to_the_experts_of_their_newest_routes(step_wise: bool, model: Path, tmp_path: Path):
    played = play(model, step_wise=step_wise)
    with opened("fsdp", model, tmp_path / "case") as case:
        batch = trainable(played.batch, case.reference)
        worker, used = FsdpWorker(case.spec, RankInfo()), []
        for name, module in worker.scorer.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, args: used.append(args[1].numpy().copy()))
        plan = [[number] for number in range(NUM_SAMPLES)]
        worker.forward(batch, plan, temperature=1.0)
        worker.forward_backward(batch, plan, LOSS, temperature=1.0)
    # Two passes. Each takes one game after another, with two layers per game.
    assert len(used) == 2 * NUM_SAMPLES * LAYERS
    for number, chosen_TK in enumerate(used):
        newest_TLK = played.last_routes[number // LAYERS % NUM_SAMPLES]
        np.testing.assert_array_equal(chosen_TK[: len(newest_TLK)], newest_TLK[:, number % LAYERS])
