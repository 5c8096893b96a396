"""Discovery of rules, readers, formats and knobs: the classes that a module defines, and packages
of others."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TypeVar, cast

from advisor.core.errors import AdvisorError

Base = TypeVar("Base")


def classes_in(module: ModuleType, base: Callable[..., Base]) -> Iterator[type[Base]]:
    """Yield the classes derived from ``base``, a class that may be abstract, that a module defines
    itself, without abstract ones."""
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and issubclass(value, cast("type[Base]", base)) and not inspect.isabstract(value):
            yield value


@contextmanager
def loading(point: EntryPoint, what: str) -> Iterator[None]:
    """Raise AdvisorError in one line for whatever another package raises while it is loaded.
    ``what``: kind of package, ``reader``."""
    try:
        yield
    except Exception as error:  # somebody else's code may raise anything
        why = f"{type(error).__name__}: {error}"[:200]
        raise AdvisorError(
            f"{what} package {point.value}: cannot be loaded ({why}); mend or uninstall it"
        ) from None
