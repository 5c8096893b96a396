"""Small training programs, each slow on purpose, with its cure and the finding it must produce.

A workload is one function, in the file of its kind. Its docstring says what is slow and what cures
it, ``@workload`` names the findings; it is a generator that yields the result of every step. The
caller decides how many steps it runs::

    from advisor.sample_workloads import Setup, load
    steps = load("pageable_copies")(Setup(variant="cured", device="cuda"))
    for _, loss in zip(range(100), steps): ...

A new one needs no entry anywhere. Lists of workloads are read from the source, so that they import
no torch."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from advisor.core.errors import AdvisorError, suggest

Variant = Literal["slow", "cured"]
ShownOn = Literal["cpu", "cuda"]
Loop = Callable[["Setup"], Iterator[Any]]
"""Program of a workload: yields after every step its loss or result, a tensor or a number."""

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings with which a workload is run."""

    variant: Variant = "slow"
    """Variant with the bottleneck, or with its cure."""
    device: str = "cpu"
    """Device: ``cpu``, ``cuda`` or ``cuda:1``."""
    scale: float = 1.0
    """Scale of the sizes; 1 is for a large GPU."""
    seed: int = 0
    """Seed of weights and data."""
    rank: int = 0
    """Number of this process among those of the workload."""
    folder: str = ""
    """Folder that the program may write files to (checkpoints); empty: none."""

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

    @property
    def dtype(self) -> Any:
        """Number type of the model: 16 bits on a GPU, for its tensor cores; 32 on a CPU."""
        import torch

        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def backend(self) -> str:
        """Backend of torch.compile: on a CPU a program is traced but not compiled, so that no C++
        compiler is needed."""
        return "inductor" if self.on_gpu else "aot_eager"

    def size(self, full: int, least: int = 1) -> int:
        """Scale a size: ``full`` at scale 1, less or more at others, never below ``least``."""
        return max(least, round(full * self.scale))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Facts of a workload that are known before it is run."""

    finds: tuple[str, ...]
    """Rules of which at least one must name the bottleneck of the slow variant, at first or second
    place, and none that of the cured one. Empty: a healthy control."""
    also: tuple[str, ...] = ()
    """Rules whose fixes are part of the cure besides, for the gain that is predicted of it."""
    shown_on: ShownOn = "cuda"
    """Device that shows the bottleneck: ``cpu`` means everywhere."""
    processes: int = 1
    """Number of processes; on CUDA each has a GPU of its own."""
    cpu_scale: float = 1 / 16
    """Scale at which a CPU takes some ten milliseconds per step."""
    steps: int = 6
    """Steps to trace so that the finding can be seen."""
    around: int = 30
    """Steps to run besides when a whole run is recorded, without the profiler."""
    stacks: bool = True
    """Whether to record Python stacks: not where thousands of frames would hide the rest."""
    samples: tuple[int, int] = (1, 1)
    """Samples of a step of the slow and of the cured variant, in the same unit: gains are measured
    for the same work."""
    differs: str = ""
    """Reason why the cured variant computes other numbers; empty: the same, up to rounding."""
    name: str = ""
    """Name of the function."""
    file: str = ""
    """Name of the function's file, without its suffix."""
    doc: str = ""
    """Docstring of the function."""

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return self.doc.partition("\n")[0]

    def default_scale(self, device: str) -> float:
        """Scale that suits the device."""
        return 1.0 if device.startswith("cuda") else self.cpu_scale


def workload(**known: Any) -> Callable[[Loop], Loop]:
    """Make a program a workload; ``known``: fields of :class:`Workload`, as literals."""

    def mark(program: Loop) -> Loop:
        program.workload = Workload(**known)  # type: ignore[attr-defined]
        return program

    return mark


@cache
def catalogue() -> dict[str, Workload]:
    """Return all workloads by name, without importing them."""
    found = {w.name: w for file in HERE.glob("*.py") for w in _described(file)}
    return dict(sorted(found.items()))


def find(name: str) -> Workload:
    """Return the workload of a name. Raises AdvisorError: there is none."""
    known = catalogue()
    if name not in known:
        hint = suggest(name, known, "see 'advisor workloads list'")
        raise AdvisorError(f"no workload {name!r}; {hint}")
    return known[name]


def load(name: str) -> Loop:
    """Return the program of a workload; this imports torch."""
    module = import_module(f"advisor.sample_workloads.{find(name).file}")
    program: Loop = getattr(module, name)
    return program


def _described(file: Path) -> Iterator[Workload]:
    """Yield a source file's workloads, as ``@workload(...)`` describes its functions."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in (each for each in body if isinstance(each, ast.FunctionDef)):
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "workload":
                said = {item.arg: _literal(item.value) for item in mark.keywords if item.arg}
                doc = ast.get_docstring(node) or ""
                yield Workload(**said, name=node.name, file=file.stem, doc=doc)


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal, or a fraction of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _literal(node.left) / _literal(node.right)
    return ast.literal_eval(node)
