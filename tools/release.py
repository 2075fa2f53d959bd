"""Checks a folder with the wheel and the source distribution of every package before it is published.

    python -m tools.release dist      # `make release` builds the folder, runs this and installs from it

Twine checks the metadata. This script checks the project's own promises. Every package is there once, in the version of
its pyproject.toml, and the requirements of the other packages accept this version. README, licence and py.typed are
included. The README has no relative link, because such a link would lead nowhere outside of the repository.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import attrs
from packaging.requirements import Requirement

from tools.locks import ROOT, projects

_RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


@attrs.frozen
class Distribution:
    """A wheel or a source distribution; its files are small enough to be read into memory."""

    name: str
    """File name of the distribution."""
    files: dict[str, bytes]
    """Content by path. Paths in a source distribution lack its top folder."""

    @property
    def is_wheel(self) -> bool:
        return self.name.endswith(".whl")

    @property
    def metadata(self) -> Message:
        """The core metadata; empty if the distribution has none."""
        is_it = re.compile(r"[^/]+\.dist-info/METADATA" if self.is_wheel else "PKG-INFO").fullmatch
        return email.message_from_bytes(next((data for path, data in self.files.items() if is_it(path)), b""))


def read_distribution(path: Path) -> Distribution:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as packed:
            return Distribution(path.name, {name: packed.read(name) for name in packed.namelist()})
    files = {}
    with tarfile.open(path) as packed:
        for member in packed.getmembers():
            content = packed.extractfile(member)
            if content is not None:
                files[member.name.partition("/")[2]] = content.read()
    return Distribution(path.name, files)


def problems(folder: Path) -> list[str]:
    """Reasons not to publish the folder; empty if there are none."""
    found = []
    for name, project in projects().items():
        stem = f"{name.replace('-', '_')}-{project['version']}"
        for wanted in (f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"):
            path = folder / wanted
            if path.is_file():
                found += [f"{wanted}: {problem}" for problem in problems_of(name, project, read_distribution(path))]
            else:
                found.append(f"{wanted} is missing")
    expected = 2 * len(projects())
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    if len(files) > expected:
        found.append(f"{len(files)} files, {expected} expected: remove files of other versions")
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    twine = subprocess.run(command, capture_output=True, text=True, check=False)
    if twine.returncode:
        found.append(f"twine check: {twine.stdout}{twine.stderr}")
    return found


def problems_of(name: str, project: dict, distribution: Distribution) -> Iterator[str]:
    """Problems of one distribution of the package with this name and `project` table."""
    metadata, files = distribution.metadata, distribution.files
    if (metadata["Name"], metadata["Version"]) != (name, project["version"]):
        yield f"metadata names {metadata['Name']} {metadata['Version']}, not {name} {project['version']}"
    readme = (ROOT / "packages" / name / "README.md").read_text()
    if metadata.get_payload(decode=True) != readme.encode():
        yield "the description in the metadata is not README.md"
    for link in _RELATIVE_LINK.findall(readme):
        yield f"README.md links to {link}, which exists in the repository only"
    licence = (ROOT / "LICENSE").read_bytes()
    if not any(path.endswith("LICENSE") and data == licence for path, data in files.items()):
        yield "there is no copy of the repository's LICENSE"
    module = name.replace("-", "_")
    typed = f"{module}/py.typed" if distribution.is_wheel else f"src/{module}/py.typed"
    if typed not in files:
        yield f"{typed} is missing"
    versions = {other: table["version"] for other, table in projects().items()}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        version = versions.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, True):
            yield f"requires {requirement}, but {version} is released with it"


def main(folder: Path) -> int:
    found = problems(folder)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(projects())} packages checked: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
