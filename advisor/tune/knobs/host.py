"""Knobs of the process around the model: cores, threads, the allocator, garbage collection."""

import gc
import os
from collections.abc import Sequence
from typing import Any

from advisor.recorder.environment import NODES, cpu_list
from advisor.tune.knob import Knob, Machine, Value, wrap_attribute

ALLOC_SETTING = "expandable_segments:True"
MALLOC_LIMITS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Variables for glibc: free memory at the end of the heap, and size of a block with a mapping of
its own, from which memory is returned to the system, bytes. The second is the largest allowed."""
FREEZE_AFTER, COLLECT_EVERY = 3, 500
"""Numbers of steps until existing objects are frozen, and between manual collections."""


class AffinityKnob(Knob):
    """Binding of the process and its children to the cores of the node that it starts on."""

    id = "affinity"
    title = "bound to one NUMA node"
    keep = "numactl --cpunodebind=0 --membind=0 python train.py"

    def apply(self, value: Value) -> None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        for node in sorted(NODES.glob("node[0-9]*/cpulist")):
            node_cores = allowed & cpu_list(node.read_text())
            if node_cores and node_cores != allowed:
                os.sched_setaffinity(0, node_cores)
                self.took_effect()
                return


class ThreadsKnob(Knob):
    """``torch.set_num_threads``, and the same for OpenMP and MKL before they are loaded."""

    id = "threads"
    title = "threads of an operator"
    safety = "reordered"
    keep = "torch.set_num_threads({value})"

    def values(self, predicted: int | None, machine: Machine) -> Sequence[Value]:
        """Return one thread per core, half as many, and one."""
        return list(dict.fromkeys([machine.cores, max(1, machine.cores // 2), 1]))

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"OMP_NUM_THREADS": str(value), "MKL_NUM_THREADS": str(value)}

    def apply(self, value: Value) -> None:
        import torch

        torch.set_num_threads(int(value or 1))
        torch.set_num_threads = lambda count: None
        self.took_effect()


class DebugSwitchesKnob(Knob):
    """Knob that switches off anomaly detection and blocking launches."""

    id = "debug-switches-off"
    title = "debug switches off"
    keep = "torch.autograd.set_detect_anomaly(False); unset CUDA_LAUNCH_BLOCKING"

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"CUDA_LAUNCH_BLOCKING": None, "TORCH_DISTRIBUTED_DEBUG": None}

    def apply(self, value: Value) -> None:
        import torch

        if os.environ.pop("CUDA_LAUNCH_BLOCKING", None):  # set by the program
            self.took_effect()
        torch.autograd.set_detect_anomaly(False)
        original = torch.set_anomaly_enabled

        def keep(on: bool, *args: Any) -> None:
            if on:
                self.took_effect()
            original(False, *args)

        torch.set_anomaly_enabled = keep


class AllocatorKnob(Knob):
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""

    id = "expandable-segments"
    title = "memory segments that grow"
    needs_cuda = True
    keep = f"PYTORCH_CUDA_ALLOC_CONF={ALLOC_SETTING} python train.py"

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"PYTORCH_CUDA_ALLOC_CONF": ALLOC_SETTING, "PYTORCH_ALLOC_CONF": ALLOC_SETTING}

    def apply(self, value: Value) -> None:
        self.took_effect()


class KeepFreedMemoryKnob(Knob):
    """Limits of glibc from which it returns freed memory to the system, for programs on a CPU."""

    id = "keep-freed-memory"
    title = "freed memory kept by the process"
    keep = (
        "MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 \\\n    python train.py"
    )

    def environment(self, value: Value) -> dict[str, str | None]:
        return {**MALLOC_LIMITS}

    def apply(self, value: Value) -> None:
        self.took_effect()


class EmptyCacheKnob(Knob):
    """Knob that removes the effect of ``torch.cuda.empty_cache``."""

    id = "keep-cache"
    title = "no empty_cache"
    needs_cuda = True
    keep = "# without torch.cuda.empty_cache() in the loop"

    def apply(self, value: Value) -> None:
        import torch

        def make(original: Any) -> Any:
            def empty_cache() -> None:
                self.took_effect()

            return empty_cache

        wrap_attribute(torch.cuda, "empty_cache", make)


class GcFreezeKnob(Knob):
    """Manual garbage collection: after some steps, existing objects are frozen and automatic
    collection ends. Cyclic garbage stays until the next collection, as the memory column shows."""

    id = "gc-freeze"
    title = "no garbage collection within steps"
    keep = (
        "gc.collect(); gc.freeze(); gc.disable()   # before the loop\n"
        f"if step % {COLLECT_EVERY} == 0: gc.collect()        # in it"
    )

    def apply(self, value: Value) -> None:
        from torch.optim import optimizer as optim

        count = 0

        def after(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == FREEZE_AFTER:
                gc.collect()
                gc.freeze()
                gc.disable()
                self.took_effect()
            elif count % COLLECT_EVERY == 0:
                gc.collect()

        optim.register_optimizer_step_post_hook(after)
