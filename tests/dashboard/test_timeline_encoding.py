"""The binary answer: what is written is what is read, byte for byte where it is documented."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.dashboard.timeline.detail_levels import select_visible
from advisor.dashboard.timeline.encoding import encode_view
from advisor.dashboard.timeline.index_builder import build_index
from advisor.measure import Analysis
from advisor.testing import TraceBuilder


@pytest.fixture(scope="module")
def index():
    b = TraceBuilder(gpu="A100", rank=0)
    for _ in range(4):
        with b.step():
            for i in range(40):
                with b.op("aten::mm", [[8, 8], [8, 8]], "float"):
                    b.launch(f"kernel_{i % 3}", 5 + i, blocks=4)
            b.memory(1 << 20, 1 << 20, 2 << 20)
    return build_index(Analysis(b.trace()))


def answer(index, x0: int, x1: int, px: int, flags=None):
    lanes = list(range(len(index.lanes)))
    view = select_visible(index, lanes, x0, x1, px, flags)
    counters = list(range(len(index.counters)))
    return view, encode_view(index, view, (x0, x1), px, counters, flags, 1.5, 7)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_written_is_what_is_read(index, decode, data):
    x0 = data.draw(st.integers(index.first_ns - 1000, index.last_ns - 1))
    x1 = x0 + data.draw(st.integers(16, index.last_ns - index.first_ns))
    px = data.draw(st.integers(16, 2000))
    flags = np.arange(len(index), dtype=np.uint8) % 4
    view, raw = answer(index, x0, x1, px, flags)
    found = decode(raw)
    assert (found.head["x0"], found.head["x1"], found.head["k"]) == (x0, x1, view.k)
    assert (found.head["seen"], found.head["version"], found.head["ms"]) == (
        view.slice_count,
        7,
        1.5,
    )
    start, dur, name, at, lane, category, flag = found.slices
    assert at.tolist() == view.position.tolist()
    assert (start + x0 == index.start[at]).all()
    assert (start + dur + x0 == index.end[at]).all()
    assert (name == index.name[at]).all()
    assert lane.tolist() == view.lane.tolist()
    assert (flag == flags[at]).all()
    base = np.array([lane.base for lane in index.lanes])
    assert (category == base[lane] + index.slot[at]).all()
    run_lane, cell, width, run_category, cover = found.runs
    assert (run_lane == view.runs.lane).all()
    begin = found.head["cell0"] + cell.astype(float) * 2.0**view.k
    assert (begin == index.first_ns + view.runs.cell * 2.0**view.k).all()
    assert (width == view.runs.width).all()
    assert (run_category == base[run_lane] + view.runs.slot).all()
    assert (cover == view.runs.cover).all()
    assert (found.flagged[3] == view.flagged.flags).all()
    assert len(found.counters[0]) == len(index.counters) * px


def test_the_header_is_where_it_is_documented(index, decode):
    _, raw = answer(index, index.first_ns, index.last_ns, 500)
    assert raw[:4] == b"ATL1"
    assert len(raw) % 8 == 0
    assert struct.unpack_from("<d", raw, 32)[0] == index.first_ns
    assert struct.unpack_from("<d", raw, 40)[0] == index.last_ns
    assert struct.unpack_from("<I", raw, 20)[0] == 500
    slices = struct.unpack_from("<I", raw, 4)[0]
    first = struct.unpack_from("<d", raw, 72)[0]
    assert slices > 0 and first == decode(raw).slices[0][0]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-8], lambda b: b + b"\0" * 8, lambda b: b"X" + b[1:], lambda b: b""]
)
def test_what_is_not_an_answer_is_refused(index, damage, decode):
    _, raw = answer(index, index.first_ns, index.last_ns, 100)
    with pytest.raises(ValueError, match="answer"):
        decode(damage(raw))
