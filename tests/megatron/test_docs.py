"""docs/megatron.md is up to date, and the image is built by the documented steps."""

from __future__ import annotations

import re
from pathlib import Path

from tools.megatron_page import MESH, page

ROOT = Path(__file__).parents[2]


def pip_steps(text):
    """The `pip` commands in a page or Dockerfile, in order."""
    return re.findall(r"^(?:RUN )?(pip .*)$", text, flags=re.MULTILINE)


def test_the_layout_page_matches_the_generated_drawing():
    assert (ROOT / "docs/megatron.md").read_text() == page(), "docs/megatron.md is out of date: run `make docs`"


def test_the_page_names_each_of_its_sixteen_ranks():
    assert MESH.world_size == 16
    cells = {cell.strip() for cell in page().split("## Layers")[0].split("|")}
    assert {str(rank) for rank in range(16)} <= cells


def test_the_image_is_built_by_the_documented_steps():
    dockerfile, install = (pip_steps((ROOT / name).read_text()) for name in ("Dockerfile", "docs/install_gpu.md"))
    assert len(dockerfile) == 3
    assert install == dockerfile
