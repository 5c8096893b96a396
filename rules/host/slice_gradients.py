"""Slices that a loop takes from one tensor, each with a gradient of the whole tensor's size."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import parent_rows
from advisor.measure.steps.steps import rows_in_steps
from advisor.replay.selection import mask_launched_under
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    of_step,
    scale_edit,
    sum_column,
)
from advisor.rules.support.kernel_work import summed_duration
from advisor.testing import Examples, TraceBuilder

SLICE_BACKWARD = r"^aten::(?:select|slice)_backward$"
NODE = r"^autograd::engine::evaluate_function: (?:Select|Slice)Backward0$"
PRODUCT = r"^aten::(?:addmm|mm|bmm|baddbmm|linear)$"
_LSTM = "https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html"
_UNBIND = "https://docs.pytorch.org/docs/stable/generated/torch.unbind.html"


class SliceGradients(Rule):
    """A loop takes slices of one tensor by index (``x[:, t]``). In the backward pass each slice has
    a gradient as large as the whole tensor. PyTorch fills it with zeros, writes the slice, and adds
    all of them up. For ``n`` slices this moves ``n`` times the tensor. ``unbind`` and ``split``
    have one gradient for all slices.

    The rule counts ``aten::select_backward`` and ``aten::slice_backward`` with equal sizes in a
    step.

    The gain is the time of these nodes of the backward pass, minus one pass over the tensor."""

    id = "slice-gradients"
    title = "Each slice taken in a loop gets a gradient as large as the whole tensor"
    training_only = True
    found_in = ("recorded/slices.slow", "traces/h100/organ_seg")
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (_UNBIND,)

    min_slices = Threshold(16, "slices of one tensor per step", CHOSEN)
    min_share = Threshold(0.05, "of the step in their gradients", XPROF)
    worst_factor = Factor(0.3, "of the time remains at most, for sums and launches", CHOSEN)

    fix = (
        "Compute independent iterations, such as a loss per class, at once on the whole tensor. "
        "Otherwise take the slices with one unbind before the loop, or with split for "
        "parts of several entries."
    )
    code = (
        "# not sum(f(x[:, c]) for c in range(n)): f reduces the other dims\n"
        "total = f(x, dim=(0, 2, 3)).sum()\n\n"
        "# or, if one iteration needs another: not  x_c = x[:, c]  in the loop\n"
        "for x_c in x.unbind(dim=1):\n"
        "    ..."
    )
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "a recurrent cell": {
            "fix": "Take the slices with one call of unbind before the loop, or split for parts of "
            "several entries. One call of nn.LSTM or nn.GRU replaces a whole loop of cells.",
            "code": "# not for t in range(x.shape[1]): x_t = x[:, t]\n"
            "for x_t in x.unbind(dim=1):\n"
            "    state = cell(x_t, state)",
            "references": (_UNBIND, _LSTM),
        }
    }
    verify = "Profile again: no aten::select_backward per slice; one aten::stack."
    falsified_by = "slices that overlap, which unbind and split cannot give"
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        groups = [
            group for group in _group_slices(a) if len(group.rows) >= self.min_slices * a.step_count
        ]
        if not groups:
            return
        rows = np.sort(np.concatenate([group.rows for group in groups]))
        on_gpu = a.device_id is not None
        places = costliest_places(a, rows, np.ones(len(rows), dtype=int), top=1)
        if on_gpu:
            ns = summed_duration(a, mask_launched_under(a, NODE) & a.in_window)
        else:
            nodes = np.flatnonzero(name_matches(a.trace.cpu["name"], NODE).to_numpy())
            nodes = rows_in_steps(a, nodes)
            ns = sum_column(a.trace.cpu["dur"].gather(nodes))
            inside = np.flatnonzero(np.isin(parent_rows(a.trace), nodes))
            places = costliest_places(a, inside, whole=ns, top=1)
        if ns < self.min_share * a.span_ns:
            return
        largest = max(groups, key=lambda group: len(group.rows))
        slices = len(largest.rows) / a.step_count
        products = np.flatnonzero(name_matches(a.trace.cpu["name"], PRODUCT).to_numpy())
        is_recurrent = len(rows_in_steps(a, products)) >= len(largest.rows)  # one per slice
        remains = 1 / slices
        yield Finding(
            summary=(
                f"{slices:.0f} slices per step of a tensor of {largest.sizes} each have a gradient "
                f"of the tensor's size. Their backward takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "gradients of slices", len(rows), "count"),
                amount_per_step(a, "time of the gradients of slices", ns),
                self.compare("slices of one tensor", slices, "min_slices", "count", per=a.per),
                self.compare_share(a, "time of the gradients of slices", ns),
            ],
            where=places,
            edits=[
                scale_edit(select, remains, remains, max(self.worst_factor, remains))
                for select in (
                    *([Select(on="gpu", under=NODE)] if on_gpu else []),
                    Select(on="host", kind=("op",), name=NODE),
                )
            ],
            **(self.case("a recurrent cell") if is_recurrent else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a loop over time": _build_loop(),
            "on a CPU": _build_loop(gpu=None),
            "a few slices": (_build_loop(count=3), "min_slices"),
            "slices of different tensors": (_build_loop(one_tensor=False), "not groups"),
            "hardly any time": (_build_loop(us=1), "min_share"),
        }


class _SliceGroup(NamedTuple):
    sizes: str
    rows: Rows


def _group_slices(a: Analysis) -> list[_SliceGroup]:
    """Return gradients of slices in the analysed window, by the whole tensor's size."""
    cpu = a.trace.cpu
    rows = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], SLICE_BACKWARD).to_numpy()))
    calls = pl.DataFrame({"row": rows, "inputs": cpu["inputs"].gather(rows)}).drop_nulls()
    sizes = {index: _format_size(a, index) for index in calls["inputs"].unique().sort()}
    by_size: dict[str, list[int]] = {}
    for row, index in calls.iter_rows():
        if sizes[index]:
            by_size.setdefault(sizes[index], []).append(row)
    return [
        _SliceGroup(size, np.array(members, dtype=np.int64)) for size, members in by_size.items()
    ]


def _format_size(a: Analysis, index: int) -> str:
    """Return the size of the whole tensor, as ``16 × 80 × 64``. Empty if it was not recorded."""
    return " × ".join(str(size) for size in inputs_at(a, index).integers(1) or [])


def _build_loop(
    *, gpu: str | None = "A100", count: int = 64, one_tensor: bool = True, us: float = 40
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)
    for _ in b.steps(5):
        b.compute("aten::linear", 2000)
        for step in range(count):
            shape = f"[16, {80 if one_tensor else 80 + step}, 64]"
            concrete = ["", shape, "1", str(step)]
            with b.op("autograd::engine::evaluate_function: SelectBackward0"):
                b.compute(
                    "aten::select_backward",
                    us,
                    [[16, 64], [], [], []],
                    ["float", "ScalarList", "Scalar", "Scalar"],
                    concrete=concrete,
                    kernel="at::native::vectorized_elementwise_kernel",
                    host_us=4,
                )
    return b
