"""Messages along the edges of a graph that are written to memory one by one."""

from typing import ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.rules.support.citations import CHOSEN, SILENT_TRACES, XPROF
from advisor.rules.support.common import amount_per_step, device_places, example_steps, of_step
from advisor.rules.support.kernel_work import kernel_rows
from advisor.testing import Examples, TraceBuilder

GATHERS = ("aten::gather", "aten::index_select")
SCATTERS = ("aten::scatter_add_", "aten::scatter_add", "aten::index_add_", "aten::index_add")
BETWEEN = ("aten::mul", "aten::mul_", "aten::fill_", "aten::zero_")
"""Operators that a sparse product does too: weights of the edges, and sums that begin at zero."""
MAX_BETWEEN = 3


class Chain(NamedTuple):
    """Kernels that make the messages of all edges and add them up."""

    rows: list[int]
    """Rows of ``trace.gpu``, in order."""
    nodes: int
    edges: int
    width: int
    """Values of a message."""
    bytes: int
    """Size of one tensor of messages."""
    tensors: int
    """Tensors of messages that are written: those gathered, and those with weights."""


class UnfusedMessages(Rule):
    """A graph network gathers the features of each edge's source, multiplies them with the edge's
    weight, and adds them up at its target. As operators of their own these write and read a tensor
    with a row for each edge. A sparse product does all three in one kernel: it reads the features
    and writes the sums.

    Found is a gather of rows [edges, width] from [nodes, width] with a scatter-add of the same rows
    behind it. Only products and fills may lie between the two. An embedding's gather and its
    gradient lie far apart, and experts compute on what they gather: both are none. A gain is not
    estimated. It depends on the graph's order and on the product's kernel, which no trace shows."""

    id = "unfused-messages"
    title = "Gather and scatter-add in place of a sparse product"
    found_in: ClassVar[tuple[str, ...]] = ("traces/h100/citation_gcn",)
    silent_in: ClassVar[tuple[str, ...]] = (*SILENT_TRACES, "traces/h100/ads_ranker")
    validation_note = (
        "three GCNConv of PyTorch Geometric on an H100, forward and backward; what a sparse "
        "product saves there was not measured"
    )
    references = (
        "https://pytorch-geometric.readthedocs.io/en/latest/advanced/sparse_tensor.html",
        "https://docs.pytorch.org/docs/stable/sparse.html",
    )

    min_share = Threshold(0.10, "of the step in kernels that make and add up messages", XPROF)
    min_edges = Threshold(2.0, "edges per node, so that messages outgrow the features", CHOSEN)

    fix = (
        "Multiply with the sparse adjacency matrix: one kernel gathers, weighs and adds up, and "
        "no message is stored. PyTorch Geometric's layers do so when given adj_t in place of "
        "edge_index."
    )
    code = (
        "# PyTorch Geometric\n"
        "data = torch_geometric.transforms.ToSparseTensor()(data)   # once\n"
        "out = model(data.x, data.adj_t)\n\n"
        "# own layers: crow and sources of the edges, sorted by target\n"
        "adjacency = torch.sparse_csr_tensor(crow, sources, weights)\n"
        "out = adjacency @ x"
    )
    verify = "Profile again: a csrmm or spmm kernel in place of gather, mul and scatter_add."
    falsified_by = "messages that are more than a product of features and a weight"
    assumptions = ("a message is a feature times a weight, and targets take the sum",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.span_ns or a.trace.inputs.is_empty():
            return
        found = [one for one in _chains(a) if one.edges >= self.min_edges * one.nodes]
        rows = np.array([row for one in found for row in one.rows], dtype=np.int64)
        dur = a.trace.gpu["dur"].to_numpy()[rows]
        ns = int(dur.sum())
        if not found or ns < self.min_share * a.span_ns:
            return
        moved = sum(2 * one.tensors * one.bytes for one in found)
        most = max(found, key=lambda one: one.bytes)
        work = a.trace.gpu[rows].with_columns(gpu=rows, cost=dur)
        yield Finding(
            summary=(
                f"Gather, products and scatter-add of {most.edges:,} edges between {most.nodes:,} "
                f"nodes take {of_step(a, ns)}. Each of {_per_step(a, len(found))} writes and reads "
                f"{t.format_bytes(most.bytes)} of messages {most.tensors} times."
            ),
            evidence=[
                amount_per_step(a, "kernels of messages", ns),
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                amount_per_step(a, "messages written and read", moved, "byte"),
                self.compare("edges per node", most.edges / most.nodes, "min_edges", "ratio"),
            ],
            where=device_places(a, work, "cost"),
            impact=impact_without_gain(
                "how fast the sparse product is on this graph is not in the trace: try it"
            ),
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a graph convolution": example_steps(_convolve),
            "no more edges than nodes": (
                example_steps(lambda b: _convolve(b, edges=100_000)),
                "min_edges",
            ),
            "hardly any time": (example_steps(lambda b: _convolve(b, us=5)), "min_share"),
            "experts compute in between": (
                example_steps(lambda b: _convolve(b, between="aten::mm")),
                "not found",
            ),
        }


def _per_step(a: Analysis, count: int) -> str:
    return t.count_noun(max(1, round(count / a.step_count)), "pass", "passes")


def _chains(a: Analysis) -> list[Chain]:
    """List gathers and what follows on the device up to the scatter-add of the same rows."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    rows = np.flatnonzero(kernel_rows(a) & gpu["op"].is_not_null().to_numpy())
    op = gpu["op"].gather(rows)
    table = pl.DataFrame(
        {"row": rows, "ts": gpu["ts"].gather(rows), "op": op, "name": cpu["name"].gather(op)}
    ).with_columns(pl.col("name").cast(pl.String))
    table = table.sort("ts")
    numbers, named, ops = (table[key].to_list() for key in ("row", "name", "op"))
    result = []
    # few operators gather: those alone are looked at
    for at in np.flatnonzero(table["name"].is_in(GATHERS).to_numpy()):
        end = at + 1
        while end < len(named) and end <= at + MAX_BETWEEN and named[end] in BETWEEN:
            end += 1
        if end < len(named) and named[end] in SCATTERS:
            one = _chain(a, numbers[at : end + 1], ops[at], ops[end], named[at + 1 : end])
            result += [] if one is None else [one]
    return result


def _chain(a: Analysis, rows: list[int], first: int, last: int, between: list[str]) -> Chain | None:
    """Return the chain if both operators are of the same rows; ``None``: they are not."""
    given = [a.trace.cpu["inputs"][row] for row in (first, last)]
    if None in given:
        return None
    gathered, added = (inputs_at(a, row).tensors for row in given)
    if len(gathered) < 2 or len(added) < 3:
        return None
    features, index, sums, messages = gathered[0], gathered[1], added[0], added[2]
    if not len(features.shape) == len(sums.shape) == len(messages.shape) == 2 or not index.shape:
        return None
    nodes, width = features.shape
    edges = index.shape[0]
    if messages.shape != (edges, width) or sums.shape[1] != width or width < 2:
        return None
    if len(index.shape) == 2 and (index.shape[1] != width or (index.strides or (1, 0))[1] != 0):
        return None  # each value has an index of its own
    products = sum(name.startswith("aten::mul") for name in between)
    return Chain(rows, nodes, edges, width, edges * width * (messages.width or 4), 1 + products)


def _convolve(
    b: TraceBuilder, *, edges: int = 2_000_000, us: float = 900, between: str = "aten::mul"
) -> None:
    nodes, width = 100_000, 16
    rows, table = [edges, width], [nodes, width]
    with b.op("aten::index_select", [table, [], [edges]], ["float", "Scalar", "long int"]):
        b.launch("void at::native::vectorized_gather_kernel<16, long>", us)
    b.run(between, "kernel", us / 2, [[edges, 1], rows])
    types = ["float", "Scalar", "long int", "float"]
    with b.op("aten::index_add_", [table, [], [edges], rows], types):
        b.launch("void at::native::indexFuncLargeIndex<float, long>", us)
    b.run("aten::addmm", "gemm", 400)
