"""The devices of one process take turns: a model is split over them, and one batch is under way."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Finding, Impact, Outcomes
from advisor.core.intervals import Intervals, intersect, union_of
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, GPIPE, SILENT_TRACES
from advisor.rules.support.common import amount_per_step, costliest_places, of_step
from advisor.testing import Examples, TraceBuilder


class SequentialDevices(Rule):
    """A model that is split over several devices of one process computes a batch on one device
    after the other. Examples are layers moved with ``.to("cuda:1")`` and ``device_map="auto"`` of
    Transformers. While one device works, the others wait.

    The rule compares the busy times of the devices. It is silent if they work at the same time, as
    with data parallelism, or if the devices have one process each. The wait is idle time of a
    device in which another works.

    A pipeline cuts the batch into micro-batches, and all devices work at once. Of the wait, the
    part for the first micro-batch is left: one in ``micro_batches``. Where the model fits on one
    device, one process per device needs no pipeline."""

    id = "sequential-devices"
    title = "GPUs take turns: one computes while the others wait"
    silent_in = SILENT_TRACES
    references = (
        "https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        "https://huggingface.co/docs/transformers/perf_infer_gpu_multi",
    )
    sources = (GPIPE,)

    min_device_share = Threshold(
        0.1, "of all devices' busy time, the device with least work that counts", CHOSEN
    )
    max_shared = Threshold(
        0.2, "of the time in which a device works, the part in which several do", CHOSEN
    )
    min_share = Threshold(0.1, "of the step, waiting for another device", CHOSEN)
    micro_batches = Factor(4, "micro-batches of the pipeline, expected", GPIPE)
    worst_micro_batches = Factor(2, "micro-batches, the least gain", GPIPE)
    best_micro_batches = Factor(16, "micro-batches, the largest gain", GPIPE)

    fix = (
        "Start one process per GPU, each with its share of the data: with "
        "DistributedDataParallel if the model fits on one GPU, else with fully_shard(). Or run a "
        "pipeline with micro-batches (torch.distributed.pipelining)."
    )
    code = (
        "# torchrun --nproc-per-node=gpu train.py\n"
        "from torch.distributed.fsdp import fully_shard\n"
        'torch.distributed.init_process_group("nccl")\n'
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
        "for block in model.layers:  # your model's blocks, before the optimizer\n"
        "    fully_shard(block)  # each GPU keeps a part of the weights\n"
        "fully_shard(model)"
    )
    inference = {
        "fix": (
            "If the model fits on one GPU, start one process per GPU, each with its share of the "
            "requests. If it does not fit, split each layer over the GPUs (tensor parallelism)."
        ),
        "code": (
            "# torchrun --nproc-per-node=gpu serve.py\n"
            "# Transformers: each GPU computes a part of every layer\n"
            'model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")'
        ),
    }
    verify = "Profile again: the devices are busy at the same time."
    falsified_by = "the same samples per second with one process per device"
    assumptions = ("the batch can be divided, and smaller kernels take proportionally less time",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        device = a.trace.gpu["device"]
        busy = {
            int(number): a.device_busy((device == number).fill_null(False).to_numpy())
            for number in device.drop_nulls().unique().sort()
        }
        total = sum(intervals.total for intervals in busy.values())
        busy = {d: i for d, i in busy.items() if i.total >= self.min_device_share * total}
        if a.device_id is None or len(busy) < 2 or a.device_id not in busy:
            return
        shared = _shared_time(list(busy.values())) / union_of(*busy.values()).total
        if shared > self.max_shared:
            return
        others = union_of(*(i for d, i in busy.items() if d != a.device_id))
        wait_ns = intersect(a.breakdown.idle, others).total
        share = wait_ns / a.span_ns
        if share < self.min_share:
            return
        shares = ", ".join(f"{i.total / a.span_ns:.0%} of GPU {d}" for d, i in sorted(busy.items()))
        saved_ns, low_ns, high_ns = (
            round(wait_ns / a.step_count * (1 - 1 / n))
            for n in (self.micro_batches, self.worst_micro_batches, self.best_micro_batches)
        )
        yield Finding(
            summary=(
                f"GPU {a.device_id} waits while another works for {of_step(a, wait_ns)}: the model "
                f"is split over {len(busy)} GPUs that take turns. Busy are {shares}."
            ),
            evidence=[
                Evidence("GPUs with work", len(busy), "count"),
                self.compare("time in which several work", shared, "max_shared", "share"),
                self.compare("waiting for another GPU", share, "min_share", "share"),
                amount_per_step(a, "idle time of these waits", wait_ns),
                Evidence(
                    "sum of their busy time",
                    t.format_duration(sum(i.total for i in busy.values()) / a.step_count),
                ),
            ],
            where=costliest_places(a, _find_crossing_operators(a)),
            impact=Impact(
                currency="step_time",
                gain_ns=saved_ns,
                low_ns=low_ns,
                high_ns=high_ns,
                share=saved_ns / a.step_ns,
                method="idle time while another GPU works",
                kind="recorded",
                per=a.per,
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "two devices in turn": _build_trace(is_split=True),
            "both at once": (_build_trace(is_split=False), "shared > self.max_shared"),
            "one device": (_build_trace(is_split=True, second_us=0), "len(busy) < 2"),
        }


def _find_crossing_operators(a: Analysis) -> NDArray[np.int64]:
    """Return the operators that wait for another device, or else the waiting calls."""
    waits = a.gaps.filter(pl.col("cause") == "device")["host"].drop_nulls().unique()
    rows = waits.to_numpy().astype(np.int64)
    ops = a.trace.cpu["parent"].gather(rows).fill_null(-1).to_numpy().astype(np.int64)
    return np.where(ops >= 0, ops, rows)


def _shared_time(busy: list[Intervals]) -> int:
    """Return the time in which several of the devices work, ns."""
    others = (union_of(*busy[:i], *busy[i + 1 :]) for i in range(len(busy)))
    return union_of(*(intersect(own, rest) for own, rest in zip(busy, others, strict=True))).total


def _build_trace(*, is_split: bool, second_us: float = 3000) -> TraceBuilder:
    """Build steps in which two devices compute, the second after the first if ``is_split``."""
    b = TraceBuilder()
    for _ in b.steps():
        for device, us in enumerate((3000, second_us)):
            if device and is_split:
                b.wait_stream(8, on=7)
            if us:
                with b.op("aten::mm"):
                    b.launch("ampere_sgemm_128x64_nn", us, stream=7 + device)
                    b.events[-1]["args"]["device"] = device
                    b.events[-1]["pid"] = device
        if is_split:
            b.wait_stream(7, on=8)
            b.run("aten::add", "vectorized_elementwise_kernel", 100)
        b.sync()
    return b
