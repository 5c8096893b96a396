"""Options that several commands share, each declared once and with one meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from advisor.cli import output as out
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.advise.options import Options as Options  # noqa: PLC0414
    from advisor.core.prices import Prices
    from advisor.render.formats import Formats
else:
    Options = Any  # with_options passes it to commands, whose other parameters are inspected

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.")
]
Rank = Annotated[int | None, typer.Option(metavar="N", min=0, help="Show this rank of the run.")]
Window = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Window to show, if a rank has several.")
]
Rules = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Additional rules: every *.py in this folder.")
]
MaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Read at most this much, unpacked (default 16G).")
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


def _refuse_both(context: typer.Context, parameter: typer.CallbackParam, chosen: bool) -> bool:
    """Raise AdvisorError if both --brief and --details are given."""
    if chosen and context.params.get("brief" if parameter.name == "details" else "details"):
        raise AdvisorError("--brief and --details: choose one")
    return chosen


ALL_DETAILS = "Also show evidence, caveats, skipped checks and limits."


def details_option(help_text: str) -> typer.models.OptionInfo:
    """Return the ``--details`` option of a command. ``help_text``: help on what it shows."""
    result: typer.models.OptionInfo = typer.Option(
        "--details/--no-details", show_default=False, callback=_refuse_both, help=help_text
    )
    return result


Brief = Annotated[
    bool,
    typer.Option(
        "--brief",
        callback=_refuse_both,
        help="Show the verdict, and the first three fixes with their gains.",
    ),
]


def format_option(formats: Formats) -> typer.models.OptionInfo:
    """Return the ``--format`` option of a command, for the formats of one kind of subject."""
    result: typer.models.OptionInfo = typer.Option(
        "--format",
        metavar="FORMAT",
        autocompletion=lambda incomplete: [n for n in formats.bundled if n.startswith(incomplete)],
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
        metavar="FILE",
        help="Prices by the GPU's name, as TOML (else [tool.advisor.prices] of pyproject.toml).",
    ),
]
PaidGpus = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="GPUs that are paid for; default: one per rank."),
]


NodeSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="GPUs per node, if the recording does not say."),
]
NodeBandwidth = Annotated[
    float | None,
    typer.Option(
        metavar="GB/S", min=0.001, help="Bandwidth per GPU between nodes, in one direction."
    ),
]
RecordedGpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The GPU that ran the work, such as 'a100 sxm4 80gb', if the file does not say.",
    ),
]
RecordedMesh = Annotated[
    str | None,
    typer.Option(metavar="MESH", help="The recorded mesh, if collectives do not show it."),
]


PRICE_OPTIONS = "--price, --prices"
SAVED_HAS_COST = "the cost in a saved report is fixed; give the trace to change prices"


def chosen_prices(price: str | None, table: Path | None) -> Prices | None:
    """Return the prices from the options, or ``None`` if neither is given. Raises AdvisorError."""
    if price is None and table is None:
        return None
    from advisor.core.prices import parse_price, read_prices

    if price is not None and table is not None:
        raise AdvisorError("--price and --prices: give only one of them")
    return parse_price(price) if price is not None else read_prices(table)


Steps = Annotated[
    str | None,
    typer.Option(
        metavar="A:B|REGEX",
        help="Steps from A up to, but not including, B, counted from 0; or the names of the "
        "ranges that are steps.",
    ),
]
MemorySnapshot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A memory snapshot (torch.cuda.memory._dump_snapshot) of the same program; without "
        "a trace, it can be a PATH.",
    ),
]
KernelProfile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A report of Nsight Compute or rocprof (.ncu-rep, .csv), a folder of them, or "
        "Triton's cache (~/.triton/cache), of the same program; without a trace, also a PATH.",
    ),
]
CompileLogs = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Logs of torch.compile (the folder of TORCH_TRACE, or a file of it) of the same "
        "program; without a trace, they can be a PATH.",
    ),
]
CaptureFile = Annotated[
    str | None,
    typer.Option(
        metavar="TRACE",
        help="A trace of the capture of the replayed CUDA or HIP graphs: it names the operators, "
        "shapes and lines of their kernels.",
    ),
]
RankList = Annotated[
    str | None, typer.Option(metavar="A-B,C", help="Analyze only these ranks: 0-63,512.")
]
Workers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Measure the ranks in N processes.")
]
Cluster = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Measure the ranks on a Dask cluster (tcp://host:8786)."),
]


_NUMBER_RANGE = re.compile(r"\s*[-+]?\w{0,2}\s*:\s*[-+]?\w{0,2}\s*|[-+\d\s.:]*")


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """Parse ``A:B``, ``A:`` or ``:B`` to a half-open range. Return ``None`` for names of ranges,
    see :func:`step_ranges`. Raises AdvisorError for a malformed or empty range."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text.strip())
    if match is None:
        if _NUMBER_RANGE.fullmatch(text) is None:
            return None
        raise AdvisorError(
            f"--steps {text}: give a range A:B of step numbers, such as 2:8 or 2:, or a regular "
            "expression for the names of the ranges that are steps"
        )
    first, last = (int(part) if part else None for part in match.groups())
    if last is not None and last <= (first or 0):
        raise AdvisorError(f"--steps {text}: the range is empty, because B is not included")
    return first, last


def step_ranges(text: str | None) -> str | None:
    """Return the pattern of range names in ``--steps``, or ``None`` if it has none."""
    return text if text is not None and parse_steps(text) is None else None


_SIZES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_size(text: str | None) -> int | None:
    """Parse ``16G``, ``500M`` or plain bytes (decimal units). Raises AdvisorError otherwise."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(match[1]) * _SIZES[match[2]]) if match is not None else 0
    if size <= 0:
        raise AdvisorError(f"--max-size {text}: give a size such as 500M or 32G")
    return size


# -- options of an analysis: each command names its own --------------------------------------------

ANALYSIS: Final[dict[str, Any]] = {
    "rank": Rank, "window": Window, "steps": Steps, "rules": Rules,
    "memory_snapshot": MemorySnapshot, "kernel_profile": KernelProfile, "capture": CaptureFile,
    "compile_log": CompileLogs, "max_size": MaxSize, "ranks": RankList, "workers": Workers,
    "cluster": Cluster, "price": Price, "prices": PriceTable, "paid_gpus": PaidGpus,
    "recorded_gpu": RecordedGpu, "node_size": NodeSize, "node_bandwidth": NodeBandwidth,
}  # fmt: skip
"""Analysis options and their declarations. Each is the field of ``Options`` or ``ReadOptions`` with
the same name, unless :func:`build_options` translates it."""


def with_options(
    *names: str, **declarations: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter ``options`` with these options of
    ANALYSIS, in its order. ``declarations``: options that this command declares otherwise. Raises
    ValueError for a name that ANALYSIS lacks."""
    chosen = {*names, *declarations}
    if unknown := chosen - ANALYSIS.keys():
        raise ValueError(f"no options of an analysis: {', '.join(sorted(unknown))}")
    declared = {name: declarations.get(name, ANALYSIS[name]) for name in ANALYSIS if name in chosen}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            options = build_options(**{name: values.pop(name) for name in declared})
            command(options=options, **values)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name != "options":
                parameters.append(parameter)
                continue
            parameters += [
                inspect.Parameter(name, parameter.kind, default=None, annotation=annotation)
                for name, annotation in declared.items()
            ]
        del run.__wrapped__  # typer reads it
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def build_options(
    *,
    steps: str | None = None,
    rules: Path | None = None,
    max_size: str | None = None,
    price: str | None = None,
    prices: Path | None = None,
    **others: Any,
) -> Options:
    """Build Options from command-line values. ``others`` are fields that are used unchanged. Raises
    AdvisorError for an invalid value."""
    from advisor.core.gpus import find_gpu

    chosen, max_bytes = parse_steps(steps), parse_size(max_size)
    if others.get("recorded_gpu"):
        find_gpu(others["recorded_gpu"])  # report an unknown GPU here, not for one of several files
    price_table = chosen_prices(price, prices)
    from advisor.advise.options import Options
    from advisor.read import ReadOptions

    option_names = {name for name in others if name in Options.__dataclass_fields__}
    read: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in others.items()
        if name not in option_names and value is not None
    }
    if max_bytes is not None:
        read["max_bytes"] = max_bytes
    return Options(
        steps=chosen,
        rules_folder=rules,
        prices=price_table,
        read=ReadOptions(step_ranges=step_ranges(steps), **read),
        **{name: others[name] for name in option_names},
    )


def with_read_options(options: Options, **changes: Any) -> Options:
    """Return a copy of the options with more fields of :class:`~advisor.read.ReadOptions` set."""
    return replace(options, read=replace(options.read, **changes))
