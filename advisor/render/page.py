"""A page of terminal text: wrapped to its width, styled or plain, never interpreting what it shows.

Everything goes through :class:`rich.text.Text` objects, so nothing in a name is read as markup,
and through :func:`~advisor.core.labels.clean`, so nothing in it reaches the terminal as a command.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from advisor.core.labels import clean

LABEL_WIDTH = 9
"""Width of the column of field names."""
MIN_FIRST = 12
"""Width that is left to the first column of a table, however wide the others are."""


class Page:
    """Lines of at most ``width`` columns, collected and then read with :meth:`getvalue`."""

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
        """The page; no line ends in blanks."""
        return "".join(f"{line.rstrip()}\n" for line in self._buffer.getvalue().splitlines())

    def blank(self) -> None:
        """An empty line."""
        self._buffer.write("\n")

    def line(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """One line of parts, each plain or with a style; cut where it does not fit."""
        text = Text(" " * indent).append_text(_styled(parts))
        text.truncate(self.width, overflow="ellipsis")
        text.rstrip()
        self._console.print(text, no_wrap=True, crop=True, overflow="ellipsis")

    def wrapped(
        self, *parts: str | tuple[str, str], first: str = "", indent: int = 0, style: str = ""
    ) -> None:
        """Parts wrapped at blanks. ``first`` starts the first line, in place of the indent."""
        text = _styled(parts)
        if not text:
            return
        text.stylize(style)
        room = max(20, self.width - indent)
        for number, piece in enumerate(text.wrap(self._console, room)):
            piece.rstrip()
            line = Text()  # a style of its own would go on for the whole line
            line.append(first.ljust(indent) if number == 0 else " " * indent, style="dim")
            self._console.print(line.append_text(piece), no_wrap=True, crop=True)

    def section(self, title: str, aside: str = "") -> None:
        """A heading with a thin line after it; an aside that does not fit beside it goes below."""
        self.blank()
        note = f" · {clean(aside)}" if aside else ""
        left = self.width - cell_len(clean(title)) - cell_len(note)
        beside, below = (note, "") if left >= 0 else ("", aside)
        dashes = "─" * max(0, (left if beside else left + cell_len(note)) - 1)
        self.line((clean(title), "bold"), (beside, "dim"), (f" {dashes}", "dim"))
        if below:
            self.wrapped(clean(below), indent=2, style="dim")

    def flow(
        self,
        label: str,
        parts: Iterable[str],
        *,
        indent: int = 4,
        separator: str = " · ",
        style: str = "",
    ) -> None:
        """A name and parts beside it; a line is broken between parts where that is possible."""
        room = max(20, self.width - indent - LABEL_WIDTH)
        lines = _flowed([clean(part) for part in parts if part], room, separator)
        for number, text in enumerate(lines):
            first = f"{' ' * indent}{label}" if number == 0 else ""
            self.wrapped(text, first=first, indent=indent + LABEL_WIDTH, style=style)

    def code(self, label: str, text: str, *, indent: int = 4) -> None:
        """A snippet, its lines kept as they are: beside its name where they fit, with comments
        above their line if need be, else below it and further left, folded."""
        given = clean(text, lines=True).strip("\n").split("\n")
        lead = " " * indent
        for width in (self.width - indent - LABEL_WIDTH - 2, self.width - indent - 2):
            lines = [piece for line in given for piece in _comment_above(line, width)]
            if max(map(cell_len, lines)) <= width:
                break
        if max(map(cell_len, lines)) <= self.width - indent - LABEL_WIDTH - 2:
            lead = f"{lead}{label}".ljust(indent + LABEL_WIDTH)
        elif label:
            self.line(f"{lead}{label}")
        room = max(20, self.width - len(lead) - 2)
        for piece in (piece for line in lines for piece in _folded(line, room)):
            self.line((f"{lead}│ ", "dim"), (piece, "cyan"))
            lead = " " * len(lead)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str | tuple[str, str]]],
        *,
        indent: int = 2,
        align: str = "",
        below: Sequence[str] = (),
    ) -> None:
        """Columns as wide as their content; ``align``: a letter a column, else the first to the
        left and figures to the right. Where that is too wide, they stand closer, and the first is
        shortened. ``below``: a line below each row."""
        align = align or "l" + "r" * (len(head) - 1)
        styles = [[cell[1] if isinstance(cell, tuple) else "" for cell in row] for row in rows]
        texts = [[clean(c[0] if isinstance(c, tuple) else c) for c in row] for row in (head, *rows)]
        room, gap = self.width - indent, 2
        if room - _others(texts, gap) < min(MIN_FIRST, max(cell_len(row[0]) for row in texts)):
            gap = 1
        texts = _fitting(texts, room, gap)
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


def _styled(parts: Sequence[str | tuple[str, str]]) -> Text:
    text = Text()
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(part[0], style=part[1] or None)
    return text


def _flowed(parts: list[str], room: int, separator: str) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + cell_len(separator) + cell_len(part) <= room:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def _comment_above(line: str, room: int) -> list[str]:
    """A line of code that is too long for its comment: the comment goes above it."""
    for sign in ("#", "//"):
        body, mark, comment = line.rpartition(f"  {sign} ")
        if cell_len(line) > room and mark and body.strip():
            lead = body[: len(body) - len(body.lstrip())]
            return [f"{lead}{sign} {comment}", body.rstrip()]
    return [line]


def _folded(line: str, room: int) -> list[str]:
    """A line of code of at most ``room`` columns; what is too much goes on below, indented: behind
    the last blank or bracket, and within a word only if the word is as long."""
    pieces: list[str] = []
    lead = line[: len(line) - len(line.lstrip())] + "    "
    while cell_len(line) > room:
        first = chop_cells(line, room)[0]
        least = len(lead) + 4
        at = max((first.rfind(sign, least) + 1 for sign in (" ", "(", "[")), default=0)
        first = first[:at] if at else first
        pieces.append(first.rstrip())
        line = lead[: room // 2] + line[len(first) :].lstrip()
    return [*pieces, line]


def _others(cells: list[list[str]], gap: int) -> int:
    """Columns that all but the first take, with the gaps before them."""
    widths = (max(map(cell_len, column)) for column in zip(*cells, strict=True))
    return sum(gap + width for width in [*widths][1:])


def _fitting(cells: list[list[str]], room: int, gap: int) -> list[list[str]]:
    """Rows of a table with its first column short enough for the figures to be whole. Of a place,
    whose end tells most, the end is kept; of other words the beginning."""
    first = max(cell_len(row[0]) for row in cells)
    left = max(MIN_FIRST, room - _others(cells, gap))
    if first <= left:
        return cells

    def short(text: str) -> str:
        if cell_len(text) <= left:
            return text
        if "/" in text:
            return f"…{chop_cells(text[::-1], left - 1)[0][::-1]}"
        return f"{chop_cells(text, left - 1)[0]}…"

    return [[short(row[0]), *row[1:]] for row in cells]
