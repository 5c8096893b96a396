"""Which formats there are, and which of them a file is for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from advisor.core.errors import AdvisorError
from advisor.render.renderer import Options, Renderer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Formats:
    """The renderers of one kind of subject.

    ``package``: whose files are formats of ours. ``group``: entry points under which other packages
    name theirs, ``<format> = <module>:<class>``. ``subject``: what they write, with an article.
    """

    def __init__(self, package: str, group: str, subject: str) -> None:
        self.package = package
        self.group = group
        self.subject = subject

    @cached_property
    def bundled(self) -> tuple[str, ...]:
        """Names of ours, without an import of any."""
        return names_in(self.package)

    @property
    def installed(self) -> dict[str, EntryPoint]:
        """Name -> entry point of those of other packages; ours come first."""
        from importlib.metadata import entry_points  # not before another package's are asked for

        found = entry_points(group=self.group)
        return {point.name: point for point in found if point.name not in self.bundled}

    def __iter__(self) -> Iterator[str]:
        """Names of all of them, ours first."""
        yield from self.bundled
        yield from self.installed

    def renderer(self, name: str) -> Renderer[Any]:
        """The renderer of a format; only its file is imported. Raises AdvisorError: none has the
        name, or the one that has it cannot be loaded."""
        if name in self.bundled:
            return _of(importlib.import_module(f"{self.package}.{name}"))()
        point = self.installed.get(name)
        if point is None:
            known = ", ".join(self)
            raise AdvisorError(f"{self.subject} cannot be written as {name}; there are {known}")
        try:
            loaded = point.load()
            made = (_of(loaded) if inspect.ismodule(loaded) else loaded)()
            if not isinstance(made, Renderer):
                raise TypeError(f"{type(made).__name__} is no Renderer")
        except Exception as error:  # somebody else's code may raise anything
            why = f"{type(error).__name__}: {error}"[:200]
            raise AdvisorError(
                f"format package {point.value}: cannot be loaded ({why}); mend or uninstall it"
            ) from None
        return made

    def render(self, name: str, subject: Any, **options: Any) -> str:
        """A report or a comparison in a format; ``options`` as in
        :class:`~advisor.render.renderer.Options`. Raises AdvisorError as ``renderer`` does."""
        return self.renderer(name).render(subject, Options(**options))

    def of_file(self, output: Path) -> str | None:
        """The format that a file's suffix means; ``None``: it means none."""
        suffix = output.suffix.lower()
        names = self if suffix else ()
        return next((name for name in names if suffix in self.renderer(name).suffixes), None)


def names_in(package: str) -> tuple[str, ...]:
    """Names of the formats in a package of ours. It is not imported: what renders a comparison
    brings all of the analysis, and ``--help`` needs no more than names."""
    folder = Path(__file__).parents[1].joinpath(*package.split(".")[1:])
    return tuple(sorted(one.name for one in pkgutil.iter_modules([str(folder)])))


def _of(module: Any) -> type[Renderer[Any]]:
    """The renderer that stands in a file."""
    for value in vars(module).values():
        if (
            inspect.isclass(value)
            and issubclass(value, Renderer)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
        ):
            return value
    raise TypeError(f"{module.__name__} has no Renderer")


REPORTS: Final = Formats("advisor.render.report", "advisor.renderers", "a report")
COMPARISONS: Final = Formats(
    "advisor.render.compare", "advisor.comparison_renderers", "a comparison"
)
DECISIONS: Final = Formats(
    "advisor.render.gate", "advisor.decision_renderers", "what a gate answers"
)
JOBS: Final = Formats("advisor.render.job", "advisor.job_renderers", "the report of a job")
