"""Hooks of the recorder: wrappers around a few entry points of torch.

Each wrapper does the user's call exactly once, with the user's arguments, result and exception.
What is ours around it writes on the tape, and what can fail besides is contained. All begin with
the same questions: does dynamo trace this (then they are as if they were not there: no graph
break, no guard on our state), are we inside something that is timed already, and is this the
watched thread? They spell out what a shared helper would do: each call of Python is a
microsecond where the caches are cold.

No module hooks: global ones put every submodule on torch's slow path and make compiled modules
warn, and hooks on an instance are pickled with the user's model."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns as now
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

from advisor.recorder.loaders import Loaders
from advisor.recorder.modules import ModuleCalls, hide_from_warnings, leave_to_dynamo
from advisor.recorder.tape import (
    APPLIED,
    BACKWARD,
    BACKWARD_END,
    BATCH,
    DATA,
    EXHAUSTED,
    FETCH,
    FETCHED,
    FETCHED_INSIDE,
    FORWARD,
    FORWARD_END,
    FORWARD_END_EVALUATION,
    FORWARD_END_NO_GRAD,
    FORWARD_END_NO_GRAPH,
    FORWARD_END_TRAINING,
    GENERATE,
    GENERATED,
    H2D,
    ITERATE,
    ITERATED,
    LAST_LOADER,
    LEAVE,
    LOADER,
    MAX_TAPE,
    OPTIMIZED_BY,
    OPTIMIZER,
    OPTIMIZER_END,
    OTHER,
    PART_OF_GRADIENTS,
    PART_OF_UPLOADS,
    RESET,
    SAVE,
    Tape,
)


class Listener:
    """Interface that the hooks call. This base class does nothing."""

    tape: Tape
    loaders: Loaders
    looping: list[Any]
    """List that is not empty while ``Recorder.steps`` waits for a batch."""
    inspect_batch: Callable[[Any], Any] = staticmethod(lambda batch: None)
    """Function that notes a batch's shapes and dtypes."""

    def on_enter(self, phase: int) -> None:
        """Called before a phase begins, while there are watchers. No callback raises."""

    def on_leave(self, phase: int) -> None:
        """Called when a phase has ended and ``phase`` continues."""

    def on_optimizer_step(self) -> None:
        """Called when an optimizer has stepped."""

    def on_forward_start(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before an outermost forward, with what it is called with."""

    def on_upload(self, tensor: Any) -> None:
        """Called before a tensor is copied from the host to a device."""

    def on_forward(self, module: Any, result: Any = None, *, replayed: bool = False) -> None:
        """Called after an outermost forward, until a backward or an update is recorded, with what
        it returned. ``replayed``: ``module`` is a CUDA graph."""

    def on_generate_start(self) -> None:
        """Called before ``generate``, until a backward or an update is recorded …"""

    def on_generate_end(self) -> None:
        """… and after it."""

    def on_first_backward(self) -> None:
        """Called when the first backward begins."""

    def on_forward_elsewhere(self, module: Any) -> bool:
        """An outermost module is called in another thread than the watched one, while such calls
        are looked at. Return whether the calling thread is watched from now on."""
        return False

    def on_other_thread(self, *, updates: bool) -> None:
        """Called when a backward or an optimizer step (``updates``) begins in an unwatched thread,
        which may become the watched one."""

    def read_tape(self) -> None:
        """Read the tape, if this thread is to read it."""

    def on_internal_error(self, error: BaseException) -> None:
        """Handle a failure of the recorder's own code: stop recording."""


class _Patch(NamedTuple):
    """Replaced attribute of torch, with what is needed to restore it."""

    owner: Any
    name: str
    original: Any
    own: bool
    """True if the owner defined the attribute itself, false if inherited."""
    hook: Any


OVERRIDABLE = frozenset(("to", "cuda"))
"""Tensor methods that ``__torch_function__`` reports. torch looks the method up in ``torch.Tensor``
and so reports our hook; overrides compare it, so it must equal the original."""


THIRD_PARTY_ITERATORS = (
    ("nvidia.dali.plugin.pytorch", "DALIGenericIterator"),
    ("nvidia.dali.plugin.pytorch", "DALIRaggedIterator"),
    ("ffcv.loader.epoch_iterator", "EpochIterator"),
)
"""Iterators of loaders other than torch's, by module and class, that use none of torch's. Once the
module is imported, waits for them are recorded like those for torch's."""


GENERATION = "transformers.generation.utils"
"""Module that defines ``generate`` of Transformers' models."""


class EqualWrapper:
    """Hook that compares and hashes like the function it wraps."""

    def __init__(self, original: Any, hook: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self._hook, owner)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if type(other) is EqualWrapper else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()


class Hooks:
    """All wrappers: ``install`` sets them, ``remove`` restores the originals."""

    def __init__(self, listener: Listener) -> None:
        self._on = listener
        self._patches: list[_Patch] = []
        self._handles: list[Any] = []
        self._calls: ModuleCalls | None = None
        self._foreign: set[Any] = set()
        self.module_calls_suspended = False
        """True while forwards are not recorded."""

    def install(self) -> None:
        """Install the wrappers. Raises AttributeError if this torch lacks a wrapped function."""
        import torch
        from torch.optim import optimizer as optim
        from torch.utils.data import dataloader

        wrap = self._patch
        wrap(dataloader._BaseDataLoaderIter, "__next__", _next(self._on))
        wrap(dataloader.DataLoader, "__iter__", _iter(self._on))
        self._foreign.clear()
        self.hook_new_imports()
        leave_to_dynamo()
        self._calls = ModuleCalls(self._on.tape.hook_state, lambda calls: _forward(self._on, calls))
        self._calls.install()
        wrap(torch.Tensor, "to", _to(self._on))
        wrap(torch.Tensor, "cuda", _cuda(self._on))
        if hasattr(torch.autograd, "_engine_run_backward"):  # what both of them call
            wrap(torch.autograd, "_engine_run_backward", _backward(self._on))
        else:
            wrap(torch.autograd, "backward", _backward(self._on))
            wrap(torch.autograd, "grad", _backward(self._on))
        opened: Opened = []
        if hasattr(torch.cuda.CUDAGraph, "replay"):
            wrap(torch.cuda.CUDAGraph, "replay", _replay(self._on))
        wrap(torch.amp.GradScaler, "step", _scaler_step(self._on, opened))
        wrap(torch, "save", _save(self._on))
        wrap(torch.serialization, "save", lambda original: torch.save)  # the same: it is pickled so
        before, after = _around_step(self._on, opened)
        self._handles = [
            optim.register_optimizer_step_pre_hook(before),
            optim.register_optimizer_step_post_hook(after),
        ]

    def hook_new_imports(self) -> bool:
        """Wrap what was imported since the last call: other loaders, ``generate``. Imports nothing.
        Return whether ``generate`` was wrapped."""
        for name, kind in THIRD_PARTY_ITERATORS:
            module = sys.modules.get(name)
            owner = None if module is None else vars(module).get(kind)
            if isinstance(owner, type) and owner not in self._foreign:
                self._foreign.add(owner)
                if "__next__" in vars(owner):
                    self._patch(owner, "__next__", _next(self._on))
        module = sys.modules.get(GENERATION)
        owner = None if module is None else vars(module).get("GenerationMixin")
        if isinstance(owner, type) and owner not in self._foreign:
            self._foreign.add(owner)
            if "generate" in vars(owner):
                self._patch(owner, "generate", _generate(self._on))
                return True
        return False

    def remove(self) -> None:
        """Restore all originals. A wrapper that other code has wrapped since stays, and only passes
        calls through."""
        if self._calls is not None:
            self._calls.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for owner, name, original, own, hook in reversed(self._patches):
            if vars(owner).get(name) is hook:
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        self._patches.clear()

    def suspend_module_calls(self) -> None:
        """Restore ``Module.__call__`` until ``resume_module_calls``, before a profiler with Python
        stacks starts. torch's tracer recognises modules by it, as it is when the process's first
        tracer starts."""
        self.module_calls_suspended = True
        if self._calls is not None:
            self._calls.remove()

    def resume_module_calls(self) -> None:
        """Wrap ``Module.__call__`` again, once that profiler has ended."""
        self.module_calls_suspended = False
        if self._calls is not None and self._patches:
            self._calls.install()

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        made = make(original)
        hook: Any = made if hasattr(made, "__wrapped__") else functools.wraps(original)(made)
        if name in OVERRIDABLE:
            hook = EqualWrapper(original, hook)
        setattr(owner, name, hook)
        self._patches.append(_Patch(owner, name, original, own, hook))


def _next(on: Listener) -> Callable[[Any], Any]:
    from torch import Tensor

    tape, looping, inspect_batch = on.tape, on.looping, on.inspect_batch
    put, hook_state, numbers = tape.log.extend, tape.hook_state, on.loaders.numbers

    def make(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            if get_ident() != hook_state[0]:
                return original(self)
            before = hook_state[1]
            if before == DATA:  # inside Recorder.steps, or a dataset's own loader
                batch = original(self)
                if looping:
                    try:
                        put((FETCHED_INSIDE, now(), BATCH, inspect_batch(batch)))
                        looping.clear()
                    except Exception as error:
                        on.on_internal_error(error)
                return batch
            if before == OPTIMIZER:  # one that raised: its hook for the end was not called
                before = OTHER
            if hook_state[2]:
                on.on_enter(DATA)
            put((FETCH, now()))
            hook_state[1] = DATA
            try:
                if hook_state[3]:
                    on.read_tape()
                batch = original(self)
            except BaseException as raised:
                hook_state[1] = before
                put((EXHAUSTED if isinstance(raised, StopIteration) else LEAVE, now()))
                if hook_state[2]:
                    on.on_leave(before)
                raise
            hook_state[1] = before
            try:
                end = now()
                kind = type(batch)
                # two tensors, the usual batch: what ``inspect_batch`` would find
                if (
                    (kind is list or kind is tuple)
                    and len(batch) == 2
                    and type(batch[0]) is Tensor
                    and type(batch[1]) is Tensor
                ):
                    x, y = batch
                    put((FETCHED, end, BATCH, (((x.shape, x.dtype), (y.shape, y.dtype)), None)))
                else:
                    put((FETCHED, end, BATCH, inspect_batch(batch)))
                number = numbers.get(id(self), -1)
                if number != hook_state[LAST_LOADER]:
                    hook_state[LAST_LOADER] = number
                    put((LOADER, number))
                if hook_state[2]:
                    on.on_leave(before)
            except Exception as error:
                on.on_internal_error(error)
            return batch

        return __next__

    return make


def _iter(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state

    def make(original: Any) -> Any:
        def __iter__(self: Any) -> Any:
            if get_ident() != hook_state[0] or hook_state[1] == DATA:
                return original(self)
            begin = now()
            put((ITERATE, begin))
            iterator = original(self)
            try:
                data = on.loaders.on_iterator(self, iterator, begin, now() - begin)
                if data is not None:
                    put((ITERATED, data))
            except Exception as error:
                on.on_internal_error(error)
            return iterator

        return __iter__

    return make


def _timed(
    on: Listener,
    phase: int,
    *,
    inside: frozenset[int],
    end: int = LEAVE,
    applies: Callable[[Any, Any], bool] | None = None,
) -> Callable[[Any], Any]:
    """Return a wrapper that times calls as a phase, except inside the phases ``inside``.

    ``applies`` looks at the arguments. ``end`` is the code of a call that returned."""
    compiling = _compiling()
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state

    def make(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if (
                compiling()
                or hook_state[1] in inside
                or get_ident() != hook_state[0]
                or (applies is not None and not applies(args, kwargs))
            ):
                return original(*args, **kwargs)
            before = hook_state[1]
            if hook_state[2]:
                on.on_enter(phase)
            hook_state[1] = phase
            put((phase, now()))
            code = LEAVE
            try:
                result = original(*args, **kwargs)
                code = end
            finally:
                hook_state[1] = before
                put((code, now()))
                if hook_state[2]:
                    on.on_leave(before)
            if end == OPTIMIZER_END and hook_state[3]:
                on.read_tape()
            return result

        return timed

    return make


def _forward(
    on: Listener, calls: ModuleCalls
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the call of an outermost module, timed as a forward. Inner modules are not timed."""
    from torch import is_grad_enabled

    function, original, code = calls.function, calls.original, calls.code
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state
    evaluated = 0  # the model that ran last in evaluation mode, with a graph
    elsewhere: set[int] = set()  # unwatched threads inside of a call

    def call_elsewhere(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = get_ident()
        outermost = this not in elsewhere
        elsewhere.add(this)
        try:
            return (module._compiled_call_impl or module._call_impl)(*args, **kwargs)
        finally:
            if outermost:
                elsewhere.discard(this)

    def forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal evaluated
        if hook_state[7]:
            this = get_ident()
            if this == hook_state[0]:
                hook_state[7] -= 1
            elif this in elsewhere or not on.on_forward_elsewhere(module):
                return call_elsewhere(module, args, kwargs)
        before, result = hook_state[1], None
        if hook_state[3] and hook_state[6] and not hook_state[5]:
            on.read_tape()  # of an optimizer that is not seen, a step's end is known by now
        on.on_forward_start(module, args, kwargs)
        if hook_state[2]:
            on.on_enter(FORWARD)
        hook_state[1] = FORWARD
        put((FORWARD, now()))
        try:
            if calls.reported:
                function.__code__ = original
            call = module._compiled_call_impl or module._call_impl
            result = call(*args, **kwargs)
            return result
        finally:
            if calls.reported and function.__code__ is original:
                function.__code__ = code
            hook_state[1] = before
            end = FORWARD_END if is_grad_enabled() else FORWARD_END_NO_GRAD
            if end == FORWARD_END and result is not None:
                if not module.__dict__.get("training", True):
                    end = FORWARD_END_NO_GRAPH
                    if _has_graph(result):
                        end, evaluated = FORWARD_END_EVALUATION, id(module)
                elif evaluated == id(module):
                    end, evaluated = FORWARD_END_TRAINING, 0
            put((end, now()))
            if hook_state[2]:
                on.on_leave(before)
            if not hook_state[6]:
                on.on_forward(module, result)

    return forward


def _replay(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper that times replays of CUDA graphs outside modules as forwards, until a
    backward or an update is recorded: graphs of a training are more than a forward. Those in code
    that PyTorch compiled are parts of something else."""
    compiling = _compiling()
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state

    def make(original: Any) -> Any:
        def replay(self: Any) -> Any:
            if (
                compiling()
                or hook_state[6]
                or get_ident() != hook_state[0]
                or hook_state[1] in PART_OF_UPLOADS
                or str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
            ):
                return original(self)
            before = hook_state[1]
            if hook_state[2]:
                on.on_enter(FORWARD)
            hook_state[1] = FORWARD
            put((FORWARD, now()))
            try:
                return original(self)
            finally:
                hook_state[1] = before
                put((FORWARD_END_NO_GRAD, now()))
                if hook_state[2]:
                    on.on_leave(before)
                on.on_forward(self, replayed=True)

        return replay

    return make


def _generate(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper that marks calls of ``generate``. Its forwards are timed as usual."""
    compiling = _compiling()
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state

    def make(original: Any) -> Any:
        def generate(*args: Any, **kwargs: Any) -> Any:
            if (
                compiling()
                or hook_state[6]
                or get_ident() != hook_state[0]
                or hook_state[1] in PART_OF_GRADIENTS
            ):
                return original(*args, **kwargs)
            on.on_generate_start()
            put((GENERATE, now()))
            try:
                return original(*args, **kwargs)
            finally:
                put((GENERATED, now()))
                on.on_generate_end()

        return generate

    return make


def _to(on: Listener) -> Callable[[Any], Any]:
    """Wrap ``Tensor.to``: time copies from the host to a device."""
    from torch import device

    is_cpu = _attribute("is_cpu")

    def applies(args: Any, kwargs: Any) -> bool:
        target: Any = args[1] if len(args) > 1 else kwargs.get("device")
        if not args:
            return False
        kind = type(target)
        if kind is device:
            there = target.type != "cpu"
        else:
            there = kind is int or (kind is str and not target.startswith("cpu"))
        if not there or not is_cpu(args[0]):
            return False
        on.on_upload(args[0])
        return True

    return _timed(on, H2D, inside=PART_OF_UPLOADS, applies=applies)


def _cuda(on: Listener) -> Callable[[Any], Any]:
    is_cpu = _attribute("is_cpu")

    def applies(args: Any, kwargs: Any) -> bool:
        if not args or not is_cpu(args[0]):
            return False
        on.on_upload(args[0])
        return True

    return _timed(on, H2D, inside=PART_OF_UPLOADS, applies=applies)


def _attribute(name: str) -> Callable[[Any], Any]:
    """Return a reader of a tensor attribute, false for other objects. ``__torch_function__`` and
    ``TorchFunctionMode`` do not see the access."""
    from torch import Tensor
    from torch._C import DisableTorchFunction as silently

    of = operator.attrgetter(name)

    def read(tensor: Any) -> Any:
        with silently():
            return isinstance(tensor, Tensor) and of(tensor)

    return read


def _backward(on: Listener) -> Callable[[Any], Any]:
    """Wrap backwards. Until an optimizer steps, also note whether weights or gradients changed
    since the last backward, which then ended a step."""
    compiling = _compiling()
    tape, probe = on.tape, UpdateProbe()
    put, hook_state = tape.log.extend, tape.hook_state
    inside = PART_OF_GRADIENTS

    def make(original: Any) -> Any:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            if get_ident() != hook_state[0]:
                on.on_other_thread(updates=False)
                if get_ident() != hook_state[0]:
                    return original(*args, **kwargs)
            before = hook_state[1]
            if before in inside:
                return original(*args, **kwargs)
            if not hook_state[5]:
                if not hook_state[6]:
                    on.on_first_backward()
                if probe.has_update(args):
                    put((APPLIED, now()))
            if hook_state[2]:
                on.on_enter(BACKWARD)
            hook_state[1] = BACKWARD
            put((BACKWARD, now()))
            code = LEAVE
            try:
                result = original(*args, **kwargs)
                code = BACKWARD_END
            finally:
                hook_state[1] = before
                put((code, now()))
                if hook_state[2]:
                    on.on_leave(before)
            if not hook_state[5]:
                probe.remember_state()
            return result

        return run_backward

    return make


def _scaler_step(on: Listener, opened: Opened) -> Callable[[Any], Any]:
    """Wrap a gradient scaler's step. It counts even if the scaler skips the optimizer."""
    put = on.tape.log.extend

    def applies(args: Any, kwargs: Any) -> bool:
        if _left_open(on, opened):
            on.tape.hook_state[1] = OTHER
        if on.tape.hook_state[1] == OPTIMIZER:
            return False
        put((OPTIMIZED_BY, id(args[1]) if len(args) > 1 else 0))
        return True

    return _timed(on, OPTIMIZER, inside=frozenset((DATA,)), end=OPTIMIZER_END, applies=applies)


Opened = list[tuple[int, int, tuple[int, Any]]]
"""Optimizer steps in progress: the optimizer's id, the phase around it, and the frame as (id,
code)."""


def _around_step(on: Listener, opened: Opened) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks before and after optimizer steps. The second is not called if one raises."""
    compiling = _compiling()
    tape = on.tape
    log, put, hook_state = tape.log, tape.log.extend, tape.hook_state

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling():
            return
        if get_ident() != hook_state[0]:
            on.on_other_thread(updates=True)
            if get_ident() != hook_state[0]:
                return
        phase = hook_state[1]
        if opened and _left_open(on, opened):
            phase = OTHER
        caller = sys._getframe(1)
        opened.append((id(optimizer), phase, (id(caller), caller.f_code)))
        if hook_state[2]:
            on.on_enter(OPTIMIZER)
        hook_state[1] = OPTIMIZER
        put((OPTIMIZER, now()))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling() or get_ident() != hook_state[0] or not opened:
            return
        number, hook_state[1], _ = opened.pop()
        if hook_state[2]:
            on.on_leave(hook_state[1])
        put((OPTIMIZED_BY, number, OPTIMIZER_END, now()))
        hook_state[5] = 1
        if hook_state[3] or len(log) > MAX_TAPE:
            on.on_optimizer_step()
            on.read_tape()

    return before, after


def _left_open(on: Listener, opened: Opened) -> bool:
    """Return whether the last optimizer step begun has raised; if so, clear ``opened``."""
    if not opened:
        return False
    hook_state = on.tape.hook_state
    if hook_state[1] == OPTIMIZER and _on_the_stack(opened[-1][2]):
        return False
    opened.clear()
    on.tape.log.extend((RESET, now()))
    if hook_state[2]:
        on.on_leave(OTHER)
    return True


def _on_the_stack(call: tuple[int, Any]) -> bool:
    """Return whether a call, as (frame id, code), is still running: on the stack that led here."""
    # not the optimizer's that asks: a dead frame's memory is used again
    frame: Any = sys._getframe(4)
    while frame is not None:
        if (id(frame), frame.f_code) == call:
            return True
        frame = frame.f_back
    return False


def _save(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape

    def make(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == tape.hook_state[0]:
                tape.log.extend((SAVE, now()))
            return original(*args, **kwargs)

        return save

    return make


def _compiling() -> Callable[[], bool]:
    """Return the function that tells whether dynamo traces this call; dynamo takes it as constant.
    ``is_compiling`` would also cover export, at five times the cost; our lines do no harm there."""
    from torch.compiler import is_dynamo_compiling

    asked: Callable[[], bool] = is_dynamo_compiling
    return asked


MAX_NODES = 4096
"""Most graph nodes searched for a leaf, once."""


class UpdateProbe:
    """Detector of weight updates between two backwards, for programs without a known optimizer.

    One leaf of the graph stands for all of them: an update changes its version, and what clears
    gradients changes or removes its gradient; accumulating does neither between one backward's end
    and the next one's begin. That covers updates by hand, optimizers that are compiled, of other
    libraries or in other threads. No value of a tensor is read."""

    def __init__(self) -> None:
        self._leaf: Any = None
        self._shape: Any = None
        self._state: Any = None

    def has_update(self, args: tuple[Any, ...]) -> bool:
        """Return whether weights or gradients changed since the last backward. ``args`` are the
        next one's; the first holds its outputs."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    return self._state is not None and _state(leaf) != self._state
                result = _leaf_of(args[0])
                if result is None:
                    return False
                replaced = self._state is not None and result.shape == self._shape
                self._leaf, self._shape = ref(result), result.shape
                return replaced  # by a new one, as in w = (w - lr * w.grad).detach()
        except (RuntimeError, AttributeError, TypeError, IndexError):
            return False

    def remember_state(self) -> None:
        """Remember the leaf's version and gradient, at the end of a backward."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    self._state = _state(leaf)
        except (RuntimeError, AttributeError, TypeError):
            self._state = None


def _state(leaf: Any) -> tuple[Any, ...]:
    grad = leaf.grad
    return leaf._version, id(grad), None if grad is None else grad._version


def _has_graph(result: Any) -> bool:
    """Return whether a forward's result, or a tensor directly in it, has a graph. Other types and
    deeper levels are not looked at: their code is the program's. Modes do not see the access."""
    from torch import Tensor
    from torch._C import DisableTorchFunction

    if isinstance(result, dict):
        result = dict.values(result)
    elif not isinstance(result, tuple | list):
        result = (result,)
    with DisableTorchFunction():
        return any(type(value) is Tensor and value.requires_grad for value in result)


def _leaf_of(outputs: Any) -> Any:
    """Return a parameter that the outputs depend on, else any leaf, else ``None``."""
    from torch.nn import Parameter

    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set(todo)
    any_leaf = None
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if isinstance(variable, Parameter):
                return variable
            any_leaf = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return any_leaf


hide_from_warnings(globals())
