"""``advisor ledger``: accuracy of past predictions, by rule and device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out
from advisor.core.text import count_noun

if TYPE_CHECKING:
    from advisor.replay.ledger import Prediction


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="Runs or ledgers; default: your own ledger and the shipped one.",
        ),
    ] = None,
    format_name: Annotated[Literal["terminal", "json"], typer.Option("--format")] = "terminal",
) -> None:
    """Compare past predictions with measurements."""
    from advisor.replay import ledger

    files = [path / ledger.FILE if path.is_dir() else path for path in paths or []]
    rows: list[Prediction] = [] if files else list(ledger.shipped_rule_predictions())
    skipped = 0
    for file in files or [ledger.user_file()]:
        result = ledger.read_ledger(file)
        rows += result.predictions
        skipped += result.skipped
    if format_name == "json":
        out.show_json(rows)
        return
    width = out.find_report_width(sys.stdout)
    out.show(_render(rows, skipped, width, shipped=not files))


def _render(rows: list[Prediction], skipped: int, width: int, *, shipped: bool) -> str:
    from advisor.render.formats.terminal import Page
    from advisor.replay import ledger

    page = Page(width, colour=False)
    if shipped:
        own_count = len(rows) - len(ledger.shipped_rule_predictions())
        yours = f"yours: {count_noun(own_count, 'prediction')}" if own_count else "yours: none yet"
        page.wrap(
            "The ledger has fixes whose gain was predicted and then measured. Shipped with "
            f"advisor: {len(rows) - own_count}; {yours} (`advisor try --remember train.py` adds "
            "them)."
        )
    if not rows:
        page.wrap(
            "No predictions yet: `advisor try --remember train.py` adds to your ledger, "
            "and each tried run has its own ledger."
        )
    for device in sorted({row.device for row in rows}):
        page.section(device or "no GPU")
        records = ledger.records_by_rule(row for row in rows if row.device == device)
        page.table(
            ["rule", "predictions", "in range", "measured / predicted"],
            [
                [
                    rule,
                    str(item.predictions),
                    str(item.inside),
                    f"{item.low:.2f} to {item.high:.2f}",
                ]
                for rule, item in records.items()
            ],
        )
    if skipped:
        page.wrap(f"{skipped} lines could not be read and were skipped.")
    return page.getvalue()
