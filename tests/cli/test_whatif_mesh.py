"""``advisor whatif --mesh``: the terminal, JSON and the library say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor import open as open_run
from advisor import whatif
from advisor.core.text import format_duration
from benchmarks.simulation.kineto import trace
from benchmarks.simulation.meshes import draw_pair, play_mesh

Run = Callable[..., Any]
MESH = ("--mesh", "dp=4,tp=2", "--node-size", "8")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the first rank of a simulated job of dp=2,tp=4."""
    pair = draw_pair(5)
    path = tmp_path_factory.mktemp("mesh") / "rank0.json"
    path.write_bytes(trace(play_mesh(pair.model, pair.recorded), 0))
    return path


def test_the_terminal_json_and_the_library_say_the_same(file: Path, advisor: Run) -> None:
    result = whatif(open_run(file), mesh="dp=4,tp=2", node_size=8)
    completed = advisor("whatif", str(file), *MESH)
    assert completed.code == 0 and "dp=4,tp=2" in completed.out
    assert format_duration(result.step_ns) in completed.out
    assert "Memory of a GPU: not recorded" in completed.out
    assert max(map(len, completed.out.splitlines())) <= 80
    document = json.loads(advisor("whatif", str(file), *MESH, "--format", "json").out)
    assert document["step_ns"] == pytest.approx(result.step_ns)
    assert document["measured"] == {"dp": 2, "tp": 4, "pp": 1, "cp": 1, "ep": 1}
    assert [axis["axis"] for axis in document["axes"]] == ["dp", "tp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "dp=4", "--edit", "remove comm"), "edits"),
        (("--mesh", "four"), "dp=8,tp=4"),
        (("--mesh", "dp=4,tp=2"), "--node-size"),
        (("--mesh", "dp=4,tp=2", "--recorded-mesh", "dp=0"), "dp=8,tp=4"),
    ],
)
def test_invalid_mesh_is_one_line_error(
    file: Path, advisor: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = advisor("whatif", str(file), *arguments)
    assert result.code == 2 and message in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_the_table_of_the_mesh_knows_the_size_of_a_node(file: Path, advisor: Run) -> None:
    """Ranks 0 to 7 on nodes of 8: an axis lies inside of a node, and has its link."""
    unknown = advisor("analyze", str(file), "--by", "mesh", "--no-progress").out
    known = advisor("analyze", str(file), "--by", "mesh", "--node-size", "8", "--no-progress").out
    assert "inside a node" in known and "inside a node" not in unknown
