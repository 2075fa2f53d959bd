"""Searches the documents of a local file with BM25. Needs the extra `search`.

A process reads and indexes a file once, when it creates the first environment that uses the file; with placement
`process`, each environment process does so. Index a large corpus beforehand (`python -m rl_environments.corpora
documents.jsonl index`): an index folder is memory-mapped, so all processes share its pages.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from rl_core.errors import ConfigError, DataError, RLError, install

_one_at_a_time = threading.Lock()


@attrs.frozen(kw_only=True)
class Document:
    """A document that a search finds."""

    title: str
    """Empty if the corpus has no titles."""
    text: str


class Corpus:
    """Documents and the BM25 index that finds them."""

    def __init__(self, retriever: Any, documents: Sequence[Any]) -> None:
        self._bm25s = _bm25s()
        self._retriever = retriever
        self._documents = documents
        self._reading = threading.Lock()
        """Held while documents are read: bm25s moves the file position of an index folder, which all threads share."""

    def search(self, query: str, count: int) -> list[Document]:
        """Returns at most `count` documents that share a word with the query, the best first. English stop words and
        words of one character do not count."""
        words = self._bm25s.tokenize([query], show_progress=False, return_ids=False)
        if not words[0]:
            return []
        found = self._retriever.retrieve(
            words, corpus=range(len(self._documents)), k=min(count, len(self._documents)), show_progress=False
        )
        pairs = zip(found.documents[0].tolist(), found.scores[0].tolist(), strict=True)
        with self._reading:
            return [_document(self._documents[number]) for number, score in pairs if score > 0]


def load_corpus(path: str) -> Corpus:
    """Loads a corpus from a file of documents, or from a folder that `write_index` made.

    Raises:
        ConfigError: the extra is missing.
        DataError: the file does not exist, has an invalid line, or holds no documents or no word to search for; or the
            folder holds no index, or an index without its documents.
    """
    with _one_at_a_time:
        return _load(str(Path(path).expanduser().resolve()))


@cache
def _load(path: str) -> Corpus:
    bm25s = _bm25s()
    if Path(path).is_dir():
        try:
            retriever = bm25s.BM25.load(path, load_corpus=True, mmap=True, show_progress=False)
        except Exception as error:
            raise DataError(f"{path} cannot be read as an index: {type(error).__name__}: {error}") from error
        if retriever.corpus is None:
            raise DataError(
                f"{path} holds an index without its documents (corpus.jsonl); make it again: python -m "
                "rl_environments.corpora DOCUMENTS.jsonl INDEX_FOLDER"
            )
        return Corpus(retriever, retriever.corpus)
    if not Path(path).exists():
        raise DataError(f"corpus: {path} does not exist; expected a .jsonl file or an index folder")
    documents = read_documents(Path(path))
    return Corpus(_indexed(documents, Path(path)), documents)


def read_documents(path: Path) -> list[dict[str, str]]:
    """Reads JSON lines with `text` and, optionally, `title`. Skips blank lines. Raises DataError, which names the line
    if a single line is at fault."""
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a .jsonl file")
    documents = []
    for number, line in _lines(path):
        try:
            row = json.loads(line.decode("utf-8-sig"))
            documents.append({"title": _storable(row.get("title") or ""), "text": _storable(row["text"])})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"{path}:{number}: got {line.decode(errors='replace')!r:.80}; expected UTF-8 JSON like "
                '{"title": "…", "text": "…"}'
            ) from None
    if not documents:
        raise DataError(f"{path} has no documents; expected JSON lines with `text` and, optionally, `title`")
    return documents


def _storable(value: Any) -> str:
    """The value as text without lone surrogates, which neither files nor tokenizers accept. Raises TypeError if the
    value is neither text nor a number."""
    if not isinstance(value, str | int | float):
        raise TypeError
    return str(value).encode("utf-8", "replace").decode()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers. Only a line feed ends a line: `str.splitlines` also
    splits at characters that JSON allows inside text, such as U+2028."""
    try:
        with path.open("rb") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def write_index(documents: Path, folder: Path) -> int:
    """Indexes a file of documents into a new folder, which appears when it is complete. Returns the number of
    documents. Raises what `load_corpus` raises, and DataError if the folder exists or cannot be written."""
    if folder.exists():
        raise DataError(f"{folder} already exists: choose another folder, or remove it first")
    read = read_documents(documents)
    retriever = _indexed(read, documents)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
            whole = Path(unfinished, "index")
            retriever.save(whole, corpus=read, show_progress=False)
            whole.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    return len(read)


def _indexed(documents: Sequence[dict[str, str]], path: Path) -> Any:
    bm25s = _bm25s()
    words = bm25s.tokenize([f"{each['title']} {each['text']}" for each in documents], show_progress=False)
    if not words.vocab:
        raise DataError(
            f"{path}: got {len(documents)} documents without a word to search for; expected words of two characters or "
            "more that are not English stop words"
        )
    retriever = bm25s.BM25()
    retriever.index(words, show_progress=False)
    return retriever


def _document(row: Any) -> Document:
    # An index that bm25s itself saved has no titles.
    return Document(title=str(row.get("title") or ""), text=row["text"])


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError(f"a search needs bm25s: {install('rl-environments[search]')}") from error
    return bm25s


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m rl_environments.corpora DOCUMENTS.jsonl INDEX_FOLDER")
    try:
        print(write_index(Path(sys.argv[1]), Path(sys.argv[2])), "documents indexed")
    except RLError as error:
        sys.exit(f"error: {error}")
