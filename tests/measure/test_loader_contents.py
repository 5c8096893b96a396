"""The parts of a loader's fetches, and the line of the user's code that calls each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from advisor.measure import Analysis
from advisor.measure.steps.named_intervals import measure_contents
from advisor.read import read_trace
from advisor.testing import TraceBuilder

pytestmark = pytest.mark.timed

RANGE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def fetches(a: Analysis) -> np.ndarray[Any, Any]:
    return np.flatnonzero((a.trace.cpu["name"].cast(pl.String) == RANGE).to_numpy())


def loader_rows(a: Analysis) -> list[tuple[str | None, str, str, float]]:
    """(user's frame, what it calls, the call in that that holds most, ms), most first."""
    names = [None if n is None else str(n) for n in a.trace.cpu["name"]]
    return [
        (None if frame is None else names[frame], names[callee], names[leaf], ns / 1e6)
        for frame, callee, leaf, ns in measure_contents(a, fetches(a))
        .select("frame", "callee", "leaf", "ns")
        .iter_rows()
    ]


def loading() -> TraceBuilder:
    """Three steps: 1 ms of the user's own code, 5 ms in a library's built-in, 2 ms in an op."""
    b = TraceBuilder(gpu=None)
    for _ in range(3):
        with b.step(), b.python("train.py(10): main"), b.range(RANGE):
            b.host(1)
            with b.python("torch/utils/data/dataloader.py(700): __next__"):
                with b.python("data.py(41): __getitem__"):
                    b.host(1000)
                    with b.python("scipy/ndimage/_interpolation.py(600): zoom"):
                        b.host(20)
                        with b.python("<built-in method zoom_shift of module object at 0x7f>"):
                            b.host(5000)
                with b.python("data.py(80): collate"), b.op("aten::stack", host_us=2000):
                    pass
                b.host(300)  # PyTorch's own: nobody's line
    return b


def test_loader_time_belongs_to_user_line_and_callee():
    a = loading().analysis()
    zoom, stack, own_row, *_rest = loader_rows(a)
    assert zoom[:3] == (
        "data.py(41): __getitem__",
        "scipy/ndimage/_interpolation.py(600): zoom",
        "<built-in method zoom_shift of module object at 0x7f>",
    )
    assert zoom[3] == pytest.approx(3 * 5.02, rel=0.01)
    assert stack[:2] == ("data.py(80): collate", "aten::stack")
    assert stack[3] == pytest.approx(3 * 2, rel=0.01)
    assert own_row[:3] == ("data.py(41): __getitem__",) * 3
    assert own_row[3] == pytest.approx(3 * 1, rel=0.01)
    total_ms = sum(int(a.trace.cpu["dur"][int(row)]) for row in fetches(a)) / 1e6
    assert total_ms - 3 * 0.31 <= sum(ms for *_, ms in loader_rows(a)) <= total_ms


def test_loader_work_is_identified_by_operators_without_stacks():
    b = TraceBuilder(gpu=None)
    for _ in range(3):
        with b.step(), b.range(RANGE):
            b.host(500)
            with b.op("aten::stack"), b.op("aten::cat", host_us=900):
                pass
    ((frame, callee, leaf, ms),) = loader_rows(b.analysis())
    assert (frame, callee, leaf) == (None, "aten::stack", "aten::cat")
    assert ms == pytest.approx(3 * 0.9, rel=0.01)


def test_method_of_two_objects_is_one_entry():
    b = TraceBuilder(gpu=None)
    with b.step(), b.range(RANGE), b.python("data.py(5): load"):
        for address in ("0x7f01", "0x7f02"):
            with b.python(f"<built-in method std of Tensor object at {address}>"):
                b.host(1000)
    (_frame, callee, _leaf, ms), *_ = loader_rows(b.analysis())
    assert callee.startswith("<built-in method std of Tensor")
    assert ms == pytest.approx(2, rel=0.01)


def test_a_function_that_calls_itself_is_counted_once():
    b = TraceBuilder(gpu=None)
    walk = "data.py(5): walk"
    with b.step(), b.range(RANGE), b.python(walk), b.python(walk), b.python(walk):
        b.host(1000)
    assert sum(ms for *_, ms in loader_rows(b.analysis())) == pytest.approx(1.0, rel=0.01)


class _SlowDataset:
    """Two samples; each sleeps, decodes a little, and is an array."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        json.loads("[1, 2, 3]")
        return np.zeros(4, dtype=np.float32)


def test_recorded_loader_describes_its_work(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        schedule=schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda p: p.export_chrome_trace(str(tmp_path / "t.json")),
    ) as profiler:
        for _batch in torch.utils.data.DataLoader(_SlowDataset(), batch_size=2):
            profiler.step()
    a = Analysis(read_trace(str(tmp_path / "t.json")))
    frame, callee, _leaf, ms = loader_rows(a)[0]
    assert frame is not None and frame.endswith(": __getitem__")
    assert "sleep" in callee
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slept = sum(e["dur"] for e in events if "sleep" in e["name"] and "python" in e["cat"])
    assert ms >= 0.004 * 1e3 * 2 * len(fetches(a))
    assert ms == pytest.approx(slept / 1e3, rel=0.01)
