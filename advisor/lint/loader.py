"""Hints about loading data and copying it to the GPU."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from advisor.lint.source import Hint, Script, is_constant, is_method, keyword, position

LOADERS = {"torch.utils.data.DataLoader", "DataLoader", "torch_geometric.loader.DataLoader"}
MAX_WORKERS = 4
_WORKERS_POSITION = 5
"""Position of ``num_workers`` among the positional arguments."""


def check_loader(source: Script) -> Iterator[Hint]:
    """DataLoader arguments; blocking copies of pinned batches; a sampler without the epoch."""
    loaders = [call for call in source.calls if source.qualified_name(call.func) in LOADERS]
    for call in loaders:
        yield from _arguments(source, call)
    if any(is_constant(keyword(call, "pin_memory"), True) for call in loaders):
        yield from _blocking(source)
    yield from _epoch(source)


def _arguments(source: Script, call: ast.Call) -> Iterator[Hint]:
    if any(item.arg is None for item in call.keywords) or any(
        isinstance(item, ast.Starred) for item in call.args
    ):
        return  # **options: the call does not show what they contain
    workers = keyword(call, "num_workers")
    if workers is None and len(call.args) > _WORKERS_POSITION:
        workers = call.args[_WORKERS_POSITION]
    none = workers is None or is_constant(workers, 0)
    missing = []
    if workers is None:
        missing.append(f"num_workers={_suggest_workers()}")
    if keyword(call, "pin_memory") is None and re.search(r"\bcuda\b", source.text):
        missing.append("pin_memory=True")
    if keyword(call, "persistent_workers") is None and (workers is None or not none):
        missing.append("persistent_workers=True")
    if not missing and not none:
        return
    wanted = list(missing)
    if workers is not None and none:
        missing.append("num_workers above 0")
        wanted.append(f"num_workers={_suggest_workers()}")
        if keyword(call, "persistent_workers") is None:
            wanted.append("persistent_workers=True")
    if missing == ["persistent_workers=True"]:
        why = "workers restart for every epoch, and its first batch waits for them"
        confirmed = "workers-respawned"
    elif none:
        why = "the training process loads and transforms every batch itself, while the GPU waits"
        confirmed = "single-process-loader"
    else:
        why = "a copy from pageable memory blocks the host"
        confirmed = "pageable-copies"
    yield Hint(
        id="dataloader-arguments",
        title=f"DataLoader without {', '.join(missing)}",
        why=f"{why}; a dataset in memory may be faster without workers",
        fix=(
            "Set num_workers by the cores that the process may use where it runs: "
            f"{_count_cores()} here, and the loop itself needs one."
        ),
        code=f"DataLoader(..., {', '.join(wanted)})",
        confirmed_by=confirmed,
        **position(call),
    )


def _count_cores() -> int:
    """Cores that a process may use on this machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _suggest_workers() -> int:
    """Workers that leave the loop a core; four keep up with most loops."""
    return max(1, min(MAX_WORKERS, _count_cores() - 1))


def _blocking(source: Script) -> Iterator[Hint]:
    for call in source.calls:
        if not is_method(call, "to", "cuda") or keyword(call, "non_blocking") is not None:
            continue
        assert isinstance(call.func, ast.Attribute)
        if source.in_training_loop(call) is None:
            continue
        if call.func.attr == "to" and not (call.args and _is_device(call.args[0])):
            continue
        yield Hint(
            id="blocking-copy",
            title=f"{source.text_of(call)[:60]} waits for the copy",
            why="the batch is in pinned memory, so the copy does not have to block the host",
            fix="Copy with non_blocking=True.",
            code=f"{_receiver(source, call)}, non_blocking=True)",
            confirmed_by="blocking-pinned-copy",
            **position(call),
        )


def _receiver(source: Script, call: ast.Call) -> str:
    """The call up to its closing bracket."""
    text = source.text_of(call)[:-1].rstrip().rstrip(",")
    return text if call.args or call.keywords else f"{text}device"


def _is_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("cuda")
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return "device" in name.lower() or name in {"rank", "local_rank"}


def _epoch(source: Script) -> Iterator[Hint]:
    """A DistributedSampler shuffles in the same order each epoch unless it gets the epoch."""
    if any(is_method(call, "set_epoch") for call in source.calls):
        return
    for call in source.calls:
        if source.qualified_name(call.func).rsplit(".", 1)[-1] != "DistributedSampler":
            continue
        if is_constant(keyword(call, "shuffle"), False):
            continue
        yield Hint(
            id="sampler-epoch",
            title="DistributedSampler without set_epoch()",
            why="every epoch has the same order, which costs quality, not time",
            fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
            code="sampler.set_epoch(epoch)   # before the epoch's loop over the loader",
            confirmed_by="",
            **position(call),
        )
