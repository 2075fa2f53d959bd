"""An outside agent chats with the policy through the router, using the `openai` package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from rl_rollout.chat import load_tokenizer
from rl_rollout.vllm.client import RemoteInferenceClient
from tests.rollout.vllm.servers import TOKENS, RunningServer

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "what is 12+3?"}]


def agent(client: RemoteInferenceClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.router_url, api_key=TOKENS.access, max_retries=0)


async def test_an_openai_client_chats_with_the_policy(client: RemoteInferenceClient):
    async with agent(client) as chat:
        assert [model.id async for model in chat.models.list()] == ["policy"]
        answer = await chat.chat.completions.create(
            model="policy",
            messages=MESSAGES,  # pyright: ignore[reportArgumentType]
            max_tokens=8,
            logprobs=True,
            extra_headers={"X-Session-ID": "episode-1"},
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 8


async def test_answers_come_as_a_stream(client: RemoteInferenceClient):
    async with agent(client) as chat:
        arguments = {"model": "policy", "messages": MESSAGES, "max_tokens": 20, "seed": 3}
        whole = await chat.chat.completions.create(**arguments)  # pyright: ignore
        stream = await chat.chat.completions.create(**arguments, stream=True)  # pyright: ignore
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(parts) > 2
    assert "".join(parts) == whole.choices[0].message.content


async def test_a_servers_refusal_reaches_the_agent(client: RemoteInferenceClient):
    async with agent(client) as chat:
        with pytest.raises(openai.NotFoundError, match="another"):
            await chat.chat.completions.create(model="another", messages=MESSAGES)  # pyright: ignore


async def test_a_chat_stops_at_the_end_that_the_template_writes(moe_server: RunningServer):
    """The model's own end token is another one. A character, and a text that is no chat, do not stop."""
    tokenizer = load_tokenizer(moe_server.model_path)
    end, letter = (tokenizer.convert_tokens_to_ids(token) for token in (tokenizer.pad_token, "a"))
    lengths = []
    async with openai.AsyncOpenAI(base_url=f"{moe_server.url}/v1", api_key=TOKENS.access, max_retries=0) as chat:
        for token in (end, letter):
            sampling: Any = {"model": "policy", "max_tokens": 8, "logit_bias": {str(token): 100}}
            answer = await chat.chat.completions.create(messages=MESSAGES, **sampling)  # pyright: ignore
            text = await chat.completions.create(prompt="1+2=", **sampling)
            lengths.append([one.usage.completion_tokens for one in (answer, text) if one.usage is not None])
    assert lengths == [[1, 8], [8, 8]]
