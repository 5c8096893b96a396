"""Encoding of the binary answer: decoding, the documented layout, and damaged answers."""

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


def encode_answer(index, x0: int, x1: int, px: int, flags=None):
    lanes = list(range(len(index.lanes)))
    view = select_visible(index, lanes, x0, x1, px, flags)
    counters = list(range(len(index.counters)))
    return view, encode_view(index, view, (x0, x1), px, counters, flags, 1.5, 7)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_decoded_answer_equals_the_view(index, decode_view, data):
    x0 = data.draw(st.integers(index.first_ns - 1000, index.last_ns - 1))
    x1 = x0 + data.draw(st.integers(16, index.last_ns - index.first_ns))
    px = data.draw(st.integers(16, 2000))
    flags = np.arange(len(index), dtype=np.uint8) % 4
    view, raw = encode_answer(index, x0, x1, px, flags)
    decoded = decode_view(raw)
    assert (decoded.header["x0"], decoded.header["x1"], decoded.header["k"]) == (x0, x1, view.level)
    assert (decoded.header["seen"], decoded.header["version"], decoded.header["ms"]) == (
        view.slice_count,
        7,
        1.5,
    )
    start, dur, name, ids, lane, category, flag = decoded.slices
    assert ids.tolist() == view.position.tolist()
    assert (start + x0 == index.start[ids]).all()
    assert (start + dur + x0 == index.end[ids]).all()
    assert (name == index.name[ids]).all()
    assert lane.tolist() == view.lane.tolist()
    assert (flag == flags[ids]).all()
    base = np.array([lane.base for lane in index.lanes])
    assert (category == base[lane] + index.slot[ids]).all()
    run_lane, cell, width, run_category, cover = decoded.runs
    assert (run_lane == view.runs.lane).all()
    cell_starts = decoded.header["cell0"] + cell.astype(float) * 2.0**view.level
    assert (cell_starts == index.first_ns + view.runs.cell * 2.0**view.level).all()
    assert (width == view.runs.width).all()
    assert (run_category == base[run_lane] + view.runs.slot).all()
    assert (cover == view.runs.cover).all()
    assert (decoded.flagged[3] == view.flagged.flags).all()
    assert len(decoded.counters[0]) == len(index.counters) * px


def test_the_header_has_the_documented_layout(index, decode_view):
    _, raw = encode_answer(index, index.first_ns, index.last_ns, 500)
    assert raw[:4] == b"ATL1"
    assert len(raw) % 8 == 0
    assert struct.unpack_from("<d", raw, 32)[0] == index.first_ns
    assert struct.unpack_from("<d", raw, 40)[0] == index.last_ns
    assert struct.unpack_from("<I", raw, 20)[0] == 500
    slices = struct.unpack_from("<I", raw, 4)[0]
    first = struct.unpack_from("<d", raw, 72)[0]
    assert slices > 0 and first == decode_view(raw).slices[0][0]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-8], lambda b: b + b"\0" * 8, lambda b: b"X" + b[1:], lambda b: b""]
)
def test_damaged_answers_are_refused(index, damage, decode_view):
    _, raw = encode_answer(index, index.first_ns, index.last_ns, 100)
    with pytest.raises(ValueError, match="answer"):
        decode_view(damage(raw))
