"""Training loops for the machine, drawn from numbers, and fixes to them beside the edits that
say the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from whatif_machine import (
    Backward,
    Copy,
    Every,
    Graph,
    Host,
    Kernel,
    Next,
    Program,
    Record,
    Span,
    Sync,
    Wait,
    renumber,
)

from advisor.core.finding import Edit, Select

SYNCS = ("none", "item", "stream", "device", "event")
LOADER = r"^enumerate\(DataLoader\)#"


@dataclass(frozen=True)
class Shape:
    """The parts of a training step; times are microseconds per step."""

    seed: int = 0
    layers: int = 8
    host: float = 600.0
    """Time of the operators of forward and backward."""
    device: float = 600.0
    """Time of their kernels."""
    python: float = 150.0
    """Time of a Python frame without launches."""
    backward: bool = True
    """Run the backward pass on autograd's thread."""
    sync: str = "none"
    sync_every: int = 1
    copy: float = 0.0
    """Time of a copy of the batch to the device."""
    pinned: bool = True
    comm: float = 0.0
    """Collectives in backward on a stream of their own, which the optimizer waits for."""
    optimizer: int = 10
    """Number of optimizer kernels, 2 µs each."""
    graph: int = 0
    """Number of kernels of a CUDA graph in forward."""
    batch: float = 0.0
    uneven: float = 0.0
    """Relative standard deviation of the work that batches need."""
    workers: int = 0
    blocks: tuple[int, ...] = (1024,)
    """Block counts of the kernels of forward and backward, drawn from these."""
    other: bool = False
    """Whether another thread writes something out meanwhile."""


def training(shape: Shape, **program: Any) -> Program:
    """The program of a shape."""
    renumber()
    r = Random(shape.seed)
    weights = [r.uniform(0.3, 1.0) for _ in range(2 * shape.layers)]
    total = sum(weights)
    cost = [r.uniform(0.3, 1.0) for _ in range(2 * shape.layers)]
    spent = sum(cost)

    def layer(i: int, name: str) -> Span:
        host = shape.host * cost[i] / spent
        us, blocks = shape.device * weights[i] / total, r.choice(shape.blocks)
        kernel = Kernel(f"gemm_{name}_{i}", us, blocks=blocks)
        before = max(0.5, host - 5.0 - 2.0)
        return Span("op", f"aten::{name}_{i}", (Host(before), kernel, Host(2.0)))

    forward: list[Any] = [layer(i, "forward") for i in range(shape.layers)]
    if shape.graph:
        graph = Graph(tuple((f"graph_{i}", 8.0) for i in range(shape.graph)))
        forward.insert(shape.layers // 2, graph)
    backward: list[Any] = []
    for i in range(shape.layers):
        node = f"autograd::engine::evaluate_function: MmBackward{i}"
        backward.append(Span("op", node, (layer(shape.layers + i, "backward"),)))
        if shape.comm and i % 3 == 2:
            backward += _collective(i, shape.comm / (shape.layers // 3))
    parts: list[Any] = []
    if shape.batch:
        parts.append(Next())
    if shape.python:
        parts.append(Span("python", "train.py(12): augment", (Host(shape.python),)))
    if shape.copy:
        copy = Copy("HtoD", shape.copy, int(shape.copy * 20e3), pinned=shape.pinned)
        sync = () if shape.pinned else (Sync("stream"),)
        parts.append(Span("op", "aten::to", (Host(4.0), copy, *sync)))
    parts += forward
    parts += [Backward(tuple(backward))] if shape.backward else backward
    if shape.comm:
        parts.append(Wait("reduced"))
    update = tuple(
        Span("op", "aten::_foreach_add_", (Host(4.0), Kernel(f"update_{i}", 2.0), Host(1.0)))
        for i in range(shape.optimizer)
    )
    if update:
        parts.append(Span("range", "Optimizer.step#SGD.step", update))
    parts += _sync(shape)
    return Program(
        tuple(parts),
        batch_us=shape.batch,
        uneven=shape.uneven,
        workers=shape.workers,
        background=_unrelated_work() if shape.other else (),
        **program,
    )


def _unrelated_work() -> tuple[Any, ...]:
    return (
        Span("python", "writer.py(3): flush", (Host(300.0),)),
        Kernel("pack", 50.0, stream=40),
        Sync("stream", stream=40),
    )


def _collective(i: int, us: float) -> list[Any]:
    return [
        Record(f"grads_{i}"),
        Wait(f"grads_{i}", 20),
        Span("range", "nccl:all_reduce", (
            Host(10.0), Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", us, 20),
        )),
        Record("reduced", 20),
    ]  # fmt: skip


def _sync(shape: Shape) -> list[Any]:
    if shape.sync == "none":
        return []
    if shape.sync == "item":
        statements: tuple[Any, ...] = (
            Span("op", "aten::item", (
                Host(3.0), Copy("DtoH", 2.0, 4, pinned=False), Sync("stream"),
            )),
        )  # fmt: skip
    elif shape.sync == "event":  # waits for the step before: the host is at most one ahead
        statements = (Record("step"), Span("op", "wait", (Sync("event", event="step", lag=1),)))
    else:
        statements = (Span("op", "wait", (Sync(shape.sync),)),)
    return [Every(shape.sync_every, statements)] if shape.sync_every > 1 else list(statements)


# -- changes to programs ------------------------------------------------------------------------


def rewrite(body: Sequence[Any], change: Callable[[Any], Sequence[Any]]) -> tuple[Any, ...]:
    """Each statement replaced by what ``change`` makes of it, inner ones first."""
    result: list[Any] = []
    for s in body:
        inner = replace(s, body=rewrite(s.body, change)) if hasattr(s, "body") else s
        result += change(inner)
    return tuple(result)


def apply_change(program: Program, change: Callable[[Any], Sequence[Any]]) -> Program:
    """Apply a change to the statements of a program."""
    return replace(program, body=rewrite(program.body, change))


@dataclass(frozen=True)
class Fix:
    """A change to a program, and the edits that describe it."""

    name: str
    edits: tuple[Edit, ...]
    change: Callable[[Program], Program]


def _kernels(start: str, change: Callable[[Kernel], Sequence[Any]]) -> Callable[[Program], Program]:
    def change_statement(s: Any) -> Sequence[Any]:
        return change(s) if isinstance(s, Kernel) and s.name.startswith(start) else (s,)

    return lambda p: apply_change(p, change_statement)


def _spans(start: str, change: Callable[[Span], Sequence[Any]]) -> Callable[[Program], Program]:
    def change_statement(s: Any) -> Sequence[Any]:
        return change(s) if isinstance(s, Span) and s.name.startswith(start) else (s,)

    return lambda p: apply_change(p, change_statement)


def scale_kernels(start: str, factor: float) -> Fix:
    """Fix: kernels take ``factor`` of their time."""
    edit = Edit(op="scale", select=Select(on="gpu", name=f"^{start}"), factor=factor)
    return Fix("scale gpu", (edit,), _kernels(start, lambda k: (replace(k, us=k.us * factor),)))


def remove_kernels(start: str) -> Fix:
    """Fix: kernels and their launches go; their operators stay."""
    edit = Edit(op="remove", select=Select(on="gpu", name=f"^{start}"))
    return Fix("remove gpu", (edit,), _kernels(start, lambda k: ()))


def remove_host(start: str = "train.py") -> Fix:
    """Fix: a Python frame goes."""
    edit = Edit(op="remove", select=Select(on="host", kind=("python",), name=f"^{start}"))
    return Fix("remove host", (edit,), _spans(start, lambda s: ()))


def scale_host(start: str, factor: float) -> Fix:
    """Fix: a Python frame takes ``factor`` of its time."""
    edit = Edit(
        op="scale", select=Select(on="host", kind=("python",), name=f"^{start}"), factor=factor
    )

    def change_span(s: Span) -> Sequence[Any]:
        return (replace(s, body=tuple(replace(h, us=h.us * factor) for h in s.body)),)

    return Fix("scale host", (edit,), _spans(start, change_span))


def asynchronous(sync: str) -> Fix:
    """The host no longer waits at the end of the step."""
    under = "aten::item" if sync == "item" else "wait"
    calls = ("memcpy", "sync_device", "sync_stream", "sync_event")
    edit = Edit(op="make_async", select=Select(on="host", call=calls, under=f"^{under}$"))

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Span) and s.name == under:
            body = tuple(
                replace(x, pinned=True) if isinstance(x, Copy) else x
                for x in s.body
                if not isinstance(x, Sync)
            )
            return (replace(s, body=body),)
        return (s,)

    return Fix("asynchronous", (edit,), lambda p: apply_change(p, change_statement))


def overlap_collectives() -> Fix:
    """Nothing waits for collectives but the optimizer one step later, and a sync of the device."""
    edit = Edit(op="overlap", select=Select(on="gpu", family=("communication",)))

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Wait) and s.event == "reduced":
            return (replace(s, event="reduced before"),)
        return (s,)

    def change_program(p: Program) -> Program:
        p = apply_change(p, change_statement)
        # what the step before left on the stream of the collectives
        return replace(p, body=(Record("reduced before", 20), *p.body))

    return Fix("overlap", (edit,), change_program)


def overlap_copies() -> Fix:
    """The batch is copied on a stream of its own, a step ahead of its use."""
    edit = Edit(op="overlap", select=Select(on="gpu", copy=("HtoD",)))

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Copy) and s.direction == "HtoD":
            return (Wait("copied", 7), replace(s, stream=30), Record("copied", 30))
        return (s,)

    return Fix("overlap copy", (edit,), lambda p: apply_change(p, change_statement))


def merge_update(factor: float) -> Fix:
    """Fix: the optimizer's kernels become one."""
    edit = Edit(op="merge", select=Select(on="gpu", name="^update_"), factor=factor)

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Span) and s.name.startswith("Optimizer.step"):
            first = s.body[0]
            total = sum(k.us for op in s.body for k in op.body if isinstance(k, Kernel))
            body = tuple(
                replace(x, us=total * factor) if isinstance(x, Kernel) else x for x in first.body
            )
            return (replace(s, body=(replace(first, body=body),)),)
        return (s,)

    return Fix("merge", (edit,), lambda p: apply_change(p, change_statement))


def set_launch_cost(start: str = "gemm_forward", host_ns: int = 1000) -> Fix:
    """Fix: operators and launches cost ``host_ns`` each."""
    edit = Edit(op="drop_launch", select=Select(on="gpu", name=f"^{start}"), host_ns=host_ns)

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Span) and s.kind == "op":
            inner = [x for x in s.body if isinstance(x, Kernel) and x.name.startswith(start)]
            if inner:
                return (replace(s, body=tuple(replace(k, launch_us=host_ns / 1e3) for k in inner)),)
        return (s,)

    return Fix("drop_launch", (edit,), lambda p: apply_change(p, change_statement))


def into_graph(start: str = "gemm_forward") -> Fix:
    """Fix: the operators become one CUDA graph, with one call."""
    edit = Edit(op="drop_launch", select=Select(on="gpu", name=f"^{start}"), host_ns=1000)

    def change_program(p: Program) -> Program:
        kernels: list[Kernel] = []

        def collect(s: Any) -> Sequence[Any]:
            if isinstance(s, Kernel) and s.name.startswith(start):
                kernels.append(s)
            return (s,)

        apply_change(p, collect)
        graph = Graph(tuple((k.name, k.us) for k in kernels), launch_us=5.0 + len(kernels))
        graphs = [graph]

        def change_statement(s: Any) -> Sequence[Any]:
            if isinstance(s, Span) and s.kind == "op":
                inner = [x for x in s.body if isinstance(x, Kernel) and x.name.startswith(start)]
                return ((graphs.pop(),) if graphs else ()) if inner else (s,)
            return (s,)

        return apply_change(p, change_statement)

    return Fix("drop_launch graph", (edit,), change_program)


def spread(workers: int) -> Fix:
    """Fix: the loader's work moves to more worker processes."""
    edit = Edit(op="parallelize", select=Select(on="host", name=LOADER), workers=workers)
    return Fix("spread", (edit,), lambda p: replace(p, workers=workers * max(1, p.workers)))


def remove_wait(sync: str) -> Fix:
    """The call that waits at the end of the step goes; what it comes with stays."""
    calls = ("sync_device", "sync_stream", "sync_event")
    edit = Edit(op="remove", select=Select(on="host", call=calls, under="^wait$"))

    def change_statement(s: Any) -> Sequence[Any]:
        return () if isinstance(s, Sync) else (s,)

    return Fix("remove wait", (edit,), lambda p: apply_change(p, change_statement))


WAVE = 108 * (2048 // 256)
"""Blocks of 256 threads that an A100 runs at a time: 108 SMs, 2048 threads each."""


def resize(factor: float) -> Fix:
    """A batch ``factor`` times as large. A kernel takes longer only once its blocks fill the
    device; copies and the loader's work grow with the batch, collectives and optimizer do not."""
    edit = Edit(
        op="resize", select=Select(on="gpu", name="^(gemm|graph|Memcpy|nccl|update)"), factor=factor
    )

    def change_statement(s: Any) -> Sequence[Any]:
        if isinstance(s, Kernel) and s.name.startswith("gemm"):
            waves = s.blocks / WAVE
            grown = max(1.0, waves * factor) / max(1.0, waves)
            return (replace(s, us=s.us * grown),)
        if isinstance(s, Graph):
            waves = 1024 / WAVE
            grown = max(1.0, waves * factor) / waves
            return (replace(s, kernels=tuple((n, us * grown) for n, us in s.kernels)),)
        if isinstance(s, Copy) and s.direction == "HtoD":
            return (replace(s, us=s.us * factor),)
        return (s,)

    return Fix(
        "resize",
        (edit,),
        lambda p: replace(apply_change(p, change_statement), batch_us=p.batch_us * factor),
    )


def with_matrices(program: Program, sizes: Sequence[tuple[int, int, int]]) -> Program:
    """The program with operators of forward as bf16 matrix products of these sizes in turn."""
    number = iter(range(10**6))

    def change_statement(s: Any) -> Sequence[Any]:
        if not (isinstance(s, Span) and s.name.startswith("aten::forward_")):
            return (s,)
        m, k, n = sizes[next(number) % len(sizes)]
        args = (
            ("Input Dims", [[m, k], [k, n]]),
            ("Input type", ["c10::BFloat16", "c10::BFloat16"]),
            ("Input Strides", [[k, 1], [n, 1]]),
        )
        body = tuple(
            replace(x, name="ampere_bf16_s16816gemm_bf16_128x128") if isinstance(x, Kernel) else x
            for x in s.body
        )
        return (Span("op", "aten::mm", body, args),)

    return apply_change(program, change_statement)


A100_BF16, A100_BYTES = 312e12, 2039e9
"""FLOP/s and bytes/s of the A100 80GB SXM (NVIDIA's data sheet)."""


def roofline(share: float) -> Fix:
    """Matrix products reach ``share`` of what the device can do, where they did not yet."""
    edit = Edit(op="roofline", select=Select(on="gpu", name="s16816gemm"), factor=share)

    def change_statement(s: Any) -> Sequence[Any]:
        if not (isinstance(s, Span) and s.name == "aten::mm"):
            return (s,)
        (m, k), (_, n) = dict(s.args)["Input Dims"]
        bound = max(2 * m * k * n / A100_BF16, 2 * (m * k + k * n + m * n) / A100_BYTES) * 1e6
        body = tuple(
            replace(x, us=min(x.us, bound / share)) if isinstance(x, Kernel) else x for x in s.body
        )
        return (replace(s, body=body),)

    return Fix("roofline", (edit,), lambda p: apply_change(p, change_statement))


def combine_fixes(*fixes: Fix) -> Fix:
    """Apply several fixes one after the other."""

    def change_program(p: Program) -> Program:
        for f in fixes:
            p = f.change(p)
        return p

    edits = tuple(e for f in fixes for e in f.edits)
    return Fix(" + ".join(f.name for f in fixes), edits, change_program)
