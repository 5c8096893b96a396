"""A document for a terminal: the verdict first, at most a screen unless more is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len

from advisor.core import labels
from advisor.core import text as t
from advisor.render import document as d
from advisor.render.page import Page
from advisor.render.renderer import DEFAULT, DocumentRenderer, RenderOptions

MAX_SCREEN_LINES: Final = 45
"""Lines of a report that nobody asked details of, where fewer fixes in full make it fit."""
MAX_FULL: Final = 3
"""Fixes that are shown in full then, and rows of a brief report."""
MAX_CODE: Final = 6
"""Lines of code of a fix then."""
MAX_ITEMS: Final = 12
"""Of a list then."""
EMPTY_CELL: Final = "–"
"""A cell of what was not measured: a column of these is left out first, where there is no room."""
_RANGE: Final = re.compile(r" \([^()]*–[^()]*\)")
"""Of a gain: ``about 5.4 ms (4.3–5.4 ms), 41%``."""
STYLES: Final = {
    "": "", "strong": "bold", "soft": "dim", "code": "", "good": "green", "bad": "bold red",
    "warn": "yellow", "critical": "bold red", "warning": "yellow", "info": "",
}  # fmt: skip


class Terminal(DocumentRenderer):
    """Text of at most ``width`` columns."""

    def draw(self, document: d.Document, options: RenderOptions = DEFAULT) -> str:
        """The document; of the fixes after the first ones a line each."""
        cards = d.cards(document.blocks)
        fixes = sum(card.fix for card in cards)
        if options.brief:
            return _brief(document, [card for card in cards if card.fix], options)
        if options.top is not None:
            return _Screen(document, options, options.top).text
        if options.details:
            return _Screen(document, options, len(cards)).text
        for full in range(min(MAX_FULL, fixes), 0, -1):
            screen = _Screen(document, options, full)
            if screen.text.count("\n") <= MAX_SCREEN_LINES:
                return screen.text
        return _Screen(document, options, min(1, fixes)).text


def _brief(document: d.Document, cards: Sequence[d.Card], options: RenderOptions) -> str:
    page = Page(options.width, colour=options.colour)
    page.wrapped(labels.clean(document.headline), style=document.style)
    shown = cards[:MAX_FULL]
    for card in shown:
        _row(page, card)
    if len(cards) > len(shown):
        page.wrapped(f"{len(cards) - len(shown)} more: without --brief.", indent=4, style="dim")
    return page.getvalue()


def _row(page: Page, card: d.Card) -> None:
    """One line a fix: what it is and what it brings; two where the title is long."""
    gain, name = labels.clean(card.gain), labels.clean(card.title)
    if len(name) > page.width - len(gain) - 6:  # a whole title before the range
        gain = _RANGE.sub("", gain, count=1)
    if len(name) > page.width - len(gain) - 6:
        page.wrapped(name, first=f"{card.number:>2}  ", indent=4)
        page.wrapped(gain.rjust(page.width - 4), indent=4, style="green")
        return
    blanks = " " * max(2, page.width - 4 - len(name) - len(gain))
    page.line((f"{card.number:>2}  ", STYLES.get(card.tag, "")), name, (f"{blanks}{gain}", "green"))


class _Screen:
    """One drawing, with so many fixes in full."""

    def __init__(self, document: d.Document, options: RenderOptions, full: int) -> None:
        self.page = Page(options.width, colour=options.colour)
        self.details = options.details
        self.full = self.first = full
        self.left_out: list[str] = []
        self.rows = 0
        page = self.page
        if document.headline:
            page.wrapped(labels.clean(document.headline), style=document.style)
            page.blank()
        self.blocks(document.blocks)
        for note in document.notes:
            page.blank()
            page.wrapped(labels.clean(note), style="dim")
        self._rest(options)
        self.text = page.getvalue()

    def _rest(self, options: RenderOptions) -> None:
        """One line that counts what is left out."""
        if self.rows and options.top is not None:
            total = self.rows + self.first
            self.left_out.insert(0, f"{self.rows} more in detail (--top {total})")
        if self.left_out and not self.details:
            self.page.blank()
            text = ", ".join(self.left_out)
            self.page.wrapped(f"Not shown: {text}. --details shows them.", style="dim")
        elif self.left_out:
            self.page.blank()
            self.page.wrapped(f"{', '.join(self.left_out)}.", style="dim")

    def blocks(self, blocks: Sequence[d.Block]) -> None:
        """Draw them below each other."""
        before: d.Block | None = None
        for place, block in enumerate(blocks):
            match block:
                case d.Card() if not (block.fix or block.full or self.details):
                    _row(self.page, block)
                case d.FieldList() if not any(
                    row.parts and (self.details or not row.detail) for row in block.rows
                ):
                    continue
                case d.Card() if block.fix and (self.full <= 0 or self._is_brief(block)):
                    if not self.rows:
                        self.page.blank()
                    self.rows += 1
                    _row(self.page, block)
                case d.Card():
                    self.full -= block.fix
                    if place or block.number:
                        self.page.blank()
                    self.card(block)
                case d.Section():
                    self.section(block)
                case _:
                    if isinstance(block, d.FieldList) and isinstance(before, d.Figure):
                        self.page.blank()
                    self.block(block)
            before = block

    def _is_brief(self, card: d.Card) -> bool:
        return card.brief and not self.details

    def section(self, section: d.Section) -> None:
        """A heading and what is below it, or that it is left out."""
        if (section.folded or section.detail) and not self.details:
            if section.counted:
                self.left_out.append(labels.clean(section.counted))
            return
        if not section.in_lines:
            return
        self.page.section(section.title, section.aside)
        self.blocks(section.blocks)

    def card(self, card: d.Card) -> None:
        """A fix in full."""
        page = self.page
        number = f"{card.number:>2}" if card.number else " ∙"
        page.wrapped(labels.clean(card.title), first=f"{number}  ", indent=4, style="bold")
        if card.gain:
            page.flow("gain", [card.gain], style="green")
        asked, self.details = self.details, self.details or card.full
        for block in (*card.blocks, *(card.details if self.details else ())):
            if isinstance(block, d.FieldList):
                self.fields(block, indent=4)
            else:
                self.block(block)
        self.details = asked

    def fields(self, fields: d.FieldList, indent: int) -> None:
        """Labels with text beside them."""
        for row in fields.rows:
            if row.detail and not self.details:
                continue
            parts = [d.plain_text(part) for part in row.parts]
            if row.prose and not self.details:
                parts = [t.first_sentence(part) for part in parts]
            self.page.flow(row.label, parts, indent=indent, style=STYLES[row.style])

    def block(self, block: d.Block) -> None:
        """One that is no card and no section."""
        page = self.page
        match block:
            case d.Paragraph(text=""):
                page.blank()
            case d.Paragraph():
                first = f" {block.mark} ".ljust(block.indent) if block.mark else ""
                page.wrapped(
                    *styled_parts(block.text),
                    first=first,
                    indent=block.indent,
                    style=STYLES[block.style],
                )
            case d.FieldList():
                self.fields(block, block.indent)
            case d.Items():
                self.items(block)
            case d.EvidenceList():
                page.flow("evidence", [d.fact_line(row) for row in block.rows])
            case d.Grid():
                self.table(block)
            case d.Code():
                text = block.text if self.details else _shortened(block.text)
                page.code(block.label, text, indent=block.indent)
            case d.Figure():
                lines = block.lines(page.width)
                for line in lines or ():
                    page.line(*line)
                table = block.table() if lines is None else None
                if table is not None:
                    self.table(table)

    def items(self, block: d.Items) -> None:
        """A list, a mark before each."""
        if block.title:
            self.page.blank()
            self.page.wrapped(labels.clean(block.title), indent=2, style="bold")
        shown = block.items if self.details else block.items[:MAX_ITEMS]
        for item in shown:
            self.page.wrapped(*styled_parts(item), first=f" {block.mark}  ", indent=4)
        if len(shown) < len(block.items):
            self.page.wrapped(f"and {len(block.items) - len(shown)} more", indent=4, style="dim")

    def table(self, table: d.Grid) -> None:
        """Columns; where room is short the rows that matter most."""
        rows = table.rows if table.short is None else table.short
        if table.title:
            self.page.blank()
            self.page.wrapped(labels.clean(table.title), indent=2, style="dim")
        kept = list(range(len(table.head)))
        empty = [n for n in kept[1:] if all(d.plain_text(row[n]) == EMPTY_CELL for row in rows)]
        for column in dict.fromkeys((*empty, *table.optional)):
            wide = (
                max(cell_len(d.plain_text(row[n])) for row in (table.head, *rows)) for n in kept
            )
            if sum(wide) + 2 * len(kept) <= self.page.width:
                break
            kept.remove(column)
        self.page.table(
            [table.head[n] for n in kept],
            [[_cell(row[n]) for n in kept] for row in rows],
            align="".join(table.sides[n] for n in kept),
            below=table.below,
        )
        if table.more and len(rows) < len(table.rows):
            self.page.wrapped(labels.clean(table.more), indent=2, style="dim")


def styled_parts(text: d.Inline) -> list[str | tuple[str, str]]:
    """A line as :class:`~advisor.render.page.Page` takes it."""
    return [
        labels.clean(part)
        if isinstance(part, str)
        else (labels.clean(part.text), STYLES[part.style])
        for part in d.spans(text)
    ]


def _cell(text: d.Inline) -> str | tuple[str, str]:
    return (text.text, STYLES[text.style]) if isinstance(text, d.Span) else d.plain_text(text)


def _shortened(code: str) -> str:
    """The first lines of a snippet that is long."""
    lines = code.strip("\n").split("\n")
    if len(lines) <= MAX_CODE + 1:
        return code
    return "\n".join([*lines[:MAX_CODE], f"… {len(lines) - MAX_CODE} more lines"])
