"""Lever: a change that can be made to a program while it starts, without editing its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from advisor.trial.spec import Value

Safety = Literal["exact", "reordered", "precision"]
"""What a lever may do to the numbers. ``exact``: losses equal bit for bit. ``reordered``: equal
within what another order of the same sums makes. ``precision``: the loss curve stays in a band."""


class Machine(NamedTuple):
    """What levers have to know of where they are pulled."""

    cores: int
    """That the program may use."""
    cuda: bool
    """Whether the recorded program used a GPU."""


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Lever:
    """One file a lever, in ``advisor/trial/levers/``; found there by itself. A rule names it.

    ``apply`` runs in the trial's process right after ``import torch``, before the program goes on.
    It replaces entry points of torch and calls ``self.met()`` when one of them changed something:
    a lever that met nothing is told as such and not believed.
    """

    id: ClassVar[str] = ""
    title: ClassVar[str] = ""
    """What it does, in a few words."""
    safety: ClassVar[Safety] = "exact"
    redraws: ClassVar[bool] = False
    """Random numbers may be drawn by another generator (loader workers have their own): where
    losses are not equal for that, their curve must stay in the band of ``precision``."""
    needs_cuda: ClassVar[bool] = False
    group: ClassVar[str] = ""
    """Of levers in one group, a program takes one."""

    def __init__(self) -> None:
        self.used = False

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """Settings to try, that of the prediction first. ``wanted``: the number that the finding
        names (workers)."""
        return (None,)

    def environment(self, value: Value) -> dict[str, str | None]:
        """Variables of the process; ``None``: without it."""
        return {}

    def apply(self, value: Value) -> None:
        """Change the running program."""

    def lines(self, value: Value) -> str:
        """What to write into the program to keep it."""
        raise NotImplementedError

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """Calls, by their full names, and the keyword arguments that keep the change in one of
        them; empty: it is more than that."""
        return frozenset(), {}

    def met(self) -> None:
        """Something was changed."""
        self.used = True
