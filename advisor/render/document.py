"""Document: content on a subject as blocks that every format draws in its own way.

One function a subject builds it (``documents/``), one file a format draws it (``formats/``). Text
in blocks is plain: escaping, cleaning and wrapping are the format's."""

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
"""Meaning of a piece of text; each format has its own look for it."""


@dataclass(frozen=True)
class Span:
    text: str
    style: Style = ""
    title: str = ""
    """Full text that ``text`` is short for, where a format can show it on demand."""


Inline = str | Span | tuple[str | Span, ...]
"""Text in a line."""


@dataclass(frozen=True)
class RenderOptions:
    """Options of a renderer besides the subject. Each renderer reads those that apply to it."""

    width: int = 80
    """Columns of a line of text."""
    colour: bool = False
    """Whether the text goes to a terminal that has colours."""
    top: int | None = None
    """Number of findings shown in full; ``None``: as many as fit a screen, or all in a file."""
    details: bool = False
    """Show evidence, caveats, verification, skipped checks and limits in a terminal too."""
    brief: bool = False
    """Show the verdict, and the first three fixes with their gains; ``top`` where it is set."""
    analysis: Analysis | None = None
    """The measurements behind a report, for a timeline; ``None``: there is only the report."""
    clean: Callable[[str], str] = str
    """Function applied to names that come from the ``analysis``: leaves out what is private."""


DEFAULT = RenderOptions()


class Block:
    """A part of a document."""


@dataclass(frozen=True)
class Paragraph(Block):
    """Text that is wrapped. ``indent``: columns, where lines have columns."""

    text: Inline
    style: Style = ""
    mark: str = ""
    """Mark that stands before it in a terminal."""
    indent: int = 2
    spare: int = 0
    """Level from which a terminal leaves it out to fit a screen; 0: never. So for other blocks."""


@dataclass(frozen=True)
class TextField:
    label: str
    parts: Sequence[Inline]
    style: Style = ""
    detail: bool = False
    """Whether it is left out where room is short."""
    prose: bool = False
    """Whether these are sentences, of which the first will do where room is short."""
    spare: int = 0
    min_parts: int | None = None
    """Parts that stay where a terminal leaves something out to fit a screen; ``None``: all."""


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
    """Mark before each item, in a terminal."""
    title: str = ""


EvidenceRow = tuple[str, str, str]
"""Name of a measured value, the value, and the limit that it is compared with."""


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
    """Alignment: a letter a column, ``l`` or ``r``; empty: text first, then figures."""
    short: Sequence[Sequence[Inline]] | None = None
    """Rows that are shown where room is short; ``None``: all."""
    omitted_note: str = ""
    """Text that stands for the rows that ``short`` leaves out."""
    below: Sequence[str] = ()
    """Lines below the rows in a terminal, one each."""
    optional: Sequence[int] = ()
    """Columns that a terminal leaves out where they do not fit, the first of these first."""
    spare: int = 0
    min_rows: int | None = None
    """Rows that stay where a terminal leaves something out to fit a screen; ``None``: all."""

    @property
    def sides(self) -> str:
        """Alignment of each column: ``align``, or text first and then figures."""
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
    """A picture of data. A format that cannot draw it shows its table."""

    @abstractmethod
    def table(self) -> Grid | None:
        """Return the numbers; ``None``: only a page shows this."""

    @abstractmethod
    def html(self, *, small: bool = False) -> Markup:
        """Draw the picture for a page; ``small``: for a notebook's cell."""

    def lines(self, width: int, *, short: bool = False) -> list[list[tuple[str, str]]] | None:
        """Return lines for a terminal, of (text, style of rich); ``None``: the table will do.
        ``short``: as few as possible."""
        return None


@dataclass(frozen=True)
class Section(Block):
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    aside: str = ""
    folded: bool = False
    """Whether it is shown on demand: by a click on a page, by ``--details`` in a terminal."""
    detail: bool = False
    """Whether a terminal shows it with ``--details`` only; a page shows it always."""
    summary: str = ""
    """Text that stands in its place in a terminal: ``3 skipped checks``."""
    short: bool = False
    """Whether a notebook's cell shows it too."""
    spare: int = 0

    @property
    def has_lines(self) -> bool:
        """Whether there is anything in it for text in lines, which has no pictures."""
        return not all(isinstance(b, Figure) and b.table() is None for b in self.blocks)


@dataclass(frozen=True)
class Card(Block):
    """A finding, or something else that a reader may act on."""

    title: str
    blocks: Sequence[Block]
    number: str = ""
    gain: str = ""
    """Gain of acting on it, as text."""
    place: str = ""
    """Place to act at, in a few words."""
    tag: str = ""
    """Severity of the finding."""
    details: Sequence[Block] = ()
    """Blocks that are shown on demand."""
    fix: bool = True
    """Whether it counts among those of which a terminal shows the first ones in full."""
    always_full: bool = False
    """Whether it is always shown in full."""
    brief: bool = False
    """Whether a terminal shows it on a line, unless details are asked for."""


@dataclass(frozen=True)
class Document:
    """Content on one subject, whatever format draws it."""

    headline: str
    blocks: Sequence[Block]
    name: str
    """Kind of the document, such as ``report``."""
    status: str = ""
    """Class of the headline: ``healthy``, ``bad`` …"""
    style: str = "bold"
    """Style of the headline, in a terminal."""
    badge: str = ""
    """The status in words."""
    action: str = ""
    """First fix, that of the card numbered 1: a page shows it under the headline."""
    heading: str = ""
    """Heading above the headline where the document stands among others; empty: none."""
    footer: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    """Closing lines of a terminal."""
    data: Any = None
    """Data for JSON, where the document itself is the subject: dicts, lists, named tuples."""

    def to_json(self) -> bytes:
        """Return ``data`` as JSON, indented by two; NaN is null."""
        return msgspec.json.format(msgspec.json.encode(convert_tuples(self.data)), indent=2)


def convert_tuples(value: Any) -> Any:
    """Turn named tuples into dicts, however deep they lie."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: convert_tuples(item) for key, item in value.items()}
    return [convert_tuples(item) for item in value] if isinstance(value, list | tuple) else value


def cards(blocks: Iterable[Block]) -> list[Card]:
    """Yield all cards in their order, those in sections too."""
    result: list[Card] = []
    for block in blocks:
        if isinstance(block, Card):
            result.append(block)
        elif isinstance(block, Section) and not block.folded:
            result += cards(block.blocks)
    return result


def fact_line(fact: EvidenceRow) -> str:
    """Write a row of evidence: ``share of the step 19%, limit 5% (TraceLens)``."""
    name, value, limit = fact
    return f"{name} {value}, limit {limit}" if limit else f"{name} {value}"


def plain_text(text: Inline) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in spans(text))


def spans(text: Inline) -> tuple[str | Span, ...]:
    return text if isinstance(text, tuple) else (text,)
