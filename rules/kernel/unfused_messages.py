"""Messages along the edges of a graph that are written to memory."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.rules.support.citations import CHOSEN, SILENT_TRACES, XPROF
from advisor.rules.support.common import amount_per_step, device_places, example_steps, of_step
from advisor.rules.support.kernel_work import kernel_mask
from advisor.testing import Examples, TraceBuilder

GATHERS = ("aten::gather", "aten::index_select")
SCATTERS = ("aten::scatter_add_", "aten::scatter_add", "aten::index_add_", "aten::index_add")
OPS_BETWEEN_GATHER_AND_SCATTER = ("aten::mul", "aten::mul_", "aten::fill_", "aten::zero_")
"""Operators whose work a sparse product includes: multiplying by edge weights, and zeroing sums."""
_MAX_BETWEEN = 3


class MessageChain(NamedTuple):
    """Kernels that compute the messages of all edges and add them up."""

    rows: list[int]
    """Rows of ``trace.gpu``, in order."""
    nodes: int
    edges: int
    width: int
    """Number of values per message."""
    bytes: int
    """Size of one tensor of messages."""
    tensors: int
    """Number of message tensors that are written: the gathered ones and the weighted ones."""


class UnfusedMessages(Rule):
    """A graph network gathers the features of each edge's source, multiplies them with the edge's
    weight, and adds them up at its target. As separate operators these write and read a tensor with
    one row per edge. A sparse product does all three in one kernel: it reads the features and
    writes the sums.

    The rule finds a gather of rows [edges, width] from [nodes, width] followed by a scatter-add of
    the same rows. Only products and fills may be between the two. So an embedding's gather and its
    distant gradient do not count, and neither do experts, which compute on the gathered rows. The
    gain is not estimated: it depends on the graph's order and on the product's kernel, which no
    trace shows."""

    id = "unfused-messages"
    title = "Gather and scatter-add in place of a sparse product"
    found_in = ("traces/h100/citation_gcn",)
    silent_in = (*SILENT_TRACES, "traces/h100/ads_ranker")
    validation_note = (
        "three GCNConv layers of PyTorch Geometric on an H100, forward and backward; the saving of "
        "a sparse product was not measured"
    )
    references = (
        "https://pytorch-geometric.readthedocs.io/en/latest/advanced/sparse_tensor.html",
        "https://docs.pytorch.org/docs/stable/sparse.html",
    )

    min_share = Threshold(0.10, "of the step in kernels that compute and add up messages", XPROF)
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
        "# or, in your own layers: crow and sources of edges, sorted by target\n"
        "adjacency = torch.sparse_csr_tensor(crow, sources, weights)\n"
        "out = adjacency @ x"
    )
    verify = "Profile again: a csrmm or spmm kernel in place of gather, mul and scatter_add."
    falsified_by = "messages that are more than a product of features and a weight"
    assumptions = ("a message is a feature times a weight, and targets take the sum",)
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.span_ns:
            return
        chains = [chain for chain in _find_chains(a) if chain.edges >= self.min_edges * chain.nodes]
        rows = np.array([row for chain in chains for row in chain.rows], dtype=np.int64)
        dur = a.trace.gpu["dur"].to_numpy()[rows]
        ns = int(dur.sum())
        if not chains or ns < self.min_share * a.span_ns:
            return
        bytes_moved = sum(2 * chain.tensors * chain.bytes for chain in chains)
        largest = max(chains, key=lambda chain: chain.bytes)
        work = a.trace.gpu[rows].with_columns(gpu=rows, cost=dur)
        yield Finding(
            summary=(
                f"Gather, products and scatter-add of {largest.edges:,} edges between "
                f"{largest.nodes:,} nodes take {of_step(a, ns)}. Each of "
                f"{_count_passes(a, len(chains))} stores "
                f"{t.count_noun(largest.tensors, 'message tensor')} of "
                f"{t.format_bytes(largest.bytes)} and reads them back."
            ),
            evidence=[
                amount_per_step(a, "kernels of messages", ns),
                self.compare_share(a, "kernels of messages", ns),
                amount_per_step(a, "messages written and read", bytes_moved, "byte"),
                self.compare("edges per node", largest.edges / largest.nodes, "min_edges", "ratio"),
            ],
            where=device_places(a, work, "cost"),
            impact=impact_without_gain(
                "the trace does not show how fast the sparse product is on this graph: try it"
            ),
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a graph convolution": example_steps(_add_convolution),
            "no more edges than nodes": (
                example_steps(lambda b: _add_convolution(b, edges=100_000)),
                "min_edges",
            ),
            "hardly any time": (example_steps(lambda b: _add_convolution(b, us=5)), "min_share"),
            "experts compute in between": (
                example_steps(lambda b: _add_convolution(b, between="aten::mm")),
                "not chains",
            ),
        }


def _count_passes(a: Analysis, count: int) -> str:
    return t.count_noun(max(1, round(count / a.step_count)), "pass", "passes")


def _find_chains(a: Analysis) -> list[MessageChain]:
    """Return chains from a gather to the scatter-add of the same rows."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    rows = np.flatnonzero(kernel_mask(a) & gpu["op"].is_not_null().to_numpy())
    op = gpu["op"].gather(rows)
    table = pl.DataFrame(
        {"row": rows, "ts": gpu["ts"].gather(rows), "op": op, "name": cpu["name"].gather(op)}
    ).with_columns(pl.col("name").cast(pl.String))
    table = table.sort("ts")
    numbers, named, ops = (table[key].to_list() for key in ("row", "name", "op"))
    result = []
    # loop over gathers only, which are few
    for start in np.flatnonzero(table["name"].is_in(GATHERS).to_numpy()):
        end = start + 1
        while (
            end < len(named)
            and end <= start + _MAX_BETWEEN
            and named[end] in OPS_BETWEEN_GATHER_AND_SCATTER
        ):
            end += 1
        if end < len(named) and named[end] in SCATTERS:
            chain = _match_chain(
                a, numbers[start : end + 1], ops[start], ops[end], named[start + 1 : end]
            )
            result += [] if chain is None else [chain]
    return result


def _match_chain(
    a: Analysis, rows: list[int], gather_op: int, scatter_op: int, between: list[str]
) -> MessageChain | None:
    """Return the chain if both operators use the same rows, or ``None``."""
    inputs = [a.trace.cpu["inputs"][row] for row in (gather_op, scatter_op)]
    if None in inputs:
        return None
    gathered, added = (inputs_at(a, row).tensors for row in inputs)
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
    return MessageChain(
        rows, nodes, edges, width, edges * width * (messages.width or 4), 1 + products
    )


def _add_convolution(
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
