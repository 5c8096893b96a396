"""Call stacks without library frames: the other frames move up, and nothing else changes."""

from __future__ import annotations

import numpy as np

from advisor.dashboard.timeline.index_builder import build_index, depth_without, library_frames
from advisor.measure import Analysis
from advisor.testing import TraceBuilder


def analysis_with_stacks() -> Analysis:
    b = TraceBuilder()
    with (
        b.step(),
        b.python("train.py(12): loop"),
        b.python("torch/nn/modules/module.py(1501): _call_impl"),
        b.python("/usr/lib/python3.11/contextlib.py(81): inner"),
        b.python("/home/x/model.py(7): forward"),
        b.op("aten::mm"),
    ):
        b.launch("gemm", 900)
    return Analysis(b.trace())


def test_only_library_frames_are_hidden_and_their_children_move_up() -> None:
    a = analysis_with_stacks()
    names = a.trace.cpu["name"].cast(str).to_list()
    hidden = library_frames(a)
    assert {names[i] for i in np.flatnonzero(hidden)} == {
        "torch/nn/modules/module.py(1501): _call_impl",
        "/usr/lib/python3.11/contextlib.py(81): inner",
    }
    depth = dict(zip(names, a.trace.cpu["depth"].to_list(), strict=True))
    without = dict(zip(names, depth_without(a, hidden).tolist(), strict=True))
    assert without["train.py(12): loop"] == depth["train.py(12): loop"]
    assert without["/home/x/model.py(7): forward"] == depth["train.py(12): loop"] + 1
    assert without["aten::mm"] == depth["aten::mm"] - 2


def test_the_index_without_library_frames_keeps_everything_else() -> None:
    a = analysis_with_stacks()
    complete, without_libraries = build_index(a), build_index(a, libraries=False)
    assert len(without_libraries) == len(complete) - 2
    names = [
        {index.names[i] for i in np.unique(index.name)} for index in (complete, without_libraries)
    ]
    assert names[0] - names[1] == {
        "torch/nn/modules/module.py(1501): _call_impl",
        "/usr/lib/python3.11/contextlib.py(81): inner",
    }
    for index in (complete, without_libraries):
        for lane in index.lanes:  # slices of a lane do not overlap
            start, end = (
                index.start[lane.first_slice : lane.end_slice],
                index.end[lane.first_slice : lane.end_slice],
            )
            assert (end[:-1] <= start[1:]).all()
