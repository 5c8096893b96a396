"""What the step takes besides time: energy, and money."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field


class RankEnergy(Struct, frozen=True, kw_only=True):
    """Energy of the GPU of one rank."""

    rank: int
    """Its number."""
    joules: float
    """Mean per step, J."""
    watts: float
    """Mean over the steps, W."""
    method: Literal["counter", "power"]
    """The driver's energy counter, or its power integrated over time."""
    steps: int
    """Steps that it is of."""


class EnergyUse(Struct, frozen=True, kw_only=True):
    """Energy of the GPUs while steps ran that no profiler slowed; of whole boards, whoever else
    used them included. Hosts are not in it."""

    joules: float | None
    """Per step, all ranks together, each GPU once, J; ``null``: not measured on all of them."""
    watts: float | None
    """The same, W."""
    ranks: list[RankEnergy]
    """Those that were measured."""


class FixCost(Struct, frozen=True, kw_only=True):
    """What a finding's fix saves, after those ranked before it."""

    rule: str
    """Of the finding."""
    priority: int
    """Its priority."""
    step: float
    """Saved per step, in the currency."""


class Cost(Struct, frozen=True, kw_only=True):
    """Money, from the price of an hour. Time of the step times price; nothing else."""

    currency: str
    """Three letters."""
    per_hour: float
    """Of one GPU."""
    gpus: int
    """That are paid for."""
    source: str
    """Where the price comes from."""
    step: float
    """Per step, all GPUs together."""
    run: float | None
    """The recorded run, from its first step to the end of its last; ``null``: a trace alone."""
    step_after: float | None
    """Per step once all ranked findings are fixed; ``null``: none has a gain."""
    bound: bool
    """Gains are upper bounds: ``step_after`` is at least this."""
    fixes: list[FixCost] = field(default_factory=list)
    """By priority."""
