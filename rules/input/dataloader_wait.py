"""The loader's workers are too slow: the device waits for the next batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.rules.common import figure, of_step, places
from advisor.rules.elsewhere import JAX_AHEAD, TF_PREFETCH
from advisor.rules.input.waits import OTHERS, culprits, find_waits, in_one_step, recurs
from advisor.rules.sources import ENGINE_FLOOR, HAND_OVER, OURS, TENSORBOARD, XPROF
from advisor.testing import TraceBuilder

_TF_DATA = (
    ("the loader's workers: they deliver", "tf.data: the input pipeline delivers"),
    ("the DataLoader's wait", "the wait for tf.data"),
    ("the DataLoader keeps up", "tf.data keeps up"),
)
"""What is called otherwise where tf.data is waited for."""


class DataLoaderWait(Rule):
    """The device is idle while the training loop waits for the loader's workers, so the step is as
    slow as the input pipeline.

    PyTorch marks each fetch of a batch, ``enumerate(DataLoader)#….__next__``. What counts is the
    part of that wait during which the device is idle and its next work comes after the wait: a
    wait while the device still works through its queue costs nothing. Without device work in the
    trace (training on the CPU) all of the wait counts. A loader without worker processes
    (``num_workers=0``) is the subject of the rule single-process-loader.

    A batch that is ready is not free: taking it over (queue, shared memory, wake-up) took 1.5 ms
    for 8 KiB and 4 ms for 2 MiB, with 2 workers and with 6 alike (torch 2.13, two busy cores).
    Waits that short say nothing about the workers, and more of them would not help.

    Traps: the first batch of an epoch, for which workers are started, says nothing about the
    others: when one step of three or more holds nearly all the wait, the rule abstains. A loader of
    one's own leaves no mark in the trace; its time shows as Python before the first kernel.
    """

    id = "dataloader-wait"
    title = "The step waits for the DataLoader"
    category = "input"
    knobs = ("workers", "loader-prefetch")
    found_in = ("workloads/cpu_transforms",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
        "workloads/cpu_transforms",
    )
    validated_on = (
        "CPU recordings, torch 2.13: fires with 2 workers that need 80 ms a batch (6 workers: step "
        "102 to 54 ms), silent where only the hand-over shows; silent on A100 and V100 traces "
        "whose loader keeps up (0.1 % and 0.0 % of the step)"
    )
    references = (
        "https://pytorch.org/docs/stable/data.html",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    min_share = Threshold(0.05, "of the step", TENSORBOARD, XPROF)
    min_batch_ms = Threshold(
        3.0, "ms: shorter waits are the hand-over of a batch that is ready", HAND_OVER
    )
    healthy_share = Threshold(
        0.01, "of the step, exposed: below, the loader is said to keep up", ENGINE_FLOOR
    )
    more = Threshold(
        2, "times the workers, for the estimate: one doubling, where cores are free", OURS
    )

    fix = (
        "Make a batch cheaper or make more of them at once: raise num_workers up to the "
        "cores this process may use, keep workers alive between epochs, prefetch more. If "
        "the cores are busy already, move decoding and augmentation to the device or cache "
        "their result; if the storage is, read larger shards from a local disk."
    )
    code = (
        "cores = len(os.sched_getaffinity(0)) // local_world_size\n"
        "loader = DataLoader(\n"
        "    dataset, batch_size=..., num_workers=max(1, cores - 1),\n"
        "    prefetch_factor=4, persistent_workers=True, pin_memory=True)"
    )
    verify = (
        "Profile again: the exposed wait falls. Iterating over the loader alone, without "
        "the model, shows the fastest step this loader allows."
    )
    falsified_by = "the same step time when the loop reuses one batch already on the device"
    assumptions = ("there are cores, and storage bandwidth, for more workers",)
    confidence = 0.9

    elsewhere: ClassVar = {
        TENSORFLOW: FrameworkAdvice(
            "Let tf.data work ahead of the step: prefetch last, map and interleave in parallel "
            "with AUTOTUNE, batch before cheap maps so that they are vectorised, cache what stays "
            "the same, read from several files at once, and take Python functions "
            "(tf.py_function) out of the pipeline.",
            "files.interleave(tf.data.TFRecordDataset,\n"
            "                 num_parallel_calls=tf.data.AUTOTUNE)\n" + TF_PREFETCH,
            title="The step waits for tf.data",
            says=_TF_DATA,
        ),
        JAX: FrameworkAdvice(
            "Let the input pipeline work ahead of the step: prefetch last and map in parallel "
            "(tf.data), or worker processes (Grain); and bring the next batch to the device while "
            "this step runs.",
            TF_PREFETCH + "\n" + JAX_AHEAD,
            title="The step waits for its input",
            says=_TF_DATA,
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the exposed part of the wait with the step."""
        if a.trace.cpu.is_empty():
            yield SkippedCheck(
                what="waiting for the input pipeline",
                why="the trace holds no host events",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
            return
        waits = find_waits(a, OTHERS)
        if waits is None:
            return
        share = waits.exposed / a.span_ns
        batch = waits.total / len(waits.host)
        if share < self.min_share or batch < self.min_batch_ms * 1e6:
            if share < self.healthy_share and a.device_id is not None:
                yield PassedCheck(
                    text=f"the DataLoader keeps up: the device waits {share:.1%} "
                    f"{t.format_of(a.per)}"
                )
            return
        if not recurs(waits, self.min_share * a.step_ns):
            yield in_one_step(waits)
            return
        per_step = waits.exposed / a.step_count
        inside = culprits(a, waits)
        waiting = float(np.mean(waits.by_step > 0))
        hidden = (
            ""
            if a.device_id is None
            else f" (of {t.format_duration(waits.total / a.step_count)} waited)"
        )
        yield Finding(
            summary=(
                f"{of_step(a, waits.exposed)}{hidden} nothing runs but the "
                "wait for the loader's workers: they deliver batches more slowly than the step "
                "uses them." + inside.summary
            ),
            evidence=[
                Evidence("exposed wait", per_step, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "wait", waits.total),
                Evidence("mean wait for a batch", batch, "ns", *self.limit("min_batch_ms", 1e6)),
                Evidence("steps that wait", waiting, "share"),
                Evidence("longest wait of a step", int(waits.by_step.max()), "ns"),
                *inside.evidence,
            ],
            where=[*inside.where, *places(a, waits.host, waits.each)],
            edits=[Edit(op="spread", select=Select(on="host", name=OTHERS), workers=self.more)],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Workers that are too slow, with a device and without."""
        slow, host_only = TraceBuilder(), TraceBuilder(gpu=None)
        for _ in range(4):
            with slow.step():
                slow.loader_wait(4000)
                slow.run("aten::mm", "ampere_sgemm_128x64_nn", 3000)
                slow.sync()
            with host_only.step():
                host_only.loader_wait(4000)
                with host_only.op("aten::mm", host_us=3000):
                    pass
        return {"slow workers": slow, "training on the CPU": host_only}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """A wait behind queued device work; one without workers; the first batch of an epoch."""
        hidden, single, first = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for number in range(4):
            with hidden.step():
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 6000)
                hidden.loader_wait(4000)
            with single.step():
                single.loader_wait(4000, workers=0)
                single.run("aten::mm", "ampere_sgemm_128x64_nn", 3000)
                single.sync()
            with first.step():
                first.loader_wait(14000 if number == 0 else 30)
                first.run("aten::mm", "ampere_sgemm_128x64_nn", 30000)
                first.sync()
        return {
            "hidden behind device work": (hidden, "share < self.min_share"),
            "no workers": (single, "waits is None"),
            "first batch": (first, "not recurs("),
        }
