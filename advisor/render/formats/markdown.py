"""A document as GitHub's Markdown, for a pull request or a wiki. Details are folded."""

import re
from collections.abc import Iterable, Sequence

from advisor.core import labels
from advisor.render import document as d
from advisor.render.renderer import DEFAULT, DocumentRenderer, RenderOptions

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_LIST = re.compile(r"^(\s*)([-+=#]|\d+(?=[.)](?:\s|$)))")


def escape(text: object) -> str:
    """Escape text that Markdown, HTML and GitHub (mentions, issue numbers) would interpret."""
    safe = labels.clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _SPECIAL.sub(r"\\\g<0>", safe)
    safe = _LIST.sub(lambda m: f"{m[1]}{m[2]}\\" if m[2].isdigit() else f"{m[1]}\\{m[2]}", safe)
    # An empty comment separates the two, so that GitHub notifies nobody and links nothing.
    safe = re.sub(r"@|#(?=\d)", r"\g<0><!-- -->", safe).replace("://", ":<!-- -->//")
    return safe.replace("www.", "www<!-- -->.")


def code_span(text: object) -> str:
    """Write a code span that may contain backticks. Its pipes do not end a table cell."""
    safe = labels.clean(text).replace("|", "\\|")
    fence = "`" * (_measure_longest_run(safe) + 1)
    if not safe.strip():
        return f"{fence} {safe} {fence}" if safe else ""
    blank = " " if safe[0] in "` " or safe[-1] in "` " else ""
    return f"{fence}{blank}{safe}{blank}{fence}"


def fenced_block(text: str, language: str = "python") -> str:
    """Write a fenced block that its content cannot end."""
    safe = labels.clean(text, lines=True).strip("\n")
    fence = "`" * max(3, _measure_longest_run(safe) + 1)
    return f"{fence}{language}\n{safe}\n{fence}"


def _measure_longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Write a table. ``align``: one letter per column, l or r."""
    marks = [{"l": ":---", "r": "---:"}[letter] for letter in align]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *rows))


class Markdown(DocumentRenderer):
    """GitHub-flavoured Markdown."""

    suffixes = (".md", ".markdown")

    def draw(self, document: d.Document, options: RenderOptions = DEFAULT) -> str:
        """Write the whole document, with ``top`` fixes in full."""
        total = sum(card.fix for card in d.cards(document.blocks))
        drawn = _Page(options.top, total)
        heading = [f"### {escape(document.heading)}"] if document.heading else []
        headline = f"**{escape(document.headline)}**"
        parts = [*heading, headline, *drawn.blocks(document.blocks, 3 + len(heading))]
        parts += [f"*{escape(note)}*" for note in document.notes]
        return "\n\n".join(part for part in parts if part) + "\n"


class _Page:
    """Writer of one page. It counts the fixes that are still shown in full."""

    def __init__(self, top: int | None, total: int) -> None:
        self.left = total if top is None else top
        self.total = total

    def blocks(self, blocks: Sequence[d.Block], level: int = 3) -> list[str]:
        """Write the blocks as parts separated by blank lines."""
        parts: list[str] = []
        omitted = 0
        for part in blocks:
            if isinstance(part, d.Card) and part.fix:
                self.left -= 1
                if self.left < 0:
                    omitted += 1
                    continue
            parts += self.block(part, level)
        if omitted:
            parts.append(f"{omitted} more: `--top {self.total}`.")
        return parts

    def block(self, part: d.Block, level: int) -> list[str]:
        match part:
            case d.Section() if not part.has_lines:
                return []
            case d.Section():
                inner = self.blocks(part.blocks, level + 1)
                title = " · ".join(filter(None, (part.title, part.aside)))
                if part.folded:
                    return _fold_parts(title, inner)
                return [f"{'#' * level} {escape(title)}", *inner]
            case d.Card():
                return self.card(part, level)
            case d.Paragraph():
                text = format_inline(part.text)
                return [f"*{text}*" if part.style == "soft" and text else text]
            case d.FieldList():
                return ["\n".join(_write_fields(part))]
            case d.Items():
                lead = [f"**{escape(part.title)}**"] if part.title else []
                return [*lead, "\n".join(f"- {format_inline(item)}" for item in part.items)]
            case d.EvidenceList():
                rows = [f"- {escape(d.fact_line(row))}" for row in part.rows]
                return ["\n".join(rows)]
            case d.Grid():
                return _write_grid(part)
            case d.Code():
                return [fenced_block(part.text, part.language)]
            case d.Figure():
                numbers = part.table()
                return [] if numbers is None else _write_grid(numbers)
        return []

    def card(self, card: d.Card, level: int) -> list[str]:
        """Write a fix: what, gain, where, why, how, and the rest folded."""
        number = f"{card.number}. " if card.number else ""
        parts = [f"{'#' * level} {number}{escape(card.title)}"]
        if card.gain:
            parts.append(f"**{escape(card.gain)}**")
        parts += self.blocks(card.blocks, level + 1)
        if card.details:
            parts += _fold_parts("Details", self.blocks(card.details, level + 1))
        return parts


def _fold_parts(title: str, parts: list[str]) -> list[str]:
    inner = "\n\n".join(part for part in parts if part)
    return [f"<details><summary>{escape(title)}</summary>\n\n{inner}\n\n</details>"]


def format_inline(text: d.Inline) -> str:
    """Write a line of text with its styles."""
    pieces = []
    for part in d.spans(text):
        if isinstance(part, str):
            pieces.append(escape(part))
        elif part.style == "code":
            pieces.append(code_span(part.text))
        elif part.style == "strong" and part.text.strip():
            pieces.append(f"**{escape(part.text)}**")
        else:
            pieces.append(escape(part.text))
    return "".join(pieces)


def _write_fields(fields: d.FieldList) -> list[str]:
    """Write one line per field. A field without a label continues the field above it."""
    lines = []
    for row in fields.rows:
        text = " · ".join(format_inline(part) for part in row.parts if part)
        if text:
            lines.append(f"- {f'{row.label}: ' if row.label else ''}{text}")
    return lines


def _write_grid(grid: d.Grid) -> list[str]:
    rows = [[format_inline(cell) for cell in row] for row in grid.rows]
    title = [f"**{escape(grid.title)}**"] if grid.title else []
    return [*title, table([escape(name) for name in grid.head], grid.sides, rows)]
