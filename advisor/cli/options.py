"""Options that several commands have: each is declared here, and means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import output as out

if TYPE_CHECKING:
    from advisor.render.formats import Formats

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.")
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="N", min=0, help="Of a run: this rank.")
]
Window = Annotated[
    int | None,
    typer.Option("--window", metavar="N", min=0, help="Which window of a rank that has several."),
]
Rules = Annotated[
    Path | None,
    typer.Option("--rules", metavar="DIR", help="More rules: every *.py in this folder."),
]
MaxSize = Annotated[
    str | None,
    typer.Option(
        "--max-size", metavar="SIZE", help="Stop at this uncompressed size (default 16G)."
    ),
]
Redact = Annotated[
    bool,
    typer.Option("--redact/--no-redact", help="Leave out credentials, users, hosts and folders."),
]
Progress = Annotated[
    bool, typer.Option("--progress/--no-progress", help="Progress on stderr, on a terminal.")
]


Details = Annotated[
    bool,
    typer.Option(
        "--details/--no-details",
        help="Show evidence, caveats, verification, skipped checks and limits too.",
    ),
]
Brief = Annotated[
    bool, typer.Option("--brief", help="Show the verdict and the three largest findings.")
]


def form(formats: Formats) -> typer.models.OptionInfo:
    """``--format``, of one kind of subject."""
    found: typer.models.OptionInfo = typer.Option(
        "--format",
        metavar=out.metavar(formats),
        help="Default: by the suffix of --output, else terminal.",
    )
    return found
