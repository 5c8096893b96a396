"""How far off projections have been: the same work measured on two GPUs.

``crossings.json`` holds pairs of measurements; their projection is computed by the same arithmetic
as that of a trace, so an error in the one shows in the other. A band is as wide as the worst of
them of its kind: many layers on one pair of GPUs are one pair of GPUs, and so few of these allow
nothing finer. They are of one vendor, which says little of another's kernels: there the spread is
added of the efficiencies that kernels of one family reach on GPUs of both (``efficiencies``, of
public traces; four of five lie within it, as of ``hosts``).
"""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from itertools import combinations

import msgspec

from advisor.core.gpus import GpuSpec, known
from advisor.replay.bands import spread
from advisor.replay.project.moves import SHORTEST_NS
from advisor.replay.project.rates import matmul_rate, memory_rate


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work on two GPUs."""

    kind: str
    """``compute`` or ``memory``: what bounds it on the first."""
    what: str
    dtype: str
    half_sums: bool = False
    flops: float
    moved: float
    """Bytes, each tensor once."""
    source: str
    source_ns: float
    target: str
    target_ns: float
    reference: str

    @property
    def projected_ns(self) -> float:
        """On the second GPU, from the first."""
        return projected(self, _gpu(self.source), _gpu(self.target), self.source_ns)

    @property
    def error(self) -> float:
        """Logarithm of projected over measured, of both ways the one that is farther off."""
        back = projected(self, _gpu(self.target), _gpu(self.source), self.target_ns)
        return max(
            abs(math.log(self.projected_ns / self.target_ns)),
            abs(math.log(back / self.source_ns)),
        )


class Efficiency(msgspec.Struct, frozen=True):
    """What the kernels of one family reach of the attainable rates in a public trace."""

    family: str
    bound: str
    vendor: str
    share: float
    trace: str


class HostTime(msgspec.Struct, frozen=True):
    """What one operator takes a host, in the median of a public trace, ns."""

    op: str
    ns: float
    trace: str


class _File(msgspec.Struct, frozen=True):
    crossings: tuple[Crossing, ...]
    efficiencies: tuple[Efficiency, ...]
    hosts: tuple[HostTime, ...]


def projected(work: Crossing, source: GpuSpec, target: GpuSpec, source_ns: float) -> float:
    """ns on ``target`` of what takes ``source_ns`` on ``source``."""
    ideal = []
    for gpu in (source, target):
        rate = matmul_rate(gpu, work.dtype, half_sums=work.half_sums) or math.inf
        ideal.append(max(work.flops / rate, work.moved / memory_rate(gpu)))
    fixed = min(SHORTEST_NS[source.vendor], source_ns)
    return SHORTEST_NS[target.vendor] + (source_ns - fixed) * ideal[1] / ideal[0]


@cache
def _gpu(name: str) -> GpuSpec:
    return next(gpu for gpu in known() if gpu.name == name)


@cache
def measurements() -> _File:
    """What is known."""
    text = resources.files("advisor.replay.project").joinpath("crossings.json").read_bytes()
    return msgspec.json.decode(text, type=_File)


@cache
def error(kind: str, *, other_vendor: bool) -> float:
    """Logarithm by which the time of device work of this kind may be off: the largest error of the
    kind; of any, for kinds that nobody measured."""
    pairs = measurements().crossings
    own = [c.error for c in pairs if c.kind == kind]
    within = max(own or [c.error for c in pairs])
    return math.hypot(within, _between_vendors()) if other_vendor else within


@cache
def _between_vendors() -> float:
    """Logarithm by which a family's efficiencies differ between the vendors."""
    rows = measurements().efficiencies
    return spread(
        [
            abs(math.log(one.share / other.share))
            for one, other in combinations(rows, 2)
            if (one.family, one.bound) == (other.family, other.bound) and one.vendor != other.vendor
        ]
    )


@cache
def host_error() -> float:
    """Logarithm by which the host time of one program differs between machines."""
    return spread(
        [
            abs(math.log(one.ns / other.ns))
            for one, other in combinations(measurements().hosts, 2)
            if one.op == other.op and one.trace != other.trace
        ]
    )
