"""A Document: what is said of a subject, as blocks that every format draws in its own way.

One function a subject builds it (``documents/``), one file a format draws it (``formats/``). Text
in blocks is plain: escaping, cleaning and wrapping are the format's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.render.html import Markup

Style = Literal["", "strong", "soft", "code", "good", "bad", "warn"]
"""What a piece of text means; each format has its own look for it."""


@dataclass(frozen=True)
class Span:
    """A piece of text with a style."""

    text: str
    style: Style = ""
    title: str = ""
    """The whole of what ``text`` is short for, where a format can show it on demand."""


Inline = str | Span | tuple[str | Span, ...]
"""Text in a line."""


@dataclass(frozen=True)
class RenderOptions:
    """What a renderer may need besides the subject. Each takes what means something to it."""

    width: int = 80
    """Columns, of text in lines."""
    colour: bool = False
    """The text goes to a terminal that has colours."""
    top: int | None = None
    """Findings that are shown in full; ``None``: as many as fit a screen, or all in a file."""
    details: bool = False
    """Show evidence, caveats, verification, skipped checks and limits in a terminal too."""
    brief: bool = False
    """Show the verdict and the three largest findings, a line each."""
    analysis: Analysis | None = None
    """The measurements behind a report, for a timeline; ``None``: there is only the report."""
    clean: Callable[[str], str] = str
    """Applied to names that come from the ``analysis``: leaves out what is private."""


DEFAULT = RenderOptions()


class Block:
    """A part of a document."""


@dataclass(frozen=True)
class Paragraph(Block):
    """Text that is wrapped. ``indent``: columns, where lines have columns."""

    text: Inline
    style: Style = ""
    mark: str = ""
    """Stands before it in a terminal."""
    indent: int = 2


@dataclass(frozen=True)
class TextField:
    """A label and the parts that follow it."""

    label: str
    parts: Sequence[Inline]
    style: Style = ""
    detail: bool = False
    """Left out where room is short."""
    prose: bool = False
    """Sentences, of which the first will do where room is short."""


@dataclass(frozen=True)
class FieldList(Block):
    """Labels with text beside them."""

    rows: Sequence[TextField]
    indent: int = 2


@dataclass(frozen=True)
class Items(Block):
    """A list of lines of text with a mark before each."""

    items: Sequence[Inline]
    mark: str = "•"
    """Before each, in a terminal."""
    title: str = ""


EvidenceRow = tuple[str, str, str]
"""What was measured, its value, the limit that it is compared with."""


@dataclass(frozen=True)
class EvidenceList(Block):
    """Measured values with their thresholds and sources."""

    rows: Sequence[EvidenceRow]


@dataclass(frozen=True)
class Grid(Block):
    """Cells in columns; the first is text, the others are figures where ``align`` is empty."""

    head: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    title: str = ""
    align: str = ""
    """A letter a column, ``l`` or ``r``."""
    short: Sequence[Sequence[Inline]] | None = None
    """Those of the rows that are shown where room is short; ``None``: all."""
    omitted_note: str = ""
    """What is said of the rows that ``short`` leaves out."""
    below: Sequence[str] = ()
    """A line below each row, in a terminal."""
    optional: Sequence[int] = ()
    """Columns that a terminal leaves out where they do not fit, the first of these first."""

    @property
    def sides(self) -> str:
        """``align``, or what stands for it."""
        return self.align or "l" + "r" * (len(self.head) - 1)


@dataclass(frozen=True)
class Code(Block):
    """Lines of a program."""

    text: str
    language: str = "python"
    label: str = "code"
    indent: int = 4


@dataclass(frozen=True)
class Tiles(Block):
    """Figures of merit on a page: (name, value, note). Text in lines has them elsewhere."""

    rows: Sequence[tuple[str, str, str]]


class Figure(Block):
    """A picture of data. What a format cannot draw is shown as its table."""

    @abstractmethod
    def table(self) -> Grid | None:
        """The numbers; ``None``: only a page shows this."""

    @abstractmethod
    def html(self, *, small: bool = False) -> Markup:
        """The picture for a page; ``small``: for a notebook's cell."""

    def lines(self, width: int) -> list[list[tuple[str, str]]] | None:
        """Lines for a terminal, of (text, style of rich); ``None``: the table will do."""
        return None


@dataclass(frozen=True)
class Section(Block):
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    aside: str = ""
    folded: bool = False
    """On a page it opens on demand, in a terminal ``--details`` shows it."""
    detail: bool = False
    """In a terminal ``--details`` shows it; a page shows it always."""
    summary: str = ""
    """What is said in its place in a terminal: ``3 skipped checks``."""
    short: bool = False
    """A notebook's cell shows it too."""

    @property
    def has_lines(self) -> bool:
        """Whether there is anything in it for text in lines, which has no pictures."""
        return not all(isinstance(b, Figure) and b.table() is None for b in self.blocks)


@dataclass(frozen=True)
class Card(Block):
    """A finding, or something else that somebody may act on."""

    title: str
    blocks: Sequence[Block]
    number: str = ""
    gain: str = ""
    """What acting on it brings."""
    place: str = ""
    """Where to act, in a few words."""
    tag: str = ""
    """How severe it is."""
    details: Sequence[Block] = ()
    """Shown on demand."""
    fix: bool = True
    """Counts among those of which a terminal shows the first ones in full."""
    always_full: bool = False
    """Always shown in full."""
    brief: bool = False
    """In a terminal a line, unless details are asked for."""


@dataclass(frozen=True)
class Document:
    """All that is said of a subject."""

    headline: str
    blocks: Sequence[Block]
    name: str
    """What it is: ``report``."""
    status: str = ""
    """Class of the headline: ``healthy``, ``bad`` …"""
    style: str = "bold"
    """Of the headline, in a terminal."""
    badge: str = ""
    """The status in words."""
    heading: str = ""
    """Above the headline where the document stands among others; empty: none."""
    footer: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    """Closing lines of a terminal."""
    data: Any = None
    """What JSON has of it, where the document itself is the subject: dicts, lists, named tuples."""

    def to_json(self) -> bytes:
        """``data`` as JSON, indented by two; NaN is null."""
        return msgspec.json.format(msgspec.json.encode(as_plain(self.data)), indent=2)


def as_plain(value: Any) -> Any:
    """Named tuples as dicts, however deep they lie."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value] if isinstance(value, list | tuple) else value


def cards(blocks: Iterable[Block]) -> list[Card]:
    """All cards in their order, those in sections too."""
    result: list[Card] = []
    for block in blocks:
        if isinstance(block, Card):
            result.append(block)
        elif isinstance(block, Section) and not block.folded:
            result += cards(block.blocks)
    return result


def fact_line(fact: EvidenceRow) -> str:
    """``share of the step 19%, limit 5% (TraceLens)``."""
    name, value, limit = fact
    return f"{name} {value}, limit {limit}" if limit else f"{name} {value}"


def plain_text(text: Inline) -> str:
    """The text without its meanings."""
    return "".join(part if isinstance(part, str) else part.text for part in spans(text))


def spans(text: Inline) -> tuple[str | Span, ...]:
    """The pieces of a text."""
    return text if isinstance(text, tuple) else (text,)
