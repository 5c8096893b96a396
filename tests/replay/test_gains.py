"""Predicted against true gains: programs run on a machine of the tests' own, with and without a
fix; the replay sees only the trace of the run without.

The bar: a predicted gain is within 5% of the true gain. Below a floor of 1% of the step, gains
are as small as what the machine's jitter makes two runs of steps differ by, so there the
difference itself must stay under the floor: a fix without a gain must be predicted to
gain less than that. Host times, kernels and latencies of the machine vary by 3 to 20%, and
kernels that run at once slow each other down; the replay knows nothing of either.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from whatif_machine import (
    Copy,
    Host,
    Kernel,
    Machine,
    Program,
    Record,
    Settings,
    Span,
    Sync,
    Wait,
    run,
)
from whatif_programs import (
    LOADER,
    Fix,
    Shape,
    asynchronous,
    combine_fixes,
    into_graph,
    merge_update,
    overlap_collectives,
    overlap_copies,
    remove_host,
    remove_kernels,
    remove_wait,
    resize,
    roofline,
    scale_host,
    scale_kernels,
    set_launch_cost,
    spread,
    training,
    with_matrices,
)

from advisor.core.finding import Edit, Select
from advisor.measure import Analysis
from advisor.read import read_trace
from advisor.replay.host_nodes import CERTAIN_WAIT_NS
from advisor.replay.window_replayer import WindowReplayer
from advisor.rules.distributed.sequential_devices import SequentialDevices

WITHIN = 0.05
"""Allowed error, as a share of the true gain."""
FLOOR = 0.01
"""Smallest gain that is compared, as a share of the step."""
STEPS = 12
"""Whole turns of loops that wait every second or third step."""
EXAMPLES = int(os.environ.get("ADVISOR_WHATIF_EXAMPLES", "0"))
"""Set it to look further than CI does: that many examples of each kind, other ones each time."""

examples = settings(
    max_examples=EXAMPLES or 10,
    derandomize=not EXAMPLES,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)

MS = st.sampled_from([200.0, 600.0, 1500.0, 3000.0])
SHAPES = st.builds(
    Shape,
    seed=st.integers(0, 10**6),
    layers=st.sampled_from([3, 6, 9, 15]),
    host=MS,
    device=MS,
    python=st.sampled_from([50.0, 150.0, 800.0]),
    backward=st.booleans(),
    sync=st.sampled_from(["none", "item", "stream", "device", "event"]),
    sync_every=st.sampled_from([1, 1, 2, 3]),
    copy=st.sampled_from([0.0, 50.0, 400.0, 1500.0]),
    pinned=st.booleans(),
    comm=st.sampled_from([0.0, 300.0, 900.0, 2500.0]),
    optimizer=st.sampled_from([0, 10, 40]),
    graph=st.sampled_from([0, 0, 20]),
    batch=st.sampled_from([0.0, 0.0, 400.0, 3000.0]),
    uneven=st.sampled_from([0.0, 0.3]),
    workers=st.sampled_from([0, 0, 2, 4]),
    other=st.sampled_from([False, False, True]),
)
SHAPES_WITHOUT_WORKERS = SHAPES.filter(lambda s: not (s.batch and s.workers))
"""A fix for launches gains at most the idle time that launches cause, not that of the loader."""
SETTINGS = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([1024, 1024, 200]),
        "seed": st.integers(0, 10**6),
        "sync_rows": st.booleans(),
        "whole_us": st.sampled_from([False, False, True]),
    }
)


def loop(shape: Shape) -> Program:
    """The program of a shape. Uneven batches are absorbed by what the host is ahead, which takes
    a while to build up."""
    return training(shape, steps=STEPS, warmup=12 if shape.batch and shape.uneven else 4)


def replayed(machine: Machine, folder: Path) -> WindowReplayer:
    path = folder / "trace.json"
    path.write_bytes(machine.json())
    return WindowReplayer(Analysis(read_trace(str(path))), profiled=False)


def loader_rate_is_not_in_the_trace(shape: Shape, slow: Machine, fast: Machine) -> bool:
    """Workers that keep up with the slow steps but not with the fast ones, or whose steps wait for
    them no longer than for ready batches (docs/whatif.md)."""
    waits = [event["dur"] for event in slow.events if "_MultiProcessing" in event["name"]]
    rate, fast_rate = (
        (m.program.batch_us + Settings.hand_us) / max(1, m.program.workers) for m in (slow, fast)
    )
    late = fast_rate * (1 + shape.uneven)
    is_limit = shape.workers > 0 and late > 0.95 * fast.period
    return is_limit and (rate < 1.03 * slow.period or max(waits, default=0) < CERTAIN_WAIT_NS / 1e3)


class Case:
    """A program with and without a fix, and the result of its replay; times in µs."""

    def __init__(
        self,
        shape: Shape,
        machine: dict[str, Any],
        fix: Fix,
        folder: Path,
        program: Program | None = None,
    ) -> None:
        program = loop(shape) if program is None else program
        self.slow = run(program, **machine)
        self.fast = run(fix.change(program), **machine)
        self.true = self.slow.period - self.fast.period
        self.replayer = replayed(self.slow, folder)
        self.predicted = self.replayer.gain(fix.edits) / 1e3

    def check(self) -> None:
        allowed = max(WITHIN * abs(self.true), FLOOR * self.slow.period)
        assert abs(self.predicted - self.true) <= allowed, (
            f"true {self.true:.1f} µs, predicted {self.predicted:.1f} µs of {self.slow.period:.1f}"
        )


def check(shape: Shape, machine: dict[str, Any], fix: Fix, folder: Path) -> None:
    case = Case(shape, machine, fix, folder)
    assume(not loader_rate_is_not_in_the_trace(shape, case.slow, case.fast))
    case.check()


@examples
@given(
    SHAPES,
    SETTINGS,
    st.sampled_from([0.0, 0.3, 0.7, 1.5]),
    st.sampled_from(["gemm", "gemm_forward", "gemm_backward"]),
)
def test_kernels_made_faster_or_slower(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], factor: float, which: str
) -> None:
    check(shape, machine, scale_kernels(which, factor), tmp_path)


@examples
@given(SHAPES, SETTINGS, st.sampled_from(["gemm_forward", "gemm_backward"]))
def test_gain_of_removed_kernels(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], which: str
) -> None:
    check(shape, machine, remove_kernels(which), tmp_path)


@examples
@given(SHAPES, SETTINGS, st.sampled_from([None, 0.1, 0.5, 2.0]))
def test_host_work_removed_or_scaled(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], factor: float | None
) -> None:
    fix = remove_host() if factor is None else scale_host("train.py", factor)
    check(shape, machine, fix, tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.sync != "none"), SETTINGS)
def test_the_host_no_longer_waits(tmp_path: Path, shape: Shape, machine: dict[str, Any]) -> None:
    check(shape, machine, asynchronous(shape.sync), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.sync in ("stream", "device", "event")), SETTINGS)
def test_a_wait_removed(tmp_path: Path, shape: Shape, machine: dict[str, Any]) -> None:
    check(shape, machine, remove_wait(shape.sync), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.comm > 0), SETTINGS)
def test_collectives_overlapped(tmp_path: Path, shape: Shape, machine: dict[str, Any]) -> None:
    check(shape, machine, overlap_collectives(), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.comm > 0), SETTINGS, st.sampled_from([0.1, 0.5, 2.0]))
def test_collectives_that_move_fewer_bytes_or_have_another_bandwidth(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], factor: float
) -> None:
    check(shape, machine, scale_kernels("nccl", factor), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.copy > 0), SETTINGS)
def test_copies_overlapped(tmp_path: Path, shape: Shape, machine: dict[str, Any]) -> None:
    check(replace(shape, pinned=True), machine, overlap_copies(), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.optimizer > 0), SETTINGS, st.sampled_from([0.3, 1.0]))
def test_gain_of_merged_kernels(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], factor: float
) -> None:
    check(shape, machine, merge_update(factor), tmp_path)


@examples
@given(
    SHAPES_WITHOUT_WORKERS, SETTINGS, st.sampled_from(["gemm_forward", "gemm_backward", "update_"])
)
def test_launches_that_cost_less(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], which: str
) -> None:
    check(shape, machine, set_launch_cost(which), tmp_path)


@examples
@given(SHAPES_WITHOUT_WORKERS, SETTINGS)
def test_gain_of_operators_in_one_cuda_graph(
    tmp_path: Path, shape: Shape, machine: dict[str, Any]
) -> None:
    """A graph's first kernel starts when the whole graph has been launched, which the edit does
    not know: a few µs per step, which only steps well above a millisecond do not see."""
    assume(max(shape.host, shape.device) >= 1500)
    check(shape, machine, into_graph(), tmp_path)


@examples
@given(SHAPES.filter(lambda s: s.batch > Settings.hand_us), SETTINGS, st.sampled_from([2, 4]))
def test_the_loader_gets_workers(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], workers: int
) -> None:
    check(shape, machine, spread(workers), tmp_path)


@examples
@given(
    SHAPES,
    SETTINGS,
    st.sampled_from([0.5, 2.0, 4.0]),
    st.sampled_from([(1024,), (108, 432, 1728), (54,)]),
)
def test_another_batch_size(
    tmp_path: Path,
    shape: Shape,
    machine: dict[str, Any],
    factor: float,
    blocks: tuple[int, ...],
) -> None:
    check(replace(shape, blocks=blocks, pinned=True), machine, resize(factor), tmp_path)


@examples
@given(SHAPES, SETTINGS, st.sampled_from([0.5, 0.75, 0.9]))
def test_matrix_products_brought_to_their_roofline(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], share: float
) -> None:
    """The roofline is the data sheet's for bf16 on the machine's A100, worked out in the
    program."""
    sizes = [(1024, 1024, 1024), (4096, 2048, 2048), (8192, 256, 256)]
    program = with_matrices(loop(shape), sizes)
    case = Case(shape, machine, roofline(share), tmp_path, program)
    assume(not loader_rate_is_not_in_the_trace(shape, case.slow, case.fast))
    case.check()


@examples
@given(SHAPES.filter(lambda s: s.comm > 0 and s.sync != "none"), SETTINGS)
def test_gain_of_combined_fixes(tmp_path: Path, shape: Shape, machine: dict[str, Any]) -> None:
    fix = combine_fixes(
        asynchronous(shape.sync),
        overlap_collectives(),
        remove_host(),
        set_launch_cost("gemm"),
        scale_kernels("gemm", 0.5),
    )
    check(shape, machine, fix, tmp_path)


# -- no gain, because something else hides it --------------------------------------------------

BUSY = Shape(layers=9, host=500, device=3000, python=150, optimizer=10)
"""A program whose device never waits for the host."""
LATE = Shape(layers=9, host=3000, device=500, python=800, optimizer=10)
"""A program whose device always waits for the host."""
FED = Shape(layers=9, host=300, device=300, python=50, batch=6000, workers=2)
"""A program that waits for the loader."""

HIDDEN = {
    "python while the device is behind": (BUSY, remove_host()),
    "launches while the device is behind": (BUSY, set_launch_cost("gemm")),
    "a sync of the step before while the device is behind": (
        replace(BUSY, sync="event"),
        asynchronous("event"),
    ),
    "kernels while the host is behind": (LATE, scale_kernels("gemm", 0.5)),
    "collectives under kernels while the host is behind": (
        replace(LATE, comm=300.0),
        overlap_collectives(),
    ),
    "a copy while the host is behind": (replace(LATE, copy=150.0), overlap_copies()),
    "python while the loader is behind": (FED, remove_host()),
    "kernels while the loader is behind": (FED, scale_kernels("gemm", 0.3)),
    "workers for a loader that device work hides": (
        replace(BUSY, batch=1000.0),
        spread(4),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
@settings(examples, max_examples=3)
@given(machine=SETTINGS, seed=st.integers(0, 10**6), backward=st.booleans())
def test_a_fix_that_something_else_hides_gains_nothing(
    tmp_path: Path, name: str, machine: dict[str, Any], seed: int, backward: bool
) -> None:
    shape, fix = HIDDEN[name]
    case = Case(replace(shape, seed=seed, backward=backward), machine, fix, tmp_path)
    assert abs(case.true) <= FLOOR * case.slow.period  # so it is on the machine
    assert abs(case.predicted) <= FLOOR * case.slow.period


@settings(examples, max_examples=6)
@given(machine=SETTINGS, seed=st.integers(0, 10**6))
def test_a_hidden_fix_pays_after_the_fix_that_hid_it(
    tmp_path: Path, machine: dict[str, Any], seed: int
) -> None:
    shape = replace(BUSY, host=1500, python=800, seed=seed, backward=False)
    first, second = scale_kernels("gemm", 0.3), remove_host()
    combined = Case(shape, machine, combine_fixes(first, second), tmp_path)
    first_fixed = run(first.change(loop(shape)), **machine)
    true = first_fixed.period - combined.fast.period
    assert true > 0.05 * combined.slow.period
    predicted = combined.replayer.gain(second.edits, first.edits) / 1e3
    assert abs(predicted - true) <= max(WITHIN * true, FLOOR * combined.slow.period)
    assert abs(combined.replayer.gain(second.edits)) / 1e3 <= FLOOR * combined.slow.period


# -- limits, as docs/whatif.md states them -----------------------------------------------------


def test_delay_of_an_idle_loader_is_overestimated(
    tmp_path: Path,
) -> None:
    # 4500 µs per batch; the wait at the end of the step keeps the host from asking early
    shape = Shape(host=600, device=3000, batch=7500, workers=2, optimizer=10, sync="device")
    case = Case(shape, {}, scale_kernels("gemm", 0.1), tmp_path)
    rate = (7500 + Settings.hand_us) / 2
    assert case.fast.period == pytest.approx(rate, rel=0.03)
    assert case.predicted > 1.5 * case.true


def test_wait_outside_the_window_has_no_gain(
    tmp_path: Path,
) -> None:
    shape = Shape(host=1500, device=1500, sync="device", sync_every=50)
    case = Case(shape, {}, asynchronous("device"), tmp_path)
    assert case.predicted == 0


@pytest.mark.parametrize("beside", ["upload", "thread"])
def test_a_device_that_is_behind_sets_the_step_beside_other_streams(
    tmp_path: Path, beside: str
) -> None:
    program = loop(Shape(host=300, device=2000, copy=100, other=beside == "thread"))
    if beside == "upload":
        program = overlap_copies().change(program)
    machine = run(program)
    analysis = replayed(machine, tmp_path).a
    assert analysis.step_ns / 1e3 == pytest.approx(machine.period, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        pytest.param(
            Shape(
                seed=292, layers=9, device=200, python=50, backward=False, sync="event",
                sync_every=3, copy=1500, comm=2500, optimizer=0, batch=3000, workers=2,
            ),
            overlap_collectives(),
            id="batches are ready in most steps",
        ),
        pytest.param(
            Shape(
                seed=119341, layers=6, host=3000, device=200, python=50, sync="device", copy=400,
                pinned=False, optimizer=0, other=True,
            ),
            set_launch_cost(),
            id="a wait for the device ends with another thread's work",
        ),
        pytest.param(
            Shape(
                seed=374, layers=3, python=800, backward=False, copy=1500, comm=2500, optimizer=0,
                graph=20, other=True,
            ),
            overlap_copies(),
            id="another thread's kernels beside a device that is behind",
        ),
    ],
)  # fmt: skip
def test_gain_with_work_beside_the_step(tmp_path: Path, shape: Shape, fix: Fix) -> None:
    Case(shape, {"seed": 119341}, fix, tmp_path).check()


def split_training(micro_batches: int) -> Program:
    """A model whose second half is on another device (stream 8), with a GPipe schedule."""

    def layers(name: str, us: float, stream: int) -> list[Span]:
        kernel = Kernel(f"gemm_{name}", us / micro_batches, stream=stream)
        return [Span("op", "aten::addmm", (Host(10.0), kernel)) for _ in range(8)]

    def hand_over(name: str, source: int, target: int) -> list[Any]:
        return [Record(name, source), Wait(name, target)]

    body: list[Any] = []
    for _ in range(micro_batches):
        body += layers("forward_0", 600, 7) + hand_over("forward", 7, 8)
        body += layers("forward_1", 600, 8)
    for _ in range(micro_batches):
        body += layers("backward_1", 1200, 8) + hand_over("backward", 8, 7)
        body += layers("backward_0", 1200, 7)
    read = Span("op", "aten::item", (Copy("DtoH", 2.0, 4, pinned=False), Sync("stream")))
    return Program((*body, read), steps=STEPS, warmup=4)


def test_gain_of_devices_that_no_longer_take_turns(tmp_path: Path) -> None:
    slow, fast = run(split_training(1)), run(split_training(4))
    for event in slow.device:
        if event["args"]["stream"] == 8:
            event["args"]["device"] = event["pid"] = 1
    true = slow.period - fast.period
    (finding,) = SequentialDevices().check(replayed(slow, tmp_path).a)
    impact = finding.impact
    assert impact.low_ns < 1e3 * true < impact.high_ns
    assert impact.gain_ns / 1e3 == pytest.approx(true, rel=0.2)


# -- the replay itself -------------------------------------------------------------------------


@settings(examples, max_examples=25)
@given(SHAPES, SETTINGS)
def test_steps_are_replayed_and_starts_explained(
    tmp_path: Path, shape: Shape, machine: dict[str, Any]
) -> None:
    quality = replayed(run(loop(shape), **machine), tmp_path).quality
    assert quality.step_error <= 0.02
    assert quality.explained is not None
    assert quality.explained >= 0.9
    assert quality.steps >= 3


def test_edits_without_matches_change_nothing(tmp_path: Path) -> None:
    replayer = replayed(run(loop(Shape(comm=300, batch=400))), tmp_path)
    nothing = [
        Edit(op="remove", select=Select(on="gpu", name="no such kernel")),
        Edit(op="scale", select=Select(on="host", name="no such frame"), factor=0.5),
        Edit(op="overlap", select=Select(on="gpu", name="no such kernel")),
        Edit(op="merge", select=Select(on="gpu", name="no such kernel"), factor=1.0),
        Edit(op="drop_launch", select=Select(on="gpu", name="no such kernel")),
        Edit(op="make_async", select=Select(on="host", name="no such call")),
        Edit(op="parallelize", select=Select(on="host", name="no such loader"), workers=4),
        Edit(op="roofline", select=Select(on="gpu", name="no such kernel")),
        Edit(op="resize", select=Select(on="gpu", name="no such kernel"), factor=1.0),
    ]
    for edit in nothing:
        assert replayer.gain([edit]) == pytest.approx(0.0, abs=1.0), edit.op


def test_independent_edits_compose_in_any_order(tmp_path: Path) -> None:
    shape = Shape(comm=900, sync="item", batch=400, python=400)
    replayer = replayed(run(loop(shape)), tmp_path)
    edits = [
        e
        for f in (
            asynchronous("item"),
            overlap_collectives(),
            remove_host(),
            scale_kernels("gemm", 0.5),
        )
        for e in f.edits
    ]
    forward, backward = replayer.period(edits), replayer.period(edits[::-1])
    assert forward == pytest.approx(backward, rel=1e-6)
    assert forward < replayer.period(edits[:2]) < replayer.period()


def test_removed_host_time_is_removed_once(tmp_path: Path) -> None:
    """A frame and what it encloses, both removed, save as much as the frame does."""
    replayer = replayed(run(loop(LATE)), tmp_path)
    frame = Edit(op="remove", select=Select(on="host", kind=("python",), name="^train"))
    same = Edit(op="remove", select=Select(on="host", name=r"train\.py\(12\)"))
    assert replayer.gain([frame, same]) == pytest.approx(replayer.gain([frame]))
    assert replayer.gain([frame]) == pytest.approx(800e3, rel=0.05)


def test_loader_selector_matches_the_edit_language() -> None:
    from advisor.replay.edit_language import parse_edit

    assert parse_edit("parallelize loader 2").select.name.startswith("^enumerate")
    assert LOADER.startswith("^enumerate")
