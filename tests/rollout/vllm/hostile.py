"""Seeded requests that our clients would never send: wrong types, ranges, sizes, paths and encodings, requests that
break off, and clients that leave.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import attrs
import msgspec

from rl_rollout.vllm import bodies
from rl_rollout.vllm.routes import ROUTES
from tests.rollout.vllm.servers import TOKENS

_ANSWER_S = 100.0
_PATIENCE_S = 0.5
"""Seconds to wait for the answer to a request that need not get one."""


def nested(depth: int) -> Any:
    """A list nested `depth` times, as raw JSON, because json.dumps cannot nest so deep."""
    return msgspec.Raw(b"[" * depth + b"]" * depth)


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2.5, -0.5, 1e308, 2**31, 2**63, 2**64, 2**70, -(2**63) - 1, 10**400, "", "x", "policy",
    "\x00", "7", "東京 🙂", "x" * 5000, [], [[]], [None], ["a", 1], [-1], [2**40], [1.5], {}, {"a": 1}, {"": {"": []}},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 7}}}, {"type": "json_object"},
    {"regex": "("},
    msgspec.Raw(b"NaN"), msgspec.Raw(b"-Infinity"), msgspec.Raw(b"1e999"), msgspec.Raw(b'"\\ud800"'), nested(100),
    nested(100_000), msgspec.Raw(b'{"a":' * 30_000 + b"1" + b"}" * 30_000),
]  # fmt: skip
BROKEN = [
    b"", b"{", b"nothing", b"\xff\xfe\x00{", b'{"model": "policy", "prompt": "\xff"}', b"[]", b"7", b"null", b'"x"',
    b'{"model":"policy","prompt":"1","prompt":"2","max_tokens":1}', '{"model": "policy"}'.encode("utf-16"),
    b"\xef\xbb\xbf{}", b"\x00" * 1000, b"{}" * 1000, b"[" * 200_000, b'{"messages": [{"role": {}}]}',
    b'{"model":"policy","messages":"x"}',
    b'{"model":"policy","messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
    b'{"model":"policy","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc"}}]}]}',
]  # fmt: skip
SEGMENTS = [
    "v1",
    "rl",
    "..",
    ".",
    "%2e%2e",
    "%00",
    "%ff",
    "%252e",
    "models",
    "completions",
    "",
    "\\",
    "%0d%0aX:1",
    "é",
    "*",
]
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "BREW", "CONNECT", "post"]
HEADERS = [
    "Content-Length: -1", "Content-Length: 7, 8", "Content-Length: x", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "Content-Encoding: what", "Content-Type: text/plain",
    "Content-Type: application/json; charset=utf-99", "Content-Type: multipart/form-data; boundary=x",
    "Content-Type: Application/JSON", "Content-Type: application/json\r\nContent-Type: text/plain",
    "X-Session-ID: " + "s" * 5000, "Expect: 100-continue", "Host: elsewhere", "X-Request-Id: \x01",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
    "Cookie: " + "c" * 70_000, "Range: bytes=9-1", "Accept-Encoding: br;q=nan", "Authorization: Basic eA==",
    "\r\n".join(f"X-{i}: {i}" for i in range(200)),
]  # fmt: skip
_MESSAGES = [{"role": "user", "content": "1+1="}]
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "policy", "prompt": "1+1=", "max_tokens": 4},
    "/v1/chat/completions": {"model": "policy", "messages": _MESSAGES, "max_tokens": 4},
    "/v1/chat/completions/batch": {"model": "policy", "messages": [_MESSAGES, _MESSAGES], "max_tokens": 4},
    "/v1/responses": {"model": "policy", "input": "1+1=", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"model": "policy", "messages": _MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "policy", "messages": _MESSAGES},
    "/tokenize": {"model": "policy", "prompt": "1+1="},
    "/detokenize": {"model": "policy", "tokens": [1, 2, 3]},
}
_SAMPLING = ("/v1/completions", "/v1/chat/completions")


@attrs.frozen(kw_only=True)
class HostileRequest:
    """The bytes of one request, and when the client closes the connection."""

    kind: str
    head: bytes
    body: bytes
    leaves_after_sent: int | None = None
    """The connection is closed after this many bytes were sent; None: not before all are sent."""
    leaves_after_received: int | None = None
    """The connection is closed after this many bytes were received; None: not before the answer has ended."""
    is_whole: bool = True
    """Whether the request must get an answer."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.head[:300]!r} {self.body[:300]!r}"


def hostile_request(seed: int, *, to_router: bool) -> HostileRequest:
    """The request of this seed. A request to a router uses no control route, and no route in WHOLE outside of /v1."""
    dice = random.Random(seed)
    kinds = [_wrong_field, _wrong_field, _wrong_field, _broken_body, _odd_path, _odd_head, _departure]
    paths = [path for path in WHOLE if path.startswith("/v1/") or not to_router]
    return dice.choice(kinds if to_router else [*kinds, _wrong_control, _wrong_control])(dice, paths)


def known_fields() -> Mapping[str, list[str]]:
    """Route → the field names of vLLM's own classes for it."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    classes: dict[str, list[Any]] = {
        "/v1/completions": [CompletionRequest],
        "/v1/chat/completions": [ChatCompletionRequest],
        "/v1/chat/completions/batch": [BatchChatCompletionRequest],
        "/v1/responses": [ResponsesRequest],
        "/v1/messages": [AnthropicMessagesRequest],
        "/v1/messages/count_tokens": [AnthropicCountTokensRequest],
        "/tokenize": [TokenizeChatRequest, TokenizeCompletionRequest],
        "/detokenize": [DetokenizeRequest],
    }
    return {path: sorted({name for one in those for name in one.model_fields}) for path, those in classes.items()}


def _head(method: str, path: str, body: bytes, *others: str) -> bytes:
    token = TOKENS.access if path.startswith("/v1") else TOKENS.control
    given = ["Host: 127.0.0.1", f"Authorization: Bearer {token}", *others]
    names = {line.partition(":")[0].lower() for line in others}
    if not names & {"content-length", "transfer-encoding"}:
        given.append(f"Content-Length: {len(body)}")
    if "connection" not in names:
        given.append("Connection: close")
    if "content-type" not in names:
        given.append("Content-Type: application/json")
    return f"{method} {path} HTTP/1.1\r\n{chr(10).join(f'{line}{chr(13)}' for line in given)}\n\r\n".encode(
        "latin-1", "replace"
    )


def dumped(value: Any) -> bytes:
    """`value` as JSON. `Raw` values stay as they are, lone surrogates and NaN included."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, dict):
        return b"{" + b",".join(json.dumps(key).encode() + b":" + dumped(item) for key, item in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dumped, value)) + b"]"
    return json.dumps(value).encode()


def _wrong_field(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    path = dice.choice(paths)
    fields = dict(WHOLE[path])
    for name in dice.sample(known_fields()[path], dice.choice([1, 1, 2])):
        fields[name] = dice.choice(VALUES)
    body = dumped(fields)
    return HostileRequest(kind="wrong field", head=_head("POST", path, body), body=body)


def _broken_body(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    body = dice.choice(BROKEN)
    return HostileRequest(kind="broken body", head=_head("POST", dice.choice(paths), body), body=body)


def _odd_path(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    del paths
    path = "/" + "/".join(dice.choices(SEGMENTS, k=dice.randint(1, 6)))
    if dice.random() < 0.3:
        path = "/v1/" + quote(dice.randbytes(dice.choice([8, 3000, 30_000])))
    head = _head(
        dice.choice([*METHODS, "GET", "POST"]), path + dice.choice(["", "?a=%ff&a=1", "?" + "q" * 5000, "#x"]), b""
    )
    return HostileRequest(kind="odd path", head=head, body=b"", is_whole=False)


def _odd_head(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    path = dice.choice(paths)
    body = dumped({**WHOLE[path], "seed": dice.choice([7, 10**400])})
    return HostileRequest(
        kind="odd head", head=_head("POST", path, body, dice.choice(HEADERS)), body=body, is_whole=False
    )


def _departure(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    path = dice.choice(_SAMPLING)
    del paths
    body = dumped({**WHOLE[path], "max_tokens": 400, "ignore_eos": True, "stream": dice.random() < 0.5})
    head = _head("POST", path, body)
    if dice.random() < 0.5:
        sent = dice.randrange(1, len(head) + len(body))
        return HostileRequest(kind="half sent", head=head, body=body, leaves_after_sent=sent)
    received = dice.choice([0, 1, 50, 300, 1000])
    return HostileRequest(kind="leaves", head=head, body=body, leaves_after_received=received)


def _wrong_control(dice: random.Random, paths: Sequence[str]) -> HostileRequest:
    """A request to a control route that would leave the server unchanged even if the request were valid."""
    del paths
    name = dice.choice(
        ["generate", "score", "cancel", "abort", "load_adapter", "prepare_weights", "update_weights", "wake", "health"]
    )
    fields: dict[str, Any] = dict.fromkeys(ROUTES[name][0].__struct_fields__)
    plain = [
        value
        for value in VALUES
        if not isinstance(value, msgspec.Raw | int) or (isinstance(value, int) and value.bit_length() < 64)
    ]
    if name == "generate":
        sampling = {field: dice.choice(plain) for field in bodies.Sampling.__struct_fields__}
        fields = {"sample_id": f"hostile-{dice.random()}", "prompt_tokens": b"\1\0\0\0", "params": sampling, "seed": 1}
    for field in fields:
        if dice.random() < 0.6:
            fields[field] = dice.choice([*plain, b"", b"123", b"\xff\xff\xff\x7f"])
    body = msgspec.msgpack.encode(fields)
    if dice.random() < 0.3:
        body = dice.choice(
            [b"\x91" * 100_000, dice.randbytes(200), body[: len(body) // 2], b"\xdd\xff\xff\xff\xff", b"\x81" * 5000]
        )
    return HostileRequest(kind="wrong control", head=_head("POST", f"/rl/{name}", body), body=body)


async def sent(request: HostileRequest, host: str, port: int) -> tuple[int, bytes] | None:
    """Sends the request. Returns the answer's status and, if an answer is due, its body. Returns None if the client
    leaves early, or if no answer comes and none is due.

    Raises:
        TimeoutError: an answer is due and did not arrive in time.
        ConnectionError: the connection ended before the answer did.
    """
    reader, writer = await asyncio.open_connection(host, port)
    everything = request.head + request.body
    try:
        try:
            writer.write(everything[: request.leaves_after_sent])
            await writer.drain()
        except ConnectionError:
            pass  # refused before all of it was read: an answer may have been sent
        if request.leaves_after_sent is not None:
            return None
        if request.leaves_after_received is not None:
            await asyncio.wait_for(reader.read(request.leaves_after_received), _ANSWER_S)
            return None
        try:
            line = await asyncio.wait_for(reader.readline(), _ANSWER_S if request.is_whole else _PATIENCE_S)
        except TimeoutError:
            if request.is_whole:
                raise
            return None
        if not line.startswith(b"HTTP/1.1 "):
            if request.is_whole:
                raise ConnectionError(f"{line!r} is not an HTTP answer")
            return None
        return int(line.split()[1]), await asyncio.wait_for(_body(reader), _ANSWER_S) if request.is_whole else b""
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer that ends with its connection. Raises ConnectionError if it is incomplete."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.read()
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n") if b": " in line)
    is_chunked = headers.get(b"transfer-encoding") == b"chunked"
    if not (body.endswith(b"0\r\n\r\n") if is_chunked else len(body) == int(headers[b"content-length"])):
        raise ConnectionError(f"{head!r}: the body broke off after {len(body)} bytes")
    return body
