"""Base of the rules about the loop's own code, and the operators of that code: outside modules,
loading, backward pass and optimizer."""

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core import labels
from advisor.core.finding import Location
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host import stacks
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import SampledStack
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import Rows, backward_operators

PYTORCH = r"(?:^|/)torch/.*\.py\("
OF_LOOP = r"(?:^|/)torch/(?:serialization|utils/tensorboard)"
"""Files of PyTorch that are the loop's own code. Every loop needs the Python of its other files."""


class LoopRule(Rule):
    """Base of the rules about the loop's own code, with their advice."""

    host_check = "the loop's own code"
    is_python_time = True
    references = ("https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",)

    min_ms = Threshold(0.5, "ms per step: Python around small models takes as long", CHOSEN)
    min_tensor_operators = Threshold(
        32, "operators per step in a function: a loop over tensors", CHOSEN
    )

    fix = (
        "Run this code every N steps, if the other steps can do without its result. Or compute it "
        "once, or prepare it in a DataLoader worker. Where it waits (a sleep, a server, a lock), "
        "wait in another thread."
    )
    code = "if step % 100 == 0:     # if the other steps can do without\n    log(metrics)"
    inference: ClassVar[Mapping[str, Any]] = {
        "fix": "Compute once what is the same for many requests, and keep it. Replace loops and "
        "sorted() over elements by operators on whole tensors or NumPy arrays, such as topk. Or "
        "do this work in another process, while the model runs on the next batch. Where it waits "
        "(a sleep, a server, a lock), wait in another thread.",
        "code": "",
        "assumptions": (
            "the result can be kept, computed on whole arrays, or made while the model runs",
        ),
        "cases": {
            "many operators": {
                "fix": "Work on the whole batch, without a Python loop over rows and elements: "
                "topk, gather, scatter_add, bincount, masks. Read results once, with .tolist() "
                "after the loop.",
                "code": "# counts of each row's tokens, without a loop\n"
                "counts = torch.zeros_like(scores)\n"
                "counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))\n"
                "scores -= alpha * counts",
            }
        },
    }
    verify = "Record again: the step is shorter by this code's time."
    falsified_by = "the same step time without this code"
    assumptions = ("the step can go on without this code's result",)
    confidence = 0.75
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "many operators": {
            "title": "A function of the loop runs many small operators in each step",
            "fix": "Run each operation once on all tensors, and before the loop if its result "
            "stays the same. Use functions such as torch._foreach_norm for lists of parameters, "
            "and clip_grad_norm_(foreach=True) to clip. For metrics, run one operator on the whole "
            "batch. Read results with .item() once, after the loop, or every N steps.",
            "code": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)\n"
            "# metrics: one operator on the batch, such as\n"
            "torch.bincount(target * n + predicted, minlength=n * n)",
            "assumptions": ("its work can be done on all tensors at once, or in fewer steps",),
        },
        "averaged weights": {
            "title": "Averages of the weights are updated one tensor at a time",
            "fix": "Update all tensors at once and in place: AveragedModel does so with one "
            "operator for all. Do not make a new state_dict in each step.",
            "code": "from torch.optim.swa_utils import (\n"
            "    AveragedModel, get_ema_multi_avg_fn)\n"
            "average = AveragedModel(\n"
            "    model, multi_avg_fn=get_ema_multi_avg_fn(0.999))\n"
            "average.update_parameters(model)     # once in each step",
            "assumptions": ("it averages the weights of a model",),
        },
        "overlapping boxes": {
            "title": "A function of the loop compares boxes with many small operators",
            "fix": "First drop the boxes below the score threshold. Then remove overlapping ones "
            "of all classes with one call of torchvision.ops.batched_nms. Overlaps of all pairs "
            "come from torchvision.ops.box_iou.",
            "code": "keep = scores > threshold\n"
            "boxes, scores, labels = boxes[keep], scores[keep], labels[keep]\n"
            "keep = torchvision.ops.batched_nms(boxes, scores, labels, max_iou)",
            "references": ("https://docs.pytorch.org/vision/stable/ops.html",),
            "assumptions": ("it compares boxes to remove those that overlap",),
        },
        "samples one by one": {
            "title": "A function of the loop changes one sample at a time with small operators",
            "fix": "Change the whole batch at once, with one random number for each sample. "
            "torchvision.transforms.v2 and Kornia work on batches too.",
            "code": "n = len(batch)\n"
            "flip = (torch.rand(n) < 0.5).view(n, 1, 1, 1)\n"
            "batch = torch.where(flip, batch.flip(-1), batch)\n"
            "batch = batch * (0.8 + 0.4 * torch.rand(n, 1, 1, 1))",
            "assumptions": ("it does the same to each sample, with other random numbers",),
        },
        "a table": {
            "title": "A function of the loop makes a table with many small operators in each step",
            "fix": "Make the table once, before the loop, if it is the same in each step. "
            "Otherwise fill it with operators on whole tensors.",
            "code": "filters = make_filters()     # once, before the loop",
            "assumptions": ("its result is the same in each step",),
        },
        "figures to show": {
            "title": "A function of the loop computes figures with many operators in each step",
            "fix": "Compute the figures only in steps that show them. Where each step needs them, "
            "run each operation once on all tensors, and read results once.",
            "code": "if step % log_every == 0:     # not in every step\n"
            "    monitor.update(model, outputs)",
            "assumptions": ("only some steps show these figures",),
        },
    }


_CASES_BY_NAME = {
    "overlapping boxes": r"(?:\b|_)(?:nms|ious?|giou|suppress\w*|overlaps?)(?:\b|_)"
    r"|NMS|IoU|Suppress",
    "averaged weights": r"(?:\b|_)ema(?:\b|_)|Ema|EMA|[Tt]eacher|[Mm]omentum|[Aa]verag",
    "samples one by one": r"(?:\b|_)(?:augment\w*|transforms?|crops?|flips?|jitter|mixup)(?:\b|_)"
    r"|Augment|Transform|Crop|Flip|Jitter|Mix[Uu]p",
    "a table": r"(?:\b|_)(?:filters?|grids?|masks?|tables?|basis|anchors?|positions?)(?:\b|_)",
    "figures to show": r"(?:\b|_)(?:log|stats?|metrics?|monitor|summary|track)(?:\b|_)"
    r"|Logg|Stats|Metric|Monitor|Summar|Track",
}
"""Case for many operators -> pattern of names of functions that do such work."""


def case_by_name(case: str, place: Location | None, cases: Container[str]) -> str:
    """Return the case of ``cases`` for the function at a place, if its name says what its many
    operators do; else ``case``."""
    if case != "many operators" or place is None:
        return case
    names = (
        name
        for name, pattern in _CASES_BY_NAME.items()
        if name in cases and re.search(pattern, str(place.function))
    )
    return next(names, case)


def share_by_name(case: str, sampled: Sequence[SampledStack]) -> float:
    """Return the share of these samples in functions whose names say that they do a case's work."""
    pattern = re.compile(_CASES_BY_NAME.get(case, r"$^"))
    functions = re.compile(r"\(\d+\): ")
    total = sum(stack.samples for stack in sampled)
    inside = sum(
        stack.samples
        for stack in sampled
        if any(pattern.search(functions.split(frame)[-1]) for frame in stack.frames)
    )
    return inside / total if total else 0.0


TRAINS = (
    r"^nn\.Module: |^(?:Optimizer\.|enumerate\(DataLoader\)|advisor::|autograd::engine)"
    r"|(?:^|/)torch/(?:nn/modules/module\.py\(\d+\): _(?:wrapped_)?call_impl"
    r"|distributed/distributed_c10d\.py\("
    r"|autograd/\w+\.py\(\d+\): (?:backward|grad)|_tensor\.py\(\d+\): backward|optim/|utils/data/)"
)
"""Pattern of rows that load, run a module, go backward, update or wait for other ranks."""
_SINGLE_CALL_OPS = (
    r"^aten::(?:linear|matmul|mm|addmm|bmm|baddbmm|einsum|\w*conv\w*"
    r"|\w*_loss|nll_loss\w*|_?log_softmax|binary_cross_entropy\w*|kl_div|_?cdist\w*"
    r"|scaled_dot_product_attention|\w*_norm|embedding)$"
)
"""Products, convolutions, and PyTorch functions for what programs also write in several operators:
no other function can replace them."""
_CLASS_LOSSES = r"^aten::(?:cross_entropy_loss|nll_loss\w*|_?log_softmax)$"
"""Losses over the scores of classes. The last or second dimension counts the classes."""
_MAX_OPERATORS, _MIN_OPERATOR_SHARE = 3, 0.10
"""Maximum number of named operators of the loop's own code, and their minimum share of its
operators' time. The largest is always named."""


def operators_beside_training(a: Analysis) -> Rows:
    """Return operators in the analysed steps on the main thread outside modules, loading, the
    backward pass and the optimizer. Empty if nothing tells them apart."""
    trains = name_matches(a.trace.cpu["name"], TRAINS).to_numpy()
    if a.trace.main_thread is None or not trains.any():
        return np.empty(0, dtype=np.int64)
    left_out = stacks.innermost_ancestor(stacks.parent_rows(a.trace), trains) >= 0
    left_out |= (a.trace.cpu["thread"] != a.trace.main_thread).to_numpy()
    rows = rows_in_steps(a, stacks.outermost_rows(a.trace))
    return rows[~left_out[rows]]


def find_line_of_loop(a: Analysis, rows: Rows) -> list[Location]:
    """Return the line of the loop's own code that sampled stacks name, if most of these operators
    are of that code. Empty if they are not, or if nothing was sampled."""
    beside = np.isin(rows, operators_beside_training(a))
    if a.run_steps is None or 2 * beside.sum() < len(rows):
        return []
    line = a.run_steps.hottest_line(stacks.LOOP)
    return [] if line is None else [line.location]


def largest_operators(a: Analysis, rows: Rows) -> dict[str, float]:
    """Return the operators with most time among these, with their time per profiled step, ns."""
    cpu = a.trace.cpu
    names = cpu["name"].gather(rows).cast(pl.String)
    table = pl.DataFrame({"name": names, "ns": cpu["dur"].gather(rows)})
    top = table.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name", descending=True)
    return {name: ns / max(a.step_count, 1) for name, ns in top.head(_MAX_OPERATORS).iter_rows()}


def name_operators(largest: Mapping[str, float], total: float) -> str:
    """Name the operators that take most of this code's time. Empty if operators do not take it."""
    texts = [
        f"{labels.clean(name)} takes {ns / total:.0%}"
        for index, (name, ns) in enumerate(largest.items())
        if not index or ns >= _MIN_OPERATOR_SHARE * total
    ]
    return f" Of its operators, {', '.join(texts)}." if texts else ""


def differentiated_operators(a: Analysis, rows: Rows) -> Rows:
    """Return operators that the backward pass goes through, such as a loss computed by hand."""
    operator = stacks.is_operator(a.trace)
    graph = a.forward_op[a.forward_op >= 0]
    outermost = stacks.climb_stack(stacks.parent_rows(a.trace), operator, graph, top=True)
    return rows[np.isin(rows, outermost)]


def backward_of(a: Analysis, rows: Rows) -> float:
    """Return the time per profiled step of the backward pass of these operators, ns."""
    return operator_time(a, backward_operators(a, rows))


def operator_time(a: Analysis, rows: Rows) -> float:
    """Return the time per profiled step of these operators, ns."""
    return float(a.trace.cpu["dur"].gather(rows).sum()) / max(a.step_count, 1)


class WholeOperators(NamedTuple):
    """Operators for which PyTorch has no other function."""

    rows: Rows
    row: int
    """Row of the longest call of the operator and inputs with most time."""
    shapes: str
    """Shapes of its tensors, ``20×50×96 and 4001×96``. Empty if they are not recorded."""
    classes: int
    """Maximum number of classes whose scores a loss is computed from, or 0 if there is no loss."""

    def name(self, a: Analysis) -> str:
        """Return the name and shapes: ``aten::linear on 20×50×96 and 4001×96``."""
        name = labels.clean(str(a.trace.cpu["name"][self.row]))
        return f"{name} on {self.shapes}" if self.shapes else name


def whole_operators(a: Analysis, rows: Rows) -> WholeOperators | None:
    """Find the operators among these that are products, or one function of PyTorch already."""
    cpu = a.trace.cpu
    single_calls = rows[name_matches(cpu["name"].gather(rows), _SINGLE_CALL_OPS).to_numpy()]
    if not len(single_calls):
        return None
    table = cpu.select("name", "inputs", "dur")[single_calls].with_columns(row=single_calls)
    calls = table.group_by("name", "inputs").agg(
        pl.col("dur").sum().alias("ns"), pl.col("row").sort_by("dur").last()
    )
    row = int(calls.sort("ns", "row")["row"][-1])
    losses = single_calls[name_matches(cpu["name"].gather(single_calls), _CLASS_LOSSES).to_numpy()]
    scores = [sizes[0] for loss in losses if (sizes := _read_shapes(a, int(loss)))]
    classes = [shape[1] for shape in scores if len(shape) > 1]
    shapes = ["×".join(map(str, shape)) for shape in _read_shapes(a, row)[:2]]
    return WholeOperators(single_calls, row, " and ".join(shapes), max(classes, default=0))


def _read_shapes(a: Analysis, row: int) -> list[tuple[int, ...]]:
    """Return the shapes of an operator's tensors, without single numbers."""
    inputs = a.trace.cpu["inputs"][row]
    if inputs is None or a.trace.inputs.is_empty():
        return []
    return [shape for tensor in inputs_at(a, inputs).tensors if (shape := tuple(tensor.shape))]
