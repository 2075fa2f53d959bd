"""Expands the words of a bash script as bash does, without running anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import attrs

from rl_examples.importing.arithmetic import computed
from rl_examples.importing.words import HERE_DOCUMENT, LEFT, LEFT_END, Command, Operator, commands, parts

DECLARING = ("export", "declare", "local", "readonly", "typeset")
_KEYWORDS = ("if", "then", "elif", "else", "do", "while", "until", "{", "!", "time", *DECLARING)
"""Words that may precede a command or an assignment."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRACED = re.compile(r"\$\{(\w+|@|\*)(?:\[([@*]|\d+)\])?(?:(:?)([-=?+])(.*))?\}", re.DOTALL)
_REPLACEMENT = re.compile(
    r"\$\{(\w+)(?:(?P<all>//?)(?P<old>(?:\\.|[^/}*?\[#%\\])+)/(?P<new>[^}]*)|##\*(?P<end>[^}*?\[\\]+))\}"
)
"""`${NAME//old/new}`, `${NAME/old/new}` and `${NAME##*end}` without patterns in `old` and `end`."""
_OF_A_KEY = re.compile(r"\$\{\w+(?:\.|:(?![-=?+\d]))[^}]*\}")
"""OmegaConf's `${trainer.run_name}`, which bash would refuse."""
_WHOLE_ARRAY = re.compile(r'"\$(?:@|\{(?:@|\w+\[@\])\})"')
_PRINTED_DOCUMENT = re.compile(rf"\$\(\s*cat\s+({HERE_DOCUMENT.pattern}\s*?\n.*?)\s*\)", re.DOTALL)
_LEFT = re.compile(f"{LEFT}([^{LEFT_END}]*){LEFT_END}")
_SPACE_OR_WORD = re.compile(f"\\s+|(?:{_LEFT.pattern}|[^\\s{LEFT}])+")
_ESCAPES = dict(zip("abefnrtv", "\a\b\x1b\f\n\r\t\v", strict=True)) | {"E": "\x1b"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)

_CALCULATES = re.compile(r"(?<![$\w])\(\((.*?)\)\)|(?:^|[;&|]\s*|\b(?:do|then|else)\s+)let\s+([^;&|]*)", re.DOTALL)
"""`((NAME += 1))` and `let NAME=1`."""
_CALCULATED = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))")
_GETS = re.compile(
    r"(?:^|[;&|]\s*|\b(?:do|then|else|while)\s+)(?:IFS=\S*\s+)?(unset|read|mapfile|readarray|getopts|printf\s+-v)\s+([^;&|<>]*)"
)
"""Commands that set the variables that they name to what only bash knows, or unset them."""

Quoting = Literal["none", "double", "document"]
"""The quotes that a text stands in; `document`: it is a here-document, in which double quotes are text."""
_PLAIN: Mapping[Quoting, str] = {"none": "", "double": "'", "document": "'\""}
"""The quotes that are ordinary characters."""
Piece = tuple[bool, str | None]
"""Whether bash splits the text at spaces, and the text; None ends an array's element."""


def unexpanded(text: str) -> list[str]:
    """Returns the parts of an expanded text that only bash can compute."""
    return _LEFT.findall(text)


def shown(text: str) -> str:
    """Returns an expanded text for a message, with the source of the parts that only bash can compute."""
    return _LEFT.sub(r"\1", text)


def _left(source: str) -> Piece:
    return False, f"{LEFT}{shown(source)}{LEFT_END}"


@attrs.define
class Shell:
    """The variables of a script, and the expansion of words with them.

    A part that only bash can compute, such as `$(date)` or a variable without a value, stays in the result, where
    `unexpanded` finds it.
    """

    variables: dict[str, str]
    arrays: dict[str, list[str]] = attrs.field(factory=dict)

    def run(self, command: Command) -> Iterator[str]:
        """Carries out the command's assignments. Yields the words of what remains, expanded, and its operators."""
        for is_operator, group in groupby(command.words, lambda word: isinstance(word, Operator)):
            words = list(group)
            yield from words if is_operator else self._run_simple(words, command.documents)
        self._forget_changed(command)

    def text(self, word: str, quoting: Quoting = "none") -> str:
        """Expands a word where bash does not split it, as in an assignment."""
        return "".join(" " if text is None else text for _, text in self._pieces(word, quoting))

    def fields(self, word: str) -> list[str]:
        """Returns the words that bash makes of a word."""
        fields, current = list[str](), None
        for splits, text in self._pieces(word, "none"):
            for part in [text] if text is None or not splits else _SPACE_OR_WORD.finditer(text):
                part = part if isinstance(part, str | None) else part[0]
                if part is None or (splits and part.isspace()):
                    fields += [] if current is None else [current]
                    current = None
                else:
                    current = (current or "") + part
        return fields if current is None else [*fields, current]

    def _run_simple(self, words: list[str], documents: Sequence[str]) -> list[str]:
        """Runs the words between two operators. Returns the fields of the command after its assignments."""
        at, assigned = 0, list[re.Match[str]]()
        while at < len(words) and (words[at] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[at])):
            declares = words[at] in DECLARING
            here = words[at:] if declares else [words[at]]
            assigned += [found for word in here if (found := _ASSIGNMENT.fullmatch(word))]
            at += len(here)
        rest = words[at:]
        if not rest:  # `NAME=value command` sets NAME for the command only
            for found in assigned:
                self._assign(*found.groups())
        elif rest[0] in ("read", "mapfile", "readarray") and len(documents) == 1:
            self._read(rest, documents[0])
        fields = [field for word in rest for field in self.fields(word)]
        if fields[:2] == ["set", "--"]:
            self.arrays["@"] = fields[2:]
        return fields

    def _forget_changed(self, command: Command) -> None:
        """Leaves the variables to bash that the command changes otherwise than by assignments, such as `((N += 1))`."""
        changed = {
            name: found[0].strip(" ;&|")
            for found in _CALCULATES.finditer(command.text)
            for names in _CALCULATED.findall(found[1] or found[2])
            for name in names
        }
        for found in _GETS.finditer(command.text):
            names = re.findall(r"(?<![\w$\"'-])[A-Za-z_]\w*(?![\w\"'])", found[2])
            names = names[:1] if found[1].startswith("printf") else names
            if found[1] == "unset":
                for name in names:
                    self.variables.pop(name, None)
                    self.arrays.pop(name, None)
            elif not command.documents:
                changed |= dict.fromkeys(names, found[0].strip(" ;&|"))
        for name in changed:
            if name:
                self.arrays.pop(name, None)
                self.variables[name] = _left(changed[name])[1] or ""

    def _assign(self, name: str, appends: str, value: str) -> None:
        if value.startswith("(") and value.endswith(")"):
            before = self.arrays.get(name, []) if appends else []
            elements = (word for command in commands(value[1:-1]) for word in command.words)
            self.arrays[name] = [*before, *(field for word in elements for field in self.fields(word))]
        else:
            value = re.sub(r"^~(?=/|$)", "$HOME", value)
            self.variables[name] = (self.variables.get(name, "") if appends else "") + self.text(value)

    def _read(self, words: list[str], document: str) -> None:
        """Reads a here-document into the variable or array that `read -d ''` or `mapfile -t` names."""
        name, body = words[-1], self._document(document)
        if words[0] != "read":
            self.arrays[name] = body.splitlines()
        elif "''" in words or '""' in words:
            self.variables[name] = body.strip()

    def _document(self, document: str) -> str:
        """Returns the text of a here-document."""
        found = HERE_DOCUMENT.match(document)
        assert found is not None
        body = document[found.end() :].partition("\n")[2].rpartition("\n")[0] + "\n"
        body = body if found["quote"] else re.sub(r"(?<!\\)((?:\\\\)*)\\\n", r"\1", body)
        body = re.sub(r"^\t+", "", body, flags=re.MULTILINE) if found["tabs"] else body
        return body if found["quote"] else self.text(body, "document")

    def _pieces(self, text: str, quoting: Quoting, *, splits: bool = False) -> Iterator[Piece]:
        """Yields the expanded pieces of a text. `splits`: whether text without quotes is split too, as in the default
        value of an expansion."""
        for part in parts(text, _PLAIN[quoting]):
            kind = part[0] if len(part) > 1 else ""
            if part == "\\\n":
                continue
            if kind == "\\":
                is_escape = quoting == "none" or part[1] in ("$`\\" if quoting == "document" else '$`\\"')
                yield False, part[is_escape:]
            elif part.startswith(('"', '$"')) and kind:
                if not _WHOLE_ARRAY.fullmatch(part):
                    yield False, ""
                yield from self._pieces(part[part.index('"') + 1 : -1], "double")
            elif kind == "'":
                yield False, part[1:-1]
            elif part.startswith("$'") and kind:
                yield False, _ESCAPE.sub(_unescaped, part[2:-1])
            elif kind == "`":
                yield _left(part)
            elif kind == "$":
                yield from self._expansion(part, quoting)
            else:
                yield splits, part

    def _expansion(self, part: str, quoting: Quoting) -> Iterator[Piece]:
        splits = quoting == "none"
        if part.startswith("$((") and part.endswith("))"):
            result = computed(self.text(part[3:-2], "double"), self.variables)
            yield _left(part) if result is None else (splits, str(result))
        elif part.startswith("$("):
            printed = _PRINTED_DOCUMENT.fullmatch(part)
            yield (splits, self._document(printed[1]).rstrip("\n")) if printed else _left(part)
        elif _OF_A_KEY.fullmatch(part):
            yield False, part
        elif found := _BRACED.fullmatch(part):
            yield from self._variable(found, quoting)
        elif found := _REPLACEMENT.fullmatch(part):
            before = self.variables.get(found[1])
            yield _left(part) if before is None else (splits, self._replaced(found, before))
        elif part.startswith("${"):
            yield _left(part)
        elif found := _BRACED.fullmatch(f"${{{part[1:]}}}"):
            yield from self._variable(found, quoting, part)
        else:
            yield _left(part)

    def _variable(self, found: re.Match[str], quoting: Quoting, source: str = "") -> Iterator[Piece]:
        """Expands `$NAME` or `${NAME:-word}`."""
        name, index, colon, operator, word = found.groups()
        index = name if name in ("@", "*") else index
        array = self.arrays.get("@" if name == "*" else name, [] if name in ("@", "*") else None)
        splits = quoting == "none"
        if index in ("@", "*") and array is None and name in self.variables:
            array = [self.variables[name]]
        if index in ("@", "*") and array is not None:
            joined = [" ".join(array)] if index == "*" and not splits else array
            for number, element in enumerate(joined):
                yield from [(False, None)] if number else []
                yield splits, element
            return
        value = self.variables.get(name) if index is None else None
        if array is not None and value is None:
            value = dict(enumerate(array)).get(int(index or 0))
        is_set = value is not None and bool(value or not colon)
        within: Quoting = "none" if splits else "double"
        if operator == "+" or (not is_set and operator in ("-", "=")):
            if operator == "=":
                self.variables[name] = self.text(word, within)
            if is_set or operator != "+":
                yield from self._pieces(word, within, splits=splits)
        elif is_set or (not operator and (value is not None or array is not None)):
            yield splits, value or ""
        else:
            yield _left(source or found[0])

    def _replaced(self, found: re.Match[str], before: str) -> str:
        if found["end"]:
            return before.rpartition(found["end"])[2]
        old = re.sub(r"\\(.)", r"\1", found["old"])
        return before.replace(old, self.text(found["new"]), -1 if found["all"] == "//" else 1)


def _unescaped(found: re.Match[str]) -> str:
    """The character of an escape in `$'…'`."""
    *in_hex, octal, other = found.groups()
    if other is not None:
        return _ESCAPES.get(other, other if other in "\\'\"?" else found[0])
    code = next((int(digits, 16) for digits in in_hex if digits), None)
    return chr(int(octal, 8) & 255 if code is None else code)
