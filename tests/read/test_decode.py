"""A piece of JSON to columns: every event that can be used is, whatever else is in the piece."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.read.event_columns import (
    MISSING,
    NAME_LIMIT,
    RAW_LIMIT,
    Piece,
    decode_integers,
    float_column,
)
from advisor.read.formats.kineto import decode as pieces
from advisor.read.formats.kineto.decode import decode_piece
from advisor.read.trace_events import EventArgs, TraceEvent


def op(name: str = "aten::mm", **fields: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 2,
        "ts": 5,
        "dur": 3,
        "args": {"External id": 9},
        **fields,
    }


def kernel(name: str = "gemm", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": 6,
        "dur": 2,
        "args": {"device": 0, "stream": 7, "correlation": 3, **args},
    }


def decode(*events: Any) -> Piece:
    return decode_piece(json.dumps(list(events)).encode())


def names(piece: Piece, group: str = "host") -> list[str]:
    return [piece.names[code] for code in getattr(piece, group)["name"].tolist()]


# -- damage in one event does not cost another --------------------------------------------------

GOOD = json.dumps(op("good")).encode()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'"name": "a\x00b\x1b[2Jc"', "a b [2Jc"),
        (b'"name": "\xff\xfe"', "\ufffd\ufffd"),
        (b'"name": "\xc3\xa9"', "\u00e9"),
        (rb'"name": "C:\Users\me\x.py"', r"C:\Users\me\x.py"),
        (rb'"name": "\ud800!"', "\ufffd!"),
        (b'"name": "x", "args": {"External id": NaN}', "x"),
        (b'"name": "x", "args": {"junk": [Infinity, -Infinity, nan]}', "x"),
        (b'"name": "x", "args": {"External id": [1]}', "x"),
        (b'"name": "x", "args": [1, 2]', "x"),
        (b'"name": "x", "args": null', "x"),
        (b'"name": "x", "args": {"Input Dims": {"a": [1]}}', "x"),
        (b'"name": "x", "args": {"External id": true}', "x"),
        (b'"name": "first", "name": "x"', "x"),
        (b'"name": 12', "12"),
        (b'"name": null', ""),
        (b'"name": ["x"]', ""),
        (b'"name": "x", "ph": "X", "bp": {"e": [{}]}', "x"),
        (b'"name": "x", "tid": [4]', "x"),
        (b'"name": "x", "tid": 1' + b"0" * 400, "x"),
        (b'"name": "x", "args": {"a": {"b": {"c": {"d": [[[[]]]]}}}}', "x"),
    ],
)
def test_a_malformed_event_is_read_and_costs_no_other(text: bytes, name: str) -> None:
    malformed = (
        b'{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 2, "ts": 1, "dur": 1, ' + text + b"}"
    )
    piece = decode_piece(b"[" + b",".join([GOOD, malformed, GOOD]) + b"]")
    assert names(piece) == ["good", name, "good"]
    assert piece.unsound == 0
    assert piece.events == 3


@pytest.mark.parametrize(
    "text",
    [
        b"12",
        b'"text"',
        b"null",
        b"[1]",
        b"{]",
        b'{"ph" "X"}',
        b'{"ph": "X", "args": {"a": 01}}',
        b'{"ph": "X", "tid": 1' + b"0" * 5000 + b"}",
        b'{"ph":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_values_that_are_no_events_are_skipped_and_counted(text: bytes) -> None:
    piece = decode_piece(b"[" + b",".join([GOOD, text, GOOD]) + b"]")
    assert names(piece) == ["good", "good"]
    assert piece.unsound == 1
    assert piece.dropped == {"not decodable": 1}


def test_lost_quote_costs_at_most_its_neighbours() -> None:
    many = [json.dumps(op(f"n{i}")).encode() for i in range(50)]
    many[20] = many[20].replace(b'"n20"', b'n20"')
    piece = decode_piece(b"[" + b",".join(many) + b"]")
    assert len(names(piece)) >= 48
    assert piece.unsound >= 1


def test_events_read_by_force_are_counted() -> None:
    piece = decode(op(), op(tid={"a": 1}), op())
    assert piece.dropped == {"unexpected types, read leniently": 1}
    assert piece.events == 3


@pytest.mark.parametrize("text", [b"", b"[", b"[]", b"[,]", b"[,,]", b"[ ]", b"]", b"\0", b"[" * 9])
def test_pieces_without_events_have_no_columns(text: bytes) -> None:
    piece = decode_piece(text)
    assert piece.events == 0
    assert (piece.host, piece.device, piece.memory) == ({}, {}, {})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
arg_names = st.sampled_from([spec.encode_name for spec in msgspec.structs.fields(EventArgs)])
field_names = st.sampled_from([spec.encode_name for spec in msgspec.structs.fields(TraceEvent)])
categories = st.sampled_from(
    [
        "cpu_op",
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "cuda_runtime",
        "user_annotation",
        "Trace",
        "python_function",
        "cuda_sync",
        "cuda_profiler_range",
        "cpu_instant_event",
        "ac2g",
        "malformed",
    ]
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            categories,
            st.sampled_from(["X", "i", "M", "s", "B", "E", "?"]),
            st.dictionaries(field_names, json_values, max_size=3),
            st.dictionaries(arg_names, json_values, max_size=6),
        ),
        max_size=12,
    )
)
def test_any_values_anywhere_are_not_exception_and_lose_no_event(rows: list[Any]) -> None:
    events = [
        {**op(), "ph": phase, "cat": category, "args": args, **fields}
        for category, phase, fields, args in rows
    ]
    piece = decode(*events)
    assert piece.events + piece.unsound == len(events)
    check_shape(piece)
    restored = pieces._decoder.decode(pieces._encoder.encode(piece))
    assert_same_pieces(piece, restored)


def check_shape(piece: Piece) -> None:
    """Columns of a group are equally long, and codes are within their lists."""
    lists = {
        "name": piece.names,
        "range": piece.names,
        "limits": piece.names,
        "thread": piece.threads,
        "inputs": piece.inputs,
        "comm": piece.comms,
    }
    for group in (piece.host, piece.device, piece.sync, piece.memory, piece.counters):
        assert len({len(column) for column in group.values()}) <= 1
        for key, values in lists.items():
            if key in group and len(group[key]):
                assert group[key].min() >= -1
                assert group[key].max() < len(values)


def assert_same_pieces(one: Piece, two: Piece) -> None:
    for field in Piece.__struct_fields__:
        a, b = getattr(one, field), getattr(two, field)
        if not isinstance(a, dict) or not any(isinstance(v, np.ndarray) for v in a.values()):
            assert a == b, field
            continue
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert np.array_equal(a[key], b[key], equal_nan=a[key].dtype.kind == "f"), (field, key)


# -- what goes where ----------------------------------------------------------------------------


def test_events_go_where_their_category_says() -> None:
    piece = decode(
        op("op"),
        op("range", cat="user_annotation"),
        op("frame", cat="python_function"),
        op("cudaLaunchKernel", cat="cuda_runtime"),
        op("cuLaunchKernel", cat="cuda_driver"),
        op("Buffer Flush", cat="overhead"),
        kernel("gemm"),
        {**kernel("Memcpy HtoD (Pinned -> Device)"), "cat": "gpu_memcpy"},
        {**kernel("Memset (Device)"), "cat": "gpu_memset"},
        {**kernel("Stream Sync"), "cat": "cuda_sync"},
        op("range", cat="gpu_user_annotation"),
        op("PyTorch Profiler (0)", cat="Trace"),
        op("?", cat="news"),
        op("?", cat="News"),
        {**op("a"), "ph": "B"},
        {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 2, "cat": "ac2g", "name": "ac2g"},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2.0, "args": {"name": "main"}},
    )
    assert names(piece) == [
        "op",
        "range",
        "frame",
        "cudaLaunchKernel",
        "cuLaunchKernel",
        "Buffer Flush",
    ]
    assert piece.host["kind"].tolist() == [0, 1, 2, 3, 3, 4]
    assert piece.device["kind"].tolist() == [0, 1, 2]
    assert names(piece, "sync") == ["Stream Sync"]
    assert piece.ignored == {"category news": 2, "begin/end pairs": 1}
    assert piece.thread_names == [("1", "2", "main")]
    assert piece.events == 17


def test_the_legacy_profiler_tells_categories_by_process() -> None:
    legacy = {"ph": "X", "name": "mul", "ts": 1, "dur": 1, "tid": 0, "args": {}}
    piece = decode(
        {**legacy, "pid": "CPU functions"},
        {**legacy, "pid": "CUDA functions"},
        {**legacy, "pid": 5},
    )
    assert len(piece.host["ts"]) == len(piece.device["ts"]) == 1
    assert piece.ignored == {"category none": 1}


def test_absent_and_present_numbers() -> None:
    piece = decode(
        kernel(grid=[2, 3, 4], block=[32, 2, 1], **{"registers per thread": 40, "bytes": 5}),
        kernel(grid=[], block=["a"], **{"registers per thread": None}),
        {**kernel(), "args": None, "pid": 4, "tid": 20},
    )
    device = piece.device
    assert device["blocks"].tolist()[0] == 24
    assert device["threads"].tolist()[0] == 64
    assert np.isnan(device["blocks"][1:]).all()
    assert device["registers"][0] == 40
    assert np.isnan(device["registers"][1:]).all()
    assert device["device"].tolist() == [0, 0, 4]  # the process of a kernel is its device
    assert device["stream"].tolist() == [7, 7, 20]
    assert device["correlation"].tolist() == [3, 3, -1]


@pytest.mark.parametrize(
    "grid", ["123", {"1": 2}, [1, [2]], [0, 1, 1], [-1, 1, 1], [1, 2, 3, 4], [2**40, 1, 1], [1.5]]
)
def test_invalid_grid_is_unmeasured(grid: Any) -> None:
    assert math.isnan(decode(kernel(grid=grid)).device["blocks"][0])


def test_inputs_that_repeat_are_kept_once() -> None:
    dims = {"Input Dims": [[2, 3], []], "Input type": ["float", ""]}
    piece = decode(
        op(args=dims),
        op(args=dims),
        op(args={**dims, "Input Strides": [[3, 1], []]}),
        op(args={}),
        op(args={"Input dims": [[2, 3], []], "Input type": ["float", ""]}),
        op(args={"Input Dims": None}),
        op(args={"Input Dims": [[1]] * RAW_LIMIT}),
    )
    codes = piece.host["inputs"].tolist()
    assert codes[0] == codes[1] >= 0
    assert codes[2] not in (codes[0], -1)
    assert codes[3] == -1
    assert codes[4] >= 0
    assert codes[5:] == [-1, -1]
    assert piece.inputs[codes[0]].split(b"\0")[:2] == [b"[[2, 3], []]", b'["float", ""]']


def test_collectives_are_kept_once() -> None:
    args = {"Collective name": "allreduce", "In msg nelems": 5, "Group size": 8, "dtype": "Float"}
    piece = decode(kernel(**args), kernel(**args), kernel(), op(args=args))
    code = piece.device["comm"].tolist()
    assert code[0] == code[1] == piece.host["comm"][0] >= 0
    assert code[2] == -1
    assert len(piece.comms) == 1


def test_long_names_are_cut() -> None:
    piece = decode(op("x" * 100_000), op("x" * 200_000), kernel("y" * 100_000))
    assert {len(name) for name in piece.names} == {NAME_LIMIT}


def test_newer_occupancy_details() -> None:
    detail = {
        "activeBlocksPerMultiprocessor": 4,
        "limitingFactors": "REGS|SMEM",
        "blockLimitRegs": 5,
    }
    piece = decode(
        kernel(occupancy=detail), kernel(), kernel(occupancy=7), kernel(occupancy=detail)
    )
    assert piece.device["active_blocks"].tolist()[0] == 4
    assert np.isnan(piece.device["active_blocks"][1:3]).all()
    limits = piece.device["limits"].tolist()
    assert piece.names[limits[0]] == "REGS|SMEM"
    assert limits[1:3] == [-1, -1]
    assert limits[3] == limits[0]


def test_counters_are_read_by_their_own_names() -> None:
    piece = decode(
        op(),
        {
            "ph": "X",
            "cat": "cuda_profiler_range",
            "name": "gemm",
            "ts": 4,
            "dur": 2,
            "args": {
                "sm__cycles": 12.5,
                "dram__bytes": "7",
                "text": "no",
                "flag": True,
                "list": [1],
            },
        },
    )
    assert [piece.names[c] for c in piece.counters["name"].tolist()] == [
        "sm__cycles",
        "dram__bytes",
    ]
    assert [piece.names[c] for c in piece.counters["range"].tolist()] == ["gemm", "gemm"]
    assert piece.counters["value"].tolist() == [12.5, 7.0]


def test_threads_are_pairs_of_process_and_thread() -> None:
    piece = decode(op(pid=1, tid=5), op(pid="1", tid=5.0), op(pid=2, tid=5), op(pid=1, tid="x"))
    threads = [piece.threads[code] for code in piece.host["thread"].tolist()]
    assert threads == [("1", "5"), ("1", "5"), ("2", "5"), ("1", "x")]


# -- times --------------------------------------------------------------------------------------


def test_unix_microseconds_with_decimals_keep_their_nanoseconds() -> None:
    """A float holds 1713800000000000.123 only to a quarter of a microsecond."""
    times = (
        "1713800000000000.123",
        "1713800000000000.124",
        "1713800000000002.001",
        "1714000000000000.5",
    )
    text = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":{ts},"dur":1.5}}'
        for ts in times
    )
    piece = decode_piece(f"[{text}]".encode())
    times_ns = [piece.epoch + int(ts) for ts in piece.host["ts"].tolist()[:3]]
    assert times_ns == [1713800000000000, 1713800000000000, 1713800000000002]
    ns = np.rint(piece.host["ts"] * 1000 - piece.host["ts"][0] * 1000).astype(int)
    assert ns.tolist()[:3] == [0, 1, 1878]
    assert abs(ns[3] - 200_000_000_000_377) < 500  # crossed the cut: as exact as a float is


def test_times_in_microseconds_are_unchanged() -> None:
    for ts in (1713800000000000, 12.5, 1365627949868.561, "17", 0):
        piece = decode(op(ts=ts))
        assert piece.epoch == 0
        assert piece.host["ts"].tolist() == [float(ts)]


# -- numbers ------------------------------------------------------------------------------------

numbers: st.SearchStrategy[Any] = (
    st.none()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-1000, 1000).map(str)
    | st.floats(-100, 100).map(str)
    | st.text(max_size=4)
)


@given(st.lists(numbers, max_size=20))
def test_columns_of_numbers(values: list[Any]) -> None:
    for value, parsed in zip(values, float_column(values).tolist(), strict=True):
        try:
            assert parsed == float(value) or math.isnan(parsed) == math.isnan(float(value))
        except (TypeError, ValueError):
            assert math.isnan(parsed)
    for value, parsed in zip(values, decode_integers(values).tolist(), strict=True):
        if isinstance(value, int) and abs(value) < 1 << 60:
            assert parsed == value
        elif isinstance(value, float) and abs(value) < 2**60:
            assert parsed == int(value)
        elif value is None:
            assert parsed == MISSING
