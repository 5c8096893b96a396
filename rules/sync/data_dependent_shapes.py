"""An operator whose output size depends on values makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.rules.common import figure, of_step, per, total
from advisor.rules.sources import ENGINE_FLOOR
from advisor.rules.sync.held import causes, edit, held_by, where
from advisor.testing import TraceBuilder

_OPS = (
    r"^aten::(?:nonzero\w*|argwhere|where|\w*unique\w*|masked_select|masked_scatter_?|index"
    r"|index_put_?|_index_put_impl_|repeat_interleave|bincount|histc|tensor_split"
    r"|_pack_padded_sequence)$"
)


class DataDependentShapes(Rule):
    """An operator has an output whose size depends on the values of its input (``nonzero``,
    ``masked_select``, ``unique``, indexing with a boolean mask, ``repeat_interleave``), so the host
    has to wait for the device to learn the size, and the device then idles until the host has
    launched new work.

    Counted are calls that really waited inside such an operator, by the bubble they leave on the
    device, as in implicit-sync. On tensors of the host, or with the size given
    (``repeat_interleave(output_size=…)``, indexing with integers), they do not wait and are not
    counted. Varying shapes also keep CUDA graphs from being used, which is not in the figure.
    """

    id = "data-dependent-shapes"
    title = "Sizes that depend on values make the device wait"
    category = "sync"
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nonzero.html",
        "https://pytorch.org/docs/stable/generated/torch.repeat_interleave.html",
    )

    min_share = Threshold(0.01, "of the step, lost to bubbles", ENGINE_FLOOR)

    fix = (
        "Keep sizes fixed: select with torch.where(mask, a, b) or multiply by the mask "
        "instead of indexing with it, pass output_size to repeat_interleave, use "
        "torch.nonzero_static(size=…) or topk with a fixed k, and compute index lists that "
        "do not depend on the device's results on the host beforehand."
    )
    code = (
        "# instead of  mean = per_token[mask].mean()\n"
        "mean = (per_token * mask).sum() / mask.sum()\n"
        "# instead of  idx = mask.nonzero()\n"
        "idx = torch.nonzero_static(mask, size=max_count, fill_value=0)"
    )
    verify = "Profile again: no synchronisation inside these operators is left."
    falsified_by = "a run with fixed sizes whose device idles as long at the same place"
    assumptions = ("the result with fixed sizes does the same, at no more device time",)
    confidence = 0.85

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the bubbles after these operators."""
        if a.device_id is None or a.syncs.is_empty():
            return
        held = held_by(a, pl.col("cause").str.contains(_OPS))
        share = held.total / a.span_ns
        if share < self.min_share:
            return
        count = int((held.lost > 0).sum())
        per_step = held.total / a.step_count
        yield Finding(
            summary=(
                f"{of_step(a, held.total)} the device idles after "
                f"{count_noun(max(1, round(count / a.step_count)), 'operator')}{per(a)} whose "
                "output "
                "size the host has to read from the device."
            ),
            evidence=[
                Evidence("device idle after them", per_step, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "waits that left a bubble", count, "count"),
                figure(a, "host waited in them", total(held.table["waited"])),
                Evidence("by cause", causes(a, held)),
            ],
            where=where(a, held),
            edits=[edit(a, held, Select(on="host", kind=("runtime",), under=_OPS))],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Boolean indexing in the middle of a step."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                _kernels(b, 6)
                _masked_index(b)
                _kernels(b, 6)
        return {"boolean indexing": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Indexing with integers, which does not wait; nonzero of a host tensor; ``.item()``."""
        integers, host, item = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with integers.step():
                _kernels(integers, 6)
                integers.run("aten::index", "index_elementwise_kernel", 10)
                integers.host(400)
                _kernels(integers, 6)
            with host.step():
                _kernels(host, 6)
                with host.op("aten::nonzero", host_us=300):
                    pass
                _kernels(host, 6)
            with item.step():
                _kernels(item, 6)
                item.item()
                item.host(400)
        return {
            "integer indices": (integers, "a.syncs.is_empty()"),
            "a host tensor": (host, "a.syncs.is_empty()"),
            "item": (item, "share < self.min_share"),
        }


def _kernels(b: TraceBuilder, count: int) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 300, times=count)


def _masked_index(b: TraceBuilder) -> None:
    with b.op("aten::index"):
        with b.op("aten::nonzero"):
            b.launch("cub::DeviceReduceSingleTileKernel", 5)
            b.copy("DtoH", 8, 1.5, pinned=False, op=None)
        b.host(200)
        b.launch("index_elementwise_kernel", 10)
