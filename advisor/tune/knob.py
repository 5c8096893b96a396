"""Knobs: changes that can be made to a program while it starts, without editing its files. Also
wrappers around a few entry points of torch, and the two small JSON files of a trial's process: its
specification and its result. Imports no torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from advisor.core.discovery import classes_in
from advisor.core.errors import AdvisorError, suggest

Safety = Literal["exact", "reordered", "precision", "learning"]
"""Effect of a knob on the numbers. ``exact``: losses are equal bit for bit. ``reordered``: equal
within the effect of another order of the same sums. ``precision``: the loss curve stays in a range.
``learning``: the training differs, so losses are not compared. Such a knob is tried only on
request, alone, and by the time per sample."""


class Machine(NamedTuple):
    """Properties of the machine that knobs depend on."""

    cores: int
    """Number of cores that the program may use."""
    cuda: bool
    """Whether the recorded program used a GPU."""


class Knob:
    """Change to a program as it starts. Knobs are in ``advisor/tune/knobs/``; rules name them.

    ``apply`` runs in the trial's process right after ``import torch``, before the program goes on.
    It replaces entry points of torch and calls ``self.took_effect()`` when one of them changed
    something: a knob that took no effect is reported as such and dropped."""

    id: ClassVar[str] = ""
    title: ClassVar[str] = ""
    """Effect in a few words."""
    safety: ClassVar[Safety] = "exact"
    changes_random_numbers: ClassVar[bool] = False
    """Whether another generator may draw random numbers (loader workers have their own). Losses
    that differ for this reason must stay in the range of ``precision``."""
    needs_cuda: ClassVar[bool] = False
    group: ClassVar[str] = ""
    """Name of a group of knobs that exclude each other."""
    settings: ClassVar[Sequence[Value]] = (None,)
    """Settings to try, the predicted one first. Settings that depend on the machine are in
    :meth:`values`."""
    keep: ClassVar[str] = ""
    """Text to write into the program to keep it; ``{value}`` is the setting."""

    def __init__(self) -> None:
        self.used = False

    def values(self, predicted: int | None, machine: Machine) -> Sequence[Value]:
        """Return the settings to try, the predicted one first. ``predicted`` is the number that the
        finding names (workers)."""
        return self.settings

    def parse_setting(self, text: str, machine: Machine) -> Value:
        """Return the setting that the user wrote after ``KNOB=``: one of the values, or another
        number where they are numbers. Raises AdvisorError if the knob has no such setting."""
        choices = [item for item in self.values(None, machine) if item is not None]
        for item in choices:
            if str(item) == text:
                return item
        if re.fullmatch(r"\d{1,6}", text) and any(isinstance(item, int) for item in choices):
            return int(text)
        hint = f"there are {', '.join(map(str, choices))}" if choices else "it is on or off"
        raise AdvisorError(f"{self.id}={text}: no setting of this knob; {hint}")

    def environment(self, value: Value) -> dict[str, str | None]:
        """Return environment variables to set for the process. The value ``None`` unsets one."""
        return {}

    def apply(self, value: Value) -> None:
        """Change the running program."""

    def lines(self, value: Value) -> str:
        """Return what to write into the program to keep it."""
        return self.keep.format(value=value)

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """Return the full names of calls, and the keyword arguments that keep the change in one of
        them. Empty if arguments alone do not make the change."""
        return frozenset(), {}

    def schedule(self, before: float, after: float) -> str:
        """Describe the effect on a training schedule, by samples per batch before and after. Empty
        if there is no effect."""
        return ""

    def took_effect(self) -> None:
        """Record that the knob changed something."""
        self.used = True


@cache
def all_knobs() -> dict[str, type[Knob]]:
    """Return all knobs by id, in the order of their files."""
    import advisor.tune.knobs as folder

    result: dict[str, type[Knob]] = {}
    for iter_module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        module = importlib.import_module(iter_module.name)
        result |= {cls.id: cls for cls in classes_in(module, Knob) if cls.id}
    return result


def find_knob(name: str) -> Knob:
    """Return the knob with an id. Raises AdvisorError if there is none."""
    knobs = all_knobs()
    if name not in knobs:
        hint = suggest(name, knobs, f"there are {', '.join(sorted(knobs))}")
        raise AdvisorError(f"no knob {name!r}; {hint}")
    return knobs[name]()


LOADERS = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})


def wrap_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by the result of ``make``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def ignore_assignments(owner: Any, *names: str) -> None:
    """Make ``torch.backends`` ignore assignments to these attributes."""
    owner_type: Any = type(owner)
    original = owner_type.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if self is not owner or name not in names:
            original(self, name, value)

    owner_type.__setattr__ = __setattr__


def loader_arguments(change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the arguments of each DataLoader, by name, as they are given."""
    from torch.utils.data import DataLoader

    names = list(inspect.signature(DataLoader.__init__).parameters)[1:]

    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            change(arguments)
            original(self, **arguments)

        return __init__

    wrap_attribute(DataLoader, "__init__", make)


def optimizer_arguments(option: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the arguments of each of torch's own optimizers that has ``option``."""
    import torch

    for cls in vars(torch.optim).values():
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
            continue
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        if option in names and "__init__" in vars(cls):
            wrap_attribute(cls, "__init__", functools.partial(_wrap_init, names, change))


def _wrap_init(names: list[str], change: Callable[[dict[str, Any]], None], original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self).__init__ is not __init__:  # the user's own derived class decides itself
            original(self, *args, **kwargs)
            return
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        change(arguments)
        original(self, **{name: value for name, value in arguments.items() if value is not None})

    return __init__


def at_first_forward(begin: Callable[[Any], None]) -> None:
    """Call ``begin`` with each outermost module before its first forward, until the first optimizer
    step. No hook remains: global hooks slow down every module."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import optimizer as optim

    seen: set[int] = set()

    def before(module: Any, args: Any) -> None:
        has_parameters = any(True for _ in module.parameters())  # else a loss, an activation
        if id(module) in seen or not has_parameters:
            return
        seen.update(id(item) for item in module.modules())
        begin(module)

    handle = register_module_forward_pre_hook(before)

    def after(*_: Any) -> None:
        handle.remove()  # later steps call it again, without effect

    optim.register_optimizer_step_post_hook(after)


def around_forwards(call: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Let ``call(module, go)`` run each forward of each outermost module. The very first forward is
    omitted: it has begun when its module is found."""

    def begin(module: Any) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(module, lambda: original(*args, **kwargs))

        module.forward = functools.wraps(original)(forward)

    at_first_forward(begin)


SPEC: Final = "ADVISOR_TRIAL"
"""Environment variable with the file of the :class:`TrialSpec`, in the processes of a trial."""
MODULE: Final = "advisor.tune.in_child"
"""Module that runs in these processes once torch is imported, in the recorder's place."""
MAX_RESULT_BYTES = 64 << 20
SO_FAR = ".partial_result"
"""Suffix of the file with the results so far, while the program waits for its turn."""
GROUP, TURN = "group", "turn"
"""Files next to the result, for programs that take turns. The first has the process group that is
stopped and resumed, the second its turn, from 1, and the number of steps (0: as before)."""

Value = int | str | None
"""Setting of a knob, or ``None`` for a knob that is only on or off."""


class KnobSetting(Struct, frozen=True):
    knob: str
    value: Value = None

    def __str__(self) -> str:
        return self.knob if self.value is None else f"{self.knob}={self.value}"


KnobSettings = tuple[KnobSetting, ...]
"""Settings of several knobs in one process. Empty for the unchanged program."""


class TrialSpec(Struct, frozen=True, kw_only=True):
    """Specification of one process: its changes and its limits."""

    out: str
    """File for the :class:`TrialResult`."""
    root: str
    """Folder for all trials, in which the program may write."""
    scratch: str
    """Folder within ``root`` for everything that this process writes."""
    allowed: tuple[str, ...] = ()
    """Other folders in which the user allows the program to write."""
    knob_settings: KnobSettings = ()
    warmup: int = 10
    """Number of steps before timing starts."""
    steps: int = 60
    """Maximum number of timed steps."""
    seconds: float = 30.0
    """Maximum time of the timed steps, s, once there are ``least`` of them."""
    least: int = 12
    seed: int = 0
    samples: bool = False
    """Whether to count the samples of each batch."""
    turns: int = 0
    """Number of timed blocks of steps, each after a stop (SIGSTOP) until the program is resumed. 0
    for no stops."""
    record: bool = False
    """Whether to record the run (``ADVISOR_RUN_DIR``) instead of timing it."""


class TrialResult(Struct, kw_only=True):
    """Measurements of one process. Times are wall time of the training thread."""

    steps_ns: list[int] = field(default_factory=list)
    """Step times after the warm-up."""
    blocks: list[int] = field(default_factory=list)
    """Number of steps of each block, where the program took turns with others."""
    warm_ns: int | None = None
    """Mean step of the second half of the warm-up."""
    losses: list[float | None] = field(default_factory=list)
    """Losses passed to backward, from the first step on, or ``null`` where not finite."""
    norms: list[float | None] = field(default_factory=list)
    """Norm of all gradients, for each of the first ``NORM_STEPS`` steps."""
    loss_dtype: str = ""
    samples: float | None = None
    """Mean samples per training batch, or ``null`` if not counted, or without a DataLoader."""
    batch: int | None = None
    """Median samples per training batch."""
    device_bytes: int | None = None
    """Peak of allocated device memory, or ``null`` without a device."""
    host_bytes: int | None = None
    """Peak of resident memory of the process or its largest child."""
    device_free: int | None = None
    """Free device memory when the program last waited for its turn, or ``null`` without a
    device."""
    device: str = ""
    """Name of the device."""
    torch: str = ""
    problem: str = ""
    """Reason why the run ended before its steps were complete. Empty if it did not."""
    kind: Literal["", "memory", "error", "knob", "late"] = ""
    """Kind of problem: out of memory, an error of the program, a knob that did not apply, too
    little time."""
    moved: int = 0
    """Number of files that were redirected to the scratch folder."""
    refused: list[str] = field(default_factory=list)
    """Operations that were refused."""
    output: str = ""
    """Last lines that the program printed, if it did not reach its end."""
    idle: list[str] = field(default_factory=list)
    """Knobs that found nothing to change."""
    ended: bool = False
    """Whether the limit was reached, or the program ended."""


def read_spec() -> TrialSpec | None:
    """Return this process's specification, or ``None`` if it belongs to no trial."""
    path = os.environ.get(SPEC)
    if not path:
        return None
    return msgspec.json.decode(Path(path).read_bytes(), type=TrialSpec)
