"""Several of the small machines at once: ranks whose collectives wait for the last to come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whatif_machine import Kernel, Machine, Program, Settings, Work
from whatif_programs import apply_change


class Rank(Machine):
    """A machine of a cluster."""

    def __init__(self, cluster: Cluster, number: int, program: Program, settings: Settings) -> None:
        super().__init__(program, settings)
        self.cluster, self.number = cluster, number
        self.turns: dict[str, int] = {}

    def waits_for_ranks(self, work: Work) -> bool:
        """The n-th collective of a name is that of the other ranks."""
        turn = self.turns[work.name] = self.turns.get(work.name, 0) + 1
        return self.cluster.join_collective(self, work, (work.name, turn))

    def trace(self, clock: float) -> bytes:
        """The file of this rank, whose clock shows that much more than the others'."""
        data = json.loads(self.json())
        for row in data["traceEvents"]:
            row["ts"] = round(row["ts"] + clock, 3)
        size = len(self.cluster.ranks)
        data["distributedInfo"] = {"backend": "nccl", "rank": self.number, "world_size": size}
        return json.dumps(data).encode()


class Cluster:
    """Runs a program on each rank; they share nothing but their collectives."""

    def __init__(self, programs: Sequence[Program], **settings: Any) -> None:
        seed = settings.pop("seed", 0)
        self.ranks = [
            Rank(self, number, program, Settings(**settings, seed=seed + 77 * number))
            for number, program in enumerate(programs)
        ]
        self.arrived: dict[tuple[str, int], list[tuple[Rank, Work]]] = {}
        for rank in self.ranks:
            rank.start_threads()
        while True:
            waiting = [(rank.next, rank.number) for rank in self.ranks if rank.next is not None]
            if not waiting:
                break
            self.ranks[min(waiting)[1]].process_next_event()
        for rank in self.ranks:
            rank.compute_completions()

    def join_collective(self, rank: Rank, work: Work, meeting: tuple[str, int]) -> bool:
        """A rank comes to a collective; the last one lets the others go on."""
        arrived = self.arrived.setdefault(meeting, [])
        arrived.append((rank, work))
        if len(arrived) < len(self.ranks):
            return True
        for other, held_work in arrived[:-1]:
            other.start_collective(held_work, work.remaining_us, rank.now)
        return False


def with_collectives(program: Program) -> Program:
    """The program with collectives that wait for the other ranks."""

    def replace_collective(s: Any) -> Sequence[Any]:
        if isinstance(s, Kernel) and s.name.startswith("nccl"):
            return (replace(s, meets=True),)
        return (s,)

    return apply_change(program, replace_collective)
