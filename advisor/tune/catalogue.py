"""Which levers there are."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from advisor.core.errors import AdvisorError
from advisor.tune.knob import Knob


@cache
def all_knobs() -> dict[str, type[Knob]]:
    """All of them by id, in the order of their files."""
    import advisor.tune.knobs as folder

    found: dict[str, type[Knob]] = {}
    for one in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        module = importlib.import_module(one.name)
        for cls in vars(module).values():
            if (
                inspect.isclass(cls)
                and issubclass(cls, Knob)
                and cls.__module__ == one.name
                and cls.id
            ):
                found[cls.id] = cls
    return found


def find_knob(name: str) -> Knob:
    """The lever of an id. Raises AdvisorError: there is none."""
    known = all_knobs()
    if name not in known:
        raise AdvisorError(f"no lever {name!r}: there are {', '.join(sorted(known))}")
    return known[name]()
