"""`rl import-config` expands the words of a script as bash does. bash itself is the reference."""

from __future__ import annotations

import random
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from rl_examples.importing.reading import read
from rl_examples.importing.shell import Shell, unexpanded
from rl_examples.importing.words import Operator, Unclosed, commands

_PRINTS = "python3() { for word; do printf '%s\\0' \"$word\"; done; }\nset -f\n"
"""Makes bash print the words that a script passes to Python. Patterns of file names are not expanded."""
_LITERALS = ("a", "B2", "x.y=1e-6", "=", "l=['u','v']", ".", "/d/t.parquet", "k=v", ":", ",", "+n=3", "-m", "%", "@")


def words_of_bash(script: str) -> list[str]:
    found = subprocess.run(
        ["bash", "-c", _PRINTS + script],
        capture_output=True,
        check=False,
        timeout=20,
        env={"HOME": "/elsewhere/me", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
    )
    assert found.stderr == b"", (script, found.stderr)
    return found.stdout.decode().split("\0")[:-1]


def words_here(script: str) -> list[str]:
    shell = Shell({"HOME": "/elsewhere/me"})
    found = list[str]()
    for command in commands(script):
        fields = list(takewhile(lambda field: not isinstance(field, Operator), list(shell.run(command))))
        if fields[:1] == ["python3"]:
            found += fields[1:]
    return found


class Scripts:
    """Writes random scripts: variables and arrays in all kinds of quotes, over several lines, and a Python command."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names: list[str] = []
        self.arrays: list[str] = []

    def script(self) -> str:
        lines = [self.line() for _ in range(self.rng.randint(2, 6))]
        words = [self.word() for _ in range(self.rng.randint(1, 6))]
        words += [f'"${{{name}[@]}}"' for name in self.arrays] + [f"${name}" for name in self.names]
        self.rng.shuffle(words)
        between = [self.rng.choice((" ", "  ", " \\\n  ", "\t")) for _ in words]
        command = "".join(f"{space}{word}" for space, word in zip(between, words, strict=True))
        return "\n".join([*lines, f"python3{command}{self.rng.choice(('', ' # c=1', '; true', ' && true'))}\n"])

    def line(self) -> str:
        pick, name = self.rng.random(), self.rng.choice("CDEFG") + self.rng.choice("12")
        appends = "+" if self.rng.random() < 0.3 else ""
        if pick < 0.2:
            # A name is either a variable or an array: of an array, bash expands `$NAME` to the first element.
            name = f"L{name}"
            spaces = (" ", "\n", "\n  ", " # it's a comment (\n", "\n# c=1 \\\n", " \\\n")
            elements = "".join(self.rng.choice(spaces) + self.word() for _ in range(self.rng.randint(0, 5)))
            line = f"{name}{appends}=({elements}\n)"
            self.arrays.append(name)
        elif pick < 0.35:
            line = self.document(name)
            self.names.append(name)
        else:
            prefix = self.rng.choice(("", "", "", "export ", "local_=1; ", "  "))
            line = f"{prefix}{name}{appends}={self.word(empty=True)}"
            self.names.append(name)
        return line if line.endswith("END") else line + self.rng.choice(("", "", " # it's \"a comment", ";"))

    def document(self, name: str) -> str:
        tabs, quote = self.rng.choice(("", "-")), self.rng.choice(("", "'"))
        body = "".join(self.in_document() for _ in range(self.rng.randint(1, 8))).replace("\n\n", "\n")
        body = body.rstrip("\\\n") if quote == "" else body.strip("\n")
        start = "\t" if tabs else ""
        lines = "\n".join(start + line for line in f"{body}x".split("\n"))
        if self.rng.random() < 0.5:
            return f"{name}=$(cat <<{tabs}{quote}END{quote}\n{lines}\n{start}END\n)"
        return f"read -r -d '' {name} <<{tabs}{quote}END{quote}\n{lines}\n{start}END"

    def word(self, *, empty: bool = False) -> str:
        return "".join(self.part() for _ in range(self.rng.randint(0 if empty else 1, 4)))

    def part(self) -> str:
        kind = self.rng.randrange(8)
        if kind < 2:
            return self.rng.choice(_LITERALS)
        if kind == 2:
            return '"' + "".join(self.in_double() for _ in range(self.rng.randint(0, 6))) + '"'
        if kind == 3:
            texts = (*_LITERALS, " ", "\n", "\\", "\\\n", '"', "$x", "#", "`", "a;b", "(")
            return "'" + "".join(self.rng.choice(texts) for _ in range(self.rng.randint(0, 5))).replace("'", "") + "'"
        if kind == 4:
            texts = ("a", "\\n", "\\t", "\\'", "\\\\", '"', "\\x41", "\\u00e9", "\\101", " ", "\\q", "$x", '\\"')
            return "$'" + "".join(self.rng.choice(texts) for _ in range(self.rng.randint(0, 5))) + "'"
        if kind == 5:
            return self.rng.choice(("\\ ", "\\$", '\\"', "\\'", "\\\\", "\\\n", "\\#", "a#b", "\\a"))
        return self.expansion()

    def in_double(self) -> str:
        texts = (*_LITERALS, " ", "\n", " \\\n ", "\\\n", "'", "#", "\\$", '\\"', "\\\\", "\\`", "\\a", ";", "(", "&")
        return self.rng.choice((self.rng.choice(texts), self.rng.choice(texts), self.expansion(in_double=True)))

    def in_document(self) -> str:
        texts = (*_LITERALS, " ", "\n", " \\\n", "'", '"', "# c", "\\$", '\\"', "\\\\", "it's", ")", "(", ";")
        return self.rng.choice((self.rng.choice(texts), self.rng.choice(texts), self.expansion(in_double=True)))

    def expansion(self, *, in_double: bool = False) -> str:
        name = self.rng.choice([*self.names, "HOME"])
        default = self.rng.choice(
            ("", "d", "x=1 y=2", '"a b"', "${HOME}", "${HOME}/q") + (() if in_double else ("'s t'",))
        )
        forms = [
            f"${{{name}}}",
            f"${{{name}:-{default}}}",
            f"${{{name}:+{default}}}",
            "$((2 * (3 + 4)))",
            "$@",
        ]
        forms += [f"${{UNSET{mark}-{default}}}" for mark in ("", ":")] + ["${UNSET+x y}"]
        forms += [f"${{{each}[{at}]}}" for each in self.arrays for at in "@*0"]
        return self.rng.choice(forms)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_words_of_random_scripts_are_those_of_bash(first: int):
    for seed in range(first, first + 100):
        script = Scripts(seed).script()
        assert words_here(script) == words_of_bash(script), script


def test_a_reader_that_splits_quoted_text_differs_from_bash(monkeypatch: pytest.MonkeyPatch):
    """The negative control: the random scripts tell a wrong reader from a right one."""
    monkeypatch.setattr(Shell, "fields", lambda self, word: self.text(word).split())
    different = [seed for seed in range(50) if words_here(script := Scripts(seed).script()) != words_of_bash(script)]
    assert len(different) > 25


_TAIL = "python3 -m verl.trainer.main_ppo trainer.total_epochs=3"
_LAYOUTS = {
    "lines in double quotes": f'A="\n  data.seed=1 \\\n  trainer.nnodes=2 \\\n"\n{_TAIL} $A\n',
    "lines that begin beside the quote": f'A="data.seed=1\n  trainer.nnodes=2"\n{_TAIL} $A\n',
    "lines in single quotes": f"A='\n  data.seed=1\n  trainer.nnodes=2\n'\n{_TAIL} $A\n",
    "appended lines": f'A="data.seed=1"\nA+="\n  trainer.nnodes=2\n"\n{_TAIL} ${{A}}\n',
    "escapes": f"A=$'data.seed=1\\n\\ttrainer.nnodes=2'\n{_TAIL} $A\n",
    "a here-document": f"A=$(cat <<EOF\n  data.seed=1\n  trainer.nnodes=${{N:-2}}\nEOF\n)\n{_TAIL} $A\n",
    "a here-document for read": f"read -r -d '' A <<'EOF'\n  data.seed=1\n  trainer.nnodes=2\nEOF\n{_TAIL} $A\n",
    "an array with comments": f"A=(\n  data.seed=1  # it's (\n  # trainer.nnodes=9\n  trainer.nnodes=2\n)\n"
    f'{_TAIL} "${{A[@]}}"\n',
    "a text that eval runs": f'A="{_TAIL} \n  data.seed=1 "\nA+="trainer.nnodes=2"\neval "$A"\n'.replace("\n  ", " "),
    "a job in a here-document": f"sbatch <<'EOF'\n{_TAIL} \\\n  data.seed=1 trainer.nnodes=2\nEOF\n",
    "arguments of set": f'set -- data.seed=1\nset -- "$@" trainer.nnodes=2\n{_TAIL} "$@"\n',
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_keys_in_texts_over_several_lines_are_read(tmp_path: Path, layout: str):
    file = tmp_path / "run.sh"
    file.write_text(_LAYOUTS[layout])
    found = read(file)
    assert found.values == {"trainer.total_epochs": 3, "data.seed": 1, "trainer.nnodes": 2}
    assert found.remarks == ()


def test_what_only_bash_can_compute_is_told_from_quoted_text_of_the_same_form():
    (command,) = commands("""python3 a="$(date)" b='$(date)' c=$UNSET d='$UNSET' e=\\$UNSET""")
    _, *words = Shell({}).run(command)
    assert [unexpanded(word) for word in words] == [["$(date)"], [], ["$UNSET"], [], []]


def test_a_quote_that_is_not_closed_is_listed_with_its_line(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(f'{_TAIL} data.seed=1\nA="\n  trainer.nnodes=2\n')
    (remark,) = read(file).remarks
    assert "line 2: 'A=\"' cannot be read as a command" in remark
    with pytest.raises(Unclosed, match="line 1"):
        list(commands("a=(1 2"))


def test_a_comment_inside_a_command_at_which_bash_ends_it_is_listed(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(f"{_TAIL} \\\n  # data.seed=9 \\\n  data.seed=1 \\\n  trainer.nnodes=2\n")
    found = read(file)
    assert found.values == {"trainer.total_epochs": 3, "data.seed": 1, "trainer.nnodes": 2}
    assert "bash ends this command at the comment inside it" in found.remarks[0]
    file.write_text(f"{_TAIL} data.seed=1 $@ \\\n  # data.seed=9 \\\n  # data.seed=8\n")
    assert read(file).remarks == ()
