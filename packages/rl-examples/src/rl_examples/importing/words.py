"""Splits a bash script into commands and words, as bash does, without expanding anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import attrs

LEFT, LEFT_END = "\0", "\1"
"""Characters around a part of a value that only bash can compute, such as `$(date)`. They distinguish it from quoted
text of the same form."""
HERE_DOCUMENT = re.compile(r"""<<(?P<tabs>-?)[ \t]*(?P<quote>['"\\]?)(?P<end>\w+)['"]?""")
_IS_ARRAY = re.compile(r"\w+\+?=$")
_OPERATOR = re.compile(r"(?:;|\||\(|\)|&(?!>))+")
_ANSI_C = re.compile(r"\$'(?:\\.|[^'\\])*'", re.DOTALL)
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_CONTINUED_COMMENT = re.compile(r"[ \t]*#[^\n]*\\\n")


class Unclosed(ValueError):
    """A quote or a bracket is not closed."""


class Operator(str):
    """An operator between two commands, such as `&&`."""

    __slots__ = ()


@attrs.frozen(kw_only=True)
class Command:
    """A line of a script, with the lines that continue it."""

    words: Sequence[str]
    """Words with their quotes, and operators of type `Operator`."""
    documents: Sequence[str] = ()
    """Its here-documents, from `<<END` to the line `END`."""
    skips_comment: bool = False
    """Whether a comment inside the command was skipped, at which the command ends for bash."""

    @property
    def text(self) -> str:
        return " ".join(self.words)


@attrs.define
class _Scanner:
    """A position in a text. Moves over quotes, expansions and brackets as a whole."""

    text: str
    at: int = 0
    pending: list[re.Match[str]] = attrs.field(factory=list)
    """Here-documents that begin after the present line."""

    def starts(self, *beginnings: str) -> bool:
        return self.text.startswith(beginnings, self.at)

    def taken(self, pattern: re.Pattern[str]) -> str:
        """Moves over the pattern if it matches here, and returns what matched."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found[0] if found else ""

    def skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def skip(self, plain: str = "") -> None:
        """Moves over one character (with its backslash), quoted string or expansion. `plain`: quotes that are ordinary
        characters here. Raises Unclosed."""
        if self.starts("\\"):
            self.at = min(self.at + 2, len(self.text))
        elif self.starts(LEFT):
            self._skip_past(LEFT_END)
        elif self.starts("`"):
            self._skip_until("`", "`")
        elif self.starts("$("):
            self._skip_until("$(", ")")
        elif self.starts("${"):
            self._skip_until("${", "}", plain)
        elif '"' not in plain and self.starts('"', *([] if plain else ['$"'])):
            self._skip_until('$"' if self.starts("$") else '"', '"', "'")
        elif not plain and self.starts("'"):
            self._skip_past("'")
        elif not plain and self.starts("$'"):
            if not self.taken(_ANSI_C):
                raise Unclosed("$' is not closed")
        elif not self.taken(_NAME):
            self.at += 1

    def word(self) -> str:
        """Moves over a word and returns it, with an array's elements if it is `NAME=(…)`. Raises Unclosed."""
        begin = self.at
        while self.at < len(self.text) and not self.starts(" ", "\t", "\n", ";", "|", ")"):
            before = self.text[self.at - 1 : self.at] if self.at > begin else ""
            if self.starts("("):
                if before not in ("<", ">") and not _IS_ARRAY.fullmatch(self.text[begin : self.at]):
                    break
                self._skip_until("(", ")")
            elif self.starts("&") and before not in ("<", ">") and not self.starts("&>"):
                break
            else:
                self.skip()
        return self.text[begin : self.at]

    def skip_documents(self) -> list[str]:
        """At the end of a line: moves over its here-documents and returns them."""
        documents = []
        for found in self.pending:
            tabs = r"\t*" if found["tabs"] else ""
            last = re.compile(rf"\n{tabs}{found['end']}(?=\n|$)").search(self.text, self.at)
            documents.append(found[0] + self.text[self.at : last.end() if last else len(self.text)])
            self.at = last.end() if last else len(self.text)
        self.pending.clear()
        return documents

    def begins_document(self) -> bool:
        """Moves over `<<END`, if it is here."""
        if self.starts("<<<"):
            self.at += 3
            return False
        found = HERE_DOCUMENT.match(self.text, self.at)
        if found:
            self.pending.append(found)
            self.at = found.end()
        return found is not None

    def _skip_until(self, opening: str, end: str, plain: str = "") -> None:
        self.at += len(opening)
        while self.at < len(self.text) and not self.starts(end):
            if end != ")":
                self.skip(plain)
            elif self.starts("\n") and self.pending:
                self.skip_documents()
            elif self.starts("("):
                self._skip_until("(", ")")
            elif self.starts("#") and self.text[self.at - 1] in " \t\n;|&(":
                self.skip_line()
            elif not (self.starts("<<") and self.begins_document()):
                self.skip()
        if self.at >= len(self.text):
            raise Unclosed(f"{opening} is not closed")
        self.at += len(end)

    def _skip_past(self, end: str) -> None:
        found = self.text.find(end, self.at + 1)
        if found < 0:
            raise Unclosed(f"{self.text[self.at]} is not closed")
        self.at = found + 1


def commands(script: str) -> Iterator[Command]:
    """Yields the commands of a script. A comment that ends in a backslash, inside a command that is continued, is
    skipped, because the script's author meant the command to go on.

    Raises Unclosed if a quote or a bracket is not closed.
    """
    scan, words, skips_comment, has_comment = _Scanner(script), list[str](), False, False
    while scan.at < len(script) or words:
        if scan.starts("\n") or scan.at >= len(script):
            documents = scan.skip_documents()
            if words:
                yield Command(words=words, documents=documents, skips_comment=skips_comment)
            scan.at, words, skips_comment, has_comment = scan.at + 1, [], False, False
        elif scan.starts("\\\n"):
            scan.at += 2
            while words and scan.taken(_CONTINUED_COMMENT):
                has_comment = True
        elif scan.starts("#"):
            scan.skip_line()
        elif scan.starts(" ", "\t", "\r") or (scan.starts("<<") and scan.begins_document()):
            scan.at += scan.starts(" ", "\t", "\r")
        elif operator := scan.taken(_OPERATOR):
            words.append(Operator(operator))
        else:
            begin, skips_comment = scan.at, has_comment
            try:
                words.append(scan.word())
            except Unclosed as error:
                line = " ".join([*words, script[begin:]]).partition("\n")[0]
                number = script.count("\n", 0, begin) + 1
                raise Unclosed(f"line {number}: {line[:60]!r} cannot be read as a command ({error})") from error


def parts(text: str, plain: str = "") -> Iterator[str]:
    """Yields the quoted strings, the expansions and the other characters of a text, one by one. `plain`: quotes that
    are ordinary characters in this text."""
    scan = _Scanner(text)
    while scan.at < len(text):
        begin = scan.at
        scan.skip(plain)
        yield text[begin : scan.at]
