"""Hints about how data is loaded and handed to the device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from advisor.lint.hint import Hint
from advisor.lint.source import Edit, Source, is_constant, is_method, keyword

LOADERS = {"torch.utils.data.DataLoader", "DataLoader", "torch_geometric.loader.DataLoader"}
_WORKERS_AT = 5
"""Position of ``num_workers`` among the positional arguments."""


def check(source: Source) -> Iterator[tuple[Hint, list[Edit]]]:
    """DataLoader arguments; blocking copies of pinned batches; an epoch not told to the sampler."""
    loaders = [call for call in source.calls if source.dotted(call.func) in LOADERS]
    for call in loaders:
        yield from _arguments(source, call)
    if any(is_constant(keyword(call, "pin_memory"), True) for call in loaders):
        yield from _blocking(source)
    yield from _epoch(source)


def _arguments(source: Source, call: ast.Call) -> Iterator[tuple[Hint, list[Edit]]]:
    if any(item.arg is None for item in call.keywords) or any(
        isinstance(item, ast.Starred) for item in call.args
    ):
        return  # **options: what they hold is not in the call
    workers = keyword(call, "num_workers")
    if workers is None and len(call.args) > _WORKERS_AT:
        workers = call.args[_WORKERS_AT]
    none = workers is None or is_constant(workers, 0)
    missing = []
    if workers is None:
        missing.append("num_workers=4")
    if keyword(call, "pin_memory") is None and re.search(r"\bcuda\b", source.text):
        missing.append("pin_memory=True")
    if keyword(call, "persistent_workers") is None and (workers is None or not none):
        missing.append("persistent_workers=True")
    if not missing and not none:
        return
    edits = source.add_arguments(call, ", ".join(missing)) if missing else []
    if workers is not None and none and is_constant(workers, 0):
        edits.append(source.replace(workers, "4"))
        missing.append("num_workers above 0")
        if keyword(call, "persistent_workers") is None:
            edits += source.add_arguments(call, "persistent_workers=True")
    if missing == ["persistent_workers=True"]:
        why = "workers are started anew for every epoch, and its first batch waits for them"
        confirmed = "workers-respawned"
    elif none:
        why = "the training process loads and transforms every batch itself, while the device waits"
        confirmed = "single-process-loader"
    else:
        why = "batches in pageable memory cannot be copied while the host goes on"
        confirmed = "pageable-copies"
    yield (
        Hint(
            id="dataloader-arguments",
            title=f"DataLoader without {', '.join(missing)}",
            why=f"{why}; a dataset that is in memory already may be faster without workers",
            fix="Take the number of workers from the cores that the process may use.",
            confirmed_by=confirmed,
            line=call.lineno,
            column=call.col_offset,
            end_line=call.end_lineno,
        ),
        edits,
    )


def _blocking(source: Source) -> Iterator[tuple[Hint, list[Edit]]]:
    for call in source.calls:
        if not is_method(call, "to", "cuda") or keyword(call, "non_blocking") is not None:
            continue
        assert isinstance(call.func, ast.Attribute)
        if source.in_training_loop(call) is None:
            continue
        if call.func.attr == "to" and not (call.args and _is_device(call.args[0])):
            continue
        yield (
            Hint(
                id="blocking-copy",
                title=f"{source.of(call)[:60]} waits for the copy",
                why="the batch is in pinned memory, from which a copy need not hold the host up",
                fix="Copy with non_blocking=True.",
                confirmed_by="blocking-pinned-copy",
                line=call.lineno,
                column=call.col_offset,
                end_line=call.end_lineno,
            ),
            source.add_arguments(call, "non_blocking=True"),
        )


def _is_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("cuda")
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return "device" in name.lower() or name in {"rank", "local_rank"}


def _epoch(source: Source) -> Iterator[tuple[Hint, list[Edit]]]:
    """A DistributedSampler shuffles alike in every epoch unless it is told the epoch."""
    if any(is_method(call, "set_epoch") for call in source.calls):
        return
    for call in source.calls:
        if source.dotted(call.func).rsplit(".", 1)[-1] != "DistributedSampler":
            continue
        if is_constant(keyword(call, "shuffle"), False):
            continue
        statement = source.statement(call)
        edits = []
        if (
            isinstance(statement, ast.Assign)
            and statement.value is call
            and isinstance(statement.targets[0], ast.Name)
        ):
            loop = _epoch_loop(source)
            if loop is not None and isinstance(loop.target, ast.Name):
                text = f"{statement.targets[0].id}.set_epoch({loop.target.id})"
                edits = [source.insert_before(loop.body[0], text)]
        yield (
            Hint(
                id="sampler-epoch",
                title="DistributedSampler is never told the epoch",
                why="every epoch then has the same order: this costs quality, not time",
                fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
                confirmed_by="",
                line=call.lineno,
                column=call.col_offset,
                end_line=call.end_lineno,
            ),
            edits,
        )


def _epoch_loop(source: Source) -> ast.For | None:
    for loop in source.training_loops:
        for outer in source.around(loop):
            if isinstance(outer, ast.For) and "range" in source.of(outer.iter):
                return outer
    return None
