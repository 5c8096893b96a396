"""Small training programs, each slow on purpose, with its cure and the finding it must produce.

A workload is one file. Its docstring says what is slow and what cures it; ``WORKLOAD`` names the
findings; ``loop(run)`` is the program, a generator that yields after every step what the step
computed. Who drives it decides how many steps there are::

    from advisor.sample_workloads import Setup, load
    steps = load("pageable_copies")(Setup(variant="cured", device="cuda"))
    for _, loss in zip(range(100), steps): ...

Files are found by name: a new one needs no entry anywhere. What is said about them is read from
their source, so that listing them imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from advisor.core.errors import AdvisorError

Variant = Literal["slow", "cured"]
ShownOn = Literal["cpu", "cuda"]
Loop = Callable[["Setup"], Iterator[Any]]
"""A workload's program: yields after every step its loss or result, a tensor or a number."""

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a workload is run."""

    variant: Variant = "slow"
    """With the bottleneck, or with its cure."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:1``."""
    scale: float = 1.0
    """1 is for a large GPU; sizes shrink and grow with it."""
    seed: int = 0
    """Of weights and data."""
    rank: int = 0
    """Number of this process among those of the workload."""
    folder: str = ""
    """Where the program may write files (checkpoints); empty: nowhere."""

    def __post_init__(self) -> None:
        if self.variant not in get_args(Variant):
            raise ValueError(f"unknown variant {self.variant!r}: choose 'slow' or 'cured'")
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"nothing to run at scale {self.scale}")

    @property
    def cured(self) -> bool:
        """Whether the cure is applied."""
        return self.variant == "cured"

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA GPU."""
        return self.device.startswith("cuda")

    def size(self, full: int, least: int = 1) -> int:
        """``full`` at scale 1, less or more at others, never below ``least``."""
        return max(least, round(full * self.scale))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is known of a workload before it is run."""

    finds: tuple[str, ...]
    """Rules of which at least one must name the bottleneck of the slow variant, at first or second
    place, and none that of the cured one. Empty: a healthy control."""
    also: tuple[str, ...] = ()
    """Rules whose fixes are part of the cure besides, for the gain that is predicted of it."""
    shown_on: ShownOn = "cuda"
    """Where the bottleneck can be seen: ``cpu`` means everywhere."""
    processes: int = 1
    """Processes that it takes; on CUDA each has a GPU of its own."""
    cpu_scale: float = 1 / 16
    """Scale at which a CPU takes some ten milliseconds a step."""
    steps: int = 6
    """Steps to trace so that the finding can be seen."""
    around: int = 30
    """Steps to run besides when a whole run is recorded, without the profiler."""
    stacks: bool = True
    """Whether to record Python stacks: not where thousands of frames would hide the rest."""
    samples: tuple[int, int] = (1, 1)
    """What a step of the slow and one of the cured variant get done, in the same unit: gains are
    measured for the same work."""
    differs: str = ""
    """Why the cured variant does not compute the same numbers; empty: it does, up to rounding."""
    name: str = ""
    """Of the file."""
    doc: str = ""
    """Of the file."""

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return self.doc.partition("\n")[0]

    def default_scale(self, device: str) -> float:
        """Scale that suits the device."""
        return 1.0 if device.startswith("cuda") else self.cpu_scale


@cache
def catalogue() -> dict[str, Workload]:
    """All workloads by name, without importing them."""
    found = {}
    for file in sorted(HERE.glob("*.py")):
        workload = _describe(file)
        if workload is not None:
            found[file.stem] = workload
    return found


def find(name: str) -> Workload:
    """The workload of a name. Raises AdvisorError: there is none."""
    known = catalogue()
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]}?" if near else "; see 'advisor workloads list'"
        raise AdvisorError(f"no workload {name!r}{hint}")
    return known[name]


def load(name: str) -> Loop:
    """The program of a workload; this imports torch."""
    find(name)
    loop: Loop = import_module(f"advisor.sample_workloads.{name}").loop
    return loop


def _describe(file: Path) -> Workload | None:
    """What the source says after ``WORKLOAD =``; ``None``: the file is no workload."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "WORKLOAD"
            and isinstance(node.value, ast.Call)
        ):
            said = {item.arg: _literal(item.value) for item in node.value.keywords if item.arg}
            return replace(
                Workload(finds=()), **said, name=file.stem, doc=ast.get_docstring(tree) or ""
            )
    return None


def _literal(node: ast.expr) -> Any:
    """A literal, or a fraction of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _literal(node.left) / _literal(node.right)
    return ast.literal_eval(node)
