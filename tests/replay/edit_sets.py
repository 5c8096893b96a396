"""Random sets of edits of a real trace, and the laws that what they save has to obey."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor import Analysis, Edit
from advisor.core.trace import BLOCKING_CALLS
from advisor.replay.edit_language import parse_edit, write_edit
from advisor.replay.estimators import estimator_for
from advisor.replay.selection import host_spans, selected_gaps, selected_gpu, selected_host
from advisor.replay.window_replayer import GainRange

TOLERANCE = 0.001
"""Share of the step: differences below this are rounding and latencies of single calls."""
EXACT_NS = 2_000.0
EVER = (-(2**60), 2**60)


def exact_pattern(name: str) -> str:
    """A pattern for a name, whatever is in it; no quotes or spaces, so that it can be typed."""
    return "^" + re.sub(r"[^A-Za-z0-9_]", ".", name) + "$"


class EditSampler:
    """Edits of what one trace holds: its kernels, families, streams, operators and gaps."""

    def __init__(self, a: Analysis, seed: str) -> None:
        self.rng = random.Random(seed)
        gpu, cpu = a.trace.gpu.filter(a.in_window), a.trace.cpu

        def names_by_time(frame: pl.DataFrame, count: int = 12) -> list[str]:
            top = frame.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum())
            names = top.sort("dur", "name", descending=True)["name"].head(count).to_list()
            return list(dict.fromkeys(exact_pattern(name) for name in names))

        families = (
            a.families.filter(pl.col("dur") > 0)["family"].cast(pl.String).to_list()
            if a.device_id is not None
            else []
        )
        copies = gpu["copy"].drop_nulls().unique().cast(pl.String).sort().to_list()
        streams = gpu["stream"].unique().sort().to_list()
        ops = names_by_time(cpu.filter(pl.col("kind") == "op"))
        self.work = [f"kernel:{p}" for p in names_by_time(gpu.filter(pl.col("kind") == "kernel"))]
        self.work += [f"family:{f}" for f in families] + [f"copy:{c}" for c in copies]
        self.work += [f"work stream:{s}" for s in streams[:6]]
        self.work += [f"work under:{p}" for p in ops[:4]] if gpu.height else []
        if a.layers is not None and gpu.height:
            tops = a.layers.nodes.sort("ns", "name", descending=[True, False]).head(60)
            kinds = [k for k in dict.fromkeys(tops["kind"]) if re.fullmatch(r"[\w.]+", k)]
            self.work += [f"layer:{k}" for k in kinds[:4]]
        self.work += ["work", "work max:10000"] if gpu.height else []
        self.work += ["copy"] if copies else []
        self.host = [f"op:{p}" for p in ops] + [f"op:{p} at:loop" for p in ops[:4]]
        self.host += [
            f"host:{p}" for p in names_by_time(cpu.filter(pl.col("kind") == "runtime"), 6)
        ]
        self.host += [
            f"python:{p}" for p in names_by_time(cpu.filter(pl.col("kind") == "python"), 6)
        ]
        blocking = bool(cpu["call"].is_in(list(BLOCKING_CALLS)).fill_null(False).any())
        self.syncs = ["sync", *(f"sync:{p}" for p in ops[:6])] if blocking else []
        causes = a.gaps["cause"].unique().cast(pl.String).sort().to_list()
        self.gaps = ["gap", *(f"gap:{c}" for c in causes)] if causes else []
        loads = cpu["name"].cast(pl.String).str.contains(r"^enumerate\(Data").any()
        self.loader = ["loader"] if loads else []

    def factor(self) -> str:
        return f"{self.rng.choice([0, 0.25, 0.5, 0.75, round(self.rng.random(), 3)]):g}"

    def line(self) -> str:
        """Draw one edit that takes work, waiting or host time away."""
        pick, makers = self.rng.choice, []
        anything = [*self.work, *self.host, *self.syncs, *self.gaps, *self.loader]
        makers += [lambda: f"remove {pick(anything)}"] * 3 if anything else []
        makers += [lambda: f"scale {pick(anything)} {self.factor()}"] * 3 if anything else []
        if self.work:
            makers += [lambda: f"overlap {pick(self.work)}"] * 3
            makers += [lambda: f"merge {pick(self.work)} {self.factor()}"]
            makers += [lambda: f"merge {pick(self.work)}"] * 2
            makers += [lambda: f"graph {pick(self.work)}"] * 2
            makers += [lambda: f"roofline {pick(self.work)}"]
        makers += [lambda: f"graph {pick([*self.host, *self.gaps])}"] if self.host else []
        makers += [lambda: f"async {pick(self.syncs)}"] * 2 if self.syncs else []
        makers += [lambda: f"parallelize loader {self.rng.randint(1, 8)}"] if self.loader else []
        return pick(makers)()

    def lines(self) -> list[str]:
        count = self.rng.choice([1, 1, 2, 2, 3, 4])
        return list(dict.fromkeys(self.line() for _ in range(count)))

    def widen(self, line: str) -> str | None:
        """Widen the selection of an edit; ``None``: impossible."""
        verb, target, *rest = line.split()
        narrowed = [word for word in rest if ":" in word and word != "at:loop"]
        rest = [word for word in rest if word not in narrowed]
        kind = target.partition(":")[0]
        options: list[str] = ["work" if narrowed else ""]
        if kind in ("kernel", "family"):
            options = ["work"]
        if kind == "copy":
            options = ["copy", "work"] if ":" in target else ["work"]
        if kind in ("sync", "gap") and ":" in target:
            options = [kind]
        if kind in ("op", "host") and ":" in target:
            options = [
                f"{target}|{other.split()[0].partition(':')[2]}"
                for other in self.host
                if other.startswith(kind) and other.split()[0] != target
            ]
        options = [option for option in options if (option and option != target) or narrowed]
        return " ".join([verb, self.rng.choice(options), *rest]) if any(options) else None


class Violation(NamedTuple):
    """Two gains that a law does not allow."""

    law: str
    lines: tuple[str, ...]
    other: tuple[str, ...]
    gain: float
    limit: float
    step: float

    def __str__(self) -> str:
        return (
            f"{self.law}: {' + '.join(self.lines)} saves {self.gain / 1e6:.3f} ms, "
            f"{' + '.join(self.other) or 'limit'} {self.limit / 1e6:.3f} "
            f"of {self.step / 1e6:.3f} ms"
        )


class Laws:
    """The laws, tried with random sets of edits of one trace."""

    def __init__(self, a: Analysis, seed: str) -> None:
        self.a = a
        self.estimator = estimator_for(a)
        self.draw = EditSampler(a, seed)
        self.violations: list[Violation] = []
        self.checks: Counter[str] = Counter()
        self._known_gains: dict[tuple[str, ...], float] = {}

    def gain_range(self, lines: Sequence[str]) -> GainRange:
        """The gain of edits, with its range."""
        return self.estimator.gain_range([parse_edit(line) for line in lines])

    def gain(self, lines: Sequence[str]) -> float:
        """The gain without its range."""
        key = tuple(lines)
        if key not in self._known_gains:
            self._known_gains[key] = self.estimator.marginal(
                [parse_edit(line) for line in lines], ()
            )
        return self._known_gains[key]

    def check_at_most(
        self,
        law: str,
        lines: Sequence[str],
        limit: float,
        other: Sequence[str] = (),
        value: float | None = None,
    ) -> None:
        """Check that ``lines`` save at most ``limit``."""
        self.checks[law] += 1
        gain = self.gain(lines) if value is None else value
        if gain > limit + max(EXACT_NS, TOLERANCE * self.a.step_ns):
            self.violations.append(
                Violation(law, tuple(lines), tuple(other), gain, limit, self.a.step_ns)
            )

    def check_less(self, law: str, lines: Sequence[str], more: Sequence[str]) -> None:
        self.check_at_most(law, lines, self.gain(more), more)

    def check_equal(self, law: str, lines: Sequence[str], same: Sequence[str]) -> None:
        self.check_less(law, lines, same)
        self.check_less(law, same, lines)

    def check_random_set(self) -> None:
        """Check one random set."""
        draw, rng = self.draw, self.draw.rng
        lines = draw.lines()
        saved = self.gain_range(lines)
        step = self.a.step_ns
        # taking batches over from workers costs what a loop without them does not spend
        saving = not any(line.startswith("parallelize") for line in lines)
        if saving:
            self.check_at_most("saving edits cost nothing", lines, 0.0, value=-saved.gain)
        self.check_at_most("no more than the step", lines, step)
        self.check_at_most("low end below the point", lines, saved.gain, value=saved.low)
        self.check_at_most("point below the high end", lines, saved.high)
        self.check_at_most("high end within the step", lines, step, value=saved.high)
        most = max_saving(self.a, [parse_edit(line) for line in lines])
        self.check_at_most("no more than the edits touch", lines, most)
        self.check_at_most("high end: no more than the edits touch", lines, most, value=saved.high)
        self.check_equal("twice is once", [*lines, rng.choice(lines)], lines)
        shuffled = rng.sample(lines, len(lines))
        self.check_equal("any order", shuffled, lines)
        one_more = draw.line()
        if saving and not one_more.startswith("parallelize"):
            self.check_less("more edits save no less", lines, [*lines, one_more])
        place = rng.randrange(len(lines))
        edit = parse_edit(lines[place])

        def change_line(other: Edit | str) -> list[str]:
            text = other if isinstance(other, str) else write_edit(other)
            return [*lines[:place], text, *lines[place + 1 :]]

        if edit.op in ("scale", "merge"):
            smaller = replace(edit, factor=(edit.factor or 0.0) * rng.random())
            self.check_less("monotone in the factor", lines, change_line(smaller))
        if edit.op in ("scale", "overlap", "roofline", "make_async"):
            removal = Edit(op="remove", select=edit.select)
            self.check_less(f"{edit.op} saves no more than remove", lines, change_line(removal))
        wider = draw.widen(lines[place])
        if wider is not None:
            self.check_less("part saves no more than the whole", lines, change_line(wider))


def max_saving(a: Analysis, edits: Sequence[Edit]) -> float:
    """Upper limit of what edits can save, ns per step, row by row: the device time of what they
    select, a start's latency each, and the host's time, of which what the device idles."""
    device = host = 0.0
    begin = int(a.spans.start.min()) if len(a.spans) else 0
    end = int(a.spans.end.max()) if len(a.spans) else 0

    def clipped_ns(frame: pl.DataFrame, begin: int = begin, end: int = end) -> float:
        """Clip rows that may cover each other, so that each instant counts once."""
        rows = frame.sort("ts")
        ts = np.clip(rows["ts"].to_numpy(), begin, end)
        until = np.maximum.accumulate(np.clip((rows["ts"] + rows["dur"]).to_numpy(), begin, end))
        return float(np.maximum(until - np.maximum(ts, np.append(begin, until[:-1])), 0).sum())

    gpu, cpu = a.trace.gpu, a.trace.cpu
    for edit in set(edits):
        best = edit.best_factor if edit.best_factor is not None else edit.factor
        remaining_share = best if edit.op in ("scale", "merge") and best is not None else 0.0
        if edit.select.on == "gap":
            host += float(a.gaps.filter(pl.Series(selected_gaps(a, edit.select)))["dur"].sum())
        elif edit.select.on == "host":
            rows = cpu.select("ts", "dur").filter(pl.Series(selected_host(a, edit.select)))
            if edit.select.at == "loop":  # with the time between them
                _, ts, dur = host_spans(a, edit.select)
                rows = pl.DataFrame({"ts": ts, "dur": dur})
            host += clipped_ns(rows) * (1 - remaining_share)
        elif edit.op == "drop_launch":
            host += float(end - begin)
        else:
            chosen = gpu.filter(pl.Series(selected_gpu(a, edit.select, anywhere=True)))
            device += clipped_ns(chosen, *EVER) * (1 - remaining_share)
            if edit.select.layer and edit.op in ("scale", "remove"):  # with its host's time
                around = selected_host(a, replace(edit.select, on="host"))
                host += clipped_ns(cpu.filter(pl.Series(around))) * (1 - remaining_share)
            if edit.op in ("remove", "overlap", "merge"):
                device += 10_000.0 * chosen.height
            if edit.op in ("remove", "merge"):
                rows = pl.concat([chosen["launch"], chosen["op"]]).drop_nulls().unique()
                host += clipped_ns(cpu[rows.to_list()])
    idle = float(end - begin) - clipped_ns(gpu.filter(pl.Series(a.in_window)))
    return min(device + min(host, idle), float(end - begin)) / a.step_count


def neutral_edits(a: Analysis) -> list[str]:
    """Edits of everything that change nothing."""
    sampler = EditSampler(a, "zero")
    return [f"scale {t} 1" for t in [*sampler.work, *sampler.host, *sampler.syncs, *sampler.gaps]]


def check_random_sets(a: Analysis, seed: str, count: int) -> Laws:
    """Check the laws on ``count`` random sets of edits."""
    laws = Laws(a, seed)
    if not (laws.draw.work or laws.draw.host or laws.draw.gaps):
        return laws
    unchanged = neutral_edits(a)
    for line in laws.draw.rng.sample(unchanged, min(count, len(unchanged))):
        laws.check_at_most(
            "an edit of zero saves nothing", [line], 0.0, value=abs(laws.gain([line]))
        )
    for _ in range(count):
        laws.check_random_set()
    return laws
