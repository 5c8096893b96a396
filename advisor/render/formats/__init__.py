"""Formats by name and by file suffix, one file per format."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

from advisor.core.discovery import classes_in, loading
from advisor.core.errors import AdvisorError
from advisor.render.renderer import Renderer, RenderOptions


class Formats:
    """The formats of one kind of subject. ``subject``: its name with an article. ``group``: entry
    points of other packages, ``<format> = <module>:<class>``. ``without``: bundled formats that do
    not support it."""

    def __init__(self, subject: str, group: str, without: tuple[str, ...] = ()) -> None:
        self.subject = subject
        self.group = group
        names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
        self.bundled = tuple(sorted(name for name in names if name not in without))

    @property
    def external(self) -> dict[str, EntryPoint]:
        """Return entry points of other packages' formats by name. Bundled formats take
        precedence."""
        from importlib.metadata import entry_points  # only imported for other packages' formats

        points = entry_points(group=self.group)
        return {point.name: point for point in points if point.name not in self.bundled}

    def __iter__(self) -> Iterator[str]:
        """Yield names of all formats, bundled ones first."""
        yield from self.bundled
        yield from self.external

    def renderer(self, name: str) -> Renderer[Any]:
        """Return the renderer of a format, importing only its file. Raises AdvisorError if there is
        none of this name, or if it cannot be loaded."""
        if name in self.bundled:
            return _class_in(importlib.import_module(f"{__name__}.{name}"))()
        point = self.external.get(name)
        if point is None:
            known = ", ".join(self)
            raise AdvisorError(f"{name}: {self.subject} is written as one of {known}")
        with loading(point, "format"):
            loaded = point.load()
            instance = (_class_in(loaded) if inspect.ismodule(loaded) else loaded)()
            if not isinstance(instance, Renderer):
                raise TypeError(f"{type(instance).__name__} is no Renderer")
        return instance

    def render(self, name: str, subject: Any, **options: Any) -> str:
        """Write a subject in a format. ``options``: see ``RenderOptions``. Raises AdvisorError as
        ``renderer`` does."""
        return self.renderer(name).render(subject, RenderOptions(**options))

    def by_suffix(self, output: Path) -> str | None:
        """Return the format of a file's suffix, or ``None`` if there is none."""
        suffix = output.suffix.lower()
        names = self if suffix else ()
        return next((name for name in names if suffix in self.renderer(name).suffixes), None)


def _class_in(module: Any) -> type[Renderer[Any]]:
    own: type[Renderer[Any]] | None = next(classes_in(module, Renderer), None)
    if own is None:
        raise TypeError(f"{module.__name__} has no Renderer")
    return own


REPORTS: Final = Formats("a report", "advisor.renderers")
COMPARISONS: Final = Formats(
    "a comparison", "advisor.comparison_renderers", without=("agent", "github", "sarif")
)
DECISIONS: Final = Formats(
    "a gate decision", "advisor.decision_renderers", without=("agent", "notebook", "sarif")
)
TRIALS: Final = Formats(
    "a report of trials",
    "advisor.trial_renderers",
    without=("agent", "github", "sarif", "notebook"),
)
PREDICTIONS: Final = Formats(
    "a prediction", "advisor.prediction_renderers", without=("agent", "github", "sarif", "notebook")
)
