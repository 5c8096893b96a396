"""Tensor parallelism crosses nodes although one node could hold it."""

from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, impact_without_gain
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.links import select_collectives
from advisor.measure.comm.placement import TensorPlacement, find_placement
from advisor.rules.support.citations import MEGATRON, NCCL_OVERHEAD, SILENT_TRACES, TRACELENS
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    of_step,
    scale_edit,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder


class TensorAcrossNodes(Rule):
    """Tensor parallelism sends activations several times in every layer, and compute waits for
    them. Its ranks are in several nodes, so they send over the network, although one node has
    enough GPUs for them.

    Which ranks share a node follows from the option ``--node-size`` or NCCL's log. It also follows
    from the hosts in the names of the files, or from the devices that the trace lists. If none of
    them is known, or if no node has enough GPUs, the rule abstains. The gain is that of another
    order of ranks: tensor-parallel ranks share a node, and ranks of the axis that sends least leave
    it. Both rates are needed: the fastest large message across nodes, and inside one, or 0.8 of the
    datasheet's rate of the link. Waits for late ranks stay."""

    id = "tensor-across-nodes"
    title = "Tensor parallelism crosses nodes"
    silent_in = SILENT_TRACES
    references = (
        "https://arxiv.org/abs/2104.04473",
        "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.init_device_mesh",
    )
    sources = (MEGATRON, NCCL_OVERHEAD)

    min_share = Threshold(
        0.05, "of the step, exposed in tensor-parallel collectives across nodes", TRACELENS
    )

    fix = (
        "Number the ranks so that the {size} tensor-parallel ones share a node of {node}. Make "
        "tensor parallelism the last dimension of the device mesh, and data and pipeline "
        "parallelism the first ones. Megatron-LM does so by default."
    )
    code = (
        "# the last dimension has neighbouring ranks\n"
        'mesh = init_device_mesh("cuda", (world // {size}, {size}),\n'
        '                        mesh_dim_names=("dp", "tp"))\n'
        "# Megatron-LM: leave the order tp-cp-ep-dp-pp as it is"
    )
    verify = "Profile again: 'advisor analyze TRACE --by mesh' shows tensor within a node."
    falsified_by = "a rack whose NVLink connects these nodes (NVL72): then give --node-size 72"
    assumptions = ("the other axes' collectives attain the network's rate as these do",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        placed = find_placement(a)
        if placed is None:
            return
        rows = placed.tensor.rows
        exposed = sum_column(rows["exposed"])
        share = exposed / a.span_ns
        if share < self.min_share:
            yield PassedCheck(text=f"tensor parallelism across nodes is exposed for {share:.0%}")
            return
        size, nodes = placed.tensor.size, -(-placed.tensor.size // placed.tensor.local)
        edits = _build_edits(a, placed)
        yield Finding(
            summary=(
                f"The {size} tensor-parallel ranks are in {nodes} nodes, so compute waits for the "
                f"network for {of_step(a, exposed)}. A node of {placed.node} GPUs holds all of "
                "them."
            ),
            evidence=[
                Evidence("tensor-parallel ranks", size, "count"),
                Evidence("tensor-parallel ranks on one node", placed.tensor.local, "count"),
                Evidence("GPUs of a node", placed.node, "count"),
                amount_per_step(a, "exposed tensor-parallel collectives", exposed),
                self.compare(
                    "exposed tensor-parallel collectives, share of the step", share, "min_share"
                ),
                Evidence("bus bandwidth of a GPU across nodes", _bytes(placed.network), "bytes/s"),
                Evidence(
                    "bus bandwidth of a GPU inside a node", _bytes(placed.inside_node), "bytes/s"
                ),
            ],
            where=device_places(a, rows, "exposed"),
            edits=edits,
            impact=None if edits else impact_without_gain("the rate of a link is unknown"),
            fix=self.fix.format(size=size, node=placed.node),
            code=self.code.format(size=size),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "every other rank of two nodes": _build_training([0, 2, 4, 6, 8, 10, 12, 14]),
            "one node": (_build_training(list(range(8))), "placed is None"),
            "more ranks than a node has": (_build_training(list(range(16))), "placed is None"),
            "nodes unknown": (_build_training([0, 2, 4, 6, 8, 10, 12, 14], 0), "placed is None"),
            "hidden": (_build_training([0, 2, 4, 6, 8, 10, 12, 14], us=3), "min_share"),
        }


def _bytes(gb_per_s: float | None) -> float | None:
    return None if gb_per_s is None else gb_per_s * 1e9


def _build_edits(a: Analysis, placement: TensorPlacement) -> list[Edit]:
    """Scale the collectives as in the other order. At worst half of that is saved, at best all
    waits for ranks that the network makes late go too."""
    edits = []
    for rows, factor, best_factor in placement.changes:
        select, part = select_collectives(a, rows)
        usual, best = (1 - part * (1 - share) for share in (factor, best_factor))
        edits.append(scale_edit(select, usual, best, (1 + usual) / 2 if usual < 1 else usual))
    return edits


def _build_training(ranks: list[int], node: int = 8, us: float = 400) -> TraceBuilder:
    """Build layers with an all-reduce of 16 MiB among these ranks, in both passes."""
    from advisor.core.auxiliary_inputs import NetworkLog

    b = TraceBuilder(rank=0, world_size=16)
    if node:
        b.logs["network"] = NetworkLog(files=1, hosts=2, ranks=16, node_ranks=node)

    def all_reduce() -> None:
        b.collective("allreduce", 16 << 20, us, group_size=len(ranks), ranks=ranks, wait=True)

    for _ in b.steps(4):
        for _ in range(4):
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 300)
            all_reduce()
        for _ in range(4):
            with b.op("autograd::engine::evaluate_function: MmBackward0"):
                b.launch("ampere_sgemm_128x64_nn", 600)
                all_reduce()
        b.sync()
    return b
