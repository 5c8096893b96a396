"""Code in a trial's process: it applies the knobs, times the steps, records the losses, and ends.

Named to the start-up file by ``ADVISOR_BEGIN``. ``before_program`` runs ahead of the program's
first line, ``begin`` when torch has been imported. What is measured goes to a file of its own; the
program ends by SystemExit after its last step."""

import atexit
import ctypes
import functools
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from advisor.tune.knob import GROUP, SO_FAR, TURN, TrialResult, TrialSpec, read_spec
from advisor.tune.overlay import Overlay

Note = Callable[[str], None]
MAX_BLOCK_OVERRUN = 4.0
"""Multiple of its share of the seconds after which a block ends, however many steps it has."""
MIN_RECORDED_STEPS = 5
"""Minimum number of steps of a recording, however long they take."""
MAX_LOSSES = 20_000
NORM_STEPS = 6
"""Number of first steps whose gradients are measured; none of them is timed."""

_trial: list[tuple[TrialSpec, Overlay]] = []
"""Trial of this process: one entry, from ``before_program`` on."""


def before_program() -> None:
    """Redirect what the program writes. Raises what is wrong with the trial's own files: a program
    that could write anywhere must not begin."""
    spec = read_spec()
    if spec is None:
        return
    overlay = Overlay(spec.scratch, (spec.root, *spec.allowed))
    overlay.install()
    overlay.redirect_native()
    overlay.watch()
    _trial.append((spec, overlay))
    # a program that never imports torch, or ends before
    atexit.register(_refusals, spec, overlay, os.getpid())


def _refusals(spec: TrialSpec, overlay: Overlay, process: int) -> None:
    if os.getpid() == process and overlay.refused and not _exists(spec.out):
        _write(spec.out, TrialResult(refused=overlay.refused, problem=_last()[0], kind="error"))


def begin(note: Note) -> None:
    """Begin the trial once torch is imported. Never raises: the user's import of torch calls it."""
    if not _trial:
        return
    spec, overlay = _trial[0]
    try:
        _begin(spec, overlay, note)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        note(f"problem {problem}")
        _write(spec.out, TrialResult(problem=problem, kind="knob"))


def _begin(spec: TrialSpec, overlay: Overlay, note: Note) -> None:
    import torch

    from advisor.tune.knob import find_knob

    overlay.redirect_torch_save()
    random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(spec.seed)
    if spec.record:
        _record(spec, note)
        return
    applied = [(find_knob(item.knob), item) for item in spec.knob_settings]
    for item, knob_setting in applied:
        item.apply(knob_setting.value)
    timer = TrialRecorder(spec, overlay, [item for item, _ in applied], note)
    timer.start()


def _record(spec: TrialSpec, note: Note) -> None:
    """Run the recorder until there are enough steps."""
    from torch.optim import optimizer as optim

    from advisor.recorder import injection

    injection.begin(note)
    count, begun = 0, time.monotonic()

    def after(*_: Any) -> None:
        nonlocal count
        count += 1
        shares = (time.monotonic() - begun) / spec.seconds
        late = (
            shares > (1 if count >= spec.warmup else MAX_BLOCK_OVERRUN / 2)
            and count >= MIN_RECORDED_STEPS
        )
        if count >= spec.steps or late:
            raise SystemExit(0)

    optim.register_optimizer_step_post_hook(after)


class TrialRecorder:
    """Timer of steps; it also keeps the losses and the first gradients' norms, as tensors."""

    def __init__(self, spec: TrialSpec, overlay: Overlay, applied: list[Any], note: Note) -> None:
        from advisor.recorder.tape_reader import CallCounter

        self.spec, self.overlay, self.applied, self.note = spec, overlay, applied, note
        self.process = os.getpid()
        self.steps_ns: list[int] = []
        self.blocks: list[int] = []
        self.warm: list[int] = []
        self.turns = PauseControl(spec) if spec.turns else None
        self.last = self.begun = 0
        self.losses: list[Any] = []
        self.norms: list[Any] = []
        self.batches: list[int] = []
        self.step = 0
        self.written = False
        self.counter = CallCounter(self._ended)

    def start(self) -> None:
        """Install the hooks that time steps and keep losses and norms."""
        import torch
        from torch.optim import optimizer as optim

        autograd = torch.autograd
        name = "_engine_run_backward" if hasattr(autograd, "_engine_run_backward") else "backward"
        original = getattr(autograd, name)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self.losses) < MAX_LOSSES:
                first = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
                if isinstance(first, torch.Tensor) and first.numel() == 1:
                    self.losses.append(first.detach().clone())
            return original(tensors, *args, **kwargs)

        setattr(autograd, name, backward)
        if self.spec.samples:
            self._count_samples()
        optim.register_optimizer_step_pre_hook(self._norm)
        self.counter.start()
        atexit.register(self._leave)
        if multiprocessing.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self._leave, exitpriority=0)

    def _count_samples(self) -> None:
        from torch import is_grad_enabled
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        from advisor.recorder.loaders import samples_of

        original = _BaseDataLoaderIter.__next__

        @functools.wraps(original)
        def __next__(self_: Any) -> Any:
            batch = original(self_)
            # without gradients it is an evaluation
            if is_grad_enabled() and len(self.batches) < MAX_LOSSES:
                count = samples_of(batch)
                if count is not None:
                    self.batches.append(count)
            return batch

        _BaseDataLoaderIter.__next__ = __next__

    def _norm(self, optimizer: Any, *_: Any) -> None:
        if len(self.norms) >= NORM_STEPS:
            return
        import torch

        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        result = [grad.detach().float().norm() for grad in grads if grad is not None]
        if result:
            self.norms.append(torch.stack([item.to(result[0].device) for item in result]).norm())

    def _ended(self, count: int) -> None:
        spec, now = self.spec, time.perf_counter_ns()
        self.step = count
        if count <= spec.warmup // 2:
            self.last = now
            return
        took, self.last = now - self.last, now
        if count < spec.warmup:
            self.warm.append(took)
            return
        if count == spec.warmup:
            self._begin_block()
            self.begun = self.last
            return
        self.steps_ns.append(took)
        ends = self._has_all()
        if not ends and not (self.turns and self.turns.block_complete(self._in_block(), now)):
            return
        _synchronize()
        self.steps_ns[-1] += time.perf_counter_ns() - now
        if self.turns:
            self.blocks.append(self._in_block())
        if ends:
            self.counter.stop()
            self.write("", "")
            raise SystemExit(0)  # no Exception: hooks let it through, and so do most programs
        self._begin_block()

    def _in_block(self) -> int:
        return len(self.steps_ns) - sum(self.blocks)

    def _has_all(self) -> bool:
        """Return whether the step that has just ended is the last one."""
        spec, timed = self.spec, len(self.steps_ns)
        if self.turns:
            return len(self.blocks) + 1 >= spec.turns and self.turns.block_complete(
                self._in_block(), self.last
            )
        return timed >= spec.steps or (
            timed >= spec.least and self.last - self.begun > spec.seconds * 1e9
        )

    def _begin_block(self) -> None:
        """Wait for a turn, where there are any, once the device has nothing left to do."""
        _synchronize()
        if self.turns:
            if self.turns.can_pause():
                _write(self.spec.out + SO_FAR, self.result("", ""))
                self.turns.wait()
            else:
                self.turns, self.blocks = None, []
        self.last = time.perf_counter_ns()

    def _leave(self) -> None:
        """Write the result as the interpreter ends, by itself or by an uncaught exception."""
        if os.getpid() != self.process or self.written:
            return
        if self.step == 0 and _exists(self.spec.out):
            return
        self.write(*_last())

    def write(self, problem: str, kind: Any) -> None:
        """Write the result, in the first rank only."""
        self.written = True
        if os.environ.get("RANK", "0") in ("", "0"):
            _write(self.spec.out, self.result(problem, kind))

    def result(self, problem: str, kind: Any) -> TrialResult:
        """Return what has been measured so far."""
        import torch

        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        dtype = str(self.losses[0].dtype).removeprefix("torch.") if self.losses else ""
        device, free, name = None, None, ""
        try:
            losses, norms = _numbers(self.losses), _numbers(self.norms)
            if cuda:
                device = int(torch.cuda.max_memory_allocated())
                free = int(torch.cuda.mem_get_info()[0])
                name = str(torch.cuda.get_device_name())
        except RuntimeError as error:  # a device that has failed
            losses, norms, problem = [], [], problem or str(error)[:300]
            kind = kind or "error"
        warm = self.warm
        return TrialResult(
            steps_ns=self.steps_ns,
            blocks=self.blocks,
            warm_ns=sum(warm) // len(warm) if warm else None,
            losses=losses,
            norms=norms,
            loss_dtype=dtype,
            samples=sum(self.batches) / len(self.batches) if self.batches else None,
            batch=sorted(self.batches)[len(self.batches) // 2] if self.batches else None,
            device_bytes=device,
            device_free=free,
            host_bytes=_resident(),
            device=name,
            torch=str(torch.__version__),
            problem=problem,
            kind=kind,
            moved=len(self.overlay.moved),
            refused=self.overlay.refused,
            idle=[item.id for item in self.applied if not item.used],
            ended=not problem,
        )


class PauseControl:
    """Stops the trial's process group before each block of steps, all threads and workers with it,
    so that nobody works ahead. Its parent resumes it (``advisor/tune/trial_process.py``)."""

    def __init__(self, spec: TrialSpec) -> None:
        self.spec = spec
        self.home = os.path.dirname(spec.out)  # noqa: PTH120
        self.block = max(1, spec.steps // spec.turns)
        self.count = self.begun = 0
        if sys.platform.startswith("linux"):
            _die_with_parent()
            os.register_at_fork(after_in_child=_die_with_parent)

    def can_pause(self) -> bool:
        """Return whether this process may be stopped: it is alone, and in the process group that is
        resumed."""
        if not hasattr(os, "getpgrp") or os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            return False
        import torch

        spread = torch.distributed
        if spread.is_available() and spread.is_initialized() and spread.get_world_size() > 1:
            return False
        return self._read(GROUP) == [os.getpgrp()]

    def wait(self) -> None:
        """Stop, and wait until the group is resumed."""
        self.count += 1
        os.killpg(os.getpgrp(), signal.SIGSTOP)
        # a thread other than the first may run for a moment before it stops
        while (turn := self._read(TURN))[:1] < [self.count]:
            time.sleep(0.001)
        if turn[1:] > [0]:
            self.block = turn[1]
        self.begun = time.perf_counter_ns()

    def _read(self, name: str) -> list[int]:
        """Return the numbers in a file of ours; empty: it does not exist yet."""
        try:
            with open(os.path.join(self.home, name)) as file:  # noqa: PTH118, PTH123
                return [int(word) for word in file.read(64).split()]
        except (OSError, ValueError):
            return []

    def block_complete(self, steps: int, now: int) -> bool:
        late = now - self.begun > MAX_BLOCK_OVERRUN * self.spec.seconds * 1e9 / self.spec.turns
        return steps >= self.block or late


def _die_with_parent() -> None:
    """Kill this process when its parent ends (Linux), so that none stays stopped for ever. Only in
    the main thread: children of others would end with the thread that forked them."""
    if threading.current_thread() is threading.main_thread():
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _numbers(tensors: list[Any]) -> list[float | None]:
    """Return tensors as numbers; ``None`` for what is not finite, since JSON lacks it."""
    result = [float(tensor) for tensor in tensors]
    return [item if math.isfinite(item) else None for item in result]


def _resident() -> int | None:
    """Return the peak resident memory of this process or its largest ended child, bytes."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(item).ru_maxrss for item in who) * unit


def _last() -> tuple[str, str]:
    """Return the uncaught exception and its kind; empty: there was none."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return "", ""
    name = type(error).__name__
    # one that the allocator of the host raises says so in its text alone
    memory = isinstance(error, MemoryError) or name == "OutOfMemoryError"
    kind = "memory" if memory or "memory" in str(error)[:300] else "error"
    return f"{name}: {error}".replace("\n", " ")[:300], kind


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110


def _write(path: str, result: TrialResult) -> None:
    """Write the result completely or not at all."""
    beside = f"{path}.{os.getpid()}"
    with open(beside, "wb") as file:  # noqa: PTH123
        file.write(msgspec.json.encode(result))
    os.replace(beside, path)  # noqa: PTH105
