"""Small programs with one known cause each for what TORCH_TRACE logs of torch.compile.

``python tests/cli/compile_programs.py FILE`` records them all (on a CPU) into the fixture that
``test_compile_log.py`` reads: run it again after any change, the expected lines are of this file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = ("dynamo_graph_break_reason", "recompile_reasons", '"compilation_metrics"', "program")
PROGRAMS: dict[str, Callable[[Any, Any], None]] = {}
SCALE = 2.0


def program(run: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    PROGRAMS[run.__name__] = run
    return run


def call(torch: Any, function: Any, *calls: tuple[Any, ...], **options: Any) -> None:
    compiled = torch.compile(function, **({"backend": "eager"} | options))
    for arguments in calls:
        compiled(*arguments)


# -- graph breaks: the line is marked --------------------------------------------------------------


@program
def break_print(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        print("y")  # break_print
        return y.cos()

    call(torch, f, (x,))


@program
def break_item(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        n = x.sum().item()  # break_item
        return x * n

    call(torch, f, (x,))


@program
def break_branch(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        if x.sum() > 0:  # break_branch
            return x.sin()
        return x.cos()

    call(torch, f, (x,))


@program
def break_asked(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()  # break_asked
        return y.cos()

    call(torch, f, (x,))


@program
def break_sleep(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        time.sleep(0)  # break_sleep
        return y.cos()

    call(torch, f, (x,))


@program
def break_logging(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        logging.getLogger("p").warning("y")  # break_logging
        return y.cos()

    call(torch, f, (x,))


@program
def break_disabled(torch: Any, x: Any) -> None:
    @torch.compiler.disable
    def apart(x: Any) -> Any:
        return x + 1

    def f(x: Any) -> Any:
        return apart(x.sin()).cos()  # break_disabled

    call(torch, f, (x,))


@program
def break_nonzero(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        return torch.nonzero(x).sum() + x.sin()  # break_nonzero

    call(torch, f, (x,))


@program
def break_open(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        open(os.devnull).close()  # break_open  # noqa: PTH123
        return y.cos()

    call(torch, f, (x,))


@program
def break_backward(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        loss = (x * x).sum()
        loss.backward()  # break_backward
        return loss

    call(torch, f, (x.clone().requires_grad_(),))


@program
def break_in_a_loop(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        for _ in range(3):
            x = x.sin()
            print("x")  # break_in_a_loop
        return x

    call(torch, f, (x,))


@program
def break_inlined(torch: Any, x: Any) -> None:
    def inner(x: Any) -> Any:
        y = x.sin()
        time.sleep(0)  # break_inlined
        return y

    def f(x: Any) -> Any:
        return inner(x).cos()

    call(torch, f, (x,))


# -- recompilations: what changes is in the guard --------------------------------------------------


@program
def recompile_shape(torch: Any, x: Any) -> None:
    call(torch, lambda x: x.sin(), (torch.ones(3),), (torch.ones(4),), dynamic=False)


@program
def recompile_dtype(torch: Any, x: Any) -> None:
    call(torch, lambda x: x.sin(), (x,), (x.double(),))


@program
def recompile_rank(torch: Any, x: Any) -> None:
    call(torch, lambda x: x.sin(), (x,), (x[None],))


@program
def recompile_number(torch: Any, x: Any) -> None:
    call(torch, lambda x, n: x * n, (x, 2), (x, 3), dynamic=False)


@program
def recompile_text(torch: Any, x: Any) -> None:
    call(torch, lambda x, how: x.sin() if how == "sin" else x.cos(), (x, "sin"), (x, "cos"))


@program
def recompile_gradient(torch: Any, x: Any) -> None:
    call(torch, lambda x: x.sin(), (x,), (x.clone().requires_grad_(),))


@program
def recompile_grad_mode(torch: Any, x: Any) -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    compiled(x)
    with torch.no_grad():
        compiled(x)


@program
def recompile_training(torch: Any, x: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    model.eval()
    compiled(x)


@program
def recompile_global(torch: Any, x: Any) -> None:
    global SCALE  # noqa: PLW0603
    compiled = torch.compile(lambda x: x * SCALE, backend="eager")
    compiled(x)
    SCALE = 3.0
    compiled(x)


@program
def recompile_list(torch: Any, x: Any) -> None:
    call(torch, lambda xs: sum(xs), ([x],), ([x, x],))  # noqa: PLW0108


@program
def recompile_limit(torch: Any, x: Any) -> None:
    call(torch, lambda x, how: x * len(how), *((x, "n" * n) for n in range(1, 12)), dynamic=False)


# -- others ---------------------------------------------------------------


@program
def inductor_on_cpu(torch: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        return x.sin() + 1

    call(torch, f, (x,), backend="inductor", mode="reduce-overhead")


@program
def nothing_wrong(torch: Any, x: Any) -> None:
    call(torch, lambda x: x.sin() + 1, (x,), (x,))


def record(fixture: Path) -> None:
    """Run all, and keep the lines of the log that tell causes, by program."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_TRACE"] = folder
        import re

        import torch
        from torch._logging import trace_structured

        warnings.simplefilter("ignore")
        for name, run in PROGRAMS.items():
            torch._dynamo.reset()
            trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": "program", "encoding": "string"},
                payload_fn=lambda name=name: name,
            )
            run(torch, torch.ones(3))
        (log,) = Path(folder).glob("*.log")
        lines = log.read_text().splitlines()
    logs: dict[str, list[str]] = {}
    kept, current = False, ""
    own, library = r"[\w/.-]*compile_programs\.py", str(Path(torch.__file__).parent.parent)
    for line in lines:
        if line[:1] == "V":
            kept = any(name in line for name in KEPT)
            if '"program"' in line:
                current = ""
        elif kept and not current:
            current = line.strip()
            logs[current] = []
            continue
        if kept and current:
            line = re.sub(own, "/home/me/compile_programs.py", _trimmed(line))
            line = line.replace(library, "/site-packages").replace(sys.base_prefix, "/usr")
            logs[current].append(line)
    fixture.write_bytes(gzip.compress(json.dumps(logs).encode(), mtime=0))


def _trimmed(line: str) -> str:
    """Remove the settings of dynamo and inductor, which are thousands of characters."""
    start = line.find("{") if '"compilation_metrics"' in line[:200] else -1
    if start < 0:
        return line
    record = json.loads(line[start:])
    metrics = record["compilation_metrics"]
    record["compilation_metrics"] = {k: v for k, v in metrics.items() if "config" not in k}
    return line[:start] + json.dumps(record)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
