"""``advisor record``: run a training program unchanged, and record it."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from advisor.core.errors import AdvisorError

OPTIONS = ("--skip", "--warmup", "--active", "--ranks", "--deep", "--signal", "--no-report",
           "--scalene", "--scalene-steps", "--out", "--output")  # fmt: skip
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings for typer: words after the program belong to it, and ``-m`` begins a program."""

Skip = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Steps before the first window (10; from the third on if ten take over 2 s).",
    ),
]


def command(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] PROGRAM [ARGS]...",
            help="train.py args…, -m module args…, or a launcher: torchrun … train.py.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", "--output", metavar="DIR", help="Run directory (a new one)."),
    ] = None,
    skip: Skip = None,
    warmup: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Warm-up steps of a window (3).")
    ] = None,
    active: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Steps that a window keeps (5); 0 for no windows."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Ranks that record windows: 0, 0-7, 0,8 or all (0-7)."),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also record Python stacks and allocations, at twice the cost."
        ),
    ] = False,
    signal: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Signal that opens a window, such as SIGUSR2."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Print the first finding at the end.")
    ] = True,
    scalene: Annotated[
        bool,
        typer.Option("--scalene", help="Run the program again under Scalene, to find hot lines."),
    ] = False,
    scalene_steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps of the pass under Scalene.")
    ] = 50,
    attach: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Instead of a program, make a live vLLM or SGLang server profile itself: "
            "http://host:8000.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Duration with --attach (at most 120).")
    ] = 5.0,
    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option(help="With --attach, if the server does not report it."),
    ] = None,
) -> None:
    """Run a training program unchanged, and record its steps, phases and a profiled window.

    The exit code is the program's. `ADVISOR_*` variables and `[tool.advisor.record]` in
    pyproject.toml set further options."""
    if attach is not None:
        _record_server(attach, seconds, engine, program, out)
        return
    if not program:
        raise AdvisorError(
            "no PROGRAM is given: advisor record train.py, or for a server: advisor record "
            "--attach URL"
        )
    chosen = {
        "out": out, "skip": skip, "warmup": warmup, "active": active, "ranks": ranks,
        "deep": deep or None, "signal": signal, "report": None if report else False,
    }  # fmt: skip
    _record_program(program, chosen, scalene_steps if scalene else None, out)


def _record_program(
    program: list[str], chosen: dict[str, Any], scalene_steps: int | None, out: str | None
) -> NoReturn:
    """Record the program with the ``chosen`` options that are not ``None``, and exit as it does.
    With ``scalene_steps``, run it again under Scalene."""
    from advisor.recorder import launch
    from advisor.recorder.options import switched_off

    words = launch.command_line(program)
    if warning := launch.warn_misplaced(program, OPTIONS):
        print(f"advisor: {warning}", file=sys.stderr)
    if switched_off():
        launch.exit_like_program(launch.run(words, os.environ.copy()))
    code = launch.record(words, {k: v for k, v in chosen.items() if v is not None})
    if scalene_steps is not None and code == 0:
        launch.under_scalene(program, scalene_steps, out or "")
    launch.exit_like_program(code)


def _record_server(
    url: str, seconds: float, engine: str | None, program: list[str] | None, out: str | None
) -> None:
    """Record a running inference server, and print where its trace is."""
    from advisor.recorder import attach

    if program:
        raise AdvisorError("--attach records a running server: do not give a program")
    folder = None if out is None else Path(out)
    recording = attach.attach(
        url, seconds, engine, folder, lambda text: print(text, file=sys.stderr)
    )
    outcome = "interrupted after" if recording.interrupted else "recorded"
    print(f"{outcome} {recording.seconds:.1f} s; the profiler is off")
    if recording.files:
        print("\n".join(f"advisor analyze {file}" for file in recording.files))
    else:
        print("the traces are in the server's profiler folder: advisor analyze FOLDER")


def window(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory being recorded.")],
) -> None:
    """Ask a run in progress to profile its next steps."""
    from advisor.core.run_directory import is_run, read_recording
    from advisor.recorder.writer import REQUEST

    if not run.exists():
        raise AdvisorError(f"{run}: no such file or directory")
    if not is_run(run):
        raise AdvisorError(f"{run}: not a run directory (it has no manifest.json)")
    ranks = read_recording(run).ranks.values()
    if ranks and all(rank.has_ended for rank in ranks):
        raise AdvisorError(f"{run}: the run has ended, so no window can open in it")
    try:
        (run / REQUEST).touch()
        os.utime(run / REQUEST)
    except OSError as error:
        raise AdvisorError(f"cannot write to {run} ({error.strerror or error})") from None
    print("requested: a window opens within two seconds; its trace appears in the run directory")
