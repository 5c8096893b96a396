"""Document: content on a subject as blocks, which each format draws in its own way.

One function per subject builds it (``documents/``), and one file per format draws it
(``formats/``). Text in blocks is plain. The format escapes, cleans and wraps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.render.html import Markup

Style = Literal["", "strong", "soft", "code", "good", "bad", "warn"]
"""Meaning of a piece of text. Each format has its own look for it."""


@dataclass(frozen=True)
class Span:
    text: str
    style: Style = ""
    title: str = ""
    """Full version of ``text``, for formats that can show it on demand."""


Inline = str | Span | tuple[str | Span, ...]
"""Text within a line."""


@dataclass(frozen=True)
class RenderOptions:
    """Options of a renderer in addition to the subject. Each renderer reads the options that apply
    to it."""

    width: int = 80
    """Width of the text, columns."""
    colour: bool = False
    """Whether the text is for a terminal with colours."""
    top: int | None = None
    """Number of findings shown in full, or ``None`` for as many as fit a screen, or all in a
    file."""
    details: bool = False
    """Whether a terminal also shows evidence, caveats, verification, skipped checks and limits."""
    brief: bool = False
    """Whether to show only the verdict and the gains of the first three fixes, or ``top`` fixes."""
    analysis: Analysis | None = None
    """Measurements behind a report, for a timeline, or ``None`` if there is only the report."""
    clean: Callable[[str], str] = str
    """Function that removes private parts from names in the ``analysis``."""


DEFAULT = RenderOptions()


class Block:
    """A part of a document."""


@dataclass(frozen=True)
class Paragraph(Block):
    """Wrapped text. ``indent``: in columns, for formats with columns."""

    text: Inline
    style: Style = ""
    mark: str = ""
    """Mark before the paragraph in a terminal."""
    indent: int = 2
    spare: int = 0
    """Level at which a terminal starts to leave the block out to fit a screen, or 0 for never."""


@dataclass(frozen=True)
class TextField:
    label: str
    parts: Sequence[Inline]
    style: Style = ""
    detail: bool = False
    """Whether the field is left out if space is short."""
    prose: bool = False
    """Whether the parts are sentences, of which the first one is enough if space is short."""
    spare: int = 0
    min_parts: int | None = None
    """Number of parts that a terminal keeps to fit a screen, or ``None`` for all."""
    is_list: bool = False
    """Whether the parts are shares of one whole, and a shortened line ends with ``…``."""
    is_note: bool = False
    """Whether the field is a note on a gain, which a terminal keeps if anything fits."""
    quoted: bool = False
    """Whether the field holds a figure of the headline. A terminal always shows it then."""


@dataclass(frozen=True)
class FieldList(Block):
    """Labels with text next to them."""

    rows: Sequence[TextField]
    indent: int = 2


@dataclass(frozen=True)
class Items(Block):
    """A list of lines of text, each with a mark before it."""

    items: Sequence[Inline]
    mark: str = "•"
    """Mark before each item, in a terminal."""
    title: str = ""


EvidenceRow = tuple[str, str, str]
"""Name of a measured value, the value, and its limit."""


@dataclass(frozen=True)
class EvidenceList(Block):
    """Measured values with their thresholds and sources."""

    rows: Sequence[EvidenceRow]


@dataclass(frozen=True)
class Grid(Block):
    """Cells in columns. If ``align`` is empty, the first is text and the others are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    title: str = ""
    align: str = ""
    """Alignment, one letter per column, ``l`` or ``r``. Empty for text first, then figures."""
    short: Sequence[Sequence[Inline]] | None = None
    """Rows to show if space is short, or ``None`` for all."""
    omitted_note: str = ""
    """Text in place of the rows that ``short`` leaves out."""
    below: Sequence[str] = ()
    """Lines in a terminal, one below each row."""
    optional: Sequence[int] = ()
    """Columns that a terminal leaves out if they do not fit, in this order."""
    spare: int = 0
    min_rows: int | None = None
    """Number of rows that a terminal keeps to fit a screen, or ``None`` for all."""

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
    """Figures of merit on a page: (name, value, note). Text formats show them elsewhere."""

    rows: Sequence[tuple[str, str, str]]


class Figure(Block):
    """A picture of data. A format that cannot draw it shows its table."""

    @abstractmethod
    def table(self) -> Grid | None:
        """Return the numbers, or ``None`` if only a page shows this figure."""

    @abstractmethod
    def html(self, *, small: bool = False) -> Markup:
        """Draw the picture for a page. ``small``: for a notebook's cell."""

    def lines(self, width: int, *, short: bool = False) -> list[list[tuple[str, str]]] | None:
        """Return lines of (text, rich style) for a terminal, or ``None`` to show the table.
        ``short``: as few lines as possible."""
        return None


@dataclass(frozen=True)
class Section(Block):
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    aside: str = ""
    folded: bool = False
    """Whether it is shown on demand, with a click on a page or ``--details`` in a terminal."""
    detail: bool = False
    """Whether a terminal only shows it with ``--details``. A page always shows it."""
    summary: str = ""
    """Text in its place in a terminal, such as ``3 skipped checks``."""
    short: bool = False
    """Whether a notebook's cell shows it too."""
    spare: int = 0

    @property
    def has_lines(self) -> bool:
        """Whether it has content for text formats, which do not show pictures."""
        return not all(isinstance(b, Figure) and b.table() is None for b in self.blocks)


@dataclass(frozen=True)
class Card(Block):
    """A finding, or another item that a reader may act on."""

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
    """Whether it counts as a fix. A terminal shows the first fixes in full."""
    main: bool = False
    """Whether it is the fix with the largest gain, which a terminal explains if it can."""
    always_full: bool = False
    """Whether it is always shown in full."""
    brief: bool = False
    """Whether a terminal shows it on one line without ``--details``."""


@dataclass(frozen=True)
class Document:
    """Content on one subject, for any format."""

    headline: str
    blocks: Sequence[Block]
    name: str
    """Kind of the document, such as ``report``."""
    status: str = ""
    """Class of the headline: ``healthy``, ``bad`` …"""
    style: str = "bold"
    """Style of the headline, in a terminal."""
    badge: str = ""
    """Status as text."""
    action: str = ""
    """First fix, of the card numbered 1. A page shows it under the headline."""
    heading: str = ""
    """Heading above the headline for a document among others. May be empty."""
    footer: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    """Closing lines in a terminal."""
    data: Any = None
    """Data for JSON if the document itself is the subject: dicts, lists, named tuples."""

    def to_json(self) -> bytes:
        """Return ``data`` as JSON, indented by two. NaN becomes null."""
        return msgspec.json.format(msgspec.json.encode(convert_tuples(self.data)), indent=2)


def convert_tuples(value: Any) -> Any:
    """Turn named tuples into dicts, at any depth."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: convert_tuples(item) for key, item in value.items()}
    return [convert_tuples(item) for item in value] if isinstance(value, list | tuple) else value


_NOT_SHOWN: Final = {"style", "align", "mark", "language", "name", "status", "data"}
"""Fields of blocks that are no text to read."""


def map_texts(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a document or a part of it with ``clean`` applied to each text that is shown."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return tuple(map_texts(item, clean) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {
        item.name: map_texts(getattr(value, item.name), clean)
        for item in fields(value)
        if item.init and item.name not in _NOT_SHOWN
    }
    return replace(value, **changes)


def cards(blocks: Iterable[Block]) -> list[Card]:
    """Return all cards in order, including cards in sections."""
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
