"""Predicted against measured on real pairs: the same program before and after one change.

    python benchmarks/bench_pairs.py [--traces DIR] [--only NAME] [--write docs/accuracy.md]
        [--ledger]

A prediction is made from the first file alone, by the edit that stands for the change, with ranges
that know nothing of this pair. Both files are measured by interval arithmetic of this file, which
reads the JSON itself. Without --traces: the pairs in tests/corpus. All times in ms.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from public_traces import CORPUS
from shipped_ledger import replace

from advisor.replay import ledger
from advisor.replay.ledger import (
    MIN_ERRORS,
    SHIPPED,
    Prediction,
    error_of,
    shipped_experiments,
    shipped_predictions,
    without_program,
)

NUMBERS = ("predicted", "low", "high", "measured", "measured_low", "measured_high")
BEGIN, END = "<!-- pairs begin -->", "<!-- pairs end -->"
NARROW = 0.40
"""Half the width that a range may have, as a share of the measured change."""
KIND_OF_RULE = {
    "gc-pauses": "host",
    "single-process-loader": "loader",
    "workers-respawned": "host",
}
"""Kind of change of the fixes that were tried on a bundled program."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
HEAD = (
    "change",
    "edit",
    "before → after",
    "measured change",
    "predicted (range)",
    "off by",
    "half the range shown",
    "inside",
    "exposed time says",
    "finding says",
)


class StepTimes(NamedTuple):
    """Step times of one file, ms: the mean and the median."""

    mean: float
    median: float


class MeasuredChange(NamedTuple):
    """The measured change, ms. ``low`` to ``high``: the results of the ways to measure it. The
    change is what the step became shorter by, negative where it became longer."""

    before: float
    after: float | None
    low: float
    high: float


class GainInterval(NamedTuple):
    """A predicted change, ms."""

    point: float
    low: float
    high: float


class Row(NamedTuple):
    """A pair: prediction and truth."""

    pair: Pair
    truth: MeasuredChange
    predicted: GainInterval
    """Prediction with a range that knows nothing of this pair."""
    shown_range: GainInterval
    """Prediction as it is shown: with all that is known."""
    exposed: float
    """Change that the exposed time of the same edits would predict, ms."""
    finding_gain: GainInterval | None
    """Estimated gain of the finding that proposes the change; ``None``: no such finding, or one
    without an estimate."""

    @property
    def scale(self) -> float:
        """The time that errors are a share of: the measured change, or the step where the change
        itself is not expected to be much."""
        if self.pair.whole_step:
            assert self.truth.after is not None
            return self.truth.after
        return min(abs(self.truth.low), abs(self.truth.high))

    @property
    def error(self) -> float:
        """Distance of the point from what was measured, as a share of ``scale``."""
        nearest = min(max(self.predicted.point, self.truth.low), self.truth.high)
        return abs(self.predicted.point - nearest) / self.scale

    @property
    def width(self) -> float:
        """Half the range that is shown, as a share of ``scale``."""
        return (self.shown_range.high - self.shown_range.low) / 2 / self.scale

    @property
    def inside(self) -> bool:
        """The range holds what was measured."""
        return self.predicted.low <= self.truth.high and self.truth.low <= self.predicted.high


# -- measuring -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def events(path: Path) -> list[dict[str, Any]]:
    """Complete events of a trace, as they stand in the file (µs)."""
    gc.disable()  # a million new objects, none of which can be let go
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    finally:
        gc.enable()
    trace_events = data["traceEvents"] if isinstance(data, dict) else data
    return [e for e in trace_events if e.get("ph") == "X"]


def marked(path: Path) -> StepTimes:
    """Steps that the profiler marked on the host (``ProfilerStep#n``)."""
    steps = [
        e["dur"] / 1e3
        for e in events(path)
        if e["name"].startswith("ProfilerStep#") and e.get("cat") != "gpu_user_annotation"
    ]
    return StepTimes(statistics.mean(steps), statistics.median(steps))


def batch_to_batch(path: Path) -> StepTimes:
    """Step times from one batch that was asked for to the next. The first is left out: it starts
    workers, loads kernels and takes seconds."""
    starts = sorted(e["ts"] for e in events(path) if e["name"].startswith("enumerate(DataLoader)#"))
    steps = [(b - a) / 1e3 for a, b in pairwise(starts[1:])]
    return StepTimes(statistics.mean(steps), statistics.median(steps))


def whole_recording(path: Path) -> StepTimes:
    """Time from the first event of host or device to the end of the last."""
    real = [e for e in events(path) if e.get("cat") not in ("Trace", "python_function", None)]
    begin, end = min(e["ts"] for e in real), max(e["ts"] + e["dur"] for e in real)
    return StepTimes((end - begin) / 1e3, (end - begin) / 1e3)


def busy(path: Path) -> float:
    """Time in which the device did anything, ms: the union of its events."""
    total, until = 0.0, float("-inf")
    for e in sorted(
        (e for e in events(path) if str(e.get("cat")).lower() in DEVICE), key=lambda e: e["ts"]
    ):
        end = e["ts"] + e["dur"]
        total += max(0.0, end - max(e["ts"], until))
        until = max(until, end)
    return total / 1e3


def both(measure: Callable[[Path], StepTimes]) -> Callable[[Path, Path], MeasuredChange]:
    """The change between two files that are measured in the same way."""

    def truth(before: Path, after: Path) -> MeasuredChange:
        a, b = measure(before), measure(after)
        changes = sorted((a.mean - b.mean, a.median - b.median))
        return MeasuredChange(a.mean, b.mean, *changes)

    return truth


# -- pairs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two files, what was changed between them and the edit that stands for it."""

    name: str
    before: str
    after: str
    change: str
    edits: tuple[Any, ...]
    """Lines of the edit language, or ``Edit`` as keywords, where factors have a range."""
    truth: Callable[[Path, Path], MeasuredChange]
    kind: str
    """Kind of the change, as far as its errors go: see ``advisor/replay/ledger.py``."""
    group: str = ""
    """The program, where other pairs are of it too: its outcomes are left out together."""
    rule: str = ""
    """The finding that proposes this change."""
    why: str = ""
    """Why these edits stand for the change, or where the published figure is from."""
    whole_step: bool = False
    """Errors are a share of the step: a change near zero is what is to be predicted."""
    nothing_else: bool = False
    """The change is the finding's fix and no more: its estimate can be compared with the change."""

    @property
    def title(self) -> str:
        """Name of the pair in the documentation and in the shipped ledger."""
        return f"{self.name}: {self.change}" if self.whole_step else self.name


def work(op: str, factors: tuple[float, float, float], **select: Any) -> dict[str, Any]:
    """An edit of device work with (central, optimistic, pessimistic) factors."""
    middle, best, worst = factors
    return {
        "op": op,
        "select": {"on": "gpu", **select},
        "factor": middle,
        "best_factor": best,
        "worst_factor": worst,
    }


def one_by_one(*ops: str) -> tuple[Any, ...]:
    """Edits for work that is decoded one by one: small kernels of these operators with their
    launches, and the operators themselves where they are short and so do not wait."""
    pattern = "^aten::(" + "|".join(ops) + ")$"
    return (
        {
            "op": "remove",
            "select": {"on": "gpu", "kind": ("kernel",), "under": pattern, "max_ns": 10_000},
        },
        {
            "op": "remove",
            "select": {"on": "host", "kind": ("op",), "name": pattern, "max_ns": 300_000},
        },
    )


# A100: bf16 tensor cores 312 TFLOP/s, fp32 19.5 (datasheet): 16 times. Real shapes reach 60% of
# a ratio of peaks (25 to 86%): what rules/kernel/fp32_matmul.py assumes, with its sources.
TENSOR_CORES = (1 / (16 * 0.6), 1 / (16 * 0.86), 1 / (16 * 0.25))
# Half the bytes; fused, a chain of them is read and written once instead of twice.
HALF_THE_BYTES = (0.5, 0.25, 0.75)
BATCH = "particle_batch{}"

PAIRS = (
    Pair(
        "loader, steps marked",
        "pairs/loader_profiler_workers0",
        "pairs/loader_profiler_workers4",
        "`num_workers` 0 → 4",
        ("parallelize loader 4",),
        both(marked),
        kind="loader",
        group="image loader",
        rule="single-process-loader",
        nothing_else=True,
    ),
    Pair(
        "loader, steps not marked",
        "pairs/loader_autograd_workers0",
        "pairs/loader_autograd_workers4",
        "`num_workers` 0 → 4",
        ("parallelize loader 4",),
        both(batch_to_batch),
        kind="loader",
        group="image loader",
        rule="single-process-loader",
        nothing_else=True,
    ),
    Pair(
        "SAM, host reads",
        "pairs/sam_1_fp32_many_syncs",
        "pairs/sam_2_fp32_few_syncs",
        "host reads 7,023 → 275, launches 19,746 → 5,768",
        (
            "async sync",
            *one_by_one("is_nonzero", "eq", "index", "to", "add", "cat", "sub"),
        ),
        both(whole_recording),
        kind="waits",
        group="segment-anything",
        rule="host-reads",
        why=(
            "1,332 masks are encoded one by one, each with five reads and ten launches. Encoded "
            "together, no read holds the host any more, so that what else it does hides behind "
            "the device, and the small kernels and operators of each mask go."
        ),
    ),
    Pair(
        "SAM, bf16",
        "pairs/sam_2_fp32_few_syncs",
        "pairs/sam_3_bf16_compiled_sdpa",
        "bfloat16, `torch.compile`, flash attention",
        (
            work("scale", TENSOR_CORES, family=("gemm", "convolution", "attention")),
            work("scale", HALF_THE_BYTES, family=("elementwise", "normalisation", "layout")),
        ),
        both(whole_recording),
        kind="device",
        group="segment-anything",
        rule="mixed-precision-off",
        why=(
            "factors from the datasheet alone: matrix work and attention at the ratio of the "
            "A100's peaks, derated; what moves bytes at half of them"
        ),
    ),
    *(
        Pair(
            f"batch of {small}",
            "pairs/" + BATCH.format(small),
            "pairs/" + BATCH.format(large),
            f"{small} → {large}",
            (f"resize work {large // small}",),
            both(whole_recording),
            kind="batch",
            group="particle transformer",
            whole_step=True,
        )
        for small, large in ((2, 32), (2, 64), (2, 128), (32, 128))
    ),
)


# -- predicting ----------------------------------------------------------------------------------


def edit(description: Any) -> Any:
    """An ``Edit``, from a line of the language or from keywords."""
    from advisor import Edit, Select
    from advisor.replay.edit_language import parse_edit

    if isinstance(description, str):
        return parse_edit(description)
    return Edit(**{**description, "select": Select(**description["select"])})


def predict(
    path: Path, edits: Sequence[Any], title: str
) -> tuple[GainInterval, GainInterval, float]:
    """Predict the saving of a replay of the edits together, ms per step, with a range that knows
    nothing of the pair and with the range that is shown; and the saving that their exposed time
    predicts."""
    import advisor
    from advisor.measure import Analysis
    from advisor.replay.estimators import BoundEstimator
    from advisor.replay.window_replayer import WindowReplayer

    run = advisor.open(path)
    a = Analysis(run.window(run.ranks[0]))
    replayer = WindowReplayer(a)
    gain = replayer.gain(edits) / 1e6
    ranges = [GainInterval(gain, *(end / 1e6 for end in replayer.gain_range(edits)[1:3]))]
    with without_program(title):
        ranges.append(GainInterval(gain, *(end / 1e6 for end in replayer.gain_range(edits)[1:3])))
    bound = BoundEstimator(a).gain_range(edits)
    return ranges[1], ranges[0], bound.gain / 1e6


def findings(path: Path) -> dict[str, GainInterval]:
    """Savings of findings with an estimate, by rule, ms per step."""
    import advisor

    result = {}
    for f in advisor.analyze(path).findings:
        w = f.impact
        if w is not None and w.gain_ns is not None and f.rule not in result:
            low, high = (w.gain_ns if v is None else v for v in (w.low_ns, w.high_ns))
            result[f.rule] = GainInterval(w.gain_ns / 1e6, low / 1e6, high / 1e6)
    return result


def row(pair: Pair, traces: Path) -> Row:
    """Prediction and truth of one pair."""
    before, after = (traces / f"{name}.json.gz" for name in (pair.before, pair.after))
    predicted, shown_gain, exposed = predict(before, [edit(e) for e in pair.edits], pair.title)
    with without_program(pair.title):
        finding = findings(before).get(pair.rule) if pair.rule else None
    return Row(pair, pair.truth(before, after), predicted, shown_gain, exposed, finding)


# -- showing -------------------------------------------------------------------------------------


def shown_edit(description: Any) -> str:
    """An edit as text."""
    if isinstance(description, str):
        return f"`{description}`"
    select = description["select"]
    what = "/".join(select.get("family", ())) or select.get("under") or select.get("name", "")
    what = what.removeprefix("^aten::(").removesuffix(")$").replace("|", "/")
    if "max_ns" in select:
        what += f" ≤ {select['max_ns'] // 1000} µs"
    factor = f" {description['factor']:.2g}" if description.get("factor") is not None else ""
    where = "kernels" if select["on"] == "gpu" else "operators"
    return f"`{description['op']}` {where} of {what}{factor}"


def cells(r: Row) -> tuple[str, ...]:
    """A line of the table."""
    t, p = r.truth, r.predicted
    change = f"{t.low:.1f}" if t.high - t.low < 0.05 else f"{t.low:.1f} to {t.high:.1f}"
    after = "?" if t.after is None else f"{t.after:.1f}"
    finding_text = "–"
    if r.pair.rule:
        finding_text = f"`{r.pair.rule}`: "
        finding_text += (
            f"{r.finding_gain.point:.1f} ({r.finding_gain.low:.1f} to {r.finding_gain.high:.1f})"
            if r.finding_gain
            else "no estimate"
        )
    of = " of the step" if r.pair.whole_step else ""
    return (
        f"{r.pair.name}: {r.pair.change}",
        "; ".join(shown_edit(e) for e in r.pair.edits),
        f"{t.before:.1f} → {after}",
        change if t.after is not None else f"{change} expected",
        f"{p.point:.1f} ({p.low:.1f} to {p.high:.1f})",
        f"{r.error:.0%}{of}",
        f"{r.width:.0%}{of}",
        "yes" if r.inside else "**no**",
        f"{r.exposed:.1f}",
        finding_text,
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown of the pairs, with what the edits rest on below."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(cells(r) for r in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [f"- **{r.pair.name}**: {r.pair.why}" for r in rows if r.pair.why]
    text += "\n\n" + coverage(rows)
    return text + "\n\n" + "\n".join(notes) if notes else text


class Outcome(NamedTuple):
    """A measured change, and the range that all other programs give it."""

    kind: str
    program: str
    inside: bool
    half: float
    """Half the width of that range, as a share of the measured change."""


def outcome(r: Row) -> Outcome:
    """The ledger entry of a pair."""
    half = (r.predicted.high - r.predicted.low) / 2 / r.scale
    return Outcome(r.pair.kind, r.pair.group or r.pair.name, r.inside, half)


def measured_here(known: Prediction) -> Outcome:
    """Text of a program that was run with and without its fix. Its range is as wide as
    predictions of other programs were wrong, by kind of change and by rule."""
    kind = known.kind or KIND_OF_RULE[known.rule]
    with without_program(known.program):
        factor = math.exp(error_of([kind], shipped_experiments()))
        gain_range = ledger.GainInterval(known.predicted / factor, known.predicted * factor)
        if known.rule:
            wide = ledger.widened_by_rule
            gain_range = wide(
                known.rule, known.device, known.predicted, gain_range, float("inf")
            ).interval
    low, high = known.measured_low or known.measured, known.measured_high or known.measured
    inside = low <= gain_range.high and high >= gain_range.low
    half = (gain_range.high - gain_range.low) / 2 / known.measured
    return Outcome(kind, known.group or known.program, inside, half)


def coverage(rows: Sequence[Row]) -> str:
    """Rows by kind of change: how many outcomes are inside the range that all other programs
    give, and half the width of that range, the median."""
    own_runs = [
        p for p in shipped_predictions() if p.source in ("experiment", "workload", "program")
    ]
    outcomes = [*map(outcome, rows), *map(measured_here, own_runs)]
    head = "| kind of change | outcomes | programs | inside | median half-width | range from |"
    lines = [head, "|---|---|---|---|---|---|"]
    by_kind: dict[str, list[Outcome]] = {}
    for each in outcomes:
        by_kind.setdefault(each.kind, []).append(each)
    for name, group in [*by_kind.items(), ("all", outcomes)]:
        half = statistics.median(each.half for each in group)
        programs = len({each.program for each in group})
        inside = sum(each.inside for each in group)
        known = [p for p in shipped_experiments() if p.kind == name]
        few = (
            f"all kinds: {len(known)} known"
            if len(known) < MIN_ERRORS
            else f"{len(known)} of its own"
        )
        lines.append(
            f"| {name} | {len(group)} | {programs} | {inside} of {len(group)} | {half:.0%} | "
            f"{'' if name == 'all' else few} |"
        )
    outside = ", ".join(
        f"{p.program} ({p.rule or p.group})" if p.rule or p.group else p.program
        for p in own_runs
        if not measured_here(p).inside
    )
    outside = ", ".join(filter(None, [*(r.pair.title for r in rows if not r.inside), outside]))
    return "\n".join(lines) + f"\n\nOutside: {outside or 'none'}."


def entry(r: Row, traces: Path) -> Prediction | None:
    """A line of the shipped ledger, ms; ``None``: nothing was measured. Where the change
    is one finding's fix and no more, that finding's; where the step is the scale, the step's."""
    if r.truth.after is None:
        return None
    is_measured_alone = r.pair.nothing_else and r.finding_gain is not None
    point, low, high = (
        r.finding_gain if is_measured_alone and r.finding_gain is not None else r.predicted
    )
    measured = (r.truth.low + r.truth.high) / 2
    numbers = (point, low, high, measured, r.truth.low, r.truth.high)
    if r.pair.whole_step:
        before = r.truth.before
        ends = (before - point, before - high, before - low)
        numbers = (*ends, r.truth.after, r.truth.after, r.truth.after)
    return Prediction(
        source="pair",
        program=r.pair.title,
        group=r.pair.group,
        kind=r.pair.kind,
        change=r.pair.change,
        rule=r.pair.rule if is_measured_alone else "",
        device=device(traces / f"{r.pair.before}.json.gz"),
        unit="ms",
        **{name: round(ms, 1) for name, ms in zip(NUMBERS, numbers, strict=True)},
    )


def device(path: Path) -> str:
    """Name of the GPU of a trace, as far as it is recorded."""
    import advisor

    return advisor.analyze(path).scope.device_name or "a GPU that is not named"


def main() -> None:
    """Print the table; write it into a document, and lines into the ledger, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=CORPUS)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ledger", type=Path, nargs="?", const=SHIPPED)
    args = parser.parse_args()
    rows = []
    for pair in PAIRS:
        if args.only not in pair.name:
            continue
        if not (args.traces / f"{pair.before}.json.gz").exists():
            print(f"{pair.name}: {pair.before} is not in {args.traces}")
            continue
        rows.append(row(pair, args.traces))
        print("  ".join(cells(rows[-1])), flush=True)
    if args.ledger:
        replace(args.ledger, "pair", filter(None, (entry(r, args.traces) for r in rows)))
    text = f"{BEGIN}\n{table(rows)}\n{END}"
    if not args.write:
        print(f"\n{table(rows)}")
        return
    head, _, rest = args.write.read_text().partition(BEGIN)
    args.write.write_text(f"{head}{text}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
