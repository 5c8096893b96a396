"""Ranks that load the whole batch of the job, and keep their part of it."""

from collections import Counter
from typing import Any, NamedTuple

import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.trace import LOADER
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import TAKES, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    scale_edit,
)
from advisor.rules.support.loader_waits import SINGLE_PROCESS, find_waits
from advisor.testing import Examples, TraceBuilder


class Part(NamedTuple):
    """A part of a batch that a rank keeps."""

    shape: tuple[int, ...]
    """Shape of the batch."""
    kept_samples: int
    """Samples that are kept."""
    row: int
    """Row of ``trace.cpu`` of the operator that takes the part."""

    @property
    def samples(self) -> int:
        return self.shape[0]


class UnshardedLoading(Rule):
    """Each rank loads the batch of the whole job, and keeps its part: ``batch[rank::world]``. With
    N ranks, all but one in N samples are read and prepared for nothing.

    The rule finds operators that take one of N parts of a batch along its first dimension. N is the
    number of ranks, and the part is this rank's. No other operator may read the whole batch. The
    step must wait for the loader. Batches that a rank cuts into micro-batches are used whole, and
    are not reported.

    The gain is the dropped share of the wait for the loader."""

    id = "unsharded-loading"
    title = "Each rank loads samples that only other ranks use"
    found_in = ("recorded/unsharded.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording of two ranks, torch 2.13 with gloo, and its cure: 47 ms predicted, 54 ms "
        "measured"
    )
    needs_shapes = True
    training_only = True
    references = (
        "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
    )

    min_share = Threshold(0.05, "of the step in loading samples that are dropped", XPROF)
    min_steps_share = Threshold(0.9, "of the steps, with such a part of each batch", CHOSEN)
    worst_remaining_ratio = Factor(
        1.5, "times the kept share of the loading is left, where some of it is per batch", CHOSEN
    )

    fix = (
        "Give each rank its own indices, not its part of the loaded batch: a DistributedSampler, "
        "or every N-th index in a sampler of your own. The ranks train on the same samples as now."
    )
    code = (
        "sampler = DistributedSampler(dataset)  # set_epoch(epoch) in each epoch\n"
        "# keep your other arguments\n"
        "per_rank = batch_size // world_size\n"
        "loader = DataLoader(dataset, per_rank, sampler=sampler)\n"
        "# in a batch sampler of your own:\n"
        "#     yield indices[rank::world_size]\n"
        "# and no batch[rank::world_size] in the loop"
    )
    verify = "Record again: the wait for the loader is shorter, and the losses are the same."
    falsified_by = "other code that uses the whole batch, in steps that are not recorded"
    assumptions = ("loading takes as long for each sample",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        world = a.trace.meta.world_size or 1
        if world < 2 or not a.span_ns:
            return
        waits = find_waits(a, LOADER)
        if waits is None:
            return
        saved = waits.exposed * (1 - 1 / world)
        if saved < self.min_share * a.span_ns:
            return
        parts = _find_parts(a, world)
        if len(parts) < self.min_steps_share * a.step_count:
            return
        samples, kept = parts[0].samples, parts[0].kept_samples
        loader = a.trace.cpu["name"].gather(waits.host[:1])
        select = Select(on="host", name=LOADER)
        share = kept / samples
        if name_matches(loader, SINGLE_PROCESS).all():
            edit = scale_edit(select, share, share, min(1.0, self.worst_remaining_ratio * share))
        else:
            edit = Edit(op="parallelize", select=select, workers=world)
        yield Finding(
            summary=(
                f"Each rank waits for {samples} samples per batch and keeps {kept}: loading the "
                f"others takes {of_step(a, saved)}."
            ),
            evidence=[
                Evidence("ranks", world, "count"),
                Evidence("samples of a loaded batch", samples, "count"),
                Evidence("samples that the rank keeps", kept, "count"),
                amount_per_step(a, "waiting for the loader", waits.exposed),
                self.compare_share(a, "loading for other ranks", saved),
            ],
            where=costliest_places(a, waits.host, waits.exposed_ns),
            edits=[edit],
        )

    @staticmethod
    def examples() -> Examples:
        few = "self.min_steps_share * a.step_count"
        return {
            "every second sample": _build_rank(["0", "1", "", "2"]),
            "the second half": _build_rank(["0", "8", "16", "1"]),
            "from workers": _build_rank(["0", "1", "", "2"], workers=2),
            "one rank": (_build_rank(["0", "1", "", "2"], world=1), "world < 2"),
            "the other rank's part": (_build_rank(["0", "0", "", "2"]), few),
            "a part of each sample": (_build_rank(["1", "1", "", "2"]), few),
            "the batch is used whole": (_build_rank(["0", "1", "", "2"], used_whole=True), few),
            "a fast loader": (_build_rank(["0", "1", "", "2"], load_ms=0.2), "self.min_share"),
        }


def _find_parts(a: Analysis, world: int) -> list[Part]:
    """Return the part of its batch that this rank keeps, one for each step that has the most common
    sizes."""
    rank = a.trace.meta.rank
    table = outermost_in_steps(a).drop_nulls("inputs")
    takes = table.filter(pl.col("name").is_in(TAKES)).select("row", "name", "inputs")
    parts = []
    for row, name, at in takes.iter_rows():
        x = inputs_at(a, at)
        kept = _count_kept(name, x, world, rank)
        if kept is not None:
            parts.append(Part(x.tensors[0].shape, kept, row))
    if not parts:
        return []
    shapes = {part.shape for part in parts}
    others = table.filter(~pl.col("name").is_in(TAKES))["inputs"].unique().to_list()
    if any(tensor.shape in shapes for at in others for tensor in inputs_at(a, at).tensors):
        return []
    samples = Counter(part.samples for part in parts).most_common(1)[0][0]
    starts = a.steps.used["ts"].to_numpy()
    ts = a.trace.cpu["ts"].to_numpy()
    by_step = {
        int(starts.searchsorted(ts[part.row], side="right")): part
        for part in parts
        if part.samples == samples
    }
    return list(by_step.values())


def _count_kept(name: str, x: OpInputs, world: int, rank: int | None) -> int | None:
    """Return the number of samples that an operator takes from a batch if they are the rank's part
    of the first dimension, else ``None``."""
    batch = x.tensor(0)
    size = 0 if batch is None or len(batch.shape) < 1 else batch.shape[0]
    if size < world or name not in TAKES:
        return None
    taken = range_taken(name, x, 0, size)
    stride: Any = x.argument(4) if name == "aten::slice" else 1
    if taken is None or not isinstance(stride, int) or stride < 1:
        return None
    kept = len(range(*taken, stride))
    first = taken[0] if stride == world else taken[0] // max(1, kept)
    is_own = kept * world == size and stride in (1, world) and rank in (None, first)
    return kept if is_own else None


def _build_rank(
    taken: list[str],
    *,
    world: int = 2,
    used_whole: bool = False,
    load_ms: float = 20,
    workers: int = 0,
) -> TraceBuilder:
    """Build rank 1, which loads 16 samples and slices them by these arguments."""
    b = TraceBuilder(None, rank=1, world_size=world)
    for _ in b.steps():
        b.loader_wait(1000 * load_ms, workers=workers)
        b.on_host("aten::slice", 5, [[16, 8], [], [], [], []], concrete=["", *taken])
        b.on_host("aten::linear", 10_000, [[16 if used_whole else 8, 8], [8, 8]])
        b.on_host(f"{NODE_PREFIX}AddmmBackward0", 10_000)
        b.sync()
    return b
