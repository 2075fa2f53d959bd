"""The HTTP client: each request is answered once despite pauses, retries and aborts; routed experts are exact."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.errors import DeadlineError, GenerationError
from rl_core.interfaces import Completion, GenerateRequest
from rl_rollout.resuming import whole_response
from rl_rollout.transports.files import files
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import open_session
from tests.rollout.vllm.servers import (
    MAX_POSITIONS,
    TOKENS,
    RunningServer,
    connect,
    paused_under_way,
    publish,
    request,
    weights_of,
)

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def client(dense_server: RunningServer) -> AsyncIterator[RemoteInferenceClient]:
    client = await connect(dense_server)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def moe_client(moe_server: RunningServer) -> AsyncIterator[RemoteInferenceClient]:
    client = await connect(moe_server)
    yield client
    await client.close()


async def num_sampled(server: RunningServer) -> float:
    """The number of tokens that the server has sampled since its start, as vLLM counts them."""
    async with open_session(TOKENS.access) as session, session.get(f"{server.url}/metrics") as answer:
        (count,) = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", await answer.text(), re.MULTILINE)
    return float(count)


# --- each request once ----------------------------------------------------------------------------------------------


async def test_a_repeated_request_is_answered_without_sampling_again(
    client: RemoteInferenceClient, dense_server: RunningServer
):
    asked = request("again", seed=5, max_tokens=20, ignore_eos=True)
    first = await client.generate(asked)
    before = await num_sampled(dense_server)
    assert await client.generate(asked) == first
    assert await num_sampled(dense_server) == before
    with pytest.raises(GenerationError, match="needs its own"):
        await client.generate(attrs.evolve(asked, seed=6))


async def test_a_cancelled_request_leaves_the_server(client: RemoteInferenceClient):
    """The server is paused, so the request cannot end by itself."""

    def ask(number: int) -> Any:
        return client.generate(request(f"cancelled-{number}", max_tokens=MAX_POSITIONS - 3, ignore_eos=True))

    waiting = await paused_under_way(client, ask)
    waiting.cancel()
    async with asyncio.timeout(60):
        while (health := await client.health()).num_running + health.num_waiting:
            await asyncio.sleep(0.01)
    await client.resume()


async def test_a_missed_deadline_names_the_awaited_request_or_server(dense_server: RunningServer):
    client = await connect(dense_server)
    await client.pause("keep")
    client._timeout_s = 0.5
    try:
        with pytest.raises(DeadlineError, match=r"sample late|vLLM server 0"):
            await client.generate(request("late", max_tokens=4))
    finally:
        client._timeout_s = 300.0
        await client.resume()
        await client.close()


async def test_two_hundred_requests_under_random_pauses_are_each_answered_once(client: RemoteInferenceClient):
    dice = random.Random(3)
    requests = [request(f"pauses-{i}", seed=i, max_tokens=1 + i % 40, ignore_eos=True) for i in range(200)]
    done = asyncio.Event()

    async def pauses() -> None:
        while not done.is_set():
            await client.pause(dice.choice(["keep", "wait"]))
            await asyncio.sleep(dice.uniform(0, 0.05))
            await client.resume()
            await asyncio.sleep(dice.uniform(0, 0.1))

    pausing = asyncio.create_task(pauses())
    completions = await asyncio.gather(*(client.generate(each) for each in requests))
    done.set()
    await pausing
    for asked, (completion,) in zip(requests, completions, strict=True):
        assert len(completion.tokens) == asked.params.max_tokens
    undisturbed = await client.generate(attrs.evolve(requests[39], sample_id="undisturbed"))
    assert undisturbed[0].tokens == completions[39][0].tokens


async def test_text_is_tokenized_while_generation_is_busy(client: RemoteInferenceClient):
    """Generation has 64 requests under way and is paused, so tokenizing cannot wait for it."""

    def ask(number: int) -> Any:
        seeds = range(64)
        requests = [request(f"busy-{number}-{i}", seed=i, max_tokens=300, ignore_eos=True) for i in seeds]
        return asyncio.gather(*map(client.generate, requests))

    busy = await paused_under_way(client, ask)
    tokens = await asyncio.gather(*(client.tokenize(f"{i}+{i}=") for i in range(100)))
    assert not busy.done(), "tokenizing must not wait for generation"
    await client.resume()
    assert await client.detokenize(tokens[12]) == "12+12="
    assert await client.tokenize([{"role": "user", "content": "hi"}]) == await client.tokenize("user: hi\nassistant: ")
    await busy


async def test_scores_are_the_log_probs_of_generation(client: RemoteInferenceClient):
    asked = request("scored", (4, 5, 6), seed=1, max_tokens=30, ignore_eos=True)
    (completion,) = await client.generate(asked)
    (scores,) = (await client.score([asked.prompt_tokens + completion.tokens])).values()
    assert scores[0][0] == 0.0
    np.testing.assert_allclose(scores[0][3:], completion.logprobs, atol=1e-5)
    assert client.vocab_size > max(completion.tokens)


async def test_a_chat_request_is_answered_with_text(client: RemoteInferenceClient):
    answer = await client.chat([{"role": "user", "content": "12+3="}], max_tokens=5, seed=1)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert answer["usage"]["completion_tokens"] <= 5


async def test_prompts_that_take_several_steps_keep_their_seeds(client: RemoteInferenceClient):
    """Together, the prompts exceed `max_num_batched_tokens`, so some take several steps; alone, each takes one."""
    prompts = [tuple((7 * row + place) % 40 for place in range(400)) for row in range(12)]
    params = {"max_tokens": 8, "ignore_eos": True}
    together = [request(f"parts-{row}", prompt, seed=row, **params) for row, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(client.generate(each) for each in together))
    for row, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True)):
        (alone,) = await client.generate(request(f"alone-{row}", prompt, seed=row, **params))
        assert answer.tokens == alone.tokens


# --- routed experts -------------------------------------------------------------------------------------------------


async def test_routed_experts_are_the_routers_own_choices(moe_client: RemoteInferenceClient, moe_server: RunningServer):
    """Checks new prompts, turns that continue an earlier one (prefix cache), a repeated request, and requests that a
    pause interrupts.
    """
    router = _Router(moe_server.model_path)
    dice = random.Random(0)
    prompts = [tuple(dice.randrange(40) for _ in range(length)) for length in (3, 130, 200)]
    first = [request(f"turn-1-{i}", prompt, seed=i, max_tokens=40, ignore_eos=True) for i, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(moe_client.generate(each) for each in first))
    second = [
        request(f"turn-2-{i}", (*asked.prompt_tokens, *answer.tokens, 7, 8), seed=i, max_tokens=30, ignore_eos=True)
        for i, (asked, (answer,)) in enumerate(zip(first, answers, strict=True))
    ]
    waiting = [asyncio.ensure_future(moe_client.generate(each)) for each in second]
    await asyncio.sleep(0.05)
    await moe_client.pause("keep")
    await moe_client.resume()
    later = await asyncio.gather(*waiting)
    again = await asyncio.gather(*(moe_client.generate(each) for each in second))
    for asked, (completion,) in zip([*first, *second, *second], [*answers, *later, *again], strict=True):
        router.require_own_choices(asked, completion)


async def test_an_aborted_request_has_the_routed_experts_of_its_tokens(
    moe_client: RemoteInferenceClient, moe_server: RunningServer
):
    asked: list[GenerateRequest] = []

    def ask(number: int) -> Any:
        asked.append(request(f"aborted-{number}", max_tokens=MAX_POSITIONS - 3, ignore_eos=True))
        return moe_client.generate(asked[-1])

    waiting = await paused_under_way(moe_client, ask)
    await moe_client.abort([asked[-1].sample_id])
    (completion,) = await waiting
    await moe_client.resume()
    assert completion.stop_reason == "abort"
    _Router(moe_server.model_path).require_own_choices(asked[-1], completion)


async def test_routed_experts_after_an_update_are_those_of_the_new_weights(
    moe_client: RemoteInferenceClient, moe_server: RunningServer
):
    """All tokens have the routed experts of the last weights, even the prompt's tokens and those sampled with earlier
    weights.
    """
    first, second = _Router(moe_server.model_path), _Router(moe_server.model_path)
    second.add_noise(0.03)
    tokenizer = AutoTokenizer.from_pretrained(moe_server.model_path)
    prompt = tuple(random.Random(1).randrange(40) for _ in range(100))
    asked = request("under-way", prompt, max_tokens=300, ignore_eos=True)
    version = (await moe_client.health()).version + 1
    await publish(moe_client, files, first.weights, version)
    try:

        def ask(number: int) -> Any:
            return whole_response(moe_client, attrs.evolve(asked, sample_id=f"{asked.sample_id}-{number}"), tokenizer)

        waiting = await paused_under_way(moe_client, ask)
        await publish(moe_client, files, second.weights, version + 1)
        completion = await waiting
    finally:
        await publish(moe_client, files, first.weights, version + 2)
    versions = np.array(completion.policy_versions)
    assert set(versions.tolist()) == {version, version + 1}, "the weights must change during the response"
    assert len(completion.tokens) == 300
    second.require_own_choices(asked, completion)
    logprobs_T = second.logprobs(asked, completion)
    # Both in float32; paged attention rounds differently from one forward pass.
    assert np.abs(np.array(completion.logprobs) - logprobs_T)[versions == version + 1].max() < 1e-4
    with pytest.raises(AssertionError):
        first.require_own_choices(asked, completion)


class _Router:
    """The routing of the same model in transformers."""

    def __init__(self, model_path: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights_of(self._model)

    @torch.no_grad()
    def add_noise(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in self._model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)

    @torch.no_grad()
    def logprobs(self, asked: GenerateRequest, completion: Completion) -> np.ndarray:
        """The log-probs of the sampled tokens."""
        tokens_T = torch.tensor(asked.prompt_tokens + completion.tokens)
        all_TV = self._model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        return all_TV.gather(1, tokens_T[1:, None])[len(asked.prompt_tokens) - 1 :, 0].numpy()

    @torch.no_grad()
    def require_own_choices(self, asked: GenerateRequest, completion: Completion) -> None:
        tokens = torch.tensor([asked.prompt_tokens + completion.tokens])
        output = self._model(input_ids=tokens, output_router_logits=True, use_cache=False)
        own = torch.stack([logits.topk(2, dim=-1).indices for logits in output.router_logits], dim=1)[:-1]
        routed = completion.routed_experts
        assert routed is not None
        assert routed.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(routed, -1), np.sort(own.numpy(), -1))


async def test_thousands_of_requests_wait_at_the_same_time(client: RemoteInferenceClient):
    began = time.monotonic()
    requests = [request(f"many-{i}", seed=i, max_tokens=1) for i in range(3000)]
    completions = await asyncio.gather(*(client.generate(each) for each in requests))
    assert all(len(completion.tokens) == 1 for (completion,) in completions)
    print(f"3000 requests in {time.monotonic() - began:.1f} s")


async def test_a_sleeping_server_does_not_sample_until_weights_and_cache_are_awake(client: RemoteInferenceClient):
    def asked(name: str) -> GenerateRequest:
        return request(name, seed=2, max_tokens=200, ignore_eos=True)

    waiting = await paused_under_way(client, lambda number: client.generate(asked(f"asleep-{number}")))
    await client.sleep()
    await client.wake(("weights",))
    await client.pause("keep")
    await client.resume()
    await asyncio.sleep(0.3)
    assert not waiting.done(), "a server without its cache must not sample"
    await client.wake(("kv_cache",))
    (completion,) = await waiting
    (again,) = await client.generate(asked("awake"))
    assert completion.tokens == again.tokens
