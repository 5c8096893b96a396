"""Where the recorder listens: wrappers around a handful of torch's entry points.

Each wrapper does the user's call exactly once, with the user's arguments, result and exception;
what is ours around it is contained. All begin with the same two questions: is torch compiling or
exporting (then they are as if they were not there: no graph break, no guard on our state), and is
this the watched thread (``Clock.ident``; -1 when recording is off or in a forked child)?

No module hooks: global ones put every submodule on torch's slow path and make compiled modules
warn, and hooks on an instance are pickled with the user's model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

from advisor.recording.clock import BACKWARD, DATA, FORWARD, H2D, OPTIMIZER, Clock
from advisor.recording.loaders import Loaders
from advisor.recording.steps import Steps


class Listener(Protocol):
    """What hooks talk to."""

    clock: Clock
    steps: Steps
    loaders: Loaders

    def batch(self, batch: Any) -> None:
        """A loader gave this."""

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: stop."""


class Hooks:
    """The wrappers, put in place by ``install`` and taken out by ``remove``."""

    def __init__(self, listener: Listener) -> None:
        self._on = listener
        self._patches: list[tuple[Any, str, Any, Any, bool]] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        """Listen. Raises AttributeError: this torch has another shape than those that are known."""
        import torch
        from torch.optim import optimizer as optim
        from torch.utils.data import dataloader

        wrap = self._patch
        wrap(dataloader._BaseDataLoaderIter, "__next__", _next(self._on))
        wrap(dataloader.DataLoader, "__iter__", _iter(self._on))
        wrap(torch.nn.Module, "__call__", _call(self._on))
        wrap(torch.Tensor, "to", _to(self._on))
        wrap(torch.Tensor, "cuda", _cuda(self._on))
        wrap(torch.autograd, "backward", _backward(self._on))
        wrap(torch.autograd, "grad", _backward(self._on))
        wrap(optim.Optimizer, "zero_grad", _zero_grad(self._on))
        wrap(torch.amp.GradScaler, "step", _scaler_step(self._on))
        wrap(torch, "save", _save(self._on))
        self._handles = [
            optim.register_optimizer_step_pre_hook(_before_step(self._on)),
            optim.register_optimizer_step_post_hook(_after_step(self._on)),
        ]

    def remove(self) -> None:
        """Put everything back. A wrapper that somebody has wrapped since stays, and passes
        through."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for owner, name, ours, original, own in reversed(self._patches):
            if vars(owner).get(name) is ours:
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        self._patches.clear()

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        ours = functools.wraps(original)(make(original))
        setattr(owner, name, ours)
        self._patches.append((owner, name, ours, original, own))


def _next(on: Listener) -> Callable[[Any], Any]:
    clock, steps, loaders = on.clock, on.steps, on.loaders

    def make(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            if get_ident() != clock.ident:
                return original(self)
            outer = clock.cur == DATA  # inside Recorder.steps, or a dataset's own loader
            depth = len(clock.stack)
            try:
                if not outer:
                    steps.fetching()
                    depth = len(clock.stack)
                    clock.enter(DATA)
            except Exception as error:
                on.broken(error)
            try:
                batch = original(self)
            except BaseException as raised:
                try:
                    clock.leave_to(depth)
                    if isinstance(raised, StopIteration) and not outer:
                        steps.exhausted()
                        loaders.exhausted(self)
                except Exception as error:
                    on.broken(error)
                raise
            try:
                clock.leave_to(depth)
                if not outer or steps.explicit:
                    steps.fetched()
                    loaders.fetched(self)
                    on.batch(batch)
            except Exception as error:
                on.broken(error)
            return batch

        return __next__

    return make


def _iter(on: Listener) -> Callable[[Any], Any]:
    clock, steps, loaders = on.clock, on.steps, on.loaders

    def make(original: Any) -> Any:
        def __iter__(self: Any) -> Any:
            if get_ident() != clock.ident or clock.cur == DATA:
                return original(self)
            try:
                steps.iterating()
            except Exception as error:
                on.broken(error)
            begin = perf_counter_ns()
            iterator = original(self)
            try:
                loaders.iterated(self, iterator, perf_counter_ns() - begin)
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
    opens: bool = True,
    applies: Callable[[Any, Any], bool] | None = None,
    done: Callable[[Any], None] | None = None,
    always: Callable[[], None] | None = None,
) -> Callable[[Any], Any]:
    """A wrapper that times calls as a phase, except in the phases ``inside`` which it is part of.

    ``opens``: a step may begin with it. ``applies`` looks at the arguments, ``done`` is told of
    them after a call that returned, ``always`` after every call.
    """
    from torch.compiler import is_compiling

    clock, steps = on.clock, on.steps
    stack = clock.stack

    def make(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or clock.cur in inside or get_ident() != clock.ident:
                return original(*args, **kwargs)
            try:
                if applies is not None and not applies(args, kwargs):
                    return original(*args, **kwargs)
                if opens and not steps.open:
                    steps.active()
                depth = len(stack)
                clock.enter(phase)
            except Exception as error:
                on.broken(error)
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            finally:
                try:
                    clock.leave_to(depth)
                    if always is not None:
                        always()
                except Exception as error:
                    on.broken(error)
            if done is not None:
                try:
                    done(args)
                except Exception as error:
                    on.broken(error)
            return result

        return timed

    return make


def _call(on: Listener) -> Callable[[Any], Any]:
    """``Module.__call__``: of the outermost module; those inside pass through."""
    from torch import is_grad_enabled

    steps = on.steps

    def always() -> None:
        steps.forwarded(is_grad_enabled())

    from torch.compiler import is_compiling

    clock, inside = on.clock, frozenset((DATA, FORWARD, BACKWARD))
    timing = _timed(on, FORWARD, inside=inside, always=always)

    def make(original: Any) -> Any:
        timed = timing(original)

        # With stacks, torch's profiler takes every frame with this function's code for the call of
        # a module and reads its local ``self``: without one, or with code that other wrappers
        # share, the process crashes (torch 2.13).
        def module_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or clock.cur in inside:
                return original(self, *args, **kwargs)
            return timed(self, *args, **kwargs)

        return module_call

    return make


_UPLOADS_INSIDE = frozenset((DATA, H2D, FORWARD, BACKWARD, OPTIMIZER))


def _to(on: Listener) -> Callable[[Any], Any]:
    def applies(args: Any, kwargs: Any) -> bool:
        target = args[1] if len(args) > 1 else kwargs.get("device")
        return target is not None and _is_upload(args[0], target)

    return _timed(on, H2D, inside=_UPLOADS_INSIDE, opens=False, applies=applies)


def _cuda(on: Listener) -> Callable[[Any], Any]:
    def applies(args: Any, kwargs: Any) -> bool:
        return not args[0].is_cuda

    return _timed(on, H2D, inside=_UPLOADS_INSIDE, opens=False, applies=applies)


def _is_upload(tensor: Any, target: Any) -> bool:
    """Whether a copy to this target leaves the host's memory."""
    if not tensor.is_cpu:
        return False
    if isinstance(target, str):
        return not target.startswith("cpu")
    if isinstance(target, int):
        return True
    kind = getattr(target, "type", None)  # of a torch.device; a tensor's or dtype's is no text
    return isinstance(kind, str) and kind != "cpu"


def _backward(on: Listener) -> Callable[[Any], Any]:
    steps, loaders = on.steps, on.loaders

    def done(args: Any) -> None:
        steps.backwarded()
        loaders.trained()

    return _timed(on, BACKWARD, inside=frozenset((DATA, FORWARD, BACKWARD)), done=done)


def _zero_grad(on: Listener) -> Callable[[Any], Any]:
    return _timed(on, OPTIMIZER, inside=frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER)))


def _scaler_step(on: Listener) -> Callable[[Any], Any]:
    """A scaler may leave the optimizer out (infinite gradients): it was a step all the same."""
    steps = on.steps

    def done(args: Any) -> None:
        steps.optimized(id(args[1]) if len(args) > 1 else 0)

    return _timed(on, OPTIMIZER, inside=frozenset((DATA, OPTIMIZER)), done=done)


def _before_step(on: Listener) -> Callable[[Any, Any, Any], None]:
    from torch.compiler import is_compiling

    clock, steps = on.clock, on.steps

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or get_ident() != clock.ident:
            return
        try:
            if not steps.open:
                steps.active()
            clock.enter(OPTIMIZER)
        except Exception as error:
            on.broken(error)

    return before


def _after_step(on: Listener) -> Callable[[Any, Any, Any], None]:
    from torch.compiler import is_compiling

    clock, steps = on.clock, on.steps

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or get_ident() != clock.ident:
            return
        try:
            clock.leave()
            if clock.cur != OPTIMIZER:  # else a scaler or another optimizer is around it
                steps.optimized(id(optimizer))
        except Exception as error:
            on.broken(error)

    return after


def _save(on: Listener) -> Callable[[Any], Any]:
    clock, steps = on.clock, on.steps

    def make(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == clock.ident:
                try:
                    steps.saving()
                except Exception as error:
                    on.broken(error)
            return original(*args, **kwargs)

        return save

    return make
