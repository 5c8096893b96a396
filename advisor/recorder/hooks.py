"""Hooks of the recorder: wrappers around a few entry points of torch.

Each wrapper makes the user's call exactly once, with the user's arguments, result and exception.
Around it, our code writes to the tape and catches its own failures. Each wrapper first checks
whether dynamo traces the call (then it does nothing: no graph break, no guard on our state),
whether it is inside something that is timed already, and whether this is the watched thread. The
checks are repeated in each wrapper, because a shared function would cost a microsecond per call
with cold caches.

Module hooks are not used: global ones put every submodule on torch's slow path and make compiled
modules warn, and hooks on an instance are pickled with the user's model."""

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
from advisor.recorder.module_calls import CallLog
from advisor.recorder.modules import ModuleCalls, hide_from_warnings, leave_to_dynamo
from advisor.recorder.tape import (
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
    GRADIENTS_USED,
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
        """Called before an outermost forward, with its arguments."""

    def on_upload(self, tensor: Any) -> None:
        """Called before a tensor is copied from the host to a device."""

    def on_forward(self, module: Any, result: Any = None, *, replayed: bool = False) -> None:
        """Called with the result of an outermost forward after it, until a backward or an update is
        recorded. ``replayed``: ``module`` is a CUDA graph."""

    def on_generate_start(self) -> None:
        """Called before ``generate``, until a backward or an update is recorded."""

    def on_generate_end(self) -> None:
        """Called after ``generate``, until a backward or an update is recorded."""

    def on_first_backward(self) -> None:
        """Called when the first backward begins."""

    def on_forward_elsewhere(self, module: Any) -> bool:
        """Called before an outermost forward in an unwatched thread, while such forwards are
        considered. Return whether the calling thread is watched from now on."""
        return False

    def consider_calling_thread(self, *, updates: bool) -> None:
        """Called when a backward or an optimizer step (``updates``) begins in an unwatched thread,
        which may become the watched one."""

    def read_tape(self) -> None:
        """Read the tape, if this thread should read it."""

    def on_internal_error(self, error: BaseException) -> None:
        """Stop recording after a failure of the recorder's own code."""


class _Patch(NamedTuple):
    """Replaced attribute of torch, with the data to restore it."""

    owner: Any
    name: str
    original: Any
    is_own: bool
    """True if the owner defined the attribute itself, false if it inherited it."""
    hook: Any


OVERRIDABLE = frozenset(("to", "cuda"))
"""Tensor methods that ``__torch_function__`` reports. torch looks the method up in ``torch.Tensor``
and so reports our hook. Overrides compare it with the original, so it must be equal."""


THIRD_PARTY_ITERATORS = (
    ("nvidia.dali.plugin.pytorch", "DALIGenericIterator"),
    ("nvidia.dali.plugin.pytorch", "DALIRaggedIterator"),
    ("ffcv.loader.epoch_iterator", "EpochIterator"),
)
"""Iterators of third-party loaders that do not use torch's, by module and class. Once the module is
imported, waits for them are recorded like waits for torch's."""


GENERATION = "transformers.generation.utils"
"""Module that defines ``generate`` for the models of Transformers."""


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
    """All wrappers. ``install`` sets them, and ``remove`` restores the originals."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._patches: list[_Patch] = []
        self._handles: list[Any] = []
        self._module_calls: ModuleCalls | None = None
        self._wrapped_classes: set[Any] = set()
        self.module_calls_suspended = False
        """True while forwards are not recorded."""

    def install(self) -> None:
        """Install the wrappers. Raises AttributeError if this torch lacks a wrapped function."""
        import torch
        from torch.optim import optimizer as optim
        from torch.utils.data import dataloader

        wrap = self._patch
        wrap(dataloader._BaseDataLoaderIter, "__next__", _wrap_next(self._listener))
        wrap(dataloader.DataLoader, "__iter__", _wrap_iter(self._listener))
        self._wrapped_classes.clear()
        self.hook_new_imports()
        leave_to_dynamo()
        self._module_calls = ModuleCalls(
            self._listener.tape.hook_state, lambda calls: _make_forward(self._listener, calls)
        )
        self._module_calls.install()
        wrap(torch.Tensor, "to", _wrap_to(self._listener))
        wrap(torch.Tensor, "cuda", _wrap_cuda(self._listener))
        if hasattr(torch.autograd, "_engine_run_backward"):  # called by both of the others
            wrap(torch.autograd, "_engine_run_backward", _wrap_backward(self._listener))
        else:
            wrap(torch.autograd, "backward", _wrap_backward(self._listener))
            wrap(torch.autograd, "grad", _wrap_backward(self._listener))
        opened: Opened = []
        if hasattr(torch.cuda.CUDAGraph, "replay"):
            wrap(torch.cuda.CUDAGraph, "replay", _wrap_replay(self._listener))
        wrap(torch.amp.GradScaler, "step", _wrap_scaler_step(self._listener, opened))
        wrap(torch, "save", _wrap_save(self._listener))
        # the same function, as pickle requires
        wrap(torch.serialization, "save", lambda original: torch.save)
        before, after = _hook_steps(self._listener, opened)
        self._handles = [
            optim.register_optimizer_step_pre_hook(before),
            optim.register_optimizer_step_post_hook(after),
        ]

    def hook_new_imports(self) -> bool:
        """Wrap third-party loaders and ``generate`` if they were imported since the last call.
        Import nothing. Return whether ``generate`` was wrapped."""
        for name, class_name in THIRD_PARTY_ITERATORS:
            module = sys.modules.get(name)
            owner = None if module is None else vars(module).get(class_name)
            if isinstance(owner, type) and owner not in self._wrapped_classes:
                self._wrapped_classes.add(owner)
                if "__next__" in vars(owner):
                    self._patch(owner, "__next__", _wrap_next(self._listener))
        module = sys.modules.get(GENERATION)
        owner = None if module is None else vars(module).get("GenerationMixin")
        if isinstance(owner, type) and owner not in self._wrapped_classes:
            self._wrapped_classes.add(owner)
            if "generate" in vars(owner):
                self._patch(owner, "generate", _wrap_generate(self._listener))
                return True
        return False

    def remove(self) -> None:
        """Restore all originals. A wrapper that other code has wrapped since then stays, and only
        passes calls through."""
        if self._module_calls is not None:
            self._module_calls.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for owner, name, original, is_own, hook in reversed(self._patches):
            if vars(owner).get(name) is hook:
                if is_own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        self._patches.clear()

    def suspend_module_calls(self) -> None:
        """Restore ``Module.__call__`` until ``resume_module_calls``, before a profiler with Python
        stacks starts. torch's tracer recognises modules by the ``Module.__call__`` that it finds
        when the process's first tracer starts."""
        self.module_calls_suspended = True
        if self._module_calls is not None:
            self._module_calls.remove()

    def resume_module_calls(self) -> None:
        """Wrap ``Module.__call__`` again after a profiler with Python stacks has ended."""
        self.module_calls_suspended = False
        if self._module_calls is not None and self._patches:
            self._module_calls.install()

    def log_module_calls(self) -> None:
        """Log the calls of modules from now on, in a window without Python stacks."""
        if self._module_calls is not None and self._module_calls.log is None:
            self._module_calls.log = CallLog()

    def take_call_log(self) -> CallLog | None:
        """End the log of calls and return it, or ``None`` if there was none."""
        if self._module_calls is None:
            return None
        log, self._module_calls.log = self._module_calls.log, None
        return log

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        is_own = name in vars(owner)
        original = getattr(owner, name)
        inner = make(original)
        hook: Any = inner if hasattr(inner, "__wrapped__") else functools.wraps(original)(inner)
        if name in OVERRIDABLE:
            hook = EqualWrapper(original, hook)
        setattr(owner, name, hook)
        self._patches.append(_Patch(owner, name, original, is_own, hook))


def _wrap_next(on: Listener) -> Callable[[Any], Any]:
    from torch import Tensor

    tape, looping, inspect_batch = on.tape, on.looping, on.inspect_batch
    put, hook_state, numbers = tape.log.extend, tape.hook_state, on.loaders.numbers

    def make(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            if get_ident() != hook_state[0]:
                return original(self)
            before = hook_state[1]
            if before == DATA:  # inside Recorder.steps, or the loader of a dataset
                batch = original(self)
                if looping:
                    try:
                        put((FETCHED_INSIDE, now(), BATCH, inspect_batch(batch)))
                        looping.clear()
                    except Exception as error:
                        on.on_internal_error(error)
                return batch
            if before == OPTIMIZER:  # an optimizer that raised: its end hook was not called
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
                # the usual batch, two tensors: the same result as ``inspect_batch``
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


def _wrap_iter(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state

    def make(original: Any) -> Any:
        def __iter__(self: Any) -> Any:
            if get_ident() != hook_state[0] or hook_state[1] == DATA:
                return original(self)
            start = now()
            put((ITERATE, start))
            iterator = original(self)
            try:
                data = on.loaders.on_iterator(self, iterator, start, now() - start)
                if data is not None:
                    put((ITERATED, data))
            except Exception as error:
                on.on_internal_error(error)
            return iterator

        return __iter__

    return make


def _wrap_timed(
    on: Listener,
    phase: int,
    *,
    inside: frozenset[int],
    end: int = LEAVE,
    applies: Callable[[Any, Any], bool] | None = None,
) -> Callable[[Any], Any]:
    """Return a wrapper that times calls as a phase, except inside the phases ``inside``.

    ``applies`` checks the arguments. ``end`` is the code after a call that returned."""
    compiling = _get_compile_check()
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


def _make_forward(
    on: Listener, calls: ModuleCalls
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the call of an outermost module, timed as a forward. Inner modules are not timed, and
    logged only in windows."""
    from torch import is_grad_enabled

    function, original, code = calls.function, calls.original, calls.code
    tape = on.tape
    put, hook_state = tape.log.extend, tape.hook_state
    evaluated_model = 0  # id of the model that last ran in evaluation mode with a graph
    busy_threads: set[int] = set()  # unwatched threads inside a call

    def call_unwatched(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread = get_ident()
        outermost = thread not in busy_threads
        busy_threads.add(thread)
        try:
            return (module._compiled_call_impl or module._call_impl)(*args, **kwargs)
        finally:
            if outermost:
                busy_threads.discard(thread)

    def forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal evaluated_model
        if hook_state[7]:
            thread = get_ident()
            if thread == hook_state[0]:
                hook_state[7] -= 1
            elif thread in busy_threads or not on.on_forward_elsewhere(module):
                return call_unwatched(module, args, kwargs)
        before, result = hook_state[1], None
        if hook_state[3] and hook_state[6] and not hook_state[5]:
            on.read_tape()  # if the optimizer is not seen, the end of a step is known by now
        on.on_forward_start(module, args, kwargs)
        if hook_state[2]:
            on.on_enter(FORWARD)
        hook_state[1] = FORWARD
        put((FORWARD, now()))
        log = calls.log
        if log is not None and not log.begin(module, sys._getframe(1).f_back, outermost=True):
            log = None
        inside = original if log is None else calls.logging_code
        try:
            if calls.reported:
                function.__code__ = inside
            call = module._compiled_call_impl or module._call_impl
            result = call(*args, **kwargs)
            return result
        finally:
            if calls.reported and function.__code__ is inside:
                function.__code__ = code
            if log is not None:
                log.end()
            hook_state[1] = before
            end = FORWARD_END if is_grad_enabled() else FORWARD_END_NO_GRAD
            if end == FORWARD_END and result is not None:
                if not module.__dict__.get("training", True):
                    end = FORWARD_END_NO_GRAPH
                    if _has_graph(result):
                        end, evaluated_model = FORWARD_END_EVALUATION, id(module)
                elif evaluated_model == id(module):
                    end, evaluated_model = FORWARD_END_TRAINING, 0
            put((end, now()))
            if hook_state[2]:
                on.on_leave(before)
            if not hook_state[6]:
                on.on_forward(module, result)

    return forward


def _wrap_replay(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper that times replays of CUDA graphs outside modules as forwards, until a
    backward or an update is recorded: training graphs contain more than a forward. Replays in code
    that PyTorch compiled are part of a larger call and are left out."""
    compiling = _get_compile_check()
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


def _wrap_generate(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper that marks calls of ``generate``. Their forwards are timed as usual."""
    compiling = _get_compile_check()
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


def _wrap_to(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper of ``Tensor.to`` that times copies from the host to a device."""
    from torch import device

    is_cpu = _make_reader("is_cpu")

    def applies(args: Any, kwargs: Any) -> bool:
        target: Any = args[1] if len(args) > 1 else kwargs.get("device")
        if not args:
            return False
        kind = type(target)
        if kind is device:
            is_device = target.type != "cpu"
        else:
            is_device = kind is int or (kind is str and not target.startswith("cpu"))
        if not is_device or not is_cpu(args[0]):
            return False
        on.on_upload(args[0])
        return True

    return _wrap_timed(on, H2D, inside=PART_OF_UPLOADS, applies=applies)


def _wrap_cuda(on: Listener) -> Callable[[Any], Any]:
    is_cpu = _make_reader("is_cpu")

    def applies(args: Any, kwargs: Any) -> bool:
        if not args or not is_cpu(args[0]):
            return False
        on.on_upload(args[0])
        return True

    return _wrap_timed(on, H2D, inside=PART_OF_UPLOADS, applies=applies)


def _make_reader(name: str) -> Callable[[Any], Any]:
    """Return a reader of a tensor attribute, false for other objects. ``__torch_function__`` and
    ``TorchFunctionMode`` do not see the access."""
    from torch import Tensor
    from torch._C import DisableTorchFunction as disable_overrides

    get_attribute = operator.attrgetter(name)

    def read(tensor: Any) -> Any:
        with disable_overrides():
            return isinstance(tensor, Tensor) and get_attribute(tensor)

    return read


def _wrap_backward(on: Listener) -> Callable[[Any], Any]:
    """Return a wrapper that times backwards. Until an optimizer steps, it also notes whether
    weights or gradients changed since the last backward, which means that a step ended."""
    compiling = _get_compile_check()
    tape, probe = on.tape, UpdateProbe()
    put, hook_state = tape.log.extend, tape.hook_state
    inside = PART_OF_GRADIENTS

    def make(original: Any) -> Any:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            if get_ident() != hook_state[0]:
                on.consider_calling_thread(updates=False)
                if get_ident() != hook_state[0]:
                    return original(*args, **kwargs)
            before = hook_state[1]
            if before in inside:
                return original(*args, **kwargs)
            if not hook_state[5]:
                if not hook_state[6]:
                    on.on_first_backward()
                if probe.has_update(args):
                    put((GRADIENTS_USED, now()))
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


def _wrap_scaler_step(on: Listener, opened: Opened) -> Callable[[Any], Any]:
    """Return a wrapper of a gradient scaler's step, which counts even if it skips the optimizer."""
    put = on.tape.log.extend

    def applies(args: Any, kwargs: Any) -> bool:
        if _clear_raised(on, opened):
            on.tape.hook_state[1] = OTHER
        if on.tape.hook_state[1] == OPTIMIZER:
            return False
        put((OPTIMIZED_BY, id(args[1]) if len(args) > 1 else 0))
        return True

    return _wrap_timed(on, OPTIMIZER, inside=frozenset((DATA,)), end=OPTIMIZER_END, applies=applies)


Opened = list[tuple[int, int, tuple[int, Any]]]
"""Optimizer steps in progress, each as the optimizer's id, the phase around it, and the frame as
(id, code)."""


def _hook_steps(on: Listener, opened: Opened) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks before and after optimizer steps. After a step that raises, none is
    called."""
    compiling = _get_compile_check()
    tape = on.tape
    log, put, hook_state = tape.log, tape.log.extend, tape.hook_state

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling():
            return
        if get_ident() != hook_state[0]:
            on.consider_calling_thread(updates=True)
            if get_ident() != hook_state[0]:
                return
        phase = hook_state[1]
        if opened and _clear_raised(on, opened):
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


def _clear_raised(on: Listener, opened: Opened) -> bool:
    """Return whether the last begun optimizer step has raised. If so, clear ``opened``."""
    if not opened:
        return False
    hook_state = on.tape.hook_state
    if hook_state[1] == OPTIMIZER and _is_on_stack(opened[-1][2]):
        return False
    opened.clear()
    on.tape.log.extend((RESET, now()))
    if hook_state[2]:
        on.on_leave(OTHER)
    return True


def _is_on_stack(call: tuple[int, Any]) -> bool:
    """Return whether a call, as (frame id, code), is still on the current stack."""
    # skip the frame of the calling optimizer: the memory of a dead frame is reused
    frame: Any = sys._getframe(4)
    while frame is not None:
        if (id(frame), frame.f_code) == call:
            return True
        frame = frame.f_back
    return False


def _wrap_save(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape

    def make(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == tape.hook_state[0]:
                tape.log.extend((SAVE, now()))
            return original(*args, **kwargs)

        return save

    return make


def _get_compile_check() -> Callable[[], bool]:
    """Return the function that returns whether dynamo traces this call, a constant for dynamo.
    ``is_compiling`` also covers export, at five times the cost, but our code is harmless there."""
    from torch.compiler import is_dynamo_compiling

    is_traced: Callable[[], bool] = is_dynamo_compiling
    return is_traced


_MAX_NODES = 4096
"""Maximum number of graph nodes to search for a leaf."""


class UpdateProbe:
    """Detector of weight updates between two backwards, for programs without a known optimizer.

    It watches one leaf of the graph on behalf of all. An update changes its version, and clearing
    gradients changes or removes its gradient. Accumulation does neither between the end of one
    backward and the begin of the next. That covers updates by hand and optimizers that are
    compiled, from other libraries or in other threads. It reads no value of a tensor."""

    def __init__(self) -> None:
        self._leaf: Any = None
        self._shape: Any = None
        self._leaf_state: Any = None

    def has_update(self, args: tuple[Any, ...]) -> bool:
        """Return whether weights or gradients changed since the last backward. ``args`` are the
        arguments of the next backward; the first one has its outputs."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    return self._leaf_state is not None and _leaf_state(leaf) != self._leaf_state
                result = _find_leaf(args[0])
                if result is None:
                    return False
                replaced = self._leaf_state is not None and result.shape == self._shape
                self._leaf, self._shape = ref(result), result.shape
                return replaced  # by a new tensor, as in w = (w - lr * w.grad).detach()
        except (RuntimeError, AttributeError, TypeError, IndexError):
            return False

    def remember_state(self) -> None:
        """Remember the leaf's version and gradient, at the end of a backward."""
        try:
            from torch._C import DisableTorchFunction

            with DisableTorchFunction():
                leaf = self._leaf() if self._leaf is not None else None
                if leaf is not None:
                    self._leaf_state = _leaf_state(leaf)
        except (RuntimeError, AttributeError, TypeError):
            self._leaf_state = None


def _leaf_state(leaf: Any) -> tuple[Any, ...]:
    grad = leaf.grad
    return leaf._version, id(grad), None if grad is None else grad._version


def _has_graph(result: Any) -> bool:
    """Return whether a forward's result, or a tensor directly in it, has a graph. Other types and
    deeper levels are skipped, because access runs the program's code. Modes do not see this."""
    from torch import Tensor
    from torch._C import DisableTorchFunction

    if isinstance(result, dict):
        result = dict.values(result)
    elif not isinstance(result, tuple | list):
        result = (result,)
    with DisableTorchFunction():
        return any(type(value) is Tensor and value.requires_grad for value in result)


def _find_leaf(outputs: Any) -> Any:
    """Return a parameter that the outputs depend on, else any leaf, or ``None``."""
    from torch.nn import Parameter

    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set(todo)
    any_leaf = None
    while todo and len(seen) < _MAX_NODES:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if isinstance(variable, Parameter):
                return variable
            any_leaf = variable
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                todo.append(next_node)
    return any_leaf


hide_from_warnings(globals())
