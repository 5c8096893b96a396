"""Copies from GPU memory to GPU memory take a notable part of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    Rule,
    Select,
    Threshold,
)
from advisor.core.intervals import intersect
from advisor.core.trace import JAX
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import nearest, parents
from advisor.rules.common import busy_during, column, device_places, figure, of_step, per, rows
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import TRACELENS
from advisor.testing import TraceBuilder

_COMPILED = r"^CompiledFunction|^(?:## )?Call CompiledFxGraph|^Torch-Compiled Region"


class DeviceCopies(Rule):
    """Tensors are copied from GPU memory to GPU memory (``clone``, ``copy_``, ``contiguous``,
    ``cat``) for a notable part of the step: each byte is read and written, and nothing computed.

    Counted are copies by the copy engine or driver (``Memcpy DtoD``) that run under neither compute
    nor communication; other rules look at copies by kernels. Two causes are distinguished. Compiled
    functions that replay CUDA graphs copy their inputs and outputs into and out of fixed buffers,
    unless the addresses are known to stay (nearly all copies of a public V100 trace are of this
    kind). The rest is the program's own.
    """

    id = "device-copies"
    title = "Copies within GPU memory take part of the step"
    category = "transfer"
    found_in = ("traces/v100_train_copy_heavy",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
        "traces/h100_bert_small_inference",
    )
    validated_on = (
        "v100_train_copy_heavy: 774 copies per step, 12 % of it, nearly all at the border of "
        "CUDA graphs; silent on A100 training (0.6 %) and b200_eager (0.9 %)"
    )
    references = (
        "https://pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
        "https://pytorch.org/docs/stable/generated/torch.Tensor.contiguous.html",
    )

    min_share = Threshold(0.05, "of the step", TRACELENS)

    verify = "Profile again: fewer 'Memcpy DtoD' rows, and less time in them."
    falsified_by = "a different result without the copies"
    assumptions = ("correctness does not need the copies (aliasing, in-place updates)",)

    fix = (
        "Leave tensors in place: write results into views of one buffer instead of concatenating, "
        "drop clones that nobody changes, use the layout that the next operator wants from the "
        "start, and update in place."
    )
    code = (
        "out = torch.empty(n, 2 * d, device=device)\n"
        "torch.mm(x, w1, out=out[:, :d])\n"
        "torch.mm(x, w2, out=out[:, d:])             # instead of torch.cat([a, b], dim=1)"
    )
    confidence = 0.6
    cases: ClassVar = {
        "at the border of CUDA graphs": {
            "fix": "Let the graphs use tensors where they are. CUDA graph trees (PyTorch 2.1 and "
            'later, the default of mode="reduce-overhead") do not copy parameters and outputs '
            "that stay at one address. Mark other inputs that stay, and compile a larger region, "
            "so that fewer tensors cross its border.",
            "code": "torch._dynamo.mark_static_address(buffer)   # an input that never moves\n"
            'step = torch.compile(train_step, mode="reduce-overhead")   # one border',
            "confidence": 0.75,
        }
    }

    elsewhere: ClassVar = {
        **in_any_language(
            "Let kernels read their input in place, and write where the output is needed. Pass "
            "pointers, offsets and strides instead of copying to a new buffer. Swap two buffers "
            "instead of copying one to the other."
        ),
        JAX: FrameworkAdvice(
            "Donate the arguments that a step replaces, so that XLA overwrites the old state.",
            "train_step = jax.jit(train_step, donate_argnums=(0,))",
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare exposed copies within the GPU with the step."""
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(pl.col("copy") == "DtoD")
        exposed = intersect(busy_during(a, copies), a.breakdown.copies).total
        share = exposed / a.span_ns
        if share < self.min_share:
            return
        graphs = int((a.trace.cpu["call"] == "graph_launch").sum())
        border = self._under_compiled(a, copies) if graphs else 0
        of_graphs = border > 0.5 * int(copies["exposed"].sum())
        moved = int(copies["bytes"].sum())
        per_step = max(1, round(copies.height / a.step_count))
        yield Finding(
            summary=(
                f"The GPU only copies within its own memory for {of_step(a, exposed)}: "
                f"{t.count_noun(per_step, 'copy')} of "
                f"{t.format_bytes(moved / a.step_count)}{per(a)}"
                + (", most into and out of CUDA graph buffers." if of_graphs else ".")
            ),
            evidence=[
                figure(a, "exposed copy time within the GPU", exposed),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "copies", copies.height, "count"),
                figure(a, "bytes", moved, "bytes"),
                figure(a, "inside compiled functions", border),
                figure(a, "graph launches", graphs, "count"),
            ],
            where=device_places(a, copies),
            edits=[Edit(op="remove", select=Select(on="gpu", kind=("memcpy",), copy=("DtoD",)))],
            **(self.case("at the border of CUDA graphs") if of_graphs else {}),
        )

    @staticmethod
    def _under_compiled(a: Analysis, copies: pl.DataFrame) -> int:
        """Exposed time of copies that compiled functions launch, ns (the graphs' own included)."""
        named = name_matches(a.trace.cpu["name"], _COMPILED).to_numpy()
        around = np.append(nearest(parents(a.trace), named), -1)
        return int(column(copies, "exposed")[around[rows(copies["op"])] >= 0].sum())

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Concatenations; copies into the buffers of a graph."""
        cat, graph = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with cat.step():
                cat.copy("DtoD", 1 << 30, op="aten::cat")
                _train(cat)
            with graph.step(), graph.op("CompiledFunction"):
                for _ in range(40):
                    graph.copy("DtoD", 50 << 20)
                graph.graph_launch([("elementwise_kernel", 100.0)] * 30)
                graph.sync()
        return {"concatenations": cat, "into the buffers of a graph": graph}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Few copies; copies that compute hides; copies from the host."""
        few, hidden, host = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with few.step():
                few.copy("DtoD", 64 << 20)
                _train(few)
            with hidden.step():
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 6000)
                hidden.copy("DtoD", 1 << 30, stream=13)
                hidden.sync()
            with host.step():
                host.copy("HtoD", 64 << 20)
                _train(host)
        return {
            "few copies": (few, "min_share"),
            "hidden": (hidden, "share < self.min_share"),
            "from the host": (host, "share < self.min_share"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000, times=6)
    b.sync()
