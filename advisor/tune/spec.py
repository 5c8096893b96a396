"""What a trial's process gets, and what it answers: two small JSON files. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

SPEC: Final = "ADVISOR_TRIAL"
"""Names the file with the :class:`Spec` to the processes of a trial."""
MODULE: Final = "advisor.tune.child_process"
"""What begins in them once torch is imported, in the recorder's place."""
MAX_RESULT_BYTES = 64 << 20
SO_FAR = ".so_far"
"""After the name of the result's file: what is known while the program waits for its turn."""
GROUP, TURN = "group", "turn"
"""Files beside the result's, of programs that take turns: the process group that is stopped and
let go; and which turn it has, the first is 1, with the number of steps (0: as it was)."""

Value = int | str | None
"""The setting of a knob: ``None`` where it is on or off."""


class KnobSetting(Struct, frozen=True):
    """A knob and its setting."""

    knob: str
    value: Value = None

    def __str__(self) -> str:
        return self.knob if self.value is None else f"{self.knob}={self.value}"


class Spec(Struct, frozen=True, kw_only=True):
    """One process: what is changed in it, and when it ends."""

    out: str
    """File for the :class:`Result`."""
    root: str
    """Folder in which the program may write: ours, for all trials …"""
    scratch: str
    """… and in it, where everything goes that this one writes."""
    allowed: tuple[str, ...] = ()
    """Other folders in which the user lets it write."""
    knob_settings: tuple[KnobSetting, ...] = ()
    warmup: int = 10
    """Steps that are not timed."""
    steps: int = 60
    """Steps that are, at most …"""
    seconds: float = 30.0
    """… for so long, once there are some (``least``)."""
    least: int = 12
    seed: int = 0
    samples: bool = False
    """Count the samples of each batch."""
    turns: int = 0
    """Blocks in which the steps are timed, with a stop (SIGSTOP) before each, until somebody lets
    the program go; 0: in one go."""
    record: bool = False
    """Record the run (``ADVISOR_RUN_DIR``), instead of timing it."""


class Result(Struct, kw_only=True):
    """What one process measured. Times are wall time of the training thread."""

    steps_ns: list[int] = field(default_factory=list)
    """Step times after the warm-up."""
    blocks: list[int] = field(default_factory=list)
    """Steps of each block, where the program took turns with others."""
    warm_ns: int | None = None
    """A step of the second half of the warm-up."""
    losses: list[float | None] = field(default_factory=list)
    """What was given to backward, of every step from the first on; ``null``: no number."""
    norms: list[float | None] = field(default_factory=list)
    """Norm of all gradients, of the first steps (``warmup``)."""
    loss_dtype: str = ""
    samples: float | None = None
    """Of a batch that was trained on, mean; ``null``: not counted, or no DataLoader was seen."""
    batch: int | None = None
    """The same, median."""
    device_bytes: int | None = None
    """Peak of allocated device memory; ``null``: no device."""
    host_bytes: int | None = None
    """Peak of resident memory, the largest of the process and its children."""
    device_free: int | None = None
    """Of the device's memory, when the program last waited for its turn; ``null``: no device."""
    device: str = ""
    """Name of the device."""
    torch: str = ""
    problem: str = ""
    """Why the run ended before its steps; empty: it did not."""
    kind: Literal["", "memory", "error", "knob", "late"] = ""
    """Of the problem: out of memory, an error of the program, a knob that did not apply, too
    little time."""
    moved: int = 0
    """Files that the program wrote, elsewhere than it meant to."""
    refused: list[str] = field(default_factory=list)
    """What it was not allowed to do."""
    output: str = ""
    """The last lines that a program printed which did not come to its end."""
    idle: list[str] = field(default_factory=list)
    """Knobs that met nothing to change."""
    ended: bool = False
    """The limit was reached, or the program ended."""


def read_spec() -> Spec | None:
    """Of this process; ``None``: it is none of a trial."""
    path = os.environ.get(SPEC)
    if not path:
        return None
    return msgspec.json.decode(Path(path).read_bytes(), type=Spec)


def read_result(data: bytes) -> Result:
    """Raises msgspec.DecodeError for what is none."""
    return msgspec.json.decode(data[:MAX_RESULT_BYTES], type=Result)


def encode(what: Any) -> bytes:
    """As JSON."""
    return msgspec.json.encode(what)
