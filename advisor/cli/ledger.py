"""``advisor ledger``: how good the predictions were, by rule and by hardware."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out

if TYPE_CHECKING:
    from advisor.replay.ledger import Entry


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|FILE]…",
            help="Runs or ledgers; default: what bands know of: your own ledger, and ours.",
        ),
    ] = None,
    form: Annotated[Literal["terminal", "json"], typer.Option("--format")] = "terminal",
) -> None:
    """How past predictions compare with what was measured."""
    from advisor.replay import ledger
    from advisor.replay.learnt import shipped

    files = [path / ledger.FILE if path.is_dir() else path for path in paths or []]
    entries: list[Entry] = [] if files else list(shipped())
    passed_over = 0
    for file in files or [ledger.user_file()]:
        found = ledger.read(file)
        entries += found.entries
        passed_over += found.passed_over
    if form == "json":
        import msgspec

        out.show(msgspec.json.format(msgspec.json.encode(ledger.plain(entries))).decode() + "\n")
        return
    out.show(_render(entries, passed_over, out.columns(sys.stdout)))


def _render(known: list[Entry], passed_over: int, width: int) -> str:
    from advisor.render.page import Page
    from advisor.replay import ledger

    page = Page(width, colour=False)
    if not known:
        page.wrapped(
            "No trials are remembered yet: advisor try --remember train.py adds to your ledger, "
            "and the folder of each tried run has one of its own."
        )
    for device in sorted({one.device for one in known}):
        page.section(device or "no GPU")
        records = ledger.records(one for one in known if one.device == device)
        page.table(
            ["rule", "trials", "inside the band", "truth / prediction"],
            [
                [rule, str(one.trials), str(one.inside), f"{one.low:.2f} to {one.high:.2f}"]
                for rule, one in records.items()
            ],
        )
    if passed_over:
        page.wrapped(f"{passed_over} lines could not be read and were passed over.")
    return page.getvalue()
