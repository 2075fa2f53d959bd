"""Promises that the repository makes about its documents and files."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from tests.workspace.imports import PACKAGES, ROOT

INDEX_HOST = re.compile(r"\b(?:pypi|pythonhosted|npmjs)[.](?:org|com)")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|opt|mnt)/[\w.]")


def git_files(*patterns: str) -> list[str]:
    """Tracked files, and new files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def text_of(name: str) -> str:
    return (ROOT / name).read_bytes().decode("utf-8", errors="ignore")


def foreign_places(text: str) -> list[str]:
    """Lines with a path that exists on one machine only, or the address of a package index."""
    return [line for line in text.splitlines() if INDEX_HOST.search(line) or MACHINE_PATH.search(line)]


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", text, flags=re.MULTILINE))


def test_no_file_contains_the_address_of_a_package_index_or_a_path_of_one_machine():
    found = {name: foreign_places(text_of(name)) for name in git_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["https://" + "pypi" + ".org/simple", "open('" + "/home" + "/someone/data')", "-f " + "/opt" + "/wheels"]
)
def test_a_line_with_an_index_or_a_machines_path_is_found(line):
    assert foreign_places(f"fine\n{line}\nalso /usr/bin/env, my/work/x and packages/work/x\n") == [line]


def test_every_make_command_in_the_documents_exists():
    targets = make_targets(text_of("Makefile"))
    assert {"quickstart", "test", "check", "learn", "soak", "bench", "docs", "help"} <= targets
    for name in git_files("*.md"):
        for target in re.findall(r"(?:^|`|\$ )make ([a-z][a-z-]*)", text_of(name), flags=re.MULTILINE):
            assert target in targets, f"{name}: `make {target}` does not exist"


def test_make_parity_runs_every_file_with_a_parity_test():
    recipe = text_of("Makefile").partition("\nparity:")[2].partition("\n\n")[0]
    marked = [name for name in git_files("tests/*.py") if re.search(r'mark\.parity|marks=\("parity"', text_of(name))]
    assert len(marked) > 5
    assert [name for name in marked if name not in recipe] == []


def test_links_between_the_documents_lead_somewhere():
    for name in git_files("*.md"):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text_of(name)):
            assert ((ROOT / name).parent / link).exists(), f"{name}: {link} does not exist"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_readme_of_a_package_has_its_name_and_a_code_block(package):
    readme = text_of(f"packages/{package.replace('_', '-')}/README.md")
    assert readme.startswith(f"# {package.replace('_', '-')}\n")
    assert "```" in readme


def test_constraints_are_plain_versions():
    lines = text_of("constraints.txt").splitlines()
    wrong = [
        line
        for line in lines
        if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*( ; python_full_version [<=]+ '[0-9.*]+')?", line)
    ]
    assert wrong == []
    assert "torch==2.13.0" in lines


def python_examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(name), flags=re.DOTALL | re.MULTILINE)


def test_the_examples_of_rl_core_run():
    examples = python_examples("packages/rl-core/README.md")
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example, "packages/rl-core/README.md", "exec"), {})


def test_hints_say_where_packages_of_the_project_are_installed_from():
    """The packages are on no index, so hints install them from a clone or from a folder of wheels."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "packages").rglob("*.md")]
    files += (ROOT / "packages").rglob("src/**/*.py")
    lines = [line for file in files if file.name != "releasing.md" for line in file.read_text().splitlines()]
    wanted = [line for line in lines if re.search(r"pip install [^#(]*[\"' ]rl-\w+", line)]
    assert not [line for line in wanted if "--find-links" not in line and "./packages/" not in line]
    assert any("./packages/" in line for line in lines)


SECTIONS = ("trainer.", "generator.", "environment.", "data.")


def keys_in_texts(source: str) -> list[int]:
    """The lines of errors whose text begins with a configuration key, which belongs into the argument `key`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "").endswith("Error"):
            text = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            begin = str(getattr(text, "value", "")).partition(" ")[0]
            lines += [node.lineno] if begin.startswith(SECTIONS) and begin.endswith(":") else []
    return lines


def test_an_error_carries_its_key_outside_of_its_text():
    found = {name: keys_in_texts(text_of(name)) for name in git_files("packages/*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert keys_in_texts('raise ConfigError(f"trainer.epochs: got {epochs}")') == [1]
    assert keys_in_texts('raise ConfigError(f"got {epochs}", key="trainer.epochs")') == []
