"""Each knob changes what it says, and the program does not undo it.

One program sets everything the other way and looks at what became of it: with all knobs pulled
at once, each in a place of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.tune.knob import KnobSetting, Machine, TrialResult, all_knobs, find_knob
from advisor.tune.knobs import host as affinity
from advisor.tune.measured_gain import check_losses

pytest.importorskip("torch")
Run = Callable[..., TrialResult]

DISTRIBUTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

CONTRARY = (
    DISTRIBUTED
    + '''
import gc, os
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

class Net(nn.Module):
    """Says how it was called."""
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(16, 1)
    def compile(self, **options):
        self.compiled = options
    def forward(self, x):
        y = self.conv(x)
        self.order = y.is_contiguous(memory_format=torch.channels_last)
        self.kind = self.out(y.flatten(1)).dtype
        return self.out(y.flatten(1)).float()

def main():
    torch.manual_seed(0)
    data = torch.randn(64, 3, 4, 4)
    plain = DataLoader(data, batch_size=4, pin_memory=False)
    workers = DataLoader(data, batch_size=4, num_workers=1, prefetch_factor=2)
    sampled = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    sizes = [len(next(iter(one))) for one in (plain, sampled)]
    net = Net()
    wrapped = DDP(nn.Linear(4, 4), bucket_cap_mb=1, static_graph=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=False)
    judged = nn.Linear(4, 4).eval()
    kernels = []
    def backend(graph, inputs):
        kernels.append(graph)
        return graph.forward
    double = torch.compile(lambda x: x * 2, dynamic=False, backend=backend)
    for step in range(12):
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.autograd.set_detect_anomaly(True)
        torch.cuda.empty_cache()
        optimizer.zero_grad(set_to_none=False)
        dropped = all(p.grad is None for p in net.parameters())
        with torch.autocast("cpu", enabled=False):
            loss = net(data[:8]).square().mean()
        loss.backward()
        free = not judged(torch.ones(2, 4)).requires_grad
        optimizer.step()
        double(torch.ones(3 + step))
    seen = {
        "batch": sizes == [8, 8],
        "loader-pinning": plain.pin_memory is True,
        "workers": workers.num_workers == 2,
        "loader-persistent": workers.persistent_workers is True,
        "loader-prefetch": workers.prefetch_factor == 4,
        "threads": torch.get_num_threads() == 1,
        "matmul-precision": torch.get_float32_matmul_precision() == "high"
        and torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32,
        "cudnn-benchmark": torch.backends.cudnn.benchmark is True,
        "debug-switches-off": not torch.is_anomaly_enabled(),
        "set-to-none": dropped,
        "autocast": net.kind is torch.bfloat16,
        "channels-last": net.order,
        "compile": net.compiled == {"mode": None},
        "compile-dynamic": len(kernels) <= 2,
        "fused-optimizer": optimizer.defaults["fused"] is True,
        "gc-freeze": not gc.isenabled() and gc.get_freeze_count() > 0,
        "no-grad-evaluation": free,
        "ddp-bucket-size": wrapped.bucket_bytes_cap == 100 << 20,
        "ddp-static-graph": wrapped.static_graph is True,
        "ddp-bucket-view": wrapped.gradient_as_bucket_view is True,
        "keep-freed-memory": os.environ.get("MALLOC_MMAP_THRESHOLD_") == str(32 << 20),
        "expandable-segments": "expandable" in os.environ["PYTORCH_CUDA_ALLOC_CONF"],
    }
    undone, kept = ([k for k, v in seen.items() if bool(v) is way] for way in (False, True))
    if len(undone) < len(kept):  # an error's text is cut
        raise RuntimeError("undone: " + (", ".join(undone) or "none"))
    raise RuntimeError("kept: " + (", ".join(kept) or "none"))

if __name__ == "__main__":
    main()
'''
)
ALL = (
    KnobSetting("batch", "x2"),
    KnobSetting("loader-pinning"),
    KnobSetting("workers", 2),
    KnobSetting("loader-persistent"),
    KnobSetting("loader-prefetch", 4),
    KnobSetting("threads", 1),
    KnobSetting("matmul-precision"),
    KnobSetting("cudnn-benchmark"),
    KnobSetting("debug-switches-off"),
    KnobSetting("keep-cache"),
    KnobSetting("set-to-none"),
    KnobSetting("autocast"),
    KnobSetting("channels-last"),
    KnobSetting("compile", "default"),
    KnobSetting("compile-dynamic"),
    KnobSetting("fused-optimizer", "fused"),
    KnobSetting("gc-freeze"),
    KnobSetting("no-grad-evaluation"),
    KnobSetting("ddp-bucket-size", 100),
    KnobSetting("ddp-static-graph"),
    KnobSetting("ddp-bucket-view"),
    KnobSetting("expandable-segments"),
    KnobSetting("keep-freed-memory"),
)


@pytest.fixture(scope="module")
def result_of_all_knobs(run_once: Run) -> TrialResult:
    return run_once(CONTRARY, *ALL)


def test_every_knob_is_pulled_here_or_below() -> None:
    assert {knob_setting.knob for knob_setting in ALL} | {"affinity", "ddp-no-sync"} == set(
        all_knobs()
    )


def test_program_setting_opposites_undoes_no_knob(
    result_of_all_knobs: TrialResult,
) -> None:
    assert result_of_all_knobs.problem == "RuntimeError: undone: none"


def test_every_knob_reports_its_effect(result_of_all_knobs: TrialResult) -> None:
    assert result_of_all_knobs.idle == []


def test_program_without_a_knob_is_unchanged(run_once: Run) -> None:
    """Else the two tests above would show nothing."""
    script = CONTRARY.replace("net.compiled", "getattr(net, 'compiled', None)")
    script = script.replace('os.environ["PYTORCH_CUDA_ALLOC_CONF"]', '""')
    assert run_once(script).problem == "RuntimeError: kept: none"


ACCUMULATION = (
    DISTRIBUTED
    + """
torch.manual_seed(0)
net = DDP(torch.nn.Linear(8, 8))
reduced = []
def hook(state, bucket):
    reduced.append(1)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
net.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(4, 16, 8)
for step in range(200):
    before = len(reduced)
    optimizer.zero_grad()
    for number, micro in enumerate(data):
        if UNEVEN and step == 20 and number == 2:
            break
        (net(micro) - micro).square().mean().backward()
    optimizer.step()
    if step == 7:
        print("reductions", len(reduced) - before, flush=True)
        assert len(reduced) - before == WANTED, len(reduced) - before
"""
)


def accumulation(wanted: int, *, uneven: bool = False) -> str:
    """The program; it fails where a step makes another number of reductions than ``wanted``."""
    return ACCUMULATION.replace("WANTED", str(wanted)).replace("UNEVEN", str(uneven))


def test_accumulated_gradients_are_sent_once_and_unchanged(
    run_once: Run,
) -> None:
    before = run_once(accumulation(4))
    after = run_once(accumulation(1), KnobSetting("ddp-no-sync"))
    assert (before.problem, after.problem, after.idle) == ("", "", [])
    one = find_knob("ddp-no-sync")
    assert check_losses(one.safety, one.changes_random_numbers, [before], [after]).passed


def test_optimizer_step_with_unsent_gradients_ends_the_run(run_once: Run) -> None:
    result = run_once(accumulation(1, uneven=True), KnobSetting("ddp-no-sync"))
    assert "2 passes where others have 4" in result.problem


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_is_bound_to_the_cores_of_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, cores in enumerate(("8-9", "0-2,5", "3-4")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    bound: list[set[int]] = []
    monkeypatch.setattr(affinity, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(set(cores)))
    one = find_knob("affinity")
    one.apply(None)
    assert bound == [{1, 2, 5}] and one.used


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("workers", "3", 3),
        ("compile", "default", "default"),
        ("batch", "64", 64),
        ("batch", "x8", "x8"),
    ],
)
def test_a_setting_may_be_named(name: str, text: str, expected: object) -> None:
    assert find_knob(name).parse_setting(text, Machine(2, False)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [("workers", "many"), ("workers", "-1"), ("set-to-none", "1"), ("batch", "0"), ("batch", "x")],
)
def test_invalid_setting_is_one_line_error(name: str, text: str) -> None:
    with pytest.raises(AdvisorError, match=f"^{name}={text}: "):
        find_knob(name).parse_setting(text, Machine(2, False))
