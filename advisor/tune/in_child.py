"""Code in a trial's process: apply the knobs, time the steps, record the losses, and end.

``ADVISOR_BEGIN`` names this module to the start-up file. ``before_program`` runs before the
program's first line, ``begin`` after the import of torch. The measurements go to a separate file.
The program ends by SystemExit after its last step."""

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
MAX_BLOCK_RATIO = 4.0
"""Multiple of its share of the time limit at which a block ends, regardless of its steps."""
MIN_RECORDED_STEPS = 5
"""Minimum number of steps of a recording, however long they take."""
MAX_LOSSES = 20_000
NORM_STEPS = 6
"""Number of first steps whose gradients are measured. These steps are not timed."""

_trial: list[tuple[TrialSpec, Overlay]] = []
"""Trial of this process: one entry, from ``before_program`` on."""


def before_program() -> None:
    """Redirect the program's writes. Raises any error in the trial's own files: a program that
    could write anywhere must not begin."""
    spec = read_spec()
    if spec is None:
        return
    overlay = Overlay(spec.scratch, (spec.root, *spec.allowed))
    overlay.install()
    overlay.redirect_native()
    overlay.watch()
    _trial.append((spec, overlay))
    # for a program that never imports torch, or ends before it does
    atexit.register(_write_refusals, spec, overlay, os.getpid())


def _write_refusals(spec: TrialSpec, overlay: Overlay, process: int) -> None:
    if os.getpid() == process and overlay.refused and not _exists(spec.out):
        _write(
            spec.out, TrialResult(refused=overlay.refused, problem=_last_error()[0], kind="error")
        )


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
    count, started = 0, time.monotonic()

    def after(*_: Any) -> None:
        nonlocal count
        count += 1
        elapsed = (time.monotonic() - started) / spec.seconds
        is_late = (
            elapsed > (1 if count >= spec.warmup else MAX_BLOCK_RATIO / 2)
            and count >= MIN_RECORDED_STEPS
        )
        if count >= spec.steps or is_late:
            raise SystemExit(0)

    optim.register_optimizer_step_post_hook(after)


class TrialRecorder:
    """Timer of steps that also keeps the losses and the first gradients' norms, as tensors."""

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
        self.counter = CallCounter(self._end_step)

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
                loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
                if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                    self.losses.append(loss.detach().clone())
            return original(tensors, *args, **kwargs)

        setattr(autograd, name, backward)
        if self.spec.samples:
            self._count_samples()
        optim.register_optimizer_step_pre_hook(self._keep_norm)
        self.counter.start()
        atexit.register(self._write_at_exit)
        if multiprocessing.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self._write_at_exit, exitpriority=0)

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

    def _keep_norm(self, optimizer: Any, *_: Any) -> None:
        if len(self.norms) >= NORM_STEPS:
            return
        import torch

        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        result = [grad.detach().float().norm() for grad in grads if grad is not None]
        if result:
            self.norms.append(torch.stack([item.to(result[0].device) for item in result]).norm())

    def _end_step(self, count: int) -> None:
        spec, now = self.spec, time.perf_counter_ns()
        self.step = count
        if count <= spec.warmup // 2:
            self.last = now
            return
        duration_ns, self.last = now - self.last, now
        if count < spec.warmup:
            self.warm.append(duration_ns)
            return
        if count == spec.warmup:
            self._begin_block()
            self.begun = self.last
            return
        self.steps_ns.append(duration_ns)
        is_last = self._is_last_step()
        if not is_last and not (self.turns and self.turns.block_complete(self._block_steps(), now)):
            return
        _synchronize()
        self.steps_ns[-1] += time.perf_counter_ns() - now
        if self.turns:
            self.blocks.append(self._block_steps())
        if is_last:
            self.counter.stop()
            self.write("", "")
            raise SystemExit(0)  # not an Exception: hooks and most programs let it pass
        self._begin_block()

    def _block_steps(self) -> int:
        return len(self.steps_ns) - sum(self.blocks)

    def _is_last_step(self) -> bool:
        """Return whether the step that has just ended is the last."""
        spec, timed = self.spec, len(self.steps_ns)
        if self.turns:
            return len(self.blocks) + 1 >= spec.turns and self.turns.block_complete(
                self._block_steps(), self.last
            )
        return timed >= spec.steps or (
            timed >= spec.least and self.last - self.begun > spec.seconds * 1e9
        )

    def _begin_block(self) -> None:
        """Wait for a turn, if there are turns, once the device is idle."""
        _synchronize()
        if self.turns:
            if self.turns.can_pause():
                _write(self.spec.out + SO_FAR, self.result("", ""))
                self.turns.wait()
            else:
                self.turns, self.blocks = None, []
        self.last = time.perf_counter_ns()

    def _write_at_exit(self) -> None:
        """Write the result as the interpreter ends, normally or by an uncaught exception."""
        if os.getpid() != self.process or self.written:
            return
        if self.step == 0 and _exists(self.spec.out):
            return
        self.write(*_last_error())

    def write(self, problem: str, kind: Any) -> None:
        """Write the result, in the first rank only."""
        self.written = True
        if os.environ.get("RANK", "0") in ("", "0"):
            _write(self.spec.out, self.result(problem, kind))

    def result(self, problem: str, kind: Any) -> TrialResult:
        """Return the measurements so far."""
        import torch

        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        dtype = str(self.losses[0].dtype).removeprefix("torch.") if self.losses else ""
        peak_bytes, free_bytes, device_name = None, None, ""
        try:
            losses, norms = _to_numbers(self.losses), _to_numbers(self.norms)
            if on_cuda:
                peak_bytes = int(torch.cuda.max_memory_allocated())
                free_bytes = int(torch.cuda.mem_get_info()[0])
                device_name = str(torch.cuda.get_device_name())
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
            device_bytes=peak_bytes,
            device_free=free_bytes,
            host_bytes=_read_peak_memory(),
            device=device_name,
            torch=str(torch.__version__),
            problem=problem,
            kind=kind,
            moved=len(self.overlay.moved),
            refused=self.overlay.refused,
            idle=[item.id for item in self.applied if not item.used],
            ended=not problem,
        )


class PauseControl:
    """Control that stops the trial's process group before each block of steps, with all threads and
    workers, so that none works ahead. The parent resumes it (``advisor/tune/trial_process.py``)."""

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

        ranks = torch.distributed
        if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
            return False
        return self._read_numbers(GROUP) == [os.getpgrp()]

    def wait(self) -> None:
        """Stop, and wait until the group is resumed."""
        self.count += 1
        os.killpg(os.getpgrp(), signal.SIGSTOP)
        # a thread other than the first may run for a moment before it stops
        while (turn := self._read_numbers(TURN))[:1] < [self.count]:
            time.sleep(0.001)
        if turn[1:] > [0]:
            self.block = turn[1]
        self.begun = time.perf_counter_ns()

    def _read_numbers(self, name: str) -> list[int]:
        """Return the numbers in one of our files. Empty if it does not exist yet."""
        try:
            with open(os.path.join(self.home, name)) as file:  # noqa: PTH118, PTH123
                return [int(word) for word in file.read(64).split()]
        except (OSError, ValueError):
            return []

    def block_complete(self, steps: int, now: int) -> bool:
        is_late = now - self.begun > MAX_BLOCK_RATIO * self.spec.seconds * 1e9 / self.spec.turns
        return steps >= self.block or is_late


def _die_with_parent() -> None:
    """Kill this process when its parent ends (Linux), so that no process stays stopped for ever.
    Only in the main thread: children of other threads would end with the thread that forked
    them."""
    if threading.current_thread() is threading.main_thread():
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _to_numbers(tensors: list[Any]) -> list[float | None]:
    """Return tensors as numbers, with ``None`` for non-finite values, which JSON lacks."""
    result = [float(tensor) for tensor in tensors]
    return [item if math.isfinite(item) else None for item in result]


def _read_peak_memory() -> int | None:
    """Return the peak resident memory of this process or its largest ended child, in bytes."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    targets = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(item).ru_maxrss for item in targets) * unit


def _last_error() -> tuple[str, str]:
    """Return the uncaught exception and its kind. Both are empty if there was none."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return "", ""
    name = type(error).__name__
    # the host allocator's error says so only in its text
    is_memory = isinstance(error, MemoryError) or name == "OutOfMemoryError"
    kind = "memory" if is_memory or "memory" in str(error)[:300] else "error"
    return f"{name}: {error}".replace("\n", " ")[:300], kind


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110


def _write(path: str, result: TrialResult) -> None:
    """Write the result completely or not at all."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as file:  # noqa: PTH123
        file.write(msgspec.json.encode(result))
    os.replace(temporary, path)  # noqa: PTH105
