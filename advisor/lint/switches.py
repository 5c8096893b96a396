"""Hints about switches that were left on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.lint.hint import Hint, place
from advisor.lint.source import Script, is_constant


def check(source: Script) -> Iterator[Hint]:
    """Anomaly detection; blocking launches set in the program; torch.compile in the loop."""
    for call in source.calls:
        name = source.dotted(call.func)
        if name == "torch.autograd.set_detect_anomaly" and call.args:
            if is_constant(call.args[0], True):
                yield _switch(call)
        elif name == "torch.autograd.detect_anomaly":
            yield _switch(call)
        elif name == "torch.compile" and source.in_training_loop(call) is not None:
            yield Hint(
                id="compile-in-loop",
                title="torch.compile in the training loop",
                why="a new compiled function each step looks for its graph again",
                fix="Compile once, before the loop.",
                confirmed_by="recompilation",
                **place(call),
            )
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Subscript)
            and source.dotted(node.targets[0].value) == "os.environ"
            and is_constant(node.targets[0].slice, "CUDA_LAUNCH_BLOCKING")
            and is_constant(node.value, "1")
        ):
            yield Hint(
                id="launch-blocking",
                title="CUDA_LAUNCH_BLOCKING=1",
                why="the host waits for every kernel: nothing overlaps any more",
                fix="Set it for the run in which an error is looked for.",
                confirmed_by="debug-switches",
                **place(node),
            )


def _switch(call: ast.Call) -> Hint:
    return Hint(
        id="anomaly-mode",
        title="Anomaly detection is on",
        why="the stack of every operation is kept, and every gradient is checked for NaN",
        fix="Switch it on for the run in which an error is looked for.",
        confirmed_by="debug-switches",
        **place(call),
    )
