"""``layer:`` selects a module with those in it, and its host time: by hand on small traces."""

from __future__ import annotations

import pytest

from advisor import Analysis
from advisor.core.finding import Select
from advisor.core.trace import Run
from advisor.measure.host.layers import work_nodes
from advisor.replay.edit_language import parse_edit
from advisor.replay.selection import find_near_matches, selected_gpu
from advisor.replay.what_if import what_if
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder


def blocks(*, kernel_us: float, host_us: float) -> Analysis:
    """Four steps; in each three equal blocks and a head outside of them."""
    t = TraceBuilder()
    for _ in range(4):
        with t.step():
            for number in range(3):
                inner = t.python(f"nn.Module: Linear_{number}")
                with t.python(f"nn.Module: Block_{number}"), inner:
                    t.run("aten::mm", "gemm", kernel_us, host_us=host_us)
            t.run("aten::add", "add", kernel_us, host_us=host_us)
            t.sync()
    return t.analysis()


def test_kind_selects_its_modules_and_their_submodules() -> None:
    a = blocks(kernel_us=100, host_us=5)
    assert a.layers is not None
    assert sorted(a.layers.nodes["name"])[:3] == ["Block_0", "Block_1", "Block_2"]
    for pattern, count in (
        ("Block", 12), ("Block_1", 4), ("Linear_2", 4), ("*.Linear_?", 12), ("Block_0.*", 4),
        ("Head", 0), ("block", 0),
    ):  # fmt: skip
        selected = selected_gpu(a, Select(on="gpu", layer=pattern))
        assert selected.sum() == count, pattern
    assert (work_nodes(a) < 0).sum() == 4  # the head


def test_halving_layers_of_a_busy_device_halves_kernels() -> None:
    replayer = WindowReplayer(blocks(kernel_us=1000, host_us=5))
    gain = replayer.gain([parse_edit("scale layer:Block 0.5")])
    assert gain == pytest.approx(3 * 1_000_000 / 2, rel=0.02)
    assert replayer.gain([parse_edit("remove layer:Block_1")]) == pytest.approx(1e6, rel=0.02)


def test_halving_layers_of_a_launch_bound_step_halves_host_time() -> None:
    a = blocks(kernel_us=1, host_us=400)
    replayer = WindowReplayer(a)
    gain = replayer.gain([parse_edit("scale layer:Block 0.5")])
    assert gain == pytest.approx(3 * 400_000 / 2, rel=0.1)
    assert replayer.gain([parse_edit("scale work layer:Block family:gemm 0.5")]) < 10_000


def test_both_halves_add_up_and_no_more_than_all_is_saved() -> None:
    replayer = WindowReplayer(blocks(kernel_us=500, host_us=100))
    edits = [parse_edit(f"scale layer:Block_{n} 0.25") for n in range(3)]
    assert replayer.gain(edits) == pytest.approx(
        replayer.gain([parse_edit("scale layer:Block 0.25")])
    )
    step = replayer.a.step_ns
    assert 0 <= replayer.gain([parse_edit("remove layer:Block")]) <= step


def test_accuracy_warning_is_for_lighter_models_only() -> None:
    a = blocks(kernel_us=100, host_us=5)
    run = Run(traces={(0, 0): a.trace})
    assert "accura" in what_if(run, ["scale layer:Block 0.5"]).notes[0]
    assert what_if(run, ["scale family:gemm 0.5", "overlap layer:Block"]).notes == ()


def test_layer_edit_without_matches_lists_modules() -> None:
    near_matches = find_near_matches(
        blocks(kernel_us=100, host_us=5), Select(on="gpu", layer="blok")
    )
    assert near_matches.kind == "modules"
    assert "Block" in near_matches.names[:4]
    t = TraceBuilder()
    with t.step():
        t.run("aten::mm", "gemm", 100)
    assert find_near_matches(t.analysis(), Select(on="gpu", layer="Block")).names == ()


def test_a_loop_takes_its_python_with_it() -> None:
    """Three operators of 10 µs with 20 µs between them, another one after 50, and a fourth of the
    loop's kind behind that: 30 µs of Python are the loop's, 4 × 10 its operators'."""
    t = TraceBuilder(gpu=None)
    for _ in t.steps(3):
        for op, pause in (("aten::a", 20), ("aten::a", 10), ("aten::a", 50), ("aten::b", 5)):
            t.on_host(op, 10)
            t.host(pause)
        t.on_host("aten::a", 10)
    a = t.analysis()
    replayer = WindowReplayer(a)
    operator_gain = replayer.gain([parse_edit("remove op:aten::a")])
    assert operator_gain == pytest.approx(40_000, abs=2500)
    assert replayer.gain([parse_edit("remove op:aten::a at:loop")]) == pytest.approx(
        operator_gain + 30_000, abs=500
    )
    everything = replayer.gain([parse_edit("remove op:aten::. at:loop")])
    assert everything == pytest.approx(operator_gain + 10_000 + 85_000, abs=3000)
