"""A group on a running Ray cluster of two nodes, such as `ray start` on two machines creates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import IN_TIME_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_group_spans_two_nodes_and_names_a_rank_of_a_lost_node():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ray.two_nodes"], cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["scores_are_right"]
    assert seen["nodes"] in (["first"] * 2 + ["second"] * 2, ["second"] * 2 + ["first"] * 2)
    assert seen["local_ranks"] == ["0", "1", "0", "1"]
    assert "asks for 3 nodes with 0.0625 CPU, 0 GPU each" in seen["three_nodes"]
    assert "Ray has 2 nodes" in seen["three_nodes"]
    named = int(re.match(r"policy rank (\d) of 4 .* died in forward", seen["lost_node"])[1])
    assert seen["nodes"][named] == "second", "the error must name a rank of the removed node"
    assert seen["lost_node_seconds"] < IN_TIME_S
