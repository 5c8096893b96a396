"""Discovery of rules, readers, formats and knobs: the classes that a module defines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar, cast

Base = TypeVar("Base")


def classes_in(module: ModuleType, base: Callable[..., Base]) -> Iterator[type[Base]]:
    """Yield the classes derived from ``base``, a class that may be abstract, that a module defines
    itself, without abstract ones."""
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and issubclass(value, cast("type[Base]", base)) and not inspect.isabstract(value):
            yield value
