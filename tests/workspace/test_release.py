"""`make release` finds faults in a folder that is to be published."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import attrs
import pytest

from tests.workspace.imports import ROOT
from tools.locks import projects
from tools.release import main, problems, problems_of, read_distribution

pytestmark = pytest.mark.slow  # builds all distributions


def files_of(name: str, dist: Path):
    return {path.suffix: read_distribution(path) for path in dist.glob(f"{name.replace('-', '_')}-0*")}


def replaced(distribution, old: str, new: str):
    """A copy of the distribution with some text of its metadata replaced."""
    path = next(path for path in distribution.files if path.endswith(("METADATA", "PKG-INFO")))
    text = distribution.files[path].decode()
    assert old in text
    return attrs.evolve(distribution, files={**distribution.files, path: text.replace(old, new).encode()})


def without(distribution, ending: str):
    kept = {path: data for path, data in distribution.files.items() if not path.endswith(ending)}
    assert len(kept) < len(distribution.files)
    return attrs.evolve(distribution, files=kept)


def test_the_built_distributions_have_no_problems(dist: Path):
    assert problems(dist) == []


@pytest.mark.parametrize("suffix", [".whl", ".gz"])
def test_a_faulty_distribution_is_found(dist: Path, suffix: str):
    name = "rl-rollout"
    project, whole = projects()[name], files_of(name, dist)[suffix]

    def said(distribution) -> str:
        (problem,) = problems_of(name, project, distribution)
        return problem

    assert said(without(whole, "py.typed")).endswith("rl_rollout/py.typed is missing")
    assert said(without(whole, "LICENSE")) == "there is no copy of the repository's LICENSE"
    assert said(replaced(whole, "# rl-rollout\n", "# Else\n")) == "the description in the metadata is not README.md"
    assert "metadata names rl-rollout 0.0.9" in said(replaced(whole, "Version: 0.1.0", "Version: 0.0.9"))
    other_core = replaced(whole, "Requires-Dist: rl-core<0.2", "Requires-Dist: rl-core<0.1")
    assert "but 0.1.0 is released with it" in "".join(problems_of(name, project, other_core))


def test_a_faulty_folder_is_found(dist: Path, tmp_path: Path):
    folder = tmp_path / "dist"
    shutil.copytree(dist, folder)
    (folder / "rl_fsdp-0.1.0.tar.gz").unlink()
    wheel = folder / "rl_fsdp-0.1.0-py3-none-any.whl"
    shutil.copy(wheel, folder / "rl_fsdp-0.0.9-py3-none-any.whl")
    shutil.copy(wheel, folder / "rl_fsdp-0.0.8-py3-none-any.whl")
    content = read_distribution(wheel).files
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, data in content.items():
            is_metadata = path.endswith("METADATA")
            packed.writestr(path, data.replace(b"Metadata-Version:", b"Metadata-Sort:") if is_metadata else data)
    found = "\n".join(problems(folder))
    assert "rl_fsdp-0.1.0.tar.gz is missing" in found
    assert "17 files, 16 expected" in found
    assert "twine check: " in found


def test_every_missing_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{len(projects())} packages checked: {len(problems(tmp_path))} problems\n"
    assert printed.err.count("is missing") == 2 * len(projects())


def test_every_package_contains_the_licence():
    for name in projects():
        assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
