"""Discovery of rules, readers, formats and knobs: classes that a module defines, and third-party
packages."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TypeVar, cast

from advisor.core.errors import AdvisorError

Base = TypeVar("Base")


def classes_in(module: ModuleType, base: Callable[..., Base]) -> Iterator[type[Base]]:
    """Yield the concrete classes that a module itself defines and that derive from ``base``.
    ``base`` may be abstract."""
    for value in vars(module).values():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and issubclass(value, cast("type[Base]", base)) and not inspect.isabstract(value):
            yield value


@contextmanager
def loading(point: EntryPoint, what: str) -> Iterator[None]:
    """Turn any error while a package is loaded into a one-line AdvisorError. ``what``: kind of
    package, such as ``reader``."""
    try:
        yield
    except Exception as error:  # third-party code may raise anything
        why = f"{type(error).__name__}: {error}"[:200]
        raise AdvisorError(
            f"{what} package {point.value}: cannot be loaded ({why}); mend or uninstall it"
        ) from None
