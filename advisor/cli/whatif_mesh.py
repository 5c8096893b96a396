"""What ``advisor whatif --mesh`` prints."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from advisor.replay.project.mesh import MeshResult

NAMES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
GIB = 1 << 30


def show_mesh(result: MeshResult, file: TextIO, *, plain: bool) -> None:
    """The step on another mesh; ``plain``: as JSON."""
    if plain:
        print(json.dumps(_plain(result), indent=2, allow_nan=False), file=file)
        return
    old, new = result.measured, result.mesh
    print(f"{'':22} {'recorded':>16} {'there':>16}   range", file=file)
    print(f"{'mesh':22} {old!s:>16} {new!s:>16}   (ms per step)", file=file)
    print(f"{'GPUs':22} {old.world:>16,} {new.world:>16,}", file=file)
    print(f"{'batch of the job':22} {'1':>16} {f'{result.batch:.3g}':>16}   times", file=file)
    band = f"{_ms(result.low_ns)} - {_ms(result.high_ns)}"
    _line("step", result.measured_step_ns, result.step_ns, file, band)
    if (median := result.median) is not None:
        other = f"{_ms(median.low_ns)} - {_ms(median.high_ns)}"
        name = f"  of rank {median.rank}"
        _line(name, median.measured_step_ns, median.step_ns, file, other)
    print(
        f"{'samples a s and GPU':22} {'1':>16} {f'{result.throughput:.3g}':>16}   times", file=file
    )
    _line("compute", result.compute_ns, result.then_compute_ns, file)
    for axis in result.axes:
        _line(f"{NAMES[axis.axis]}, transfers", axis.ns, axis.then_ns, file)
        _line("  exposed", axis.exposed_ns, axis.then_exposed_ns, file)
    if old.pp > 1 or new.pp > 1:
        _line("pipeline's bubble", result.bubble_ns, result.then_bubble_ns, file)
    if result.memory is None:
        print("memory of a GPU: not recorded (profile_memory=True)", file=file)
    else:
        low, high = (size / GIB for size in result.memory)
        print(f"memory of a GPU: {low:.1f} to {high:.1f} GiB allocated", file=file)
    print(file=file)
    for note in result.notes:
        print(textwrap.fill(f"{note}.", 80, initial_indent="- ", subsequent_indent="  "), file=file)


def _plain(result: MeshResult) -> dict[str, Any]:
    return {
        "schema": 1,
        **result._asdict(),
        "measured": result.measured._asdict(),
        "mesh": result.mesh._asdict(),
        "axes": [axis._asdict() for axis in result.axes],
        "median": None if result.median is None else result.median._asdict(),
    }


def _line(name: str, here: float, there: float, file: TextIO, band: str = "") -> None:
    print(f"{name:22} {_ms(here):>16} {_ms(there):>16}   {band}".rstrip(), file=file)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f}" if abs(ns) < 1e7 else f"{ns / 1e6:,.1f}"
