"""Laws that hold for any replay, tried with random edits on every public real trace.

``ADVISOR_LAWS=200`` tries as many edits a trace and law (default 6), and rewrites the large
files too.

A law that says nothing of a file (no step, a replay that is not trusted) is not tried on it:
``laws_left_out.json`` lists those pairs and why, and one test a file holds the list to what is
in the file. ``ADVISOR_LAWS_LEFT_OUT=write pytest -n0 tests/replay -k left_out`` writes it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
import rewriting
from msgspec.structs import replace

from advisor import Analysis, Edit, Finding
from advisor.advise import finding_text
from advisor.advise.engine import AnalysisResult
from advisor.core.trace import BLOCKING_CALLS
from advisor.measure.steps.steps import recorded_extent
from advisor.read import read_trace
from advisor.replay.edit_language import parse_edit, write_edit
from advisor.replay.estimators import REPLAY, estimator_for
from advisor.replay.exposed_time import remaining_device_time
from advisor.replay.graph import GAP_NS, EdgeKind
from advisor.replay.host_nodes import ready_batch_ns
from advisor.replay.replay import MIN_STEADY
from advisor.replay.replay_quality import critical_path
from advisor.replay.selection import host_of_layer, selected_gaps, selected_gpu, selected_host
from advisor.replay.what_if import what_if
from advisor.replay.window_replayer import WindowReplayer
from benchmarks.public_traces import trace_names
from tests.corpus_analyses import analyze_cached

EDITS = int(os.environ.get("ADVISOR_LAWS", "6"))
"""Number of random edits per trace and law."""
LARGE = 25_000
"""Host and device rows from which a file is rewritten only when more edits are asked for."""
LEFT_OUT_FILE = Path(__file__).with_name("laws_left_out.json")
"""Reasons, by file and law, why the law says nothing of the file."""
EXACT_NS = 2.0
"""Possible error from rounding of sums, ns."""
SLACK = 0.01
"""Share of the step by which shortening something may lengthen it: a scheduling anomaly."""


def _trace_stems() -> list[str]:
    return [name.removesuffix(".json.gz") for name in trace_names()]


@functools.lru_cache(maxsize=4)
def replay(path: str) -> WindowReplayer:
    return WindowReplayer(analyze_cached(path).main)


@pytest.fixture(scope="module", params=_trace_stems())
def path(request: pytest.FixtureRequest, shared_trace: Callable[[str], str]) -> str:
    """Path of one file after the other: each is tried with all laws, and read once."""
    return shared_trace(request.param)


# -- what a law needs of a file ------------------------------------------------------------------

Need = Callable[[str], str]
"""Why a file does not have it; "" where it does."""
NEEDS: dict[str, tuple[Need, ...]] = {}
"""Needs of each law; the first that is missing counts."""


def steps(path: str) -> str:
    a = replay(path).a
    empty = a.trace.cpu.is_empty() or a.trace.gpu.is_empty() or a.steps.used.is_empty()
    return "the file holds no steps with both host and device rows" if empty else ""


def needs_small_file(path: str) -> str:
    trace = replay(path).a.trace
    large = trace.cpu.height + trace.gpu.height > LARGE
    return "large files are rewritten with ADVISOR_LAWS set" if large else ""


def needs_trusted_replay(path: str) -> str:
    method = estimator_for(replay(path).a).method
    return "" if method == REPLAY else "the replay is not trusted with these steps"


def repeatable(path: str) -> str:
    """Four of these recordings in a row are the same work four times."""
    a = replay(path).a
    table, gpu = a.steps.table, a.trace.gpu
    if table.height != a.steps.used.height:
        return "a step at the edge of one recording is in the middle of four"
    begin, end = recorded_extent(a.trace)
    recorded = end - begin
    if float(table["end"].max() - table["ts"].min()) < 0.8 * recorded:
        return "what comes before the first step of one recording is in the middle of four"
    if gpu["launch"].null_count() > 0.01 * gpu.height:
        return "work that was launched before the recording cannot be launched again"
    return ""


def needs_replayed_fixes(path: str) -> str:
    result = analyze_cached(path)
    stairs = [f for f in result.report.findings if f.priority is not None and not f.other_rank]
    is_replayed = stairs and result.estimator.method == REPLAY
    return "" if is_replayed else "no finding has a gain from a replay"


def edits(path: str) -> str:
    result = analyze_cached(path)
    if result.estimator.method != REPLAY:
        return "findings have no gain from a replay"
    return "" if own_findings(result) else "no finding has a gain from its edits"


def own_findings(result: AnalysisResult) -> list[Finding]:
    """Findings of this rank that name what they change."""
    return [f for f in result.report.findings if f.edits and f.impact and not f.other_rank]


def law(*needs: Need) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that is tried on each file with steps that has what it ``needs`` besides."""

    def register_law(test: Callable[..., None]) -> Callable[..., None]:
        NEEDS[test.__name__] = (steps, *needs)
        return test

    return register_law


def exempt_laws(path: str) -> dict[str, str]:
    """The laws that say nothing of a file, and why."""
    why = {name: next(filter(None, (n(path) for n in needs)), "") for name, needs in NEEDS.items()}
    return {name: reason for name, reason in why.items() if reason}


def test_list_of_left_out_laws_is_current(path: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["path"]
    listed, now = json.loads(LEFT_OUT_FILE.read_text()), exempt_laws(path)
    if os.environ.get("ADVISOR_LAWS_LEFT_OUT") == "write":
        listed = {key: each for key, each in {**listed, name: now}.items() if each}
        LEFT_OUT_FILE.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    assert now == listed.get(name, {}), "ADVISOR_LAWS_LEFT_OUT=write writes the list anew"


def gain(replayer: WindowReplayer, *lines: str) -> float:
    """The gain of edits together, as a share of the step."""
    return replayer.gain([parse_edit(line) for line in lines]) / replayer.unedited.period


# -- edits to draw from --------------------------------------------------------------------------


def exact_pattern(name: str) -> str:
    """A pattern for a name, whatever is in it; no quotes or spaces, so that it can be typed."""
    return "^" + re.sub(r"[^A-Za-z0-9_]", ".", name) + "$"


class Targets(NamedTuple):
    """Targets of the edit language that a trace has."""

    kernels: list[str]
    """Kernels of one name each: they select disjoint work."""
    work: list[str]
    ops: list[str]
    host: list[str]
    syncs: list[str]
    gaps: list[str]
    loader: bool


@functools.lru_cache(maxsize=4)
def targets(path: str) -> Targets:
    a = replay(path).a
    gpu = a.trace.gpu.filter(a.in_window)

    def names_by_time(frame: pl.DataFrame, count: int = 12) -> list[str]:
        top = frame.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum())
        return top.sort("dur", "name", descending=True)["name"].head(count).to_list()

    patterns = [exact_pattern(n) for n in names_by_time(gpu.filter(pl.col("kind") == "kernel"))]
    families = a.families.filter(pl.col("dur") > 0)["family"].cast(pl.String).to_list()
    copies = gpu["copy"].drop_nulls().unique().cast(pl.String).sort().to_list()
    cpu = a.trace.cpu
    ops = [f"op:{exact_pattern(n)}" for n in names_by_time(cpu.filter(pl.col("kind") == "op"))]
    calls = [
        f"host:{exact_pattern(n)}"
        for n in names_by_time(cpu.filter(pl.col("kind") == "runtime"), 6)
    ]
    frames = [
        f"python:{exact_pattern(n)}"
        for n in names_by_time(cpu.filter(pl.col("kind") == "python"), 6)
    ]
    blocking = cpu["call"].is_in(list(BLOCKING_CALLS)).fill_null(False).any()
    causes = a.gaps["cause"].unique().cast(pl.String).sort().to_list()
    return Targets(
        kernels=[f"kernel:{p}" for p in dict.fromkeys(patterns)],
        work=[
            "work",
            *(f"family:{f}" for f in families),
            *(f"copy:{c}" for c in copies),
            *_layers(a),
        ],
        ops=ops,
        host=[*calls, *frames],
        syncs=["sync"] if blocking else [],
        gaps=["gap", *(f"gap:{c}" for c in causes)] if causes else [],
        loader=bool(cpu["name"].cast(pl.String).str.contains(r"^enumerate\(Data").any()),
    )


def _layers(a: Analysis) -> list[str]:
    """The kinds of modules with most time, where modules are recorded."""
    if a.layers is None or a.device_id is None:
        return []
    kinds = a.layers.nodes.sort("ns", "name", descending=[True, False])["kind"].to_list()
    return [f"layer:{k}" for k in dict.fromkeys(kinds) if re.fullmatch(r"\w+", k)][:4]


def factor(rng: random.Random) -> str:
    return f"{rng.choice([0, 0.25, 0.5, 0.75, round(rng.random(), 3)]):g}"


def shortening_edits(path: str, count: int) -> Iterator[str]:
    """Edits that take work, waiting or host time away."""
    t, rng = targets(path), random.Random(f"shortening {Path(path).name}")
    device, host = [*t.kernels, *t.work], [*t.ops, *t.host]
    makers: list[Callable[[], str]] = []
    if device:
        makers += [lambda: f"scale {rng.choice(device)} {factor(rng)}"] * 3
        makers += [lambda: f"remove {rng.choice(device)}"] * 3
        makers += [lambda: f"overlap {rng.choice(device)}"] * 2
        makers += [lambda: f"graph {rng.choice(device)}"] * 2
        makers += [lambda: f"roofline {rng.choice(device)}"]
    if host:
        makers += [lambda: f"scale {rng.choice(host)} {factor(rng)}"] * 3
        makers += [lambda: f"remove {rng.choice(host)}"] * 3
    if t.ops and t.syncs:
        makers += [lambda: f"async sync:{rng.choice(t.ops).removeprefix('op:')}"]
    if t.syncs:
        makers += [lambda: "async sync", lambda: "remove sync"]
    if t.gaps:
        makers += [lambda: f"remove {rng.choice(t.gaps)}"]
        makers += [lambda: f"scale {rng.choice(t.gaps)} {factor(rng)}"]
    if t.loader:
        makers += [lambda: f"parallelize loader {rng.randint(1, 8)}"]
        makers += [lambda: f"scale loader {factor(rng)}"]
    for number in range(count):
        # each kind once before any comes twice
        yield (makers[number % len(makers)] if number < len(makers) else rng.choice(makers))()


def window(replayer: WindowReplayer) -> tuple[int, int]:
    """Start and end of the replayed steps, ns of the trace."""
    table = replayer.a.steps.table
    first, last = replayer.quality.steps, replayer.quality.of_steps
    if first != last or not table.height:
        return replayer.graph.origin, replayer.graph.origin + int(replayer.graph.time.max())
    return int(table["ts"].min()), int(table["end"].max())


# -- nothing changed, nothing gained -------------------------------------------------------------


@law()
def test_an_edit_of_zero_changes_nothing(path: str) -> None:
    t, rng = targets(path), random.Random(f"zero {Path(path).name}")
    replayer = replay(path)
    names = [*t.kernels, *t.work, *t.ops, *t.host, *t.syncs, *t.gaps]
    lines = [f"scale {target} 1" for target in rng.sample(names, min(EDITS, len(names)))]
    lines += [f"{verb} kernel:^none$" for verb in ("remove", "overlap", "merge", "graph")]
    lines += ["async sync:^none$", "remove op:^none$", "remove gap:none", "resize work 1"]
    wrong = {
        line: saved for line in lines if abs(saved := replayer.gain([parse_edit(line)])) > EXACT_NS
    }
    assert not wrong


# -- what the file says, not how it says it ------------------------------------------------------


def rewrite_and_replay(
    path: str, change: Callable[[rewriting.Data], rewriting.Data], to: Path
) -> WindowReplayer:
    return WindowReplayer(Analysis(read_trace(rewriting.save(change(rewriting.load(path)), to))))


@law(needs_small_file)
def test_result_is_independent_of_event_order_and_names(path: str, tmp_path: Path) -> None:
    replayer = replay(path)
    other = rewrite_and_replay(
        path, lambda d: rewriting.permuted(rewriting.renumber_processes(d)), tmp_path / "trace.json"
    )
    assert other.a.step_ns == pytest.approx(replayer.a.step_ns, abs=EXACT_NS)
    assert other.quality.explained == replayer.quality.explained
    wrong = {}
    for line in shortening_edits(path, EDITS):
        saved, then = (w.gain([parse_edit(line)]) for w in (replayer, other))
        if abs(saved - then) > EXACT_NS:
            wrong[line] = (saved, then)
    assert not wrong


def repeatable_edits(path: str, count: int) -> list[str]:
    """Edits that mean the same however often the step is repeated: no queue, no other stream, no
    neighbour beyond the step takes part."""
    t, rng = targets(path), random.Random(f"plain {Path(path).name}")
    names = [*t.kernels, *t.work, *t.ops, *t.host]
    return [f"scale {target} {factor(rng)}" for target in rng.sample(names, min(count, len(names)))]


@law(needs_trusted_replay, repeatable, needs_small_file)
def test_repeating_a_recording_keeps_its_shares(path: str, tmp_path: Path) -> None:
    """The step is the device's own span where no step is marked: four of them take four times as
    long, once the host's work before and after is left out. Fewer than three steps are replayed
    alone, from an idle device until all is done, and so each of the four ends with a wait for
    the device."""
    replayer = replay(path)
    is_replayed_alone = replayer.quality.steps < MIN_STEADY
    marked = replayer.a.steps.source != "whole trace"
    data = rewriting.load(path) if marked else rewriting.own_span(rewriting.load(path))
    repeated = rewriting.repeat_recording(data, drained=is_replayed_alone)
    other = rewrite_and_replay(path, lambda _: repeated, tmp_path / "trace.json")
    if other.a.steps.source != replayer.a.steps.source:
        pytest.skip("four of them have steps that one has not")
    times = 1 if marked else 4
    assert other.a.step_ns == pytest.approx(times * replayer.a.step_ns, rel=0.02)
    wrong = {}
    for line in repeatable_edits(path, EDITS):
        shares = gain(replayer, line), gain(other, line)
        if abs(shares[0] - shares[1]) > 0.02:
            wrong[line] = shares
    assert not wrong


@law(needs_small_file)
def test_halving_all_times_halves_the_step_and_keeps_shares(path: str, tmp_path: Path) -> None:
    """Additions of the replay (a call's cost, a release) have to come from the trace. Where no
    kernel waited for the one before it, the gap between the two is not in the file: the usual
    one stays as it is."""
    replayer = replay(path)
    other = rewrite_and_replay(
        path, lambda d: rewriting.stretch_times(d, 0.5), tmp_path / "trace.json"
    )
    assert other.a.step_ns == pytest.approx(replayer.a.step_ns / 2, rel=0.001)
    stays = 0.0
    if (replayer.graph.latencies.gap == GAP_NS).all():
        stays = GAP_NS * len(replayer.graph.device) / replayer.quality.steps
    unknown = stays / replayer.unedited.period
    wrong = {}
    for line in repeatable_edits(path, EDITS):
        shares = gain(replayer, line), gain(other, line)
        if abs(shares[0] - shares[1]) > 0.01 + unknown:
            wrong[line] = shares
    assert not wrong


# -- edits together ------------------------------------------------------------------------------


@law()
def test_edits_of_different_things_can_be_made_in_any_order(path: str) -> None:
    """The edits are of the same kind on kernels of different names, or one on the device and one
    on the host."""
    t, rng = targets(path), random.Random(f"order {Path(path).name}")
    replayer = replay(path)
    wrong = {}
    for _ in range(EDITS):
        verb = rng.choice(["scale", "remove", "merge", "overlap"])
        end = f" {factor(rng)}" if verb == "scale" else ""
        if len(t.kernels) >= 2 and (rng.random() < 0.7 or not t.ops):
            one, other = (f"{verb} {k}{end}" for k in rng.sample(t.kernels, 2))
        elif t.kernels and t.ops:
            one = f"scale {rng.choice(t.kernels)} {factor(rng)}"
            other = f"scale {rng.choice(t.ops)} {factor(rng)}"
        else:
            pytest.skip("the trace has no two different things")
        saved, then = (
            replayer.gain([parse_edit(line) for line in lines])
            for lines in ((one, other), (other, one))
        )
        # a merge leaves what it merges at the place of the first: a stream's gap is distinguished
        # by neighbours, of which an earlier edit has taken some away
        if abs(saved - then) > max(EXACT_NS, 1e-4 * replayer.unedited.period):
            wrong[one, other] = (saved, then)
    assert not wrong


# -- less is never more --------------------------------------------------------------------------


@law()
def test_shortening_does_not_lengthen(path: str) -> None:
    """Loader workers are the exception, for they hand each batch over: for small batches that
    takes longer than loading them, as with one worker for the 1.2 ms that ranks of dlrm_8ranks
    load."""
    replayer = replay(path)
    result = {line: gain(replayer, line) for line in shortening_edits(path, EDITS)}
    hand_over = ready_batch_ns(replayer.a.trace, replayer.a.step_ns, "") / replayer.unedited.period
    most = {line: hand_over if line.startswith("parallelize") else 0.0 for line in result}
    assert not {line: saved for line, saved in result.items() if saved < -SLACK - most[line]}


@law()
def test_merging_never_costs_time(path: str) -> None:
    t, rng = targets(path), random.Random(f"merge {Path(path).name}")
    replayer = replay(path)
    names = [w for w in t.work if not w.startswith("copy")] + t.kernels
    lines = [f"merge {w}" for w in names[: max(EDITS, 1)]]
    lines += [f"merge {rng.choice(names)} {factor(rng)}" for _ in range(EDITS - len(lines))]
    result = {line: gain(replayer, line) for line in lines}
    assert not {line: saved for line, saved in result.items() if saved < -0.001}


@law(needs_trusted_replay)
def test_everything_twice_as_fast_takes_half_the_time(path: str) -> None:
    """Exceptions have nothing in the file: the time of threads between their events, and the gap
    between a launch and its work. Loader workers are no threads of the file: twice as many of
    them do the same in half the time."""
    replayer = replay(path)
    a = replayer.a
    lines = [parse_edit("scale work 0.5"), parse_edit("scale host:. 0.5")]
    if a.trace.cpu["name"].cast(pl.String).str.contains("#_MultiProcessing").any():
        lines.append(parse_edit("parallelize loader 2"))
    remaining_share = replayer.period(lines) / replayer.unedited.period
    begin, end = window(replayer)
    cpu = a.trace.cpu.filter(pl.col("kind") != "overhead")
    uncovered = 0.0
    for thread in cpu["thread"].unique().to_list():
        calls = cpu.filter((pl.col("thread") == thread) & (pl.col("ts") < end)).sort("ts")
        until = np.maximum.accumulate((calls["ts"] + calls["dur"]).to_numpy())
        hole = calls["ts"].to_numpy()[1:] - until[:-1]
        inside = (calls["ts"].to_numpy()[1:] <= end) & (until[:-1] >= begin) & (hole > 0)
        uncovered = max(uncovered, float(hole[inside].sum()))
    # that of work launched before the window too, which the steps' own path does not have
    time, dur, unprofiled_steps = replayer._replay_unprofiled_step(lines)
    chain = critical_path(unprofiled_steps.graph, time, unprofiled_steps.weight, dur)
    host = [EdgeKind.PROGRAM, EdgeKind.HANDOFF, EdgeKind.LOADER]
    waits = (chain.edge >= 0) & ~np.isin(
        unprofiled_steps.graph.edge[np.maximum(chain.edge, 0)], host
    )
    latency = float(chain.ns[waits].sum()) / replayer.step_count / replayer.unedited.period
    assert 0.5 - SLACK <= remaining_share <= 0.5 + SLACK + uncovered / 2 / (end - begin) + latency


# -- no more than there is -----------------------------------------------------------------------


def max_saving_ns(replayer: WindowReplayer, edit: Edit) -> float:
    """Time that an edit takes away, ns per step, summed over all threads and streams. No path
    through the step can become shorter by more. Work that is moved or removed no longer holds up
    its stream either while it waits itself."""
    a, select = replayer.a, edit.select
    factor = edit.factor if edit.op == "scale" and edit.factor is not None else 0.0
    steps = max(1, replayer.quality.steps)
    if select.on == "gap":
        return float(a.gaps["dur"].filter(selected_gaps(a, select)).sum()) * (1 - factor) / steps
    if select.on == "gpu":
        mask = selected_gpu(a, select, anywhere=True)
        gpu = a.trace.gpu
        total = float(gpu["dur"].filter(mask).sum()) * (1 - factor)
        host = host_of_layer(select) if edit.op in ("scale", "remove") else None
        if host is not None:
            total += max_saving_ns(replayer, replace(edit, select=host)) * steps
        if edit.op == "scale":
            return total / steps
        held_ns = 0.0
        for _, rows_ in gpu.with_columns(chosen=mask).group_by("device", "stream"):
            lane = rows_.sort("ts")
            until = np.maximum.accumulate((lane["ts"] + lane["dur"]).to_numpy())
            before = np.maximum(lane["ts"].to_numpy()[1:] - until[:-1], 0)
            chosen = lane["chosen"].to_numpy()
            # what comes after a moved piece may also start without its gap
            held_ns += float(before[chosen[1:] | chosen[:-1]].sum())
        launch = gpu["launch"].filter(mask).drop_nulls()
        calls = float(a.trace.cpu["dur"].gather(launch.unique()).sum())
        return (total + held_ns + calls) / steps
    mask = selected_host(a, select)
    total = 0.0
    for _, events in a.trace.cpu.filter(mask).group_by("thread"):
        event = events.sort("ts")
        until = np.maximum.accumulate((event["ts"] + event["dur"]).to_numpy())
        before = np.append(event["ts"].to_numpy()[:1], until[:-1])
        total += float(np.maximum(until - np.maximum(event["ts"].to_numpy(), before), 0).sum())
    return total * (1 - factor) / steps


@law()
def test_gain_is_at_most_the_removed_time(path: str) -> None:
    replayer = replay(path)
    wrong = {}
    for line in shortening_edits(path, EDITS):
        edit = parse_edit(line)
        if edit.op in ("drop_launch", "roofline"):
            continue
        saved, most = replayer.gain([edit]), max_saving_ns(replayer, edit)
        if saved > most + max(EXACT_NS, SLACK * replayer.unedited.period):
            wrong[line] = (saved, most)
    assert not wrong


@law(needs_trusted_replay)
def test_host_edit_leaves_at_least_the_device_time(path: str) -> None:
    """The busiest stream is what is left when the host costs nothing."""
    replayer = replay(path)
    begin, end = window(replayer)
    gpu = replayer.a.trace.gpu.filter(
        pl.col("device") == replayer.a.device_id, pl.col("ts").is_between(begin, end)
    )
    launched = gpu.filter(
        pl.col("launch").is_not_null()
        & pl.Series(
            replayer.a.trace.cpu["ts"].gather(gpu["launch"].fill_null(0)).is_between(begin, end)
        )
    )
    # kernels of a stream may overlap (programmatic dependent launch): what is busy counts once
    busy = [0.0]
    for _, lane in launched.sort("ts").group_by("stream"):
        end_ = (lane["ts"] + lane["dur"]).to_numpy()
        before = np.append(lane["ts"].to_numpy()[:1], np.maximum.accumulate(end_)[:-1])
        busy.append(float(np.maximum(end_ - np.maximum(lane["ts"].to_numpy(), before), 0).sum()))
    busiest = max(busy) / max(1, replayer.quality.steps)
    wrong = {}
    for line in shortening_edits(path, EDITS):
        edit = parse_edit(line)
        if edit.select.on == "gpu" and edit.op != "drop_launch":
            continue
        period = replayer.period([edit])
        if period < busiest - SLACK * replayer.unedited.period:
            wrong[line] = (period, busiest)
    assert not wrong


# -- findings ------------------------------------------------------------------------------------


@law(needs_replayed_fixes)
def test_fix_sequence_adds_up_to_the_gain_of_all_findings(path: str) -> None:
    result = analyze_cached(path)
    stairs = [f for f in result.report.findings if f.priority is not None and not f.other_rank]
    edits = [e for f in stairs for e in f.edits]
    total = WindowReplayer(result.main).gain(edits)
    total = min(total, result.main.step_ns - remaining_device_time(result.main, edits))
    assert sum(f.marginal_gain_ns or 0 for f in stairs) == pytest.approx(
        total, abs=len(stairs) * EXACT_NS
    )
    assert total <= result.main.step_ns


@law(edits)
def test_typed_edit_gives_the_gain_of_its_finding(path: str) -> None:
    """Every finding's: else nobody can look at what its price takes for granted, or change that."""
    result = analyze_cached(path)
    wrong = {}
    for f in own_findings(result):
        lines = [write_edit(edit) for edit in f.edits]
        saved = sum(row.gain_ns for row in what_if(result.run, lines).edits)
        if f.impact is None or abs(saved - (f.impact.gain_ns or 0)) > len(lines) * EXACT_NS:
            wrong[f.rule] = (lines, saved, f.impact)
    assert not wrong


# -- what a report says of its gains -------------------------------------------------------------


def test_gains_and_ranges_stay_within_the_edited_time(
    path: str,
) -> None:
    report = analyze_cached(path).report
    for finding in [*report.findings, *report.notes]:
        impact = finding.impact
        if impact is None or impact.currency != "step_time" or not impact.gain_ns:
            continue
        gain, low, high = impact.gain_ns, impact.low_ns or 0, impact.high_ns or impact.gain_ns
        most = report.step_ns if impact.bound_ns is None else impact.bound_ns
        assert 0 <= low <= gain <= high <= most + EXACT_NS, finding.title
        assert high <= report.step_ns + EXACT_NS, finding.title
        conditions = " ".join(finding_text.gain_conditions(finding, report))
        if low < 0.5 * gain or high > 2 * gain:
            assert re.search(
                r"range: \w|low end 0: \w|no gain unless|(low|high) end.*: \w", conditions
            ), conditions
        shown_ns = [e.value for e in finding.evidence if e.unit == "ns" and e.per is not None]
        if shown_ns and gain > 1.05 * float(shown_ns[0] or 0):
            assert "more than the " in conditions, finding.title
        if finding.offloaded_ns is not None:
            workers = int(re.search(r"num_workers=(\d+)", finding.code + finding.fix)[1])
            assert gain <= report.step_ns - finding.offloaded_ns / workers + EXACT_NS
