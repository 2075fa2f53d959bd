"""Allowed imports between the packages and between the layers of rl_core, and modules that must stay unloaded.

Between packages and between layers, imports inside functions and for type checkers count too, because a reader follows
them as well.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import networkx
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.workspace.imports import PACKAGES, ROOT, Import, imports_of, module_name, source_root

MAY_IMPORT = {
    "rl_core": set(),
    "rl_transformers": {"rl_core"},
    "rl_fsdp": {"rl_core", "rl_transformers"},
    "rl_deepspeed": {"rl_core", "rl_transformers"},
    "rl_environments": {"rl_core"},
    "rl_megatron": {"rl_core", "rl_transformers"},
    "rl_rollout": {"rl_core", "rl_transformers"},
    "rl_examples": {*PACKAGES} - {"rl_examples"},
}


def listed(heading: str) -> tuple[str, ...]:
    """The first column of a table in docs/design.md, from the ground up."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return tuple(reversed(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)))


LAYERS = listed("layer")
"""Each layer imports only layers before it."""
ROOMS = {name: listed(f"room of `{name}`") for name in ("rl_core.trainer", "rl_megatron")}
"""Package → its modules and folders. Each imports only those before it."""
STANDS_ALONE = {"layout": {"numpy"}, "algorithms": {"torch"}}
"""Layer that is useful without other layers → the only library that it imports. Of rl_core it imports only `GROUND`."""
GROUND = {"errors", "columns", "function_settings", "trajectory_rows"}
"""Modules that import no library."""
NEVER_WITH_RL_CORE = {"vllm", "megatron", "ray"}
"""Libraries that rl_core does not import at module level, except behind an extra."""
NOWHERE_IN_RL_CORE = {"transformers", "peft"}
"""Libraries that rl_core imports nowhere, not even in functions and for type checkers."""
CONTRACTS = "rl_core.interfaces"
"""The package of the contracts. Other modules import its names from it, not from the modules that define them."""
BEHIND_AN_EXTRA = {
    "rl_core.workers.ray_rank": {"ray"},
    "rl_core.workers.ray_cluster": {"ray"},
    "rl_core.workers.ray_ranks": {"ray"},
}
"""Modules of rl_core → packages of an optional extra that they import at module level. No other module of rl_core
imports these packages or these modules at module level."""
WITHOUT_TORCH = (
    "rl_core",
    "rl_core.config",
    "rl_core.interfaces",
    "rl_core.plugins",
    "rl_core.seams",
    "rl_fsdp",
    "rl_fsdp.backend",
    "rl_deepspeed",
    "rl_deepspeed.backend",
    "rl_megatron",
    "rl_rollout",
    "rl_rollout.local.plugin",
    "rl_rollout.vllm.plugin",
    "rl_examples",
)


def top(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> str:
    """The layer of a module: `layout` for rl_core.layout.packing; empty for rl_core itself."""
    return module.partition(".")[2].partition(".")[0]


def package_violations(imports: list[Import]) -> list[str]:
    return [
        f"{found}: {top(found.importer)} may import {sorted(MAY_IMPORT[top(found.importer)]) or 'no other package'}"
        for found in imports
        if top(found.imported) in PACKAGES
        and top(found.imported) != top(found.importer)
        and top(found.imported) not in MAY_IMPORT[top(found.importer)]
    ]


def layer_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        upper, lower = layer(found.importer), layer(found.imported)
        if top(found.imported) != "rl_core" or not upper or upper == lower:
            continue
        if upper not in LAYERS:
            wrong.append(f"{found.importer}: {upper!r} is in no layer; add it to the table in docs/design.md")
        elif lower not in LAYERS:
            wrong.append(f"{found}: import the name from the module that defines it")
        elif LAYERS.index(lower) > LAYERS.index(upper):
            wrong.append(f"{found}: {lower} stands above {upper}")
        elif upper in STANDS_ALONE and lower not in GROUND:
            wrong.append(f"{found}: {upper} stands alone and imports only {' and '.join(sorted(GROUND))}")
    return wrong


def room_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for (package, rooms), found in itertools.product(ROOMS.items(), imports):
        upper, lower = (
            f"{name}.".removeprefix(f"{package}.").partition(".") for name in (found.importer, found.imported)
        )
        inside = found.importer.startswith(f"{package}.") and found.imported.startswith(f"{package}.")
        if not inside or upper[0] == lower[0]:
            continue
        if upper[0] not in rooms or lower[0] not in rooms:
            wrong.append(f"{found}: rooms of {package}, in docs/design.md, are {', '.join(rooms)}")
        elif rooms.index(lower[0]) > rooms.index(upper[0]):
            wrong.append(f"{found}: {lower[0]} stands above {upper[0]}")
    return wrong


def contract_violations(imports: list[Import]) -> list[str]:
    modules = {path.stem for path in (source_root("rl_core") / CONTRACTS.replace(".", "/")).glob("*.py")}
    return [
        f"{found}: import the name from {CONTRACTS}"
        for found in imports
        if found.imported.startswith(f"{CONTRACTS}.")
        and found.imported.split(".")[2] in modules
        and not found.importer.startswith(CONTRACTS)
    ]


def extras_of(module: str) -> set[str]:
    """The packages that a module of rl_core may import because an extra installs them."""
    found = [extras for prefix, extras in BEHIND_AN_EXTRA.items() if f"{module}.".startswith(f"{prefix}.")]
    return set().union(*found)


def foreign_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        imported = top(found.imported)
        alone = STANDS_ALONE.get(layer(found.importer))
        foreign = imported not in sys.stdlib_module_names and imported not in PACKAGES
        if imported in NOWHERE_IN_RL_CORE or (
            found.when == "import" and imported in NEVER_WITH_RL_CORE - extras_of(found.importer)
        ):
            wrong.append(f"{found}: rl_core runs without it")
        if found.when == "import" and extras_of(found.imported) - extras_of(found.importer):
            wrong.append(f"{found}: it needs an extra; import it where it is used")
        elif foreign and found.when != "typing" and alone is not None and imported not in alone:
            wrong.append(f"{found}: {layer(found.importer)} needs {', '.join(alone)} alone")
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_packages_below_them(package):
    wrong = package_violations(imports_of(source_root(package)))
    assert not wrong, "\n".join(wrong)


def test_layers_of_rl_core_import_only_layers_below_them():
    wrong = layer_violations(imports_of(source_root("rl_core")))
    assert not wrong, "\n".join(wrong)


def test_rooms_import_only_rooms_below_them():
    wrong = room_violations([found for package in PACKAGES for found in imports_of(source_root(package))])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_of_a_package_with_rooms_is_in_a_listed_room(package):
    folder = source_root(package.partition(".")[0]) / package.replace(".", "/")
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(ROOMS[package])


def test_rl_core_imports_no_engine_and_its_lower_layers_stand_alone():
    wrong = foreign_violations(imports_of(source_root("rl_core")))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_contracts_are_imported_by_one_path(package):
    wrong = contract_violations(imports_of(source_root(package)))
    assert not wrong, "\n".join(wrong)


TYPING_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def circles(package: str, imports: list[Import], modules: set[str]) -> list[list[str]]:
    """Sets of modules of one package that import each other, directly or indirectly, with the imports that connect
    them."""
    graph = networkx.DiGraph()
    for found in imports:
        imported = found.imported
        while imported and imported not in modules:
            imported = imported.rpartition(".")[0]
        if top(found.importer) == top(imported) == package and imported != found.importer:
            graph.add_edge(found.importer, imported, found=str(found))
    parts = [part for part in networkx.strongly_connected_components(graph) if len(part) > 1]
    return [[graph.edges[edge]["found"] for edge in graph.subgraph(part).edges] for part in parts]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package):
    source = source_root(package)
    found = circles(package, imports_of(source), {module_name(path, source) for path in source.rglob("*.py")})
    assert not found, "\n\n".join("\n".join(circle) for circle in found)


def test_made_up_circles_are_caught(tmp_path):
    files = {
        "rl_fsdp/backend.py": "def start():\n    from rl_fsdp.worker import Worker\n",
        "rl_fsdp/worker.py": "from rl_fsdp import sharding\n",
        "rl_fsdp/sharding.py": f"{TYPING_ONLY}from rl_fsdp.backend import Options\n",
        "rl_fsdp/options.py": "from rl_fsdp.backend import Options\n",
    }
    tree = source_tree(tmp_path, files)
    modules = {name.removesuffix(".py").replace("/", ".") for name in files}
    (circle,) = circles("rl_fsdp", imports_of(tree), modules)
    assert sorted(message.partition(":")[0] for message in circle) == sorted(files)[:1] + sorted(files)[2:]


def test_made_up_packages_that_import_each_other_are_caught(tmp_path):
    tree = source_tree(
        tmp_path,
        {
            "rl_fsdp/worker.py": "def start():\n    from rl_rollout.local import engine\n",
            "rl_rollout/__init__.py": f"{TYPING_ONLY}import rl_fsdp.backend\n",
            "rl_core/trainer/loop.py": "import rl_examples.quickstart\n",
            "rl_examples/quickstart.py": "import rl_core.trainer, rl_fsdp.backend\nfrom . import task\n",
        },
    )
    assert [message.partition(":")[0] for message in package_violations(imports_of(tree))] == [
        "rl_core/trainer/loop.py",
        "rl_fsdp/worker.py",
        "rl_rollout/__init__.py",
    ]


def test_made_up_layers_that_import_upwards_are_caught(tmp_path):
    tree = source_tree(
        tmp_path,
        {
            "rl_core/batch.py": "from rl_core import trainer\n",
            "rl_core/layout/packing.py": "from rl_core.batch import Batch\nfrom ..errors import ShapeError\n",
            "rl_core/layout/mesh.py": "from rl_core.seeds import seed_of\nfrom rl_core.columns import FIELDS\n",
            "rl_core/algorithms/losses.py": "from . import kl\nfrom ..config import Config\n",
            "rl_core/helpers.py": "import rl_core.errors\n",
            "rl_core/workers/group.py": "from rl_core import Batch\n",
            "rl_core/interfaces/inference.py": f"{TYPING_ONLY}from rl_core.config import Config\n",
        },
    )
    messages = layer_violations(imports_of(tree))
    assert [message.partition(" ")[2] for message in messages if "helpers" not in message] == [
        "imports rl_core.config.Config: config stands above algorithms",
        "imports rl_core.trainer: trainer stands above batch",
        "imports rl_core.config.Config: config stands above interfaces",
        "imports rl_core.seeds.seed_of: layout stands alone and imports only columns and errors and function_settings "
        "and trajectory_rows",
        "imports rl_core.batch.Batch: batch stands above layout",
        "imports rl_core.Batch: import the name from the module that defines it",
    ]
    assert any("'helpers' is in no layer" in message for message in messages)


def test_made_up_rooms_that_import_upwards_are_caught(tmp_path):
    tree = source_tree(
        tmp_path,
        {
            "rl_core/trainer/run.py": "from rl_core.trainer.before import preflight\n",
            "rl_core/trainer/groups.py": "from rl_core.trainer.loop.buffer import GroupBuffer\n",
            "rl_core/trainer/state/saving.py": "from rl_core.trainer import run\nfrom rl_core.trainer.state import x\n",
            "rl_core/trainer/helpers.py": "from rl_core.trainer.groups import DataRow\n",
        },
    )
    assert [message.partition(" ")[2].partition(": ")[::2] for message in room_violations(imports_of(tree))] == [
        ("imports rl_core.trainer.loop.buffer.GroupBuffer", "loop stands above groups"),
        (
            "imports rl_core.trainer.groups.DataRow",
            f"rooms of rl_core.trainer, in docs/design.md, are {', '.join(ROOMS['rl_core.trainer'])}",
        ),
        ("imports rl_core.trainer.run", "run stands above state"),
    ]


def test_made_up_imports_past_the_contracts_package_are_caught(tmp_path):
    tree = source_tree(
        tmp_path,
        {
            "rl_core/interfaces/training.py": "from rl_core.interfaces.weights import Manifest\n",
            "rl_fsdp/worker.py": "from rl_core.interfaces import Worker\nimport rl_core.interfaces.training\n",
            "rl_rollout/plugin.py": "from rl_core.interfaces.inference import Completion\n",
        },
    )
    assert [message.partition(" ")[2] for message in contract_violations(imports_of(tree))] == [
        "imports rl_core.interfaces.training: import the name from rl_core.interfaces",
        "imports rl_core.interfaces.inference.Completion: import the name from rl_core.interfaces",
    ]


def test_made_up_foreign_imports_are_caught(tmp_path):
    tree = source_tree(
        tmp_path,
        {
            "rl_core/trainer/loop.py": "import ray\nimport torch\ndef start():\n    import vllm\n",
            "rl_core/algorithms/losses.py": "import math\nimport torch\ndef mean():\n    import numpy\n",
            "rl_core/workers/ray_ranks.py": "import ray\n",
            "rl_core/workers/group.py": "from rl_core.workers.ray_ranks import RayRanks\n",
            "rl_core/workers/tokens.py": "def start():\n    from transformers import AutoTokenizer\n",
            "rl_core/workers/lazy.py": "def start():\n    from rl_core.workers.ray_ranks import RayRanks\n",
        },
    )
    assert [message.partition(" ")[2] for message in foreign_violations(imports_of(tree))] == [
        "imports numpy: algorithms needs torch alone",
        "imports ray: rl_core runs without it",
        "imports rl_core.workers.ray_ranks.RayRanks: it needs an extra; import it where it is used",
        "imports transformers.AutoTokenizer: rl_core runs without it",
    ]


def source_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# --- modules loaded at run time -------------------------------------------------------------------------------------

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Block())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


def run_python_with_only(modules: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that can import only the standard library and these top-level modules."""
    return run_python(f"ALLOWED = {modules | set(sys.stdlib_module_names)!r}\n{BLOCK}\n{code}\n")


@cache
def installed_modules() -> dict[str, set[str]]:
    """Installed distribution → its top-level modules."""
    modules: dict[str, set[str]] = {}
    for module, distributions in packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(canonicalize_name(distribution), set()).add(module)
    return modules


def with_requirements(distributions: set[str]) -> set[str]:
    """Top-level modules of installed distributions and of everything they require."""
    modules, waiting, seen = set(), list(distributions), set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in seen and name in installed_modules():
            seen.add(name)
            modules |= installed_modules()[name]
            needed = [Requirement(line) for line in requires(name) or []]
            waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return modules


@pytest.mark.parametrize("name", STANDS_ALONE)
def test_layout_and_algorithms_work_without_other_packages(name):
    every_name = f"from rl_core.{name} import *"  # the package loads its names lazily; `import *` loads all of them
    result = run_python_with_only({"rl_core"} | with_requirements(STANDS_ALONE[name]), every_name)
    assert result.returncode == 0, result.stderr


def test_a_package_that_is_not_allowed_cannot_be_imported():
    result = run_python_with_only({"rl_core"} | with_requirements({"attrs", "numpy"}), "import rl_core.batch")
    assert "ModuleNotFoundError: torch is not here" in result.stderr


def test_early_imports_load_no_torch_and_the_controller_loads_no_distributed_checkpoints():
    """Every command would wait for these imports. Importing distributed checkpoints takes more than a second."""
    early = [f"import {name}\nassert 'torch' not in sys.modules, '{name} imports torch'" for name in WITHOUT_TORCH]
    late = """
import rl_core.trainer.run
assert 'torch' in sys.modules, 'the check of early imports cannot see torch'
assert 'torch.distributed.checkpoint' not in sys.modules, 'rl_core.trainer.run imports distributed checkpoints'
"""
    result = run_python("\n".join(["import sys", *early, late]))
    assert result.returncode == 0, result.stderr


# --- declared dependencies ------------------------------------------------------------------------------------------


def declared(package: str) -> set[str]:
    """Distributions that a package's pyproject.toml requires, including extras and those of required workspace
    packages."""
    extras = project(package).get("optional-dependencies", {}).values()
    lines = itertools.chain(project(package)["dependencies"], *extras)
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    return names.union(*(declared(other) for other in PACKAGES if other.replace("_", "-") in names))


def importable(package: str) -> set[str]:
    """Top-level modules that a package may import; for a distribution that is not installed, its own name is
    assumed."""
    modules = {*sys.stdlib_module_names, *PACKAGES}
    return modules.union(*(installed_modules().get(name, {name.replace("-", "_")}) for name in declared(package)))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_third_party_import_is_a_declared_dependency(package):
    known = importable(package)
    undeclared = [str(found) for found in imports_of(source_root(package)) if top(found.imported) not in known]
    assert not undeclared, "add these to the dependencies or to an extra of the package:\n" + "\n".join(undeclared)


def project(package: str) -> dict[str, Any]:
    """The `project` table of a package's pyproject.toml."""
    return tomllib.loads((source_root(package).parent / "pyproject.toml").read_text())["project"]


def accepts_the_compatible(specifier: SpecifierSet, version: Version) -> bool:
    """Whether the range accepts this version and later ones with the same contracts (0.1.x for 0.1.3), and no
    others."""
    compatible = [version, Version(f"{version.major}.{version.minor}.{version.micro + 7}")]
    others = [Version(f"{version.major}.{version.minor + 1}"), Version(f"{version.major + 1}.0"), Version("0.0.1")]
    return all(v in specifier for v in compatible) and not any(v in specifier for v in others)


@pytest.mark.parametrize("package", PACKAGES)
def test_workspace_packages_need_each_other_in_compatible_ranges(package):
    versions = {name.replace("_", "-"): Version(project(name)["version"]) for name in PACKAGES}
    extras = project(package).get("optional-dependencies", {}).values()
    for line in itertools.chain(project(package)["dependencies"], *extras):
        requirement = Requirement(line)
        if requirement.name in versions:
            assert accepts_the_compatible(requirement.specifier, versions[requirement.name]), line


@pytest.mark.parametrize("wrong", ["==0.1.3", ">=0.1", "<0.2", ">=0.1,<0.3", ">=0.1.4,<0.2", "<=0.1.3", ""])
def test_a_too_narrow_or_too_wide_range_is_found(wrong):
    assert accepts_the_compatible(SpecifierSet(">=0.1,<0.2"), Version("0.1.3"))
    assert not accepts_the_compatible(SpecifierSet(wrong), Version("0.1.3"))
