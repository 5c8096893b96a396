"""``advisor record``: run a training program as it is, and record it."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from advisor.core.errors import AdvisorError

OPTIONS = ("--skip", "--warmup", "--active", "--ranks", "--deep", "--signal", "--no-report",
           "--scalene", "--scalene-steps", "--out", "--output")  # fmt: skip
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings for typer: what follows the program belongs to it, and ``-m`` begins a program."""


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
    skip: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Steps before the first window (10).")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Warm-up steps of a window (3).")
    ] = None,
    active: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Steps that a window keeps (5); 0: no windows."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Ranks that record windows: 0, 0-7, 0,8 or all (0-7)."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Python stacks and allocations too, at twice the cost.")
    ] = False,
    signal: Annotated[
        str | None, typer.Option(metavar="NAME", help="Signal that opens a window, as SIGUSR2.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Print the first finding at the end.")
    ] = True,
    scalene: Annotated[
        bool, typer.Option("--scalene", help="Run the program once more under Scalene: hot lines.")
    ] = False,
    scalene_steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps of the pass under Scalene.")
    ] = 50,
    attach: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Instead of a program, have a live vLLM or SGLang server profile itself: "
            "http://host:8000.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="How long, with --attach (at most 120).")
    ] = 5.0,
    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option(help="With --attach, where the server does not tell."),
    ] = None,
) -> None:
    """Run a training program as it is, and record its steps, phases and a profiled window.

    The exit code is the program's. `ADVISOR_*` variables and `[tool.advisor.record]` in
    pyproject.toml set what has no option here."""
    if attach is not None:
        _attached(attach, seconds, engine, program, out)
        return
    if not program:
        raise AdvisorError(
            "no PROGRAM is given: advisor record train.py; or a server: advisor record --attach URL"
        )
    chosen = {
        "out": out, "skip": skip, "warmup": warmup, "active": active, "ranks": ranks,
        "deep": deep or None, "signal": signal, "report": None if report else False,
    }  # fmt: skip
    _run(program, chosen, scalene_steps if scalene else None, out)


def _run(
    program: list[str], chosen: dict[str, Any], scalene_steps: int | None, out: str | None
) -> NoReturn:
    """Record the program with the options that are ``chosen`` (not ``None``), and exit as it does.
    With ``scalene_steps`` it runs once more, under Scalene."""
    from advisor.recorder import launch
    from advisor.recorder.options import switched_off

    words = launch.command_line(program)
    if behind := launch.warn_misplaced(program, OPTIONS):
        print(f"advisor: {behind}", file=sys.stderr)
    if switched_off():
        launch.exit_like_program(launch.run(words, os.environ.copy()))
    code = launch.record(words, {k: v for k, v in chosen.items() if v is not None})
    if scalene_steps is not None and code == 0:
        launch.under_scalene(program, scalene_steps, out or "")
    launch.exit_like_program(code)


def _attached(
    url: str, seconds: float, engine: str | None, program: list[str] | None, out: str | None
) -> None:
    """Record a running inference server and print where its trace is."""
    from advisor.recorder import attach

    if program:
        raise AdvisorError("--attach records a server that runs: give no program")
    folder = None if out is None else Path(out)
    done = attach.attach(url, seconds, engine, folder, lambda text: print(text, file=sys.stderr))
    how = "interrupted after" if done.interrupted else "recorded"
    print(f"{how} {done.seconds:.1f} s; the profiler is off")
    if done.files:
        print("\n".join(f"advisor analyze {file}" for file in done.files))
    else:
        print("its traces are in the profiler's folder of the server: advisor analyze FOLDER")


def window(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory being recorded.")],
) -> None:
    """Ask a run that is going on to profile its next steps."""
    from advisor.core.run_directory import is_run, read_recording
    from advisor.recorder.writer import REQUEST

    if not is_run(run):
        raise AdvisorError(f"{run}: not a run directory (it has no manifest.json)")
    ranks = read_recording(run).ranks.values()
    if ranks and all(rank.has_ended for rank in ranks):
        raise AdvisorError(f"{run}: the run has ended, so no window can open in it")
    try:
        (run / REQUEST).touch()
        os.utime(run / REQUEST)
    except OSError as error:
        raise AdvisorError(f"{run}: cannot be written to ({error.strerror or error})") from None
    print("asked: a window opens within two seconds; its trace appears in the run directory")
