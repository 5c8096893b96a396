"""Where the recorder listens: wrappers around a handful of torch's entry points.

Each wrapper does the user's call exactly once, with the user's arguments, result and exception.
What is ours around it writes on the tape, and what can fail besides is contained. All begin with
the same questions: does dynamo trace this (then they are as if they were not there: no graph
break, no guard on our state), are we inside something that is timed already, and is this the
watched thread? They spell out what a shared helper would do: each call of Python is a
microsecond where the caches are cold. ``quick`` has the same in C, for the usual case.

No module hooks: global ones put every submodule on torch's slow path and make compiled modules
warn, and hooks on an instance are pickled with the user's model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns as now
from types import MethodType
from typing import Any, NamedTuple, Protocol

from advisor.recording.clock import (
    BACKWARD,
    BACKWARD_END,
    BATCH,
    CLEARED,
    DATA,
    EXHAUSTED,
    FETCH,
    FETCHED,
    FETCHED_INSIDE,
    FORWARD,
    FORWARD_END,
    FORWARD_END_NO_GRAD,
    H2D,
    ITERATE,
    ITERATED,
    LEAVE,
    LOADER,
    MAX_TAPE,
    OPTIMIZED_BY,
    OPTIMIZER,
    OPTIMIZER_END,
    OTHER,
    RESET,
    SAVE,
    TOLD,
    Tape,
)
from advisor.recording.loaders import Loaders
from advisor.recording.outermost import PLACE, Direct, Outermost, compiled
from advisor.recording.quick import Quick, available


class Listener(Protocol):
    """What hooks talk to."""

    tape: Tape
    loaders: Loaders
    looping: list[Any]
    """Not empty: ``Recorder.steps`` waits for a batch."""

    def glance(self, batch: Any) -> Any:
        """Note what a batch is made of."""

    def entered(self, phase: int) -> None:
        """A phase is about to begin; called while somebody watches. Contained, as the next ones."""

    def left(self, phase: int) -> None:
        """A phase has ended, this one goes on."""

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def drain(self) -> None:
        """Read the tape, if it is to be read in this thread."""

    def look_again(self) -> None:
        """A loader is iterated for the first time: another model may be used with it."""

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: stop."""


class _Patch(NamedTuple):
    """One of torch's functions, replaced."""

    owner: Any
    name: str
    original: Any
    own: bool
    """It was the owner's; else inherited."""
    hook: Any
    quick: Any
    """What takes the hook's place after the first steps, or that itself."""


OVERRIDABLE = frozenset(("to", "cuda"))
"""Methods of tensors of which ``__torch_function__`` is told. torch takes the one that it tells of
from ``torch.Tensor``, so that it is our hook, and overrides look it up in tables: our hook has to
be equal to the original."""


class Equal:
    """A hook that is equal to what it is around, as those in C are."""

    def __init__(self, original: Any, hook: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self._hook, owner)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if type(other) is Equal else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()


class _Callback(NamedTuple):
    """One of the hooks that optimizers have."""

    handle: Any
    hook: Any
    quick: Any


class Hooks:
    """The wrappers, put in place by ``install`` and taken out by ``remove``. ``native``: use those
    in C, where they were built."""

    def __init__(self, listener: Listener, *, native: bool = False) -> None:
        self._on = listener
        self._patches: list[_Patch] = []
        self._callbacks: list[_Callback] = []
        self._quick = Quick(listener) if native and available() else None
        self._compiles = False
        """``torch.compile`` was called."""
        self.lifted = False
        """``Module.__call__`` is left alone: forwards are seen only where modules are called
        directly …"""
        self._bare = False
        """… and that is for good."""
        self.outermost = self._fresh()

    def install(self) -> None:
        """Listen. Raises AttributeError: this torch has another shape than those that are known."""
        import torch
        from torch.optim import optimizer as optim
        from torch.utils.data import dataloader

        wrap = self._patch
        wrap(dataloader._BaseDataLoaderIter, "__next__", _next(self._on))
        wrap(dataloader.DataLoader, "__iter__", _iter(self._on))
        wrap(torch.nn.Module, "__call__", _forward(self._on, self.outermost.met))
        wrap(torch, "compile", _compile(self._compiling))
        wrap(torch.nn.Module, "_replicate_for_data_parallel", _replicate)
        wrap(torch.Tensor, "to", _to(self._on))
        wrap(torch.Tensor, "cuda", _cuda(self._on))
        if hasattr(torch.autograd, "_engine_run_backward"):  # what both of them call
            wrap(torch.autograd, "_engine_run_backward", _backward(self._on))
        else:
            wrap(torch.autograd, "backward", _backward(self._on))
            wrap(torch.autograd, "grad", _backward(self._on))
        wrap(torch.amp.GradScaler, "step", _scaler_step(self._on))
        wrap(torch, "save", _save(self._on))
        wrap(optim.Optimizer, "zero_grad", _zero_grad(self._on))
        wrap(torch.nn.Module, "zero_grad", _zero_grad(self._on))
        opened: list[tuple[int, int]] = []
        hooks = _around_step(self._on, opened)
        quick = hooks if self._quick is None else self._quick.around_step(hooks, opened)
        handles = (
            optim.register_optimizer_step_pre_hook(hooks[0]),
            optim.register_optimizer_step_post_hook(hooks[1]),
        )
        self._callbacks = list(map(_Callback, handles, hooks, quick))

    def remove(self) -> None:
        """Put everything back. A wrapper that somebody has wrapped since stays, and passes
        through."""
        self.outermost.undo()
        self.outermost = self._fresh()
        for callback in self._callbacks:
            callback.handle.remove()
        self._callbacks.clear()
        for owner, name, original, own, *ours in reversed(self._patches):
            if any(vars(owner).get(name) is one for one in ours):
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        self._patches.clear()

    def stepped(self) -> None:
        """An optimizer has stepped: after the first few times, the hooks are replaced by those that
        cost less."""
        self._give_back("zero_grad")  # optimizers are seen
        self.outermost.stepped()
        if not (self.outermost.waits or self._compiles or compiled()):
            self._replace(lambda one: (one.hook, one.quick))

    def lift(self, *, for_good: bool = False) -> None:
        """Take the wrapper off ``Module.__call__`` until ``lower``, before a profiler with Python
        stacks starts: torch's tracer recognises modules by that function's code, the one it has
        when the first tracer of the process starts."""
        self.lifted = True
        self._bare = self._bare or for_good
        self._take_off()

    def lower(self) -> None:
        """That profiler has ended."""
        self.lifted = self._bare
        self._put_back()

    def _compiling(self) -> None:
        """Something is about to be compiled: dynamo must see functions of Python."""
        self._compiles = True
        self.outermost.stay()
        self._replace(lambda one: (one.quick, one.hook))

    def _replace(self, change: Callable[[_Patch | _Callback], tuple[Any, Any]]) -> None:
        """``change`` gives what is there now, unless somebody else has replaced it, and what is to
        be there. May be called while torch goes through the optimizers' hooks."""
        for patch in self._patches:
            there, then = change(patch)
            if there is not then and vars(patch.owner).get(patch.name) is there:
                setattr(patch.owner, patch.name, then)
        for callback in self._callbacks:
            there, then = change(callback)
            hooks, key = callback.handle.hooks_dict_ref(), callback.handle.id
            if there is not then and hooks is not None and hooks.get(key) is there:
                hooks[key] = then

    def _take_off(self) -> None:
        self._give_back("__call__")

    def _give_back(self, function: str) -> None:
        for owner, name, original, _, hook, _ in self._patches:
            if name == function and vars(owner).get(name) is hook:
                setattr(owner, name, original)

    def _put_back(self) -> None:
        """Unless outermost modules are called directly, or it is to stay off."""
        if self.lifted or self.outermost.direct:
            return
        for owner, name, original, _, hook, _ in self._patches:
            if name == "__call__" and vars(owner).get(name) is original:
                setattr(owner, name, hook)

    def _fresh(self) -> Outermost:
        return Outermost(self._direct, self._put_back, self._take_off)

    def _direct(self, call: Callable[..., Any]) -> Callable[..., Any]:
        hook: Callable[..., Any] = _forward(self._on)(call)
        if self._quick is not None:
            hook = self._quick.wrapper("__call__", call, hook)
        return hook

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        hook: Any = functools.wraps(original)(make(original))
        quick = hook
        # the call of all modules is what dynamo meets first: if need be, before it is known
        if self._quick is not None and name != "__call__":
            quick = self._quick.wrapper(name, original, hook)
        if name in OVERRIDABLE:
            hook = quick = Equal(original, hook) if quick is hook else quick
        setattr(owner, name, hook)
        self._patches.append(_Patch(owner, name, original, own, hook, quick))


def _next(on: Listener) -> Callable[[Any], Any]:
    from torch import Tensor

    tape, looping, glance = on.tape, on.looping, on.glance
    put, here = tape.log.extend, tape.here

    def make(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            if get_ident() != here[0]:
                return original(self)
            before = here[1]
            if before == DATA:  # inside Recorder.steps, or a dataset's own loader
                batch = original(self)
                if looping:
                    try:
                        put((FETCHED_INSIDE, now(), BATCH, glance(batch)))
                        looping.clear()
                    except Exception as error:
                        on.broken(error)
                return batch
            if before == OPTIMIZER:  # one that raised: its hook for the end was not called
                before = OTHER
            if here[2]:
                on.entered(DATA)
            put((FETCH, now()))
            here[1] = DATA
            try:
                if here[3]:
                    on.drain()
                batch = original(self)
            except BaseException as raised:
                here[1] = before
                put((EXHAUSTED if isinstance(raised, StopIteration) else LEAVE, now()))
                if here[2]:
                    on.left(before)
                raise
            here[1] = before
            try:
                end = now()
                kind = type(batch)
                # two tensors, the usual batch: what ``glance`` would find
                if (
                    (kind is list or kind is tuple)
                    and len(batch) == 2
                    and type(batch[0]) is Tensor
                    and type(batch[1]) is Tensor
                ):
                    x, y = batch
                    put((FETCHED, end, BATCH, (((x.shape, x.dtype), (y.shape, y.dtype)), None)))
                else:
                    put((FETCHED, end, BATCH, glance(batch)))
                number = getattr(self, "_advisor_loader", -1)
                if number != here[TOLD]:
                    here[TOLD] = number
                    put((LOADER, number))
                if here[2]:
                    on.left(before)
            except Exception as error:
                on.broken(error)
            return batch

        return __next__

    return make


def _iter(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape
    put, here = tape.log.extend, tape.here

    def make(original: Any) -> Any:
        def __iter__(self: Any) -> Any:
            if get_ident() != here[0] or here[1] == DATA:
                return original(self)
            begin = now()
            put((ITERATE, begin))
            iterator = original(self)
            try:
                data, new = on.loaders.iterated(self, iterator, now() - begin)
                if data is not None:
                    put((ITERATED, data))
                if new:
                    on.look_again()
            except Exception as error:
                on.broken(error)
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
    """A wrapper that times calls as a phase, except in the phases ``inside`` which it is part of.

    ``applies`` looks at the arguments. ``end`` is the code of a call that returned.
    """
    compiling = _compiling()
    tape = on.tape
    put, here = tape.log.extend, tape.here

    def make(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if (
                compiling()
                or here[1] in inside
                or get_ident() != here[0]
                or (applies is not None and not applies(args, kwargs))
            ):
                return original(*args, **kwargs)
            before = here[1]
            if here[2]:
                on.entered(phase)
            here[1] = phase
            put((phase, now()))
            code = LEAVE
            try:
                result = original(*args, **kwargs)
                code = end
            finally:
                here[1] = before
                put((code, now()))
                if here[2]:
                    on.left(before)
            if end == OPTIMIZER_END and here[3]:
                on.drain()
            return result

        return timed

    return make


def _compile(about_to: Callable[[], None]) -> Callable[[Any], Any]:
    """``torch.compile``, and ``Module.compile`` which calls it."""

    def make(original: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            about_to()
            return original(*args, **kwargs)

        return compiled

    return make


def _replicate(original: Any) -> Any:
    """``nn.DataParallel`` copies a module's attributes as they are: its call must be the copy's."""

    def replicate(self: Any) -> Any:
        copy = original(self)
        if type(vars(copy).get(PLACE)) is Direct:
            del vars(copy)[PLACE]
        return copy

    return replicate


def _forward(on: Listener, met: Callable[[Any], None] | None = None) -> Callable[[Any], Any]:
    """A module's call: a forward, unless it is inside of one. ``met`` is told of the module."""
    from torch import is_grad_enabled

    compiling = _compiling()
    tape = on.tape
    put, here = tape.log.extend, tape.here
    inside = frozenset((DATA, FORWARD, BACKWARD))

    def make(original: Any) -> Any:
        def __call__(*args: Any, **kwargs: Any) -> Any:
            if compiling() or here[1] in inside or get_ident() != here[0]:
                return original(*args, **kwargs)
            before = here[1]
            if met is not None:
                met(args[0])
            if here[2]:
                on.entered(FORWARD)
            here[1] = FORWARD
            put((FORWARD, now()))
            try:
                return original(*args, **kwargs)
            finally:
                here[1] = before
                put((FORWARD_END if is_grad_enabled() else FORWARD_END_NO_GRAD, now()))
                if here[2]:
                    on.left(before)

        return __call__

    return make


_UPLOADS_INSIDE = frozenset((DATA, H2D, FORWARD, BACKWARD, OPTIMIZER))


def _to(on: Listener) -> Callable[[Any], Any]:
    """``Tensor.to`` from the host to a device."""
    from torch import device

    is_cpu = _told("is_cpu")

    def applies(args: Any, kwargs: Any) -> bool:
        target: Any = args[1] if len(args) > 1 else kwargs.get("device")
        kind = type(target)
        if kind is device:
            there = target.type != "cpu"
        else:
            there = kind is int or (kind is str and not target.startswith("cpu"))
        return bool(there and is_cpu(args[0]))

    return _timed(on, H2D, inside=_UPLOADS_INSIDE, applies=applies)


def _cuda(on: Listener) -> Callable[[Any], Any]:
    is_cuda = _told("is_cuda")
    applies = lambda args, kwargs: not is_cuda(args[0])  # noqa: E731
    return _timed(on, H2D, inside=_UPLOADS_INSIDE, applies=applies)


def _told(name: str) -> Callable[[Any], Any]:
    """An attribute of a tensor. Overrides (``__torch_function__``) do not hear that we ask."""
    from torch import Tensor
    from torch._C import DisableTorchFunctionSubclass as silently

    of = operator.attrgetter(name)

    def told(tensor: Any) -> Any:
        if type(tensor) is Tensor:
            return of(tensor)
        with silently():
            return of(tensor)

    return told


def _backward(on: Listener) -> Callable[[Any], Any]:
    return _timed(on, BACKWARD, inside=frozenset((DATA, FORWARD, BACKWARD)), end=BACKWARD_END)


def _scaler_step(on: Listener) -> Callable[[Any], Any]:
    """A scaler may leave the optimizer out (infinite gradients): it was a step all the same."""
    put = on.tape.log.extend

    def applies(args: Any, kwargs: Any) -> bool:
        put((OPTIMIZED_BY, id(args[1]) if len(args) > 1 else 0))
        return True

    return _timed(
        on,
        OPTIMIZER,
        inside=frozenset((DATA, OPTIMIZER)),
        end=OPTIMIZER_END,
        applies=applies,
    )


def _around_step(
    on: Listener, opened: list[tuple[int, int]]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks of all optimizers, and the steps that have begun. The second is not called when the
    optimizer raises."""
    compiling = _compiling()
    tape = on.tape
    log, put, here = tape.log, tape.log.extend, tape.here

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling() or get_ident() != here[0]:
            return
        phase = here[1]
        if opened and (phase != OPTIMIZER or opened[-1][0] == id(optimizer)):
            opened.clear()  # one that raised
            put((RESET, now()))
            if here[2]:
                on.left(OTHER)
            phase = OTHER
        opened.append((id(optimizer), phase))
        if here[2]:
            on.entered(OPTIMIZER)
        here[1] = OPTIMIZER
        put((OPTIMIZER, now()))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling() or get_ident() != here[0] or not opened:
            return
        number, here[1] = opened.pop()
        if here[2]:
            on.left(here[1])
        put((OPTIMIZED_BY, number, OPTIMIZER_END, now()))
        if here[3] or len(log) > MAX_TAPE:
            on.stepped()
            on.drain()

    return before, after


def _save(on: Listener) -> Callable[[Any], Any]:
    tape = on.tape

    def make(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == tape.here[0]:
                tape.log.extend((SAVE, now()))
            return original(*args, **kwargs)

        return save

    return make


def _zero_grad(on: Listener) -> Callable[[Any], Any]:
    """Gradients are cleared. Where a compiled function holds the optimizer's step, its hooks are
    not called, and this is what is seen of it."""
    compiling = _compiling()
    put, here = on.tape.log.extend, on.tape.here
    inside = frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER))

    def make(original: Any) -> Any:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if not (compiling() or here[1] in inside or get_ident() != here[0]) and compiled():
                put((CLEARED, now()))
            return original(*args, **kwargs)

        return zero_grad

    return make


def _compiling() -> Callable[[], bool]:
    """Whether dynamo traces this call: it takes the answer for a constant. ``is_compiling`` would
    also know of export, at five times the cost; there our few lines do no harm."""
    from torch.compiler import is_dynamo_compiling

    asked: Callable[[], bool] = is_dynamo_compiling
    return asked
