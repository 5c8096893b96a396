"""Options that several commands have: each is declared here, and means the same everywhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advisor.cli import output as out
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.advise.options import Options
    from advisor.core.prices import Prices
    from advisor.render.formats import Formats

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.")
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="N", min=0, help="Analyze this rank of the run.")
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
        "--max-size", metavar="SIZE", help="Read at most this much, unpacked (default 16G)."
    ),
]
Redact = Annotated[
    bool,
    typer.Option(
        "--redact/--no-redact",
        show_default=False,
        help="Leave out credentials, users, hosts and folders.",
    ),
]
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress",
        show_default=False,
        help="Show progress on stderr; default: on a terminal.",
    ),
]


Details = Annotated[
    bool,
    typer.Option(
        "--details/--no-details",
        show_default=False,
        help="Show evidence, caveats, verification, skipped checks and limits too.",
    ),
]
Brief = Annotated[
    bool, typer.Option("--brief", help="Show the verdict and the three largest findings.")
]


def form(formats: Formats) -> typer.models.OptionInfo:
    """``--format``, of one kind of subject."""
    result: typer.models.OptionInfo = typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"{out.format_names(formats)}; default: by the suffix of --output, else terminal.",
    )
    return result


Price = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="Price of one GPU hour, such as 2.50/h or '2.50 EUR/h'; adds costs to the report.",
    ),
]
PriceTable = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        metavar="FILE",
        help="Prices by the GPU's name, as TOML (else [tool.advisor.prices] of pyproject.toml).",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", min=1, help="GPUs that are paid for; default: one a rank."),
]


NodeSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="GPUs per node, if the recording does not say."),
]
Network = Annotated[
    float | None,
    typer.Option(
        metavar="GB/S", min=0.001, help="Bandwidth per GPU between nodes, in one direction."
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="The GPU that ran the work, such as 'a100 sxm4 80gb', where the file does not say.",
    ),
]


PRICE_OPTIONS = "--price, --prices"
SAVED_HAS_COST = "the cost in a saved report is fixed; give the trace to change prices"


def chosen_prices(price: str | None, table: Path | None) -> Prices | None:
    """What was given; ``None``: nothing, and pyproject.toml may say. Raises AdvisorError."""
    if price is None and table is None:
        return None
    from advisor.core.prices import parse_price, read_prices

    if price is not None and table is not None:
        raise AdvisorError("--price and --prices: give one of them")
    return parse_price(price) if price is not None else read_prices(table)


Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="A:B|REGEX",
        help="Steps A up to, not including, B, counted from 0; or the names of the ranges "
        "that are steps.",
    ),
]

_NUMBERS = re.compile(r"\s*[-+]?\w{0,2}\s*:\s*[-+]?\w{0,2}\s*|[-+\d\s.:]*")


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """``A:B``, ``A:`` or ``:B`` to a half-open range; AdvisorError for what looks like one and is
    none. ``None``: names of ranges, for :func:`step_ranges`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text.strip())
    if match is None:
        if _NUMBERS.fullmatch(text) is None:
            return None
        raise AdvisorError(
            f"--steps {text}: give a range A:B of step numbers, such as 2:8 or 2:, or a regular "
            "expression of the names of the ranges that are steps"
        )
    first, last = (int(part) if part else None for part in match.groups())
    if last is not None and last <= (first or 0):
        raise AdvisorError(f"--steps {text}: that range is empty; B is not included")
    return first, last


def step_ranges(text: str | None) -> str | None:
    """A regular expression of the ranges that are steps; ``None``: steps by number, or all."""
    return text if text is not None and parse_steps(text) is None else None


_SIZES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_size(text: str | None) -> int | None:
    """``16G``, ``500M`` or plain bytes (decimal units); AdvisorError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(match[1]) * _SIZES[match[2]]) if match is not None else 0
    if size <= 0:
        raise AdvisorError(f"--max-size {text}: give a size such as 500M or 32G")
    return size


def analysis(
    *,
    rank: int | None = None,
    window: int | None = None,
    steps: str | None = None,
    rules: Path | None = None,
    max_size: str | None = None,
    gpu: str | None = None,
    price: str | None = None,
    prices: Path | None = None,
    gpus: int | None = None,
) -> Options:
    """What the options that several commands have ask for. Raises AdvisorError for one that makes
    no sense."""
    chosen, limit = parse_steps(steps), parse_size(max_size)
    paid = chosen_prices(price, prices)
    from advisor.advise.options import Options
    from advisor.read import ReadOptions
    from advisor.read.source import DEFAULT_LIMIT

    read = ReadOptions(max_bytes=limit or DEFAULT_LIMIT, step_ranges=step_ranges(steps), gpu=gpu)
    return Options(
        rank=rank,
        window=window,
        steps=chosen,
        rules_folder=rules,
        prices=paid,
        gpus=gpus,
        read=read,
    )


def reading(options: Options, **more: Any) -> Options:
    """The same with further fields of :class:`~advisor.read.ReadOptions`."""
    return replace(options, read=replace(options.read, **more))
