"""The discrete events of a job: every rank's host, streams and collectives on one true clock.

All ranks that run the same program are advanced together, as columns: a call is one piece of work
of a set of ranks. Times are float ns of the true clock; ``simulate`` puts each rank on the clock of
its host, in whole ns, so that files and summaries are of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.jobs import RANKS_PER_HOST, Fault, Job, Kernel, Ranks

Times = NDArray[np.float64]
Table = dict[str, NDArray[Any]]

BEGIN_NS = 1_718_000_000_000_000_000
"""Unix time at which every job begins."""
COMPUTE_STREAM = 7
BETWEEN_NS = 1_000.0
"""Time from the end of work to the start of what is queued behind it."""
ALPHA_NS = 15_000.0
"""A collective of no bytes."""
BACKWARD, MAIN = 1, 0
DTYPE_BYTES = 2


class Call(NamedTuple):
    """Arguments of a collective kernel besides its group's row."""

    groups: str
    """Name in ``Job.groups``; ``pp``: a pair of two stages."""
    kind: str
    """Name in PyTorch's spelling: ``allreduce``, ``_allgather_base`` …."""
    given: int
    """Elements; of an all-to-all each rank has its own in ``given`` and ``out`` of the table."""
    out: int


@dataclass
class SimulatedRun:
    """All that happened, by rank and in order of the host's calls; local clocks, whole ns."""

    job: Job
    step_ns: float
    """Mean of the steps on the true clock."""
    catalogue: list[Kernel]
    calls: list[Call]
    steps: Table
    """``rank step start end``"""
    loads: Table
    """``rank step start end``"""
    kernels: Table
    """``rank step spec thread op call called closed start end held``: operator's start, launch
    call's start and end, operator's end; kernel. ``held``: its stream had to wait before."""
    talks: Table
    """Likewise, ``spec`` a row of ``calls``, with ``row`` (of the groups), ``sequence``,
    ``stream``, ``peer`` (-1: none), ``given``, ``out``."""
    reads: Table
    """The host reads the loss: ``rank step op call called wait closed start end``: the copy's call
    begins and ends, the wait ends with the operator; start and end of the copy."""


@dataclass
class _Log:
    """Pieces of one table, a column each."""

    columns: tuple[str, ...]
    pieces: list[tuple[NDArray[Any], ...]] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        self.pieces.append(np.broadcast_arrays(*values))

    def table(self) -> Table:
        count = len(self.columns)
        joined = [
            np.concatenate([np.ravel(piece[c]) for piece in self.pieces])
            if self.pieces
            else np.zeros(0)
            for c in range(count)
        ]
        return dict(zip(self.columns, joined, strict=True))


_TIMES = ("op", "call", "called", "closed", "start", "end", "wait")


class Engine:
    """A run of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        fault = job.fault or Fault("healthy")
        self.fault = fault
        self.rng = np.random.default_rng([job.seed, 2])
        """Noise: drawn in the same order with and without the fault."""
        self.moves = np.random.default_rng([job.seed, 3])
        count = job.ranks
        self.host = np.zeros(count)
        self.free = {COMPUTE_STREAM: np.zeros(count)}
        self.done: dict[str, Times] = {}
        """End of the last collective of each rank, by what ``talk`` called it."""
        self.held = np.zeros(count, dtype=bool)
        """Whether the compute stream had to wait since its last work."""
        self.catalogue: list[Kernel] = []
        self._spec: dict[Kernel, int] = {}
        self.calls: list[Call] = []
        self._call: dict[Call, int] = {}
        self.sequence: dict[str, NDArray[np.int64]] = {}
        self.step = -1
        self.thread = MAIN
        spread = self.rng.normal(0.0, job.chip, count)
        self.device = np.exp(spread) * _factor(fault, "slow_device", count)
        self.cpu = np.exp(self.rng.normal(0.0, 0.02, count)) * _factor(fault, "slow_host", count)
        self.extra_wait = np.zeros(count)
        if fault.kind == "slow_input":
            self.extra_wait[list(fault.ranks)] = fault.wait_ns
        self.load = np.ones(count)
        """Load of the experts of each rank."""
        self.data = np.ones(count)
        """Amount of data of each rank in this step."""
        self._at = {name: groups.of(np.arange(count)) for name, groups in job.groups.items()}
        host = ("rank", "step", "spec", "thread", "op", "call", "called", "closed")
        common = (*host, "start", "end", "held")
        self.kernels = _Log(common)
        extra = ("row", "sequence", "stream", "peer", "given", "out")
        self.talks = _Log((*common, *extra))
        self.steps = _Log(("rank", "step", "start", "end"))
        self.loads = _Log(("rank", "step", "start", "end"))
        self.reads = _Log(
            ("rank", "step", "op", "call", "called", "wait", "closed", "start", "end")
        )

    # -- a step -----------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The next step's data."""
        job, fault, count = self.job, self.fault, self.job.ranks
        self.step, self.started = step, self.host.copy()
        chosen = int(self.moves.integers(count))
        uneven = np.exp(self.moves.normal(0.0, 0.1, count))
        self.data = np.ones(count)
        if fault.kind == "moving":
            if fault.index:
                self.data = uneven ** (fault.factor - 0.3)
            else:
                self.data[chosen] = fault.factor
        if job.ep > 1:
            of = np.exp(self.rng.normal(0.0, 0.02, job.ep))
            if fault.kind == "expert_imbalance":
                hot = of * (job.ep - fault.factor) / (job.ep - 1)
                hot[fault.index] = of[fault.index] * fault.factor
                of = hot
            place = np.zeros(count, dtype=np.int64)
            place[job.groups["ep"].members] = np.arange(job.ep)
            self.load = of[place]
        wait = job.load_ns * np.exp(self.rng.normal(0.0, 0.2, count))
        wait += self.extra_wait * np.exp(self.rng.normal(0.0, 0.1, count))
        self.host = self.host + 5_000.0
        self.loads.add(np.arange(count), step, self.host, self.host + wait)
        self.host = self.host + wait + 5_000.0

    def finish(self) -> None:
        """``loss.item()``: the host waits for the device, and the step ends."""
        count = self.job.ranks
        every = np.arange(count)
        op = self.host + 4_000.0
        call = op + 6_000.0
        called = call + self.job.call_ns
        stream = self.free[COMPUTE_STREAM]
        start = np.maximum(called + self.job.latency_ns, stream + BETWEEN_NS)
        end = start + 1_500.0
        closed = np.maximum(called + 2_000.0, end + 4_000.0) + 1_000.0
        self.reads.add(every, self.step, op, call, called, called + 1_000.0, closed, start, end)
        self.free[COMPUTE_STREAM] = end.copy()
        self.held[:] = False
        self.host = closed + 10_000.0
        self.steps.add(every, self.step, self.started, self.host - 1_000.0)

    def work(self, ranks: Ranks, kernels: tuple[Kernel, ...], *, expert: bool = False) -> None:
        """Kernels one after the other on the compute stream, an operator each."""
        if not kernels:
            return
        job, shape = self.job, (len(ranks), len(kernels))
        size = self.data[ranks] * (self.load[ranks] if expert else 1.0)
        spec = self._specs_of(kernels, size)
        base = np.array([kernel.ns for kernel in kernels])
        noise = np.exp(self.rng.normal(0.0, job.noise, shape))
        ns = base * noise * (self.device[ranks] * size)[:, None]
        op, call, called, closed = self._launches(ranks, shape)
        ready = called + job.latency_ns
        busy = np.cumsum(ns + BETWEEN_NS, axis=1)
        before = busy - ns - BETWEEN_NS
        # start_k = max(ready_k, end_(k-1) + BETWEEN): as a running maximum, all at once
        free = self.free[COMPUTE_STREAM][ranks] + BETWEEN_NS
        lead = np.maximum(ready - before, free[:, None])
        start = np.maximum.accumulate(lead, axis=1) + before
        held = np.zeros(shape, dtype=bool)
        held[:, 0] = self.held[ranks]
        self.held[ranks] = False
        end = start + ns
        self.free[COMPUTE_STREAM][ranks] = end[:, -1]
        self.kernels.add(
            ranks[:, None], self.step, spec, self.thread, op, call, called, closed, start, end, held
        )

    def talk(
        self,
        ranks: Ranks,
        name: str,
        kind: str,
        share: float = 1.0,
        *,
        back: bool = False,
        wait: bool = False,
        key: str = "",
        after: str = "",
    ) -> None:
        """A collective of groups ``name``, behind all compute so far.

        ``share``: of the groups' message; ``back``: an all-to-all that brings tokens back;
        ``wait``: the compute stream waits for it at once; ``key``: what ``wait`` and ``after`` call
        it, the groups' name otherwise; ``after``: it begins behind that one.
        """
        groups = self.job.groups[name]
        rows = np.unique(self._at[name][ranks])
        members = groups.members[rows]
        size = members.shape[1]
        elements = int(self.job.message[name] * share) // (DTYPE_BYTES * size) * size
        sent_elements = out = elements
        if kind == "_allgather_base":
            sent_elements = elements // size
        elif kind == "_reduce_scatter_base":
            out = elements // size
        given_all: NDArray[Any] = np.full(members.shape, sent_elements)
        out_all: NDArray[Any] = np.full(members.shape, out)
        heavy = 1.0
        if kind == "all_to_all":
            got = np.round(out * self.load[members]).astype(np.int64)
            given_all, out_all = (got, out_all) if back else (given_all, got)
            heavy = np.maximum(1.0, self.load[members].max(axis=1))
        ns = ALPHA_NS + elements * DTYPE_BYTES / self.job.rate[name] * self._link(members) * heavy
        ns = ns * np.exp(self.rng.normal(0.0, 0.05 if groups.crosses else 0.02, len(rows)))
        spec = self._call_of(Call(name, kind, sent_elements, out))
        key = key or name
        row = rows + groups.first
        self._meet(
            members, ns, groups.stream, spec, key, row, given_all, out_all, wait, after=after
        )

    def send(self, senders: Ranks, takers: Ranks) -> None:
        """Activations or gradients to the neighbouring stage; the taker waits for them."""
        members = np.stack([senders, takers], axis=1)
        elements = int(self.job.message["pp"]) // DTYPE_BYTES
        ns = ALPHA_NS + elements * DTYPE_BYTES / self.job.rate["pp"] * self._link(members)
        ns = ns * np.exp(self.rng.normal(0.0, 0.05, len(members)))
        stage = int(min(senders[0], takers[0])) // (self.job.ranks // self.job.pp)
        name = f"pp{stage}"
        groups = self.job.groups["pp"]
        # a pair of ranks has a communicator, and so a stream, of its own
        stream = groups.stream + 4 * stage
        specs = [self._call_of(Call("pp", kind, elements, elements)) for kind in ("send", "recv")]
        sent_elements = np.full(members.shape, elements)
        row = self._at["pp"][senders] + groups.first
        self._meet(
            members,
            ns,
            stream,
            np.array([specs]),
            name,
            row,
            sent_elements,
            sent_elements,
            False,
            pairs=True,
        )
        self.wait(takers, name)

    def wait(self, ranks: Ranks, *names: str) -> None:
        """The compute stream waits for the last collectives of these groups."""
        for name in names:
            done = self.done.get(name)
            if done is None:
                continue
            stream = self.free[COMPUTE_STREAM]
            stream[ranks] = np.maximum(stream[ranks], done[ranks])
            self.held[ranks] = True

    # -- parts ------------------------------------------------------------------------------

    def _meet(
        self,
        members: Ranks,
        ns: Times,
        stream: int,
        spec: Any,
        name: str,
        row: Ranks,
        sent_elements: NDArray[Any],
        out: NDArray[Any],
        wait: bool,
        *,
        pairs: bool = False,
        after: str = "",
    ) -> None:
        """A kernel on each member, which ends when all are there and the bytes are over."""
        ranks = members.ravel()
        op, call, called, closed = (
            part[:, 0].reshape(members.shape) for part in self._launches(ranks, (len(ranks), 1))
        )
        free = self.free.setdefault(stream, np.zeros(self.job.ranks))
        ready = np.maximum(called + self.job.latency_ns, free[members] + BETWEEN_NS)
        start = np.maximum(ready, self.free[COMPUTE_STREAM][members] + BETWEEN_NS)
        if after:
            start = np.maximum(start, self.done[after][members] + BETWEEN_NS)
        late = self.rng.exponential(2_000.0, members.shape)
        end = start.max(axis=1, keepdims=True) + ns[:, None] + late
        free[members] = end
        self.done.setdefault(name, np.zeros(self.job.ranks))[members] = end
        which = "pp" if pairs else f"{stream}"
        counts = self.sequence.setdefault(which, np.zeros(self.job.ranks, dtype=np.int64))
        counts[members] += 1
        peer = members[:, ::-1] if pairs else np.full(members.shape, -1)
        self.talks.add(
            members, self.step, spec, self.thread, op, call, called, closed, start, end, True,
            row[:, None], counts[members], stream, peer, sent_elements, out,
        )  # fmt: skip
        if wait:
            self.wait(ranks, name)

    def _launches(self, ranks: Ranks, shape: tuple[int, int]) -> tuple[Times, Times, Times, Times]:
        """Begin of each operator, begin and end of its launch call, end of the operator."""
        job = self.job
        slow = self.cpu[ranks][:, None]
        mean_gap_ns = max(job.launch_ns - job.call_ns, 4_000.0)
        between = mean_gap_ns * np.exp(self.rng.normal(-0.02, 0.2, shape)) * slow
        call_ns = job.call_ns * np.exp(self.rng.normal(0.0, 0.1, shape)) * slow
        each = between + call_ns
        begin = self.host[ranks][:, None] + np.cumsum(each, axis=1) - each
        op = begin + 0.3 * between
        call = begin + 0.85 * between
        called = call + call_ns
        closed = begin + each - 0.02 * between
        self.host[ranks] = begin[:, -1] + each[:, -1]
        return op, call, called, closed

    def _link(self, members: Ranks) -> Times:
        slow = np.ones(len(members))
        if self.fault.kind == "slow_link":
            slow[np.isin(members, self.fault.ranks).any(axis=1)] = self.fault.factor
        return slow

    def _specs_of(self, kernels: tuple[Kernel, ...], size: Times) -> NDArray[np.int64]:
        """Specs by rank and kernel. More data is more blocks: on other ranks it is another
        launch."""
        sizes, which = np.unique(size, return_inverse=True)
        rows = [
            [self._spec_of(k._replace(blocks=max(1, round(k.blocks * each)))) for k in kernels]
            for each in sizes.tolist()
        ]
        return np.array(rows)[which]

    def _spec_of(self, kernel: Kernel) -> int:
        if kernel not in self._spec:
            self._spec[kernel] = len(self.catalogue)
            self.catalogue.append(kernel)
        return self._spec[kernel]

    def _call_of(self, call: Call) -> int:
        if call not in self._call:
            self._call[call] = len(self.calls)
            self.calls.append(call)
        return self._call[call]

    # -- the end ----------------------------------------------------------------------------

    def played(self) -> SimulatedRun:
        """Everything on the hosts' own clocks."""
        job = self.job
        rng = np.random.default_rng([job.seed, 4])
        offset = rng.uniform(-job.offset_ns, job.offset_ns, job.hosts)
        drift = rng.uniform(-job.drift, job.drift, job.hosts)
        host = np.arange(job.ranks) // RANKS_PER_HOST
        steps = self.steps.table()
        mean = float((steps["end"] - steps["start"]).mean())
        logs = (self.loads, self.kernels, self.talks, self.reads)
        tables = [steps, *(log.table() for log in logs)]
        for table in tables:
            rank = table["rank"].astype(np.int64)
            for column, values in table.items():
                if column in _TIMES:
                    local = values * (1.0 + drift[host[rank]]) + offset[host[rank]]
                    table[column] = np.rint(local).astype(np.int64) + BEGIN_NS
                elif column == "held":
                    table[column] = values.astype(bool)
                else:
                    table[column] = values.astype(np.int64)
            first = table["call"] if "call" in table else table["start"]
            order = np.lexsort((first, rank))
            for column in table:
                table[column] = table[column][order]
        return SimulatedRun(job, mean, self.catalogue, self.calls, *tables)


def _factor(fault: Fault, kind: str, count: int) -> Times:
    factor = np.ones(count)
    if fault.kind == kind:
        factor[list(fault.ranks)] = fault.factor
    return factor
