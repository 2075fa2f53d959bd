"""Searches the documents of a local file with BM25. Needs the extra `search`.

A process reads and indexes a file once, when it creates the first environment that uses the file; with placement
`process`, each environment process does so. Index a large corpus beforehand (`python -m rl_environments.corpora
documents.jsonl index`): an index folder is memory-mapped, so all processes share its pages.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
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

    def search(self, query: str, count: int) -> list[Document]:
        """Returns at most `count` documents that share a word with the query, the best first."""
        words = self._bm25s.tokenize([query], show_progress=False, return_ids=False)
        if not words[0]:
            return []
        found = self._retriever.retrieve(
            words, corpus=range(len(self._documents)), k=min(count, len(self._documents)), show_progress=False
        )
        pairs = zip(found.documents[0].tolist(), found.scores[0].tolist(), strict=True)
        return [_document(self._documents[number]) for number, score in pairs if score > 0]


def load_corpus(path: str) -> Corpus:
    """Loads a corpus from a file of documents, or from a folder that `write_index` made.

    Raises:
        ConfigError: the extra is missing.
        DataError: the file does not exist, has an invalid line or holds no documents; or the folder holds no index.
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
        return Corpus(retriever, retriever.corpus)
    if not Path(path).exists():
        raise DataError(f"corpus: {path} does not exist; expected a .jsonl file or an index folder")
    documents = read_documents(Path(path))
    return Corpus(_indexed(documents), documents)


def read_documents(path: Path) -> list[dict[str, str]]:
    """Reads JSON lines with `text` and, optionally, `title`. Raises DataError that names the line."""
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a .jsonl file")
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            documents.append({"title": str(row.get("title") or ""), "text": str(row["text"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f'{path}:{number}: got {line!r:.80}; expected JSON like {{"title": "…", "text": "…"}}'
            ) from None
    if not documents:
        raise DataError(f"{path} has no documents; expected JSON lines with `text` and, optionally, `title`")
    return documents


def write_index(documents: Path, folder: Path) -> int:
    """Indexes a file of documents into a new folder. Returns the number of documents. Raises what `load_corpus` raises,
    and DataError if the folder exists."""
    if folder.exists():
        raise DataError(f"{folder} already exists: choose another folder, or remove it first")
    read = read_documents(documents)
    _indexed(read).save(folder, corpus=read, show_progress=False)
    return len(read)


def _indexed(documents: Sequence[dict[str, str]]) -> Any:
    bm25s = _bm25s()
    texts = [f"{each['title']} {each['text']}" for each in documents]
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return retriever


def _document(row: Any) -> Document:
    return Document(title=row["title"], text=row["text"])


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
