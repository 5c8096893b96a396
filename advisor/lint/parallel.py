"""Hints about training on several GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.lint.hint import Hint, place
from advisor.lint.source import Script, is_method, seldom

_DDP = {"torch.nn.parallel.DistributedDataParallel", "DistributedDataParallel", "DDP"}
_DP = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "DataParallel"}


def check(source: Script) -> Iterator[Hint]:
    """``DataParallel``, and accumulation that reduces gradients after every micro-batch."""
    for call in source.calls:
        if source.dotted(call.func) in _DP:
            yield _data_parallel(source, call)
    if not any(is_method(call, "no_sync", "accumulate") for call in source.calls):
        yield from _accumulation(source)


def _data_parallel(source: Script, call: ast.Call) -> Hint:
    model = source.of(call.args[0]) if len(call.args) == 1 else "model"
    return Hint(
        id="data-parallel",
        title="torch.nn.DataParallel",
        why=(
            "one process drives all GPUs: it copies the model to each in every step, gathers "
            "all outputs on the first, and Python runs on one core"
        ),
        fix=(
            "DistributedDataParallel with one process a GPU, started by torchrun: "
            "init_process_group(), local_rank from the environment, a DistributedSampler."
        ),
        code=f"DistributedDataParallel({model}, device_ids=[local_rank])",
        confirmed_by="data-parallel",
        **place(call),
    )


def _accumulation(source: Script) -> Iterator[Hint]:
    model = _wrapped_model(source)
    if model is None:
        return
    for loop in source.training_loops:
        condition = _step_condition(loop)
        backward = [
            n for n in ast.walk(loop) if is_method(n, "backward") and source.loop_around(n) is loop
        ]
        if condition is None or not backward:
            continue
        statement = source.statement(backward[0])
        if statement is None or statement not in loop.body:
            continue
        yield Hint(
            id="accumulation-without-no-sync",
            title="Gradients are reduced across ranks after every micro-batch",
            why="only the last micro-batch before optimizer.step() has to reduce them",
            fix=("Run forward and backward of the other micro-batches under model.no_sync()."),
            code=(
                f"with contextlib.nullcontext() if {source.of(condition)} else "
                f"{model}.no_sync():\n    ...   # forward and backward, both"
            ),
            confirmed_by="missing-no-sync",
            line=backward[0].lineno,
            column=backward[0].col_offset,
            end_line=backward[0].end_lineno,
        )


def _wrapped_model(source: Script) -> str | None:
    """Name of the variable that holds a DistributedDataParallel."""
    for call in source.calls:
        if source.dotted(call.func) in _DDP:
            statement = source.statement(call)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                return statement.targets[0].id
    return None


def _step_condition(loop: ast.AST) -> ast.expr | None:
    """The condition, with a remainder, under which the optimizer steps."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and seldom(node.test):
            for inner in node.body:
                for call in ast.walk(inner):
                    if is_method(call, "step") and not (call.args or call.keywords):
                        return node.test
    return None
