"""Ways for knobs to change what a program calls: wrappers around a few entry points of torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

LOADERS = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by what ``make`` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def ignore_assignments(owner: Any, *names: str) -> None:
    """Keep attributes of ``torch.backends``: what is assigned to them is passed over."""
    kind: Any = type(owner)
    original = kind.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if self is not owner or name not in names:
            original(self, name, value)

    kind.__setattr__ = __setattr__


def loader_arguments(change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the arguments of each DataLoader, by name, as they are given."""
    from torch.utils.data import DataLoader

    names = list(inspect.signature(DataLoader.__init__).parameters)[1:]

    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            change(given)
            original(self, **given)

        return __init__

    wrap(DataLoader, "__init__", make)


def optimizer_arguments(option: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the arguments of each of torch's own optimizers that has ``option``."""
    import torch

    for cls in vars(torch.optim).values():
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
            continue
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        if option in names and "__init__" in vars(cls):
            wrap(cls, "__init__", functools.partial(_with_names, names, change))


def _with_names(names: list[str], change: Callable[[dict[str, Any]], None], original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self).__init__ is not __init__:  # a class of the user's, derived: it knows better
            original(self, *args, **kwargs)
            return
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        change(given)
        original(self, **{name: value for name, value in given.items() if value is not None})

    return __init__


def at_first_forward(begin: Callable[[Any], None]) -> None:
    """Call ``begin`` with each outermost module that is called until the first optimizer step,
    before its first forward. No hook stays: global ones slow every module down."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import optimizer as optim

    seen: set[int] = set()

    def before(module: Any, args: Any) -> None:
        if id(module) in seen or _passes_through(module):
            return
        seen.update(id(item) for item in module.modules())
        begin(module)

    handle = register_module_forward_pre_hook(before)

    def after(*_: Any) -> None:
        handle.remove()  # again after later steps, which does nothing

    optim.register_optimizer_step_post_hook(after)


def _passes_through(module: Any) -> bool:
    """Neither weights nor parts: a loss, an activation called by itself."""
    return not any(True for _ in module.parameters())


def around_forwards(call: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Let ``call(module, go)`` run each forward of each outermost module but the first of all,
    which has begun when it is found."""

    def begin(module: Any) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(module, lambda: original(*args, **kwargs))

        module.forward = functools.wraps(original)(forward)

    at_first_forward(begin)
