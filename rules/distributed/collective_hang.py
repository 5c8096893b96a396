"""A collective hangs: flight-recorder dumps compared across ranks."""

from advisor.core import text as t
from advisor.core.auxiliary_inputs import FLIGHT_RECORDER, FlightCall, FlightDump
from advisor.core.finding import Finding, Location, Outcomes, PassedCheck, impact_without_gain
from advisor.core.rule import Evidence, Rule
from advisor.measure import Analysis
from advisor.measure.comm.flight_recorder import UNENDED, describe_problem, of_ranks
from advisor.testing import Examples, TraceBuilder


class CollectiveHang(Rule):
    """Ranks wait in a collective that others have not called, or have called with another
    operation, size, dtype or in another order. The job hangs until its timeout ends it.

    PyTorch's flight recorder keeps the last calls of each rank and writes them when a collective
    times out. Calls of one process group and number belong together. The first one that differs, or
    that has not ended and is missing on a rank, is the cause. A rank that itself waits in another
    group is a consequence, and listed after it. A rank without a dump has probably died.

    Sizes are compared by the number of elements, and not where they may differ between ranks
    (all-to-all). If all ranks have called it and it has not ended, the network or a GPU is slow
    or stuck. Or the job was still running."""

    id = "collective-hang"
    title = "Ranks wait in a collective that others have not called"
    auxiliary_inputs = (FLIGHT_RECORDER,)
    validation_note = (
        "dumps of gloo with planted faults, against torch's own analyzer (torchfrtrace)"
    )
    references = (
        "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
        "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.monitored_barrier",
    )
    fix = (
        "Make every rank reach this call, without a branch, early exit or exception on some ranks "
        "only. Give each rank the same number of batches (drop_last, or the Join context)."
    )
    code = (
        "from torch.distributed.algorithms.join import Join\n"
        "with Join([model]):             # ranks may have different numbers of batches\n"
        "    for batch in loader:\n"
        "        train_step(batch)"
    )
    verify = "Run again past the step in which it hung: no dump is written."
    falsified_by = "the missing rank's stack (py-spy dump) inside the same call"
    confidence = 0.9
    kinds = {
        "no dump": (
            "Ranks died or never wrote a dump",
            "Look at the log of these ranks first: an exception, out of memory, a node that went "
            "away. The others only wait for them.",
        ),
        "operation": (
            "Ranks call different collectives at the same time",
            "Call the same collectives in the same order on all ranks: no branch on the rank, the "
            "loss or the batch around one.",
        ),
        "order": (
            "Ranks call collectives in a different order",
            "Issue collectives in one order on all ranks: do not iterate over a set or a dict that "
            "was filled in another order, or over hooks that fire in the order of gradients.",
        ),
        "size": (
            "Ranks call a collective with different sizes",
            "Give all ranks the same number of elements: pad the last batch, or gather sizes first "
            "and use all_gather of padded tensors.",
        ),
        "dtype": (
            "Ranks call a collective with different dtypes",
            "Convert to one dtype on all ranks before the call.",
        ),
        "deadlock": (
            "Ranks wait for each other in different process groups",
            "Use process groups in the same order on all ranks; or wait for one group's work "
            "before another group's is issued.",
        ),
        "unknown members": (
            "Ranks wait in a process group whose other members are not recorded",
            "Look at what the other ranks of this group called last: they have not called it, or "
            "wait in another group.",
        ),
        UNENDED: (
            "A collective has not ended, though all ranks called it",
            "Look at the network and the GPUs of these ranks: NCCL_DEBUG=INFO, nvidia-smi, "
            "InfiniBand counters. A kernel before it on the same stream may be stuck.",
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        flight = a.flight
        if flight is None:
            return
        if not flight.problems:
            if flight.dumps > 1 and flight.calls:
                yield PassedCheck(
                    text=f"{t.count_noun(flight.calls, 'call')} of {flight.dumps} ranks match"
                )
            return
        cause = flight.problems[0]
        others = [describe_problem(problem) for problem in flight.problems[1:4]]
        title, fix = self.kinds.get(cause.kind, (self.title, self.fix))
        call = cause.calls[0]
        places = [call.where for call in [*cause.calls, *cause.last] if call.where is not None]
        yield Finding(
            title=title,
            summary=" ".join([describe_problem(cause), *others]),
            fix=fix,
            code=self.code if cause.kind == "not called" else "",
            evidence=[
                Evidence("collective", f"{call.operation} {call.sequence}"),
                Evidence("process group", call.group),
                Evidence("ranks that the others wait for", of_ranks(cause.ranks).lower()),
                Evidence("waiting ranks", len(cause.waiting), "count"),
                Evidence("dumps read", flight.dumps, "count"),
            ],
            where=list(dict.fromkeys(places))[:3],
            confidence=0.5 if cause.kind == UNENDED else self.confidence,
            impact=impact_without_gain("the job does not go on until this is fixed"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a rank never calls": _build_dumps(["all_reduce", "all_reduce"], ["all_reduce"]),
            "another operation": _build_dumps(
                ["all_reduce", "broadcast"], ["all_reduce", "barrier"]
            ),
            "a rank without a dump": _build_dumps(["all_reduce", "all_reduce"], None),
            "all ended": (
                _build_dumps(["all_reduce", "barrier"], ["all_reduce", "barrier"], hangs=False),
                "not flight.problems",
            ),
        }


def _build_dumps(*ranks: list[str] | None, hangs: bool = True) -> TraceBuilder:
    """Build the calls of each rank (``None``: it left no dump). The last call has not ended."""
    b = TraceBuilder()
    for rank, names in enumerate(ranks):
        if names is None:
            continue
        calls = [
            FlightCall(
                group="0", description="default_pg", operation=name, sequence=n + 1, p2p=False,
                inputs=((1024,),), outputs=((1024,),), dtypes=("Float",),
                state="scheduled" if hangs and n == len(names) - 1 > 0 else "completed",
                where=Location(file="train.py", line=10 + n, function="step"),
            )
            for n, name in enumerate(names)
        ]  # fmt: skip
        members = {"0": tuple(range(len(ranks)))}
        b.logs["flight"] = (
            *b.logs.get("flight", ()),
            FlightDump(
                path=f"rank{rank}", rank=rank, calls=tuple(calls), members=members, damaged=0
            ),
        )
    return b
