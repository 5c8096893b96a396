"""A document for a terminal: the verdict first, and at most one screen unless more is requested.

A page is wrapped to its width, styled or plain. All text passes through :class:`rich.text.Text`, so
that names are not read as markup, and through :func:`~advisor.core.labels.clean`, so that the
terminal executes nothing in them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from advisor.core import labels
from advisor.core import text as t
from advisor.core.labels import clean
from advisor.render import document as d
from advisor.render.renderer import DEFAULT, DocumentRenderer, RenderOptions

MAX_SCREEN_LINES: Final = 45
"""Maximum number of lines of a report without details. Fewer fixes are then shown in full."""
MAX_SPARE_LEVEL: Final = 6
"""Highest level at which blocks are left out to fit a screen, the first note among them."""
TIGHT_LEVEL: Final = 4
"""Level from which figures are drawn short, and only the first clause of a sentence and the first
alternative of a snippet are shown."""
MAX_FULL: Final = 3
"""Maximum number of fixes shown in full without details, and of fixes in a brief report."""
MAX_CLAUSES: Final = 2
"""Highest level of detail at which fixes of one line show their action: all of them."""
FURTHER_ROWS: Final = ({"why", "fix"}, {"code"}, {"note"}, {"where"})
"""Labels of lines of other fixes that are drawn if lines are left, the most important first."""
MAX_CODE: Final = 12
"""Maximum number of lines of a fix's code without details."""
_MAX_ITEMS: Final = 12
"""Maximum number of a list's items without details."""
STYLES: Final = {
    "": "", "strong": "bold", "soft": "dim", "code": "", "good": "green", "bad": "bold red",
    "warn": "yellow", "critical": "bold red", "warning": "yellow", "info": "",
}  # fmt: skip


class Terminal(DocumentRenderer):
    """Renderer of text of at most ``width`` columns."""

    def draw(self, document: d.Document, options: RenderOptions = DEFAULT) -> str:
        """Draw the document. Fixes after the first ones take one line each."""
        cards = d.cards(document.blocks)
        fixes = sum(card.fix for card in cards)
        if options.brief:
            return _draw_brief(document, [card for card in cards if card.fix], options)
        if options.top is not None:
            return _Screen(document, options, _Layout(options.top, clauses=0)).text
        if options.details:
            return _Screen(document, options, _Layout(len(cards))).text
        max_full = max(1, min(MAX_FULL, fixes))
        fitting: list[_Screen] = []
        flags = (True, False)
        steps = [(level, n, True) for n in (MAX_CLAUSES, 1) for level in range(TIGHT_LEVEL)]
        tight_levels = range(TIGHT_LEVEL, MAX_SPARE_LEVEL)
        steps += [
            (level, *switches) for switches in product(flags, flags) for level in tight_levels
        ]
        steps += [(MAX_SPARE_LEVEL, False, False)]
        for (level, clauses, notes), full in product(steps, range(max_full, 0, -1)):
            if fitting and not (clauses and notes):
                break
            screen = _Screen(document, options, _Layout(full, level, clauses, notes))
            if screen.fits:
                fitting.append(_fill(screen, document, options))
                if fitting[-1].shows_main:
                    return fitting[-1].text
        return (fitting or [screen])[0].text


def _draw_brief(document: d.Document, cards: Sequence[d.Card], options: RenderOptions) -> str:
    page = Page(options.width, colour=options.colour)
    page.wrap(labels.clean(document.headline), style=document.style)
    full_cards = cards[: MAX_FULL if options.top is None else options.top]
    for card in full_cards:
        _draw_row(page, card)
        page.wrap(_fix_clause(card), indent=4, style="bold")
    if len(cards) > len(full_cards):
        more = t.count_noun(len(cards) - len(full_cards), "more fix", "more fixes")
        page.wrap(f"{more}: run without --brief.", indent=4, style="dim")
    return page.getvalue()


def _fix_clause(card: d.Card) -> str:
    """Return the action of a fix, without its reason. Empty if there is none."""
    lists = (block for block in card.blocks if isinstance(block, d.FieldList))
    fields = (field for each in lists for field in each.rows if field.label == "fix")
    return next((t.first_clause(d.plain_text(f.parts[0])) for f in fields if f.parts), "")


def _draw_row(page: Page, card: d.Card) -> None:
    """Draw a fix with title and gain on one line, or on two if the title is long."""
    gain, name = labels.clean(card.gain), labels.clean(card.title)
    number = f"{card.number:>2}" if card.fix or card.number else " ∙"
    if len(name) > page.width - len(gain) - 6:
        page.wrap(name, first=f"{number}  ", indent=4)
        page.wrap(gain.rjust(page.width - 4), indent=4, style="green")
        return
    blanks = " " * max(2, page.width - 4 - len(name) - len(gain))
    page.line((f"{number}  ", STYLES.get(card.tag, "")), name, (f"{blanks}{gain}", "green"))


@dataclass(frozen=True)
class _Layout:
    """Parts of a document that a screen shows."""

    full: int
    """Number of fixes in full."""
    level: int = 0
    """Level at which blocks that are spare are left out."""
    clauses: int = MAX_CLAUSES
    """1 to also show the action of the other fixes, 2 even of those that gain little."""
    notes: bool = True
    """Whether all notes on gains are kept at tight levels too."""
    rows: Mapping[str, Set[str]] = field(default_factory=dict)
    """Labels of further lines of fixes that are not in full, by the title of the fix."""


def _fill(screen: _Screen, document: d.Document, options: RenderOptions) -> _Screen:
    """Draw more of the fixes that are not in full, as far as lines are left: the reasons of all
    before code and places."""
    further = [*product(FURTHER_ROWS, screen.row_titles)]
    for labels_shown, title in [*further, *product(FURTHER_ROWS[:1], screen.small_titles)]:
        rows = screen.layout.rows
        layout = replace(screen.layout, rows={**rows, title: rows.get(title, set()) | labels_shown})
        fuller = _Screen(document, options, layout)
        screen = fuller if fuller.fits else screen
    return screen


class _Screen:
    """Drawing of a document."""

    def __init__(self, document: d.Document, options: RenderOptions, layout: _Layout) -> None:
        self.page = Page(options.width, colour=options.colour)
        self.details = options.details
        self.layout = layout
        self.full = self.first = layout.full
        self.level, self.clauses, self.notes = layout.level, layout.clauses, layout.notes
        self.row_titles: list[str] = []
        self.small_titles: list[str] = []
        self.shows_main = True
        self.left_out: list[str] = []
        self.spare: set[str] = set()
        self.rows = 0
        page = self.page
        if document.headline:
            page.wrap(labels.clean(document.headline), style=document.style)
            page.blank_line()
        self.blocks(document.blocks)
        self._draw_omitted(options)
        for note in document.notes:
            page.blank_line()
            page.wrap(labels.clean(note), style="dim")
        self.text = page.getvalue()
        self.fits = self.text.count("\n") <= MAX_SCREEN_LINES

    def _draw_omitted(self, options: RenderOptions) -> None:
        """Draw a line that counts the omitted parts."""
        if self.rows and options.top is not None:
            total = self.rows + self.first
            self.left_out.insert(0, f"{self.rows} more in detail (--top {total})")
        if self.left_out and not self.details:
            self.page.blank_line()
            self.page.wrap(self._name_omitted(), style="dim")
        elif self.left_out:
            self.page.blank_line()
            self.page.wrap(f"{', '.join(self.left_out)}.", style="dim")

    def _name_omitted(self) -> str:
        """Name the omitted parts, as far as they fit on a line."""
        names = [name for name in self.left_out if name != "more"]
        rest = ["more"] if len(names) < len(self.left_out) else []
        line = f"Not shown (--details): {', '.join([*names, *rest])}."
        while names and cell_len(line) > self.page.width:
            # sections are removed first, then passed checks, and names of limits last
            names.remove(
                max(
                    reversed(names),
                    key=lambda name: (not name[0].isdigit(), name in self.spare, "(" not in name),
                )
            )
            line = f"Not shown (--details): {', '.join([*names, 'more'])}."
        return line

    def blocks(self, blocks: Sequence[d.Block]) -> None:
        previous: d.Block | None = None
        for index, original in enumerate(blocks):
            block = self._drop_spare(original)
            match block:
                case None:
                    continue
                case d.Card() if not (block.fix or block.always_full or self.details):
                    _draw_row(self.page, block)
                    self._draw_rows(block, {"where", "fix"})
                    self.row_titles.append(block.title)
                case d.FieldList() if not any(
                    row.parts and (self.details or not row.detail) for row in block.rows
                ):
                    continue
                case d.Card() if block.fix and (self.full <= 0 or self._is_brief(block)):
                    if not self.rows:
                        self.page.blank_line()
                    self.rows += 1
                    _draw_row(self.page, block)
                    if block.title in self.layout.rows:
                        self._draw_rows(block, {"fix"})
                    elif self.clauses > block.brief:
                        self.page.flow("fix", [_fix_clause(block)], style="bold")
                    (self.small_titles if block.brief else self.row_titles).append(block.title)
                    row_names = self.layout.rows.get(block.title, set())
                    self.shows_main &= not block.main or {"why", "code"} <= row_names
                case d.Card():
                    self.full -= block.fix
                    is_below_title = previous is None and self.level >= TIGHT_LEVEL
                    if (index or block.number) and not is_below_title:
                        self.page.blank_line()
                    self.card(block)
                case d.Section():
                    self.section(block)
                case _:
                    figures = isinstance(block, d.FieldList) and isinstance(previous, d.Figure)
                    if figures and self.level < TIGHT_LEVEL:
                        self.page.blank_line()
                    self.block(block)
            previous = block

    def _draw_rows(self, card: d.Card, field_names: Set[str]) -> None:
        """Draw lines of a card that is not in full."""
        further = self.layout.rows.get(card.title, set())
        for part in card.blocks if further else map(self._drop_spare, card.blocks):
            if isinstance(part, d.FieldList):
                named, rows = "", []
                for row in part.rows:
                    named = row.label or named
                    if named in field_names | further or row.quoted:
                        rows.append(row)
                self.fields(d.FieldList(rows), indent=4)
            elif part is not None and "code" in further:
                self.block(part)

    def _drop_spare(self, block: d.Block) -> d.Block | None:
        """Return the rest of a block at this level, and count the omitted parts."""
        if not self.level:
            return block
        match block:
            case d.Section(folded=False) if 0 < block.spare <= self.level:
                self._omit(block.summary or block.title.lower())
                return None
            case d.Grid() | d.Paragraph() if 0 < block.spare <= self.level:
                self._omit("more")
                return None
            case d.FieldList():
                kept_rows = [
                    row
                    for row in block.rows
                    if row.quoted
                    or not 0 < row.spare <= self.level
                    or (self.notes and row.is_note and row.spare >= TIGHT_LEVEL)
                ]
                fields = [replace(row, parts=self._keep_parts(row)) for row in kept_rows]
                pairs = zip(kept_rows, fields, strict=True)
                is_cut = any(row.parts != field.parts for row, field in pairs)
                if is_cut or len(kept_rows) < len(block.rows):
                    self._omit("more")
                return replace(block, rows=fields)
            case d.Grid() if block.min_rows is not None:
                rows = block.rows if block.short is None else block.short
                if len(rows) > block.min_rows:
                    self._omit("more")
                return replace(block, short=rows[: block.min_rows])
        return block

    def _keep_parts(self, row: d.TextField) -> Sequence[d.Inline]:
        """Return the parts of a line that are kept at this level."""
        if row.min_parts is None:
            return row.parts
        kept = row.parts[: max(1, row.min_parts - (self.level >= TIGHT_LEVEL))]
        return [*kept, "…"] if row.is_list and len(kept) < len(row.parts) else kept

    def _omit(self, *names: str) -> None:
        """Count omitted parts by name."""
        new = (labels.clean(name) for name in names if name)
        self.left_out += [name for name in new if name not in self.left_out]

    def _is_brief(self, card: d.Card) -> bool:
        return card.brief and not self.details

    def section(self, section: d.Section) -> None:
        """Draw a section, or note that it is left out."""
        if (section.folded or section.detail) and not self.details:
            if section.summary:
                self._omit(section.summary)
                self.spare |= {section.summary} if section.spare else set()
            return
        if not section.has_lines:
            return
        self.page.section(section.title, section.aside)
        self.blocks(section.blocks)

    def card(self, card: d.Card) -> None:
        """Draw a fix in full."""
        page = self.page
        number = f"{card.number:>2}" if card.number else " ∙"
        page.wrap(labels.clean(card.title), first=f"{number}  ", indent=4, style="bold")
        if card.gain:
            is_risk, gain = card.gain.startswith("risk: "), card.gain.removeprefix("risk: ")
            page.flow("risk" if is_risk else "gain", [gain], style="yellow" if is_risk else "green")
        requested, self.details = self.details, self.details or card.always_full
        for original in (*card.blocks, *(card.details if self.details else ())):
            if (block := self._drop_spare(original)) is None:
                continue
            if isinstance(block, d.FieldList):
                self.fields(block, indent=4)
            else:
                self.block(block)
        self.details = requested

    def fields(self, fields: d.FieldList, indent: int) -> None:
        """Draw labels with text next to them."""
        for row in fields.rows:
            if row.detail and not self.details:
                continue
            parts = [d.plain_text(part) for part in row.parts]
            if row.prose and not self.details:
                shorten = t.first_clause if self.level >= TIGHT_LEVEL else t.first_sentence
                if row.label == "why":
                    parts = [t.shorten_evidence(part, shorten) for part in parts]
                else:
                    parts = [shorten(part) for part in parts]
            self.page.flow(row.label, parts, indent=indent, style=STYLES[row.style])

    def block(self, block: d.Block) -> None:
        """Draw a block other than a card or a section."""
        page = self.page
        match block:
            case d.Paragraph(text=""):
                page.blank_line()
            case d.Paragraph():
                first = f" {block.mark} ".ljust(block.indent) if block.mark else ""
                page.wrap(
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
                text = block.text if self.details else _shorten_code(block.text)
                text = _first_alternative(text) if self.level >= TIGHT_LEVEL else text
                page.code(block.label, text, indent=block.indent)
            case d.Figure():
                lines = block.lines(page.width, short=self.level >= TIGHT_LEVEL)
                for line in lines or ():
                    page.line(*line)
                table = block.table() if lines is None else None
                if table is not None:
                    self.table(table)

    def items(self, block: d.Items) -> None:
        """Draw a list, with a mark before each item."""
        if block.title:
            self.page.blank_line()
            self.page.wrap(labels.clean(block.title), indent=2, style="bold")
        first_items = block.items if self.details else block.items[:_MAX_ITEMS]
        for item in first_items:
            self.page.wrap(*styled_parts(item), first=f" {block.mark}  ", indent=4)
        if len(first_items) < len(block.items):
            self.page.wrap(f"and {len(block.items) - len(first_items)} more", indent=4, style="dim")

    def table(self, table: d.Grid) -> None:
        """Draw columns. If space is short, draw the most important rows."""
        rows = table.rows if table.short is None else table.short
        if not rows:
            return
        if table.title:
            self.page.blank_line()
            self.page.wrap(labels.clean(table.title), indent=2, style="dim")
        columns = list(range(len(table.head)))
        empty = [
            n for n in columns[1:] if all(d.plain_text(row[n]) == t.EMPTY_CELL for row in rows)
        ]
        for column in dict.fromkeys((*empty, *table.optional)):
            widths = (
                max(cell_len(d.plain_text(row[n])) for row in (table.head, *rows)) for n in columns
            )
            if sum(widths) + 2 * len(columns) <= self.page.width:
                break
            columns.remove(column)
        self.page.table(
            [table.head[n] for n in columns],
            [[_style_cell(row[n]) for n in columns] for row in rows],
            align="".join(table.sides[n] for n in columns),
            below=table.below,
        )
        if table.omitted_note and len(rows) < len(table.rows):
            self.page.wrap(labels.clean(table.omitted_note), indent=2, style="dim")


def styled_parts(text: d.Inline) -> list[str | tuple[str, str]]:
    """Convert a line to parts for :class:`~advisor.render.formats.terminal.Page`."""
    return [
        labels.clean(part)
        if isinstance(part, str)
        else (labels.clean(part.text), STYLES[part.style])
        for part in d.spans(text)
    ]


def _style_cell(text: d.Inline) -> str | tuple[str, str]:
    return (text.text, STYLES[text.style]) if isinstance(text, d.Span) else d.plain_text(text)


def _shorten_code(code: str) -> str:
    """Return the first alternatives of a long snippet. Empty lines separate alternatives."""
    lines = code.strip("\n").split("\n")
    if len(lines) <= MAX_CODE:
        return code
    end = max((row for row in range(1, MAX_CODE + 1) if not lines[row].strip()), default=MAX_CODE)
    hidden = sum(bool(line.strip()) for line in lines[end:])
    return "\n".join([*lines[:end], f"… {t.count_noun(hidden, 'more line')}: --details"])


def _first_alternative(code: str) -> str:
    """Return the code before an empty line and a comment that begins another alternative or
    addition (``# or``, ``# also``), if it is useful by itself."""
    first, *others = _NEXT_PART.split(code.strip("\n"), maxsplit=1)
    statements = (line for line in first.split("\n") if not _PREPARES.match(line))
    if not others or not any(statements):
        return code
    return f"{first}\n# more code: --details"


_NEXT_PART: Final = re.compile(r"\n\n(?=# (?:or|also)\b)")
_PREPARES: Final = re.compile(r"\s*(#|import |from |$)")


LABEL_WIDTH = 9
"""Width of the column of field names."""
MIN_FIRST_WIDTH = 12
"""Minimum width of the first column of a table."""


class Page:
    """Page of lines of at most ``width`` columns, which :meth:`getvalue` returns."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self.width = width
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            width=width,
            force_terminal=colour,
            color_system="standard" if colour else None,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
            no_color=not colour,
        )

    def getvalue(self) -> str:
        """Return the page, without blanks at the ends of lines."""
        return "".join(f"{line.rstrip()}\n" for line in self._buffer.getvalue().splitlines())

    def blank_line(self) -> None:
        self._buffer.write("\n")

    def line(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """Add a line of parts, each plain or with a style, cut to the width."""
        text = Text(" " * indent).append_text(_join_styled(parts))
        text.truncate(self.width, overflow="ellipsis")
        text.rstrip()
        self._console.print(text, no_wrap=True, crop=True, overflow="ellipsis")

    def wrap(
        self, *parts: str | tuple[str, str], first: str = "", indent: int = 0, style: str = ""
    ) -> None:
        """Add parts wrapped at blanks. Links are never broken, even if they are wider than the
        page. ``first`` begins the first line in place of the indent."""
        text = _join_styled(parts)
        if not text:
            return
        text.stylize(style)
        room = max(20, self.width - indent)
        long_link = any(cell_len(word) > room and "://" in word for word in text.plain.split())
        lines = _split_at_blanks(text, room) if long_link else text.wrap(self._console, room)
        for number, piece in enumerate(lines):
            piece.rstrip()
            line = Text()  # a style of the line itself would apply to the whole line
            line.append(first.ljust(indent) if number == 0 else " " * indent, style="dim")
            self._console.print(
                line.append_text(piece),
                no_wrap=True,
                overflow="ignore" if long_link else None,
                crop=not long_link,
            )

    def section(self, title: str, aside: str = "") -> None:
        """Add a heading followed by a thin line. An aside that does not fit goes below."""
        self.blank_line()
        note = f" · {clean(aside)}" if aside else ""
        left = self.width - cell_len(clean(title)) - cell_len(note)
        beside, below = (note, "") if left >= 0 else ("", aside)
        dashes = "─" * max(0, (left if beside else left + cell_len(note)) - 1)
        self.line((clean(title), "bold"), (beside, "dim"), (f" {dashes}", "dim"))
        if below:
            self.wrap(clean(below), indent=2, style="dim")

    def flow(
        self,
        label: str,
        parts: Iterable[str],
        *,
        indent: int = 4,
        separator: str = " · ",
        style: str = "",
    ) -> None:
        """Add a name with parts next to it. Lines are broken between parts if possible."""
        room = max(20, self.width - indent - LABEL_WIDTH)
        lines = _flow_parts([clean(part) for part in parts if part], room, separator)
        for number, text in enumerate(lines):
            first = f"{' ' * indent}{label}" if number == 0 else ""
            self.wrap(text, first=first, indent=indent + LABEL_WIDTH, style=style)

    def code(self, label: str, text: str, *, indent: int = 4) -> None:
        """Add a snippet with unchanged lines: next to its name if they fit, with comments moved
        above their line if necessary, or else below the name and further left, folded."""
        code_lines = clean(text, lines=True).strip("\n").split("\n")
        lead = " " * indent
        for width in (self.width - indent - LABEL_WIDTH - 2, self.width - indent - 2):
            lines = [piece for line in code_lines for piece in _move_comment(line, width)]
            if max(map(cell_len, lines)) <= width:
                break
        if max(map(cell_len, lines)) <= self.width - indent - LABEL_WIDTH - 2:
            lead = f"{lead}{label}".ljust(indent + LABEL_WIDTH)
        elif label:
            self.line(f"{lead}{label}")
        room = max(20, self.width - len(lead) - 2)
        depth = 0
        for line in lines:
            for piece in _fold_line(line, room, depth):
                self.line((f"{lead}│ ", "dim"), (piece, "cyan"))
                lead = " " * len(lead)
            depth = _find_breaks(line, depth)[1]

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str | tuple[str, str]]],
        *,
        indent: int = 2,
        align: str = "",
        below: Sequence[str] = (),
    ) -> None:
        """Add columns as wide as their content. ``align``: one letter per column, by default the
        first to the left and figures to the right. If they are too wide, the gaps and the first
        column are shortened. ``below``: one line below each row."""
        align = align or "l" + "r" * (len(head) - 1)
        styles = [[cell[1] if isinstance(cell, tuple) else "" for cell in row] for row in rows]
        texts = [[clean(c[0] if isinstance(c, tuple) else c) for c in row] for row in (head, *rows)]
        room, gap = self.width - indent, 2
        if room - _measure_others(texts, gap) < min(
            MIN_FIRST_WIDTH, max(cell_len(row[0]) for row in texts)
        ):
            gap = 1
        texts = _fit_first_column(texts, room, gap)
        widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
        for number, row in enumerate(texts):
            parts: list[str | tuple[str, str]] = []
            for index, cell in enumerate(row):
                blanks = " " * (widths[index] - cell_len(cell))
                padded = blanks + cell if align[index] == "r" else cell + blanks
                style = "dim" if not number else styles[number - 1][index]
                parts += [" " * gap if index else "", (padded, style)]
            self.line(*parts, indent=indent)
            if number and below:
                self.line((clean(below[number - 1]), "dim"), indent=indent + 2)


def _split_at_blanks(text: Text, room: int) -> Iterable[Text]:
    """Return lines of at most ``room`` columns, or of one longer word."""
    starts, used = [], 0
    for word in re.finditer(r"\S+\s*", text.plain):
        if used and used + cell_len(word[0].rstrip()) > room:
            starts.append(word.start())
            used = 0
        used += cell_len(word[0])
    return text.divide(starts)


def _join_styled(parts: Sequence[str | tuple[str, str]]) -> Text:
    text = Text()
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(part[0], style=part[1] or None)
    return text


def _flow_parts(parts: list[str], room: int, separator: str) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + cell_len(separator) + cell_len(part) <= room:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def _move_comment(line: str, room: int) -> list[str]:
    """Move the comment of a line of code above it if the line is too long."""
    for sign in ("#", "//"):
        body, mark, comment = line.rpartition(f"  {sign} ")
        if cell_len(line) > room and mark and body.strip():
            lead = body[: len(body) - len(body.lstrip())]
            return [f"{lead}{sign} {comment}", body.rstrip()]
    return [line]


def _fold_line(line: str, room: int, depth: int) -> list[str]:
    """Break a line of code into lines of at most ``room`` columns that still run. Later lines are
    indented. A word or a string is only broken if it is longer than a line."""
    comment = re.match(r"\s*(#|//) ", line)
    lead = comment[0] if comment else line[: len(line) - len(line.lstrip())] + "    "
    breaks = _find_breaks(line, depth)[0]
    pieces: list[str] = []
    start, before = 0, ""
    while cell_len(before + line[start:]) > room:
        end, mark = start + len(chop_cells(line[start:], room - cell_len(before))[0]), ""
        for at, sign in breaks.items():
            fits = cell_len(before + line[start:at].rstrip() + sign) <= room
            if fits and at >= start + (0 if before else len(lead)) + 4:
                end, mark = at, sign
        pieces.append(f"{before}{line[start:end].rstrip()}{mark}")
        start = end + len(line[end:]) - len(line[end:].lstrip())
        before = lead[: room // 2]
    return [*pieces, before + line[start:]]


def _find_breaks(line: str, depth: int) -> tuple[dict[int, str], int]:
    """Return the positions at which a line of code can be broken, each with its line end: a
    backslash outside brackets, as in Python and a shell. ``depth``: number of open brackets before
    the line. Also return their number after it."""
    if re.match(r"\s*(#|//)", line):
        return {match.end(): "" for match in re.finditer(" ", line)}, depth
    result: dict[int, str] = {}
    for match in re.finditer(r"""("|')(\\.|(?!\1).)*\1|\s(#|//) .*|[(\[{\s]|[)\]}]""", line):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] in "([{ ":
            result[match.end()] = "" if depth else " \\"
    return result, depth


def _measure_others(cells: list[list[str]], gap: int) -> int:
    """Return the width of all columns but the first, with the gaps before them."""
    widths = (max(map(cell_len, column)) for column in zip(*cells, strict=True))
    return sum(gap + width for width in [*widths][1:])


def _fit_first_column(cells: list[list[str]], room: int, gap: int) -> list[list[str]]:
    """Return the rows of a table with its first column shortened so that the figures fit. Keep the
    end of a path, which is most informative, and the beginning of other texts."""
    first = max(cell_len(row[0]) for row in cells)
    width = max(MIN_FIRST_WIDTH, room - _measure_others(cells, gap))
    if first <= width:
        return cells

    def short(text: str) -> str:
        if cell_len(text) <= width:
            return text
        if "/" in text:
            return f"…{chop_cells(text[::-1], width - 1)[0][::-1]}"
        return f"{chop_cells(text, width - 1)[0]}…"

    return [[short(row[0]), *row[1:]] for row in cells]
