"""`calculator`, `gsm8k_turns` and `search` pass their suite; wrong rows, options and corpora are refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core import plugins
from rl_core.errors import DataError, RLError
from rl_core.interfaces import Action, StepResult
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.answers import is_exact_match
from rl_environments.calculator import CalculatorEnvironment, computed
from rl_environments.corpora import load_corpus, read_documents, write_index
from rl_environments.gsm8k_turns import NO_NUMBER, WRONG, Gsm8kTurnsEnvironment
from rl_environments.search import SearchEnvironment

ASKED = [{"role": "user", "content": "What is 37 * 45?"}]
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "37*45"}}</tool_call>'
DOCUMENTS = [
    {"title": "Emma", "text": "Emma is a novel by Jane Austen."},
    {"title": "Faust", "text": "Faust is a play by Goethe."},
    {"text": "A document without a title about whales."},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    return path


def play(environment: Any, *texts: str, stop_reason: Any = "stop") -> list[StepResult]:
    async def steps() -> list[StepResult]:
        await environment.reset()
        return [await environment.step(Action(text=text, tokens=(), stop_reason=stop_reason)) for text in texts]

    return asyncio.run(steps())


def shown(result: StepResult) -> str:
    assert result.observation is not None
    return result.observation if isinstance(result.observation, str) else result.observation[0]["content"]


class TestCalculator(EnvironmentConformance):
    factory = CalculatorEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": ASKED, "answer": 1665}
    rewards: ClassVar[dict[Any, float]] = {
        "1665": 1.0,
        (CALL, "It is 1,665."): 1.0,
        (CALL, CALL, "1666"): 0.0,
        ("<tool_call>{", "1665"): 1.0,
        "no idea": 0.0,
    }


class TestCalculatorInText(EnvironmentConformance):
    factory = CalculatorEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": "37*45?", "reward_spec": {"ground_truth": "1,665"}}
    rewards: ClassVar[dict[Any, float]] = {"1665": 1.0, (CALL, "1665"): 1.0, (CALL, "x"): 0.0}


class TestGsm8kTurns(EnvironmentConformance):
    factory = Gsm8kTurnsEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": ASKED, "reward_spec": {"ground_truth": "1665"}}
    options: ClassVar[dict[str, Any]] = {"later_reward": 0.5}
    rewards: ClassVar[dict[Any, float]] = {
        "so #### 1,665": 1.0,
        ("#### 1", "1665", "#### $1665.0"): 0.5,
        ("#### 1", "#### 2", "#### 3"): 0.0,
    }


def search_suite(corpus: Path) -> type[EnvironmentConformance]:
    class Suite(EnvironmentConformance):
        factory = SearchEnvironment
        row: ClassVar[dict[str, Any]] = {"prompt": "Who wrote Emma?", "answer": ["Jane Austen", "Austen"]}
        options: ClassVar[dict[str, Any]] = {"corpus": str(corpus), "max_searches": 2}
        rewards: ClassVar[dict[Any, float]] = {
            "<answer>the austen.</answer>": 1.0,
            ("<search>Emma</search>", "<answer> Jane  Austen </answer>"): 1.0,
            ("<search>Emma</search>", "<search>Faust</search>", "<search>x</search>"): 0.0,
            "neither": 0.0,
            "<answer>Goethe</answer>": 0.0,
        }

    return Suite


CHECKS = [name for name in dir(EnvironmentConformance) if name.startswith("test_")]


@pytest.mark.parametrize("check", CHECKS)
def test_search_passes_the_suite_of_environments(corpus: Path, check: str):
    getattr(search_suite(corpus)(), check)()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2", "14"),
        ("-7 // 2", "-4"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2**64 % 10**9", "709551616"),
        ("10/4", "2.5"),
        ("2 ** -1", "0.5"),
    ],
)
def test_the_calculator_shows_exact_integers_and_twelve_digits_of_fractions(expression: str, value: str):
    assert computed(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "__import__('os')",
        "'a'*3",
        "9**9**9",
        "((-9)**63)**63",
        "x",
        "True",
        "1 if 1 else 2",
        "(" * 400,
        "1+" * 400 + "1",
        "1e999",
    ],
)
def test_the_calculator_refuses_other_expressions(expression: str):
    with pytest.raises((ValueError, OverflowError)):
        computed(expression)


def test_division_by_zero_is_reported_to_the_policy():
    call = CALL.replace("37*45", "1/0")
    assert "Error: ZeroDivisionError" in shown(play(CalculatorEnvironment({"prompt": ASKED, "answer": 1}, {}), call)[0])


def test_gsm8k_turns_tells_the_policy_what_is_wrong():
    environment = Gsm8kTurnsEnvironment({"prompt": ASKED, "answer": 5}, {})
    assert [shown(result) for result in play(environment, "5", "#### 4")] == [NO_NUMBER, WRONG]


def test_a_search_shows_the_documents_that_share_a_word(corpus: Path):
    environment = SearchEnvironment({"prompt": "?", "answer": "x"}, {"corpus": str(corpus), "top_k": 2})
    found, nothing = play(environment, "<think>hm</think><search>Jane Austen</search>", "<search>zebra</search>")
    assert shown(found) == "\n\n<information>Doc 1(Title: Emma) Emma is a novel by Jane Austen.</information>\n\n"
    assert shown(nothing) == "\n\n<information>Nothing was found.</information>\n\n"


def test_an_indexed_corpus_finds_the_same_documents(corpus: Path, tmp_path: Path):
    command = [sys.executable, "-m", "rl_environments.corpora", str(corpus), str(tmp_path / "index")]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    for query in ("Goethe", "whales", "nothing at all"):
        assert load_corpus(str(tmp_path / "index")).search(query, 3) == load_corpus(str(corpus)).search(query, 3)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("calculator", {"prompt": ASKED}, "a row of calculator needs `answer`"),
        ("calculator", {"prompt": ASKED, "answer": "many"}, "a number; got 'many'"),
        ("calculator", {"answer": 1}, "needs `prompt`"),
        ("gsm8k_turns", {"prompt": ASKED, "reward_spec": {}}, "a row of gsm8k_turns needs `answer`"),
        ("gsm8k_turns", {"prompt": "x", "answer": float("inf")}, "a number; got inf"),
        ("gsm8k_turns", {"prompt": "x", "answer": "1,5"}, "a number; got '1,5'"),
        ("calculator", {"prompt": "x", "answer": "1, 2"}, "a number; got '1, 2'"),
        ("search", {"prompt": "x", "answer": " "}, "text or a list of texts; got"),  # an empty answer would be right
        ("search", {"prompt": "x", "answer": []}, "text or a list of texts; got"),
        ("search", {"prompt": "", "answer": "x"}, "needs `prompt`"),
    ],
)
def test_a_row_that_cannot_be_played_is_refused_before_the_run(name: str, row: dict[str, Any], said: str):
    with pytest.raises(RLError, match=said):
        plugins.load("rl_core.environments", name).require_row(row)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("calculator", {"format": "x"}, "not an option of the environment 'calculator' .call_format."),
        ("calculator", {"call_format": "x"}, "environment.options.call_format: got 'x'; expected one of hermes"),
        ("gsm8k_turns", {"max_trys": 2}, "Did you mean 'max_tries'"),
        ("gsm8k_turns", {"max_tries": 0}, "got 0; expected a whole number of at least 1"),
        ("gsm8k_turns", {"later_reward": 2}, "got 2; expected a number from 0 to 1"),
        ("calculator", {"calculator": {"call_format": "x"}}, "environment.options.calculator.call_format: got 'x'"),
        ("gsm8k_turns", {"gsm8k_turns": {"max_tries": 0}}, "environment.options.gsm8k_turns.max_tries: got 0"),
        ("gsm8k_turns", {"gsm8k_turns": {"later_reward": 2}}, "environment.options.gsm8k_turns.later_reward: got 2"),
        ("search", {"search": {}}, "environment.options.search.corpus: got None; expected text"),
        ("search", {}, "environment.options.corpus: got None; expected text"),
        ("search", {"corpus": "/nowhere.jsonl"}, "does not exist; expected a .jsonl file or an index folder"),
    ],
)
def test_an_invalid_option_is_refused_by_name(name: str, options: dict[str, Any], said: str):
    with pytest.raises(RLError, match=said):
        plugins.load("rl_core.environments", name)({"prompt": ASKED, "answer": "1"}, options)


def test_a_missing_file_to_index_is_not_blamed_on_an_option(tmp_path: Path):
    command = [sys.executable, "-m", "rl_environments.corpora", "/nowhere.jsonl", str(tmp_path / "index")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 1
    assert ran.stderr == "error: /nowhere.jsonl does not exist; expected a .jsonl file\n"


def test_a_corpus_that_is_empty_or_has_a_broken_line_is_refused(tmp_path: Path):
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"title": "y"}\n')
    with pytest.raises(DataError, match=r"broken.jsonl:2: got"):
        load_corpus(str(tmp_path / "broken.jsonl"))
    for line in ('{"text": null}', '{"text": ["x"]}', '{"text": "x", "title": {"y": 1}}', "[" * 100_000):
        (tmp_path / "broken.jsonl").write_text(line)
        with pytest.raises(DataError, match=r"broken.jsonl:1: got"):
            load_corpus(str(tmp_path / "broken.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="has no documents"):
        load_corpus(str(tmp_path / "empty.jsonl"))
    (tmp_path / "wordless.jsonl").write_text('{"text": "the"}\n{"text": "?"}\n')
    for use in (lambda path: load_corpus(str(path)), lambda path: write_index(path, tmp_path / "index")):
        with pytest.raises(DataError, match=r"wordless\.jsonl: got 2 documents without a word to search for"):
            use(tmp_path / "wordless.jsonl")


class Slow:
    """A file in which moving to a place takes a moment, so that other threads run before the line there is read."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seek(self, position: int) -> None:
        self._file.seek(position)
        time.sleep(0.002)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_threads_that_search_an_index_at_the_same_time_get_their_own_documents(tmp_path: Path):
    words = [f"{a}{b}x" for a in "bdfgkl" for b in "aeiou"]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": f"{word} {word}"}) + "\n" for word in words))
    write_index(tmp_path / "documents.jsonl", tmp_path / "index")
    corpus = load_corpus(str(tmp_path / "index"))
    documents: Any = corpus._documents
    documents.mmap_obj = Slow(documents.mmap_obj)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda word: [each.text for each in corpus.search(word, 1)], words))
    assert found == [[f"{word} {word}"] for word in words]


def test_only_a_line_feed_ends_a_document(tmp_path: Path):
    documents = [{"text": "one\u2028line \x85 still"}, {"text": "two"}]
    lines = [json.dumps(each, ensure_ascii=False) for each in documents]
    (tmp_path / "documents.jsonl").write_text("\r\n\n".join(lines) + "\n \n", encoding="utf-8")
    assert [each["text"] for each in read_documents(tmp_path / "documents.jsonl")] == [
        "one\u2028line \x85 still",
        "two",
    ]


def test_documents_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path):
    (tmp_path / "documents.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"documents.jsonl:2: got .*; expected UTF-8 JSON"):
        read_documents(tmp_path / "documents.jsonl")


def test_an_index_that_cannot_be_written_leaves_no_folder(tmp_path: Path, corpus: Path):
    command = f"ulimit -f 0; exec {sys.executable} -m rl_environments.corpora {corpus} {tmp_path / 'indexes' / 'index'}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr
    assert f"error: {tmp_path}/indexes/index cannot be written: " in ran.stderr
    assert list((tmp_path / "indexes").iterdir()) == []


def test_a_document_with_a_lone_surrogate_is_indexed(tmp_path: Path):
    (tmp_path / "documents.jsonl").write_text('{"text": "whale \\ud83d"}\n{"text": "shark"}\n')
    write_index(tmp_path / "documents.jsonl", tmp_path / "index")
    assert [each.text for each in load_corpus(str(tmp_path / "index")).search("whale", 1)] == ["whale ?"]


def test_an_index_without_its_documents_is_refused(tmp_path: Path, corpus: Path):
    write_index(corpus, tmp_path / "index")
    (tmp_path / "index" / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match="holds an index without its documents"):
        load_corpus(str(tmp_path / "index"))


def test_an_answer_of_only_articles_does_not_equal_an_empty_one():
    assert is_exact_match("a", ["A"])
    assert is_exact_match("(A)", ["A"])
    assert is_exact_match("The whale!", ["a whale"])
    assert not any(is_exact_match(answer, ["A"]) for answer in ("", "the", "?"))
    assert not is_exact_match("", ["!"])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("calculator", {"format": "x"}, "environment.options.format: not an option of the environment 'calculator'"),
        ("calculator", {"call_format": "x"}, "environment.options.call_format: got 'x'; expected one of hermes"),
        ("gsm8k_turns", {"max_trys": 2}, "Did you mean 'max_tries'"),
        ("search", {"corpus": "x", "top_k": 0}, "environment.options.top_k: got 0; expected a whole number"),
        ("judge", {"url": "http://h/v1", "modle": "x"}, "Did you mean 'model'"),
        ("judge", {"url": "inference_engine", "tries": 0}, "environment.options.tries: got 0"),
        ("judge", {"url": "localhost:8000", "model": "m"}, "environment.options.url: got 'localhost:8000'"),
        ("code", {"limits": {"cpu": 3}}, "environment.options.limits: got"),
        (
            "mathematics",
            {"cpu_s": 1e12},
            "environment.options.cpu_s: got 1000000000000.0; expected between 0 and 86400",
        ),
        ("mathematics", {"cpu_s": float("inf")}, "environment.options.cpu_s: got inf"),
        ("mathematics", {"cpu_s": None}, "environment.options.cpu_s: got None; expected a number"),
        ("code", {"wait_s": None}, "environment.options.wait_s: got None; expected a number"),
        ("calculator", {"call_format": ["hermes"]}, r"environment.options.call_format: got \['hermes'\]; expected one"),
        ("reasoning_gym", {"x": 1}, "not an option of the environment 'reasoning_gym' .it has none."),
        ("skyrl_gym", {"env": "nowhere.riddles:Riddle"}, "environment.options.env: 'nowhere.riddles:Riddle'"),
        ("skyrl_gym", {"env": "gsm8k", "config": ["a"]}, r"options.config: got \['a'\]; expected a mapping"),
        (
            "code",
            {"code": {}, "reward": "fraction"},
            "options.reward: has no effect .*write environment.options.code.reward",
        ),
    ],
)
def test_options_are_checked_before_the_run(name: str, options: dict[str, Any], said: str):
    with pytest.raises(RLError, match=said):
        plugins.load("rl_core.environments", name).require_options(options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gsm8k_turns", {"code": {"reward": "fraction"}}),
        ("gsm8k_turns", {"code": {"reward": "fraction"}, "max_tries": 2}),
        ("reasoning_gym", {"code": {"reward": "fraction"}, "judge": {}}),
        ("judge", {"url": "inference_engine", "model": "base"}),
        ("code", {"limits": {"cpu_s": 2.0, "memory_bytes": 1e9}}),
    ],
)
def test_valid_options_and_those_of_other_environments_are_accepted_before_the_run(name: str, options: dict[str, Any]):
    plugins.load("rl_core.environments", name).require_options(options)
