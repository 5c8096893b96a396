"""nn.DataParallel: one process drives several devices."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.intervals import intersect, union
from advisor.core.rule import Evidence, Rule
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.support.citations import SILENT_TRACES
from advisor.rules.support.common import amount_per_step, costliest_places, per_step
from advisor.testing import Examples, TraceBuilder

FORWARD = r"^DataParallel\.forward$"
COPY_FUNCTIONS = r"^(?:Broadcast|Scatter|Gather|ReduceAddCoalesced)(?:Backward)?\d*$"
"""Pattern of the autograd functions by which DataParallel copies the model and the batch to every
device and collects the results. DistributedDataParallel has none of them."""


class DataParallel(Rule):
    """``nn.DataParallel`` copies the whole model to every device in each step, from one process
    whose threads share one interpreter. DistributedDataParallel runs one process per device, does
    neither, and overlaps the reduction of gradients with the backward pass.

    PyTorch marks it with the range ``DataParallel.forward``. On one device it passes the call
    through and costs nothing, so the trace must have work on two or more devices. The figure counts
    device work and host time of the functions that broadcast, scatter and gather. They count while
    the analysed device has nothing else to do. The shared interpreter also slows every launch,
    which is not in the figure. PyTorch's own documentation recommends DistributedDataParallel
    instead, and TensorBoard's profiler plugin reports any use."""

    id = "data-parallel"
    title = "nn.DataParallel is used instead of DistributedDataParallel"
    silent_in = SILENT_TRACES
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
        "https://pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    )

    fix = (
        "Start one process per device with torchrun, and wrap the model in "
        "DistributedDataParallel. Give each process its share of the data with a "
        "DistributedSampler, and divide the batch size by the number of processes."
    )
    code = (
        "# torchrun --nproc-per-node=gpu train.py\n"
        'dist.init_process_group("nccl")\n'
        'rank = int(os.environ["LOCAL_RANK"])\n'
        "torch.cuda.set_device(rank)\n"
        "model = DistributedDataParallel(model.to(rank), device_ids=[rank])\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., sampler=DistributedSampler(dataset))"
    )
    verify = "Profile again, one trace per rank: no DataParallel.forward, gradients overlap."
    falsified_by = "DistributedDataParallel on the same devices that is no faster"
    assumptions = ("the model fits on each device, as it does now",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        cpu, gpu = a.trace.cpu, a.trace.gpu
        forward = np.flatnonzero(name_matches(cpu["name"], FORWARD).to_numpy())
        devices = gpu["device"].drop_nulls().n_unique()
        if a.device_id is None or not len(forward) or devices < 2:
            return
        copy_rows = np.flatnonzero(name_matches(cpu["name"], COPY_FUNCTIONS).to_numpy())
        ts, dur = cpu["ts"].to_numpy(), cpu["dur"].to_numpy()
        host = intersect(union(ts[copy_rows], ts[copy_rows] + dur[copy_rows]), a.spans).total
        busy_ns = {
            int(device): ns
            for device, ns in gpu.group_by("device").agg(pl.col("dur").sum()).sort("device").rows()
        }
        yield Finding(
            summary=(
                f"nn.DataParallel drives {devices} devices from one process. It copies model and "
                f"batch to them in each forward pass: {t.format_duration(host / a.step_count)} of "
                f"host time{per_step(a)}."
            ),
            evidence=[
                amount_per_step(a, "DataParallel.forward calls", len(forward), "count"),
                Evidence("devices with work", devices, "count"),
                amount_per_step(a, "host time in broadcast, scatter and gather", host),
                Evidence(
                    "most and least device time of a device",
                    f"{t.format_duration(max(busy_ns.values()))}, "
                    f"{t.format_duration(min(busy_ns.values()))}",
                ),
            ],
            where=costliest_places(a, forward.astype(np.int64)),
            edits=[
                Edit(op="remove", select=Select(on="gpu", under=COPY_FUNCTIONS)),
                Edit(op="remove", select=Select(on="host", kind=("op",), name=COPY_FUNCTIONS)),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        ddp = TraceBuilder(rank=0, world_size=2)
        for _ in ddp.steps():
            with ddp.range("DistributedDataParallel.forward"), ddp.op("aten::mm"):
                ddp.launch("ampere_sgemm_128x64_nn", 3000)
            ddp.sync()
        return {
            "two devices": _build_trace(devices=2),
            "one device": (_build_trace(devices=1), "devices < 2"),
            "DistributedDataParallel": (ddp, "not len(forward)"),
        }


def _build_trace(devices: int) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        with b.range("DataParallel.forward"):
            if devices > 1:
                with b.op("Broadcast", host_us=300):
                    b.copy("DtoD", 200 << 20, 2000)
            for device in range(devices):
                with b.op("aten::mm"):
                    b.launch("ampere_sgemm_128x64_nn", 3000, stream=7 + device)
                    b.events[-1]["args"]["device"] = device
                    b.events[-1]["pid"] = device
        b.sync()
    return b
