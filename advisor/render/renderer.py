"""Renderer: what every format is written by; and what it is told of where the text goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from advisor.measure import Analysis

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Options:
    """What a renderer may need besides the report. Each takes what means something to it."""

    width: int = 80
    """Columns, of text in lines."""
    colour: bool = False
    """The text goes to a terminal that has colours."""
    top: int | None = None
    """Findings that are told in full; ``None``: all."""
    analysis: Analysis | None = None
    """The measurements behind the report, for a timeline; ``None``: there is only the report."""
    clean: Callable[[str], str] = str
    """Applied to names that come from the ``analysis``: leaves out what is private."""


DEFAULT = Options()


class Renderer(ABC, Generic[Subject]):
    """One format of a ``Subject``: a Report, or a Comparison.

    Renderers are found like rules and readers: those in ``advisor/render/report/`` and
    ``advisor/render/compare/``, and those that installed packages name under the entry points
    of :class:`~advisor.render.formats.Formats`. A renderer is made without arguments, reads what it
    is given, and computes nothing: figures are formatted by ``core.text``, and what is drawn is
    data of :mod:`advisor.advise.views`.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of files that are written in this format unless another is asked for, with the dot."""

    @abstractmethod
    def render(self, subject: Subject, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed. Names in it come from traces: whatever the text is read
        by must take them for names."""
