"""The environment `judge`. This process serves the judge's scripted replies over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from rl_core.errors import DataError, DeadlineError, GenerationError, RLError
from rl_core.interfaces import Action, ServedModel, StepResult
from rl_environments import Judge as ComposedJudge
from rl_environments.judge import JudgeEnvironment

ROW = {"prompt": [{"role": "user", "content": "Name a {colour}."}], "reference": "red"}


class Judge:
    """Answers with `replies` in order, then always with a score of 5. Records each request."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: list[Callable[[], tuple[int, str]]] = []
        self.released = threading.Event()
        self.has_given_up = threading.Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                judge.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                judge.keys.append(self.headers.get("Authorization"))
                status, content = judge.replies.pop(0)() if judge.replies else said("Score: 5")()
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(content.encode())
                except OSError:
                    pass  # the environment stopped waiting and closed the connection

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def hang(self) -> tuple[int, str]:
        self.released.wait(timeout=250)
        self.has_given_up.set()
        return 500, ""


def said(text: str) -> Callable[[], tuple[int, str]]:
    return lambda: (200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    thread = threading.Thread(target=judge.server.serve_forever, args=(0.02,))
    thread.start()
    yield judge
    judge.released.set()
    judge.server.shutdown()
    thread.join(timeout=60)
    judge.server.server_close()


def step(judge: Judge, text: str = "blue", **options: Any) -> StepResult:
    return step_at(judge.url, text, **options)


def step_at(url: str, /, text: str = "blue", **options: Any) -> StepResult:
    async def play() -> StepResult:
        environment = JudgeEnvironment(ROW, {"url": url, "model": "m", **options})
        assert await environment.reset() == ROW["prompt"]
        result = await environment.step(Action(text=text, tokens=(), stop_reason="stop"))
        await environment.close()
        return result

    return asyncio.run(play())


def test_the_judges_last_score_is_the_reward(judge: Judge):
    judge.replies = [said("Score: 9 would be too much.\n**Score:** 7")]
    result = step(judge)
    assert (result.reward, result.done) == (0.7, True)
    assert result.metrics == {"accuracy": 0.7, "judge_tries": 1.0}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        # A number after a colon takes precedence over a number in a remark.
        ("Score: 4\n\nA perfect score (10) would need units.", 0.4),
        ("Score 10 is not deserved. **Score**: 3", 0.3),
        ("score 6", 0.6),
        ("Score: .5", 0.05),
        ("Score: 8/10", 0.8),
    ],
)
def test_a_grade_is_read_from_replies_of_several_forms(judge: Judge, reply: str, reward: float):
    judge.replies = [said(reply)]
    assert step(judge).reward == pytest.approx(reward)


def test_a_conversation_with_tool_calls_is_shown_to_the_judge(judge: Judge):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    prompt = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "tool_calls": calls}]

    async def play() -> StepResult:
        environment = JudgeEnvironment({"prompt": prompt}, {"url": judge.url, "model": "m"})
        return await environment.step(Action(text="2", tokens=(), stop_reason="stop"))

    assert asyncio.run(play()).reward == 0.5
    assert 'assistant: [{"type": "function"' in judge.asked[0]["messages"][0]["content"]


def test_the_judge_sees_question_reference_and_answer_without_thinking(judge: Judge):
    step(judge, "<think>secret</think> blue {reference}", temperature=0.5)
    (asked,) = judge.asked
    assert (asked["model"], asked["temperature"]) == ("m", 0.5)
    content = asked["messages"][0]["content"]
    assert "user: Name a {colour}." in content
    assert "A right answer:\nred" in content
    assert "blue {reference}" in content, "placeholders in the policy's answer must stay"
    assert "secret" not in content


def test_the_marks_around_an_answer_are_new_each_time(judge: Judge):
    for _ in range(2):
        step(judge)
    marks = [set(re.findall(r"----- \w{16} -----", asked["messages"][0]["content"])) for asked in judge.asked]
    assert len(marks[0]) == len(marks[1]) == 1
    assert marks[0] != marks[1]


def test_a_second_try_may_give_the_score(judge: Judge):
    judge.replies = [lambda: (503, "loading"), said("Score: 10")]
    result = step(judge)
    assert (result.reward, result.metrics["judge_tries"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda: (500, "out of memory"), "answered 500 .*out of memory"),
        (lambda: (200, "no json"), "expected a chat completion"),
        (lambda: (200, '{"choices": []}'), "expected a chat completion"),
        (said("I refuse."), "said 'I refuse.'; expected `Score: n` with n from 0 to 10"),
        (said("Score: 11"), "expected `Score: n`"),
        (said("Score: -3"), "expected `Score: n`"),
    ],
)
def test_a_failing_judge_raises_an_error_instead_of_a_reward(judge: Judge, reply: Any, message: str):
    judge.replies = [reply, reply]
    with pytest.raises(GenerationError, match=message):
        step(judge)
    assert len(judge.asked) == 2


def test_a_reply_aborted_by_a_weight_sync_is_not_a_grade(judge: Judge):
    half = {"message": {"content": "Score: 9 would be"}, "finish_reason": "abort"}
    judge.replies = [lambda: (200, json.dumps({"choices": [half]})), said("Score: 4")]
    result = step(judge)
    assert (result.reward, result.metrics["judge_tries"]) == (0.4, 2.0)


@pytest.mark.parametrize("begun", ["Score: 1", "Score: 7."])
def test_a_number_at_the_end_of_a_truncated_reply_is_not_a_grade(judge: Judge, begun: str):
    cut = {"message": {"content": begun}, "finish_reason": "length"}
    judge.replies = [lambda: (200, json.dumps({"choices": [cut]}))]
    with pytest.raises(GenerationError, match=r"reached max_tokens \(512\) .*; raise environment.options.*max_tokens"):
        step(judge, tries=1)
    after = {"message": {"content": f"{begun} or so"}, "finish_reason": "length"}
    judge.replies = [lambda: (200, json.dumps({"choices": [after]}))]
    assert step(judge).reward == float(begun[7:]) / 10


def test_a_deadline_error_names_the_address_of_the_judge(judge: Judge):
    judge.replies = [judge.hang]
    with pytest.raises(DeadlineError, match=f"the judge at {judge.url} did not answer within 0.5 s .*timeout_s"):
        step(judge, timeout_s=0.5, tries=1)
    assert not judge.has_given_up.is_set(), "the environment must not wait for the judge"


@pytest.mark.parametrize("head", ["", "HTTP/1.1 200 OK\r\n\r\n"], ids=["its head", "its body"])
def test_a_reply_that_trickles_in_does_not_extend_the_deadline(head: str):
    sent: list[bytes] = []
    with trickling(head.encode(), sent) as url:
        with pytest.raises(DeadlineError, match=f"the judge at {url} did not answer within 0.3 s"):
            step_at(url, timeout_s=0.3, tries=1)
        assert len(sent) < 600, "the environment read for 30 s or more"


def test_no_thread_goes_on_reading_a_reply_after_its_deadline():
    with trickling(b"HTTP/1.1 200 OK\r\n\r\n") as url:
        before = threading.active_count()
        with pytest.raises(DeadlineError):
            step_at(url, timeout_s=0.3, tries=1)
        deadline = time.monotonic() + 100
        while threading.active_count() > before:
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.05)


def test_the_error_of_a_server_that_does_not_speak_http_names_its_address():
    message = "cannot be reached: BadStatusLine: 220 mail server"
    with (
        trickling(b"220 mail server\r\n") as url,
        pytest.raises(GenerationError, match=f"the judge at {url} {message}"),
    ):
        step_at(url, timeout_s=200, tries=1)


@contextmanager
def trickling(head: bytes, sent: list[bytes] | None = None) -> Iterator[str]:
    """The address of a server that sends `head` at once, and then a byte every 0.05 s, which it appends to `sent`."""
    ended = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(head)
            while not ended.wait(0.05):
                try:
                    self.request.sendall(b"x")
                except OSError:
                    return
                if sent is not None:
                    sent.append(b"x")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            ended.set()
            server.shutdown()
            thread.join(timeout=60)


def test_the_error_of_a_refused_connection_names_the_address():
    # A socket that does not listen refuses connections, and no other process can get its port meanwhile.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with pytest.raises(GenerationError, match=f"the judge at {url} cannot be reached: URLError: .*refused"):
            step_at(url, tries=1)


def test_the_key_comes_from_an_environment_variable(judge: Judge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    step(judge, key_variable="JUDGE_KEY")
    assert judge.keys == ["Bearer abc"]
    with pytest.raises(DataError, match="'NO_KEY' is not set"):
        step(judge, key_variable="NO_KEY")


def test_no_error_shows_the_key(judge: Judge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", " abc\n")
    step(judge, key_variable="JUDGE_KEY")
    assert judge.keys == ["Bearer abc"]
    for key in ("secret\nabc", "sécret"):
        monkeypatch.setenv("JUDGE_KEY", key)
        with pytest.raises(DataError, match="'JUDGE_KEY' has a character that no API key has") as raised:
            step(judge, key_variable="JUDGE_KEY")
        assert key not in str(raised.value)


def test_a_model_of_the_runs_engine_is_asked_by_its_name_and_key(judge: Judge):
    served = ServedModel(url=judge.url, name="rl-base", key="abc")
    assert step(judge, url=served, model="base").reward == 0.5
    assert (judge.asked[0]["model"], judge.keys) == ("rl-base", ["Bearer abc"])
    assert "abc" not in repr(served)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "inference_engine"}, "in a run, inference_engine"),
        ({"url": "localhost:8000"}, "expected the API's address"),
        ({"model": None}, "environment.options.model: got None"),
        ({"timeout_s": 0}, "environment.options.timeout_s: got 0"),
        ({"temperature": "0"}, "environment.options.temperature: got '0'; expected a number from 0 to 2"),
        ({"modle": "x"}, "Did you mean 'model'"),
    ],
)
def test_invalid_options_are_refused(judge: Judge, options: dict[str, Any], message: str):
    with pytest.raises(RLError, match=message):
        step(judge, **options)


@pytest.mark.parametrize(("option", "value"), [("url", "x"), ("timeout_s", 0), ("key_variable", "NO_KEY")])
def test_the_error_of_an_option_in_the_judges_section_names_its_full_key(option: str, value: Any):
    section = {"url": "http://host/v1", "model": "m", option: value}
    with pytest.raises(RLError, match=f"environment.options.judge.{option}: "):
        JudgeEnvironment(ROW, {"judge": section})


@pytest.fixture(scope="module")
def revisions() -> Any:
    """The environment that docs/environments.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# my_package/revisions\.py\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["RevisionEnvironment"]


@pytest.mark.parametrize(
    ("scores", "rewards"),
    [([9], [0.9]), ([2, 8], [0.0, 0.8]), ([2, 7, 3], [0.0, 0.0, 0.3])],
    ids=["satisfied at once", "satisfied after a revision", "out of turns"],
)
def test_a_judge_in_an_environment_of_ones_own_ends_the_episode(
    judge: Judge, revisions: Any, scores: list[int], rewards: list[float]
):
    judge.replies = [said(f"Score: {score}") for score in scores]
    options = {"url": judge.url, "model": "m", "highest_score": 10}
    revisions.require_options(options)

    async def play() -> list[StepResult]:
        environment = revisions({"prompt": "Summarize: …", "article": "A cat sat."}, options)
        await environment.reset()
        results = []
        while not results or not results[-1].done:
            text = f"summary {len(results)}"
            results.append(await environment.step(Action(text=text, tokens=(), stop_reason="stop")))
        return results

    results = asyncio.run(play())
    assert [result.reward for result in results] == rewards
    assert [result.observation is None for result in results] == [False] * (len(rewards) - 1) + [True]
    asked = [request["messages"][0]["content"] for request in judge.asked]
    assert ["A cat sat." in each and f"\nsummary {turn}\n" in each for turn, each in enumerate(asked)] == [True] * len(
        rewards
    )


def test_a_judge_sends_the_conversation_as_it_is_and_counts_its_tries(judge: Judge):
    judge.replies = [said("no score"), said("Score: 3"), said("Score: 4")]
    asks = ComposedJudge({"url": judge.url, "model": "m", "highest_score": 4, "temperature": 0.5, "unknown": 1})
    conversation = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "2 + 2 = 4?"}]

    async def ask() -> list[float]:
        return [await asks.ask(conversation), await asks.ask(conversation[1:])]

    assert asyncio.run(ask()) == [0.75, 1.0]
    assert asks.num_tries == 3
    assert [request["messages"] for request in judge.asked] == [conversation, conversation, conversation[1:]]
    assert judge.asked[0]["temperature"] == 0.5


def test_a_judge_without_an_address_is_refused_before_the_run():
    ComposedJudge.require_options({"url": "inference_engine", "model": "base"})
    for options, message in (({}, "environment.options.url: got None"), ({"url": "http://a/v1"}, "options.model: got")):
        with pytest.raises(RLError, match=message):
            ComposedJudge.require_options(options)
