"""Memory snapshots: nothing of them runs, none takes the machine, and all layouts are read."""

from __future__ import annotations

import copyreg
import os
import pickle
import pickletools
import random
import resource
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch.cuda._memory_viz as viz

import advisor
from advisor import cli
from advisor.core.errors import AdvisorError
from advisor.read import open_run
from advisor.read.formats.memory_snapshot.tables import read_snapshot
from advisor.read.plain_pickle import PickledFields, read_plain
from advisor.testing import TraceBuilder
from advisor.testing.allocator import (
    GIB,
    KIB,
    LOOP,
    MIB,
    DeviceFull,
    FakeAllocator,
    Training,
    merged,
)

RAN: list[str] = []
MUTANTS = int(os.environ.get("ADVISOR_MUTATIONS", "0")) or 30


def trained_allocator(steps: int = 8, **how: Any) -> FakeAllocator:
    m = FakeAllocator(total=4 * GIB)
    training = Training(m, **how)
    for _ in range(steps):
        training.step()
    return m


# -- nothing of it runs -------------------------------------------------------------------------


class CallsFunction:
    def __reduce__(self) -> Any:
        return RAN.append, ("reduce",)


class BuildsObject:
    def __setstate__(self, state: Any) -> None:
        RAN.append("setstate")


def with_state() -> bytes:
    built = BuildsObject()
    built.__dict__["x"] = 1
    return pickle.dumps({"segments": [built]})


BODY = b"\x80\x04}\x8c\x08segments"
PROGRAMS = {
    "REDUCE": pickle.dumps({"segments": [CallsFunction()]}),
    "REDUCE, protocol 2": pickle.dumps({"segments": [CallsFunction()]}, 2),
    "BUILD": with_state(),
    "GLOBAL": BODY + b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R" + b"s.",
    "STACK_GLOBAL": BODY + b"\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85Rs.",
    "INST": BODY + b"(S'ls'\nios\nsystem\ns.",
    "OBJ": BODY + b"(cos\nsystem\nX\x02\x00\x00\x00lsos.",
    "NEWOBJ": BODY + b"cbuiltins\nlist\n)\x81s.",
    "NEWOBJ_EX": BODY + b"\x8c\x08builtins\x8c\x04list\x93)}\x92s.",
    "EXT1": BODY + b"\x82\x01s.",
    "EXT2": BODY + b"\x83\x01\x00s.",
    "EXT4": BODY + b"\x84\x01\x00\x00\x00s.",
    "PERSID": BODY + b"P1\ns.",
    "BINPERSID": BODY + b"K\x01Qs.",
    "BUILD on a dict": BODY + b"}}bs.",
    "NEXT_BUFFER": BODY + b"\x97s.",
    "READONLY_BUFFER": BODY + b"]\x98s.",
    "bytes": pickle.dumps({"segments": [b"abc"]}),
    "a set": pickle.dumps({"segments": [{1, 2}]}),
    "a frozen set": pickle.dumps({"segments": [frozenset({1})]}),
    "text opcodes": pickle.dumps({"segments": []}, 0),
    "behind a frame": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n.",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pickle_that_could_run_code_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(PROGRAMS[name])
    copyreg.add_extension("advisor.tests", name, 1)
    try:
        assert cli.run(["analyze", str(file)]) == 2
    finally:
        copyreg.remove_extension("advisor.tests", name, 1)
    error = capsys.readouterr().err
    assert error.startswith("advisor: ") and error.count("\n") == 1
    assert str(file) in error
    assert not RAN


def test_every_opcode_of_python_is_either_plain_or_refused() -> None:
    """All opcodes that pickletools knows are tried, each behind its arguments: a list of our own
    could lack some."""
    plain = {
        "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
        "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK",
        "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE", "FRAME", "STOP",
    }  # fmt: skip
    for opcode in pickletools.opcodes:
        if opcode.name in plain:
            continue
        program = b"\x80\x04(((]" + opcode.code.encode("latin-1") + b"\0" * 40
        with pytest.raises(AdvisorError, match="not only plain values"):
            read_plain([program], "x")


# -- none takes the machine ---------------------------------------------------------------------


def nested_tuples(depth: int) -> bytes:
    """A key whose hash takes 2 to the depth steps: each tuple is twice the one before."""
    return (
        b"\x80\x04}K\x01"
        + b"\x942\x86".replace(b"2", b"h\x00")
        + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(1, depth))
        + b"K\x01s."
    )


BOMBS = {
    "a key whose hash never ends": nested_tuples(200),
    "lists of lists, each twice the one before": b"\x80\x04]\x94"
    + b"".join(b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(200))
    + b".",
    "keys that collide": b"\x80\x04}("
    + b"".join(
        b"\x8a\x09" + (n * ((1 << 61) - 1)).to_bytes(9, "little") + b"N" for n in range(2000)
    )
    * 50
    + b"u.",
    "nested a million deep": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "nested tuples a million deep": b"\x80\x04)" + b"\x85" * 1_000_000 + b".",
    "a string of 8 EiB": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f",
    "a string of 4 GiB": b"\x80\x04X\xff\xff\xff\xff",
    "a frame of 8 EiB": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "a number of 200 bytes": b"\x80\x04\x8a\xc8" + b"\xff" * 200 + b".",
    "a memo of 4 billion": b"\x80\x04]r\xff\xff\xff\xff.",
    "ten million lists": b"\x80\x04(" + b"]" * 10_000_000 + b"t.",
    "no end": b"\x80\x04(" + b"N" * 3_000_000,
    "a list that holds itself": b"\x80\x04]\x94h\x00a.",
    "the start alone": b"\x80",
    "the start and no more": b"\x80\x04",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_soon_and_small(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(AdvisorError):
        read_snapshot([BOMBS[name]], "x")
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


def test_history_referenced_a_million_times_is_read_once() -> None:
    trace = trained_allocator(1).events
    value = {"segments": [], "device_traces": [trace] * 64}
    snapshot = read_snapshot([pickle.dumps(value)], "x")
    containers = read_plain([pickle.dumps(value)], "x").containers
    assert snapshot.events.height <= containers
    assert snapshot.dropped


# -- what is plain is read as Python reads it ---------------------------------------------------


def as_dicts(value: Any, like: Any) -> Any:
    """Convert the values read to the original's dicts."""
    if isinstance(like, dict):
        fields = PickledFields().from_value(value)
        assert fields is not None
        return {key: as_dicts(fields[key], like[key]) for key in like}
    if isinstance(like, list):
        return [as_dicts(each, old) for each, old in zip(value, like, strict=True)]
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_plain_values_are_read_independently_of_block_size(protocol: int, size: int) -> None:
    snapshot = trained_allocator(2).snapshot()
    snapshot["more"] = {
        "one": {"only": 1},
        "numbers": [0, -1, 255, 65536, 1 << 40, -(1 << 62), 0.5, True, None],
        "texts": ["", "é" * 300, "x" * 70_000],
        "tuple": (1, (2, 3), ()),
        "many": {f"k{n}": n for n in range(90)},
        "lists": [[n] for n in range(1200)],
    }
    data = pickle.dumps(snapshot, protocol)
    blocks = [data[n : n + size] for n in range(0, len(data), size)]
    if size == 1:
        blocks = [data[n : n + 1] for n in range(2000)] + [data[2000:]]
    assert as_dicts(read_plain(blocks, "x").value, snapshot) == snapshot


def test_dicts_of_many_keys_and_of_one_key_are_complete() -> None:
    value = {f"k{n}": n for n in range(199)}
    assert PickledFields().from_value(read_plain([pickle.dumps(value)], "x").value) == value
    assert PickledFields().from_value(read_plain([pickle.dumps({"a": 1})], "x").value) == {"a": 1}
    assert PickledFields().from_value(["a", 1, ("b", 2)]) == {"a": 1, "b": 2}


# -- the tables ---------------------------------------------------------------------------------


def test_snapshot_sums_match_the_torch_viewer() -> None:
    m = trained_allocator(5)
    text = viz.segsum(m.snapshot())
    snapshot = read_snapshot([m.pickled()], "x")
    active = snapshot.blocks.filter(pl.col("state") == "allocated")
    assert f"total_reserved: {viz.Bytes(snapshot.segments['total'].sum())}" in text
    assert f"total_allocated: {viz.Bytes(active['requested'].sum())}" in text
    assert f"segments: {snapshot.segments.height}\n" in text
    free = snapshot.segments["total"].sum() - active["requested"].sum()
    inside = (active["size"] - active["requested"]).sum()
    assert f"total_free: {viz._report_free(free - inside, inside)}" in text
    assert (
        viz.trace(m.snapshot()).count(" = cudaMalloc")
        == snapshot.events.filter(pl.col("action") == "segment_alloc").height
    )
    assert viz.profile_plot is not None and viz.trace_plot(m.snapshot())  # it takes the layout


def old_layout(snapshot: dict[str, Any], version: str) -> Any:
    """Write the same state as older releases did."""
    segments = []
    for segment in snapshot["segments"]:
        blocks = []
        for b in segment["blocks"]:
            block = {k: b[k] for k in ("size", "requested_size", "state", "frames")}
            if version == "2.0":
                del block["requested_size"], block["frames"]
                if b["state"] == "active_allocated":
                    block["history"] = [
                        {
                            "addr": b["address"],
                            "real_size": b["requested_size"],
                            "frames": b["frames"],
                        }
                    ]
            blocks.append(block)
        keys = ("device", "address", "total_size", "allocated_size", "active_size", "stream",
                "segment_type")  # fmt: skip
        segments.append({**{k: segment[k] for k in keys}, "blocks": blocks})
    if version == "a list":
        return segments
    traces = [
        [{k: v for k, v in e.items()
          if k not in ("time_us", "compile_context", "user_metadata", "pool_id")} for e in trace]
        for trace in snapshot["device_traces"]
    ]  # fmt: skip
    return {"segments": segments, "device_traces": traces}


@pytest.mark.parametrize("version", ["2.0", "2.1", "a list"])
def test_older_layouts_hold_the_same(version: str) -> None:
    m = trained_allocator(3)
    new = read_snapshot([m.pickled()], "x")
    old = read_snapshot([pickle.dumps(old_layout(m.snapshot(), version))], "x")
    columns = ["device", "address", "size", "requested", "state"]
    assert old.blocks.select(columns).equals(new.blocks.select(columns))
    stacks = [None if s is None else old.stacks[s] for s in old.blocks["stack"]]
    is_allocated = (old.blocks["state"] == "allocated").to_list()
    new_stacks = [None if s is None else new.stacks[s] for s in new.blocks["stack"]]
    assert [s for s, h in zip(stacks, is_allocated, strict=True) if h] == [
        s for s, h in zip(new_stacks, is_allocated, strict=True) if h
    ]
    assert old.events.height == (0 if version == "a list" else new.events.height)


def test_devices_labels_and_settings_are_reported() -> None:
    one, other = trained_allocator(1), FakeAllocator(device=2)
    other.label = "tower"
    with other.at(*LOOP):
        other.alloc(3 * MIB)
    snapshot = read_snapshot([pickle.dumps(merged([one, other]))], "x")
    assert snapshot.devices == [0, 2]
    assert snapshot.blocks.filter(pl.col("label") == "tower")["requested"].to_list() == [3 * MIB]
    assert snapshot.settings["expandable_segments"] == "False"


# -- with a trace, and in a run -----------------------------------------------------------------


def write_trace(folder: Path) -> Path:
    b = TraceBuilder()
    for _ in range(30):
        with b.step():
            for _ in range(5):
                with b.op("aten::mm"):
                    b.launch("gemm", 900)
    return b.write(folder / "trace.json")


@pytest.mark.parametrize("way", ["--memory-snapshot", "beside"])
def test_a_snapshot_joins_a_trace(way: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path)
    memory = trained_allocator(2).write(tmp_path / "memory.pickle")
    out = tmp_path / "report.json"
    extra = ["--memory-snapshot", str(memory)] if way == "--memory-snapshot" else [str(memory)]
    assert cli.run(["analyze", str(trace), *extra, "-o", str(out)]) == 0
    from advisor.core.report import Report

    report = Report.from_json(out.read_bytes())
    assert report.busy_share is not None
    assert report.memory[0].allocated == sum(e.bytes for e in report.memory[0].categories)


def test_two_snapshots_for_one_rank_are_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write_trace(tmp_path))]
    files += [str(trained_allocator(1).write(tmp_path / name)) for name in ("a.pickle", "b.pickle")]
    assert cli.run(["analyze", *files]) == 2
    assert "two memory snapshots for one rank" in capsys.readouterr().err


def test_out_of_memory_run_shows_its_snapshot(tmp_path: Path) -> None:
    from advisor.testing.record import RecordBuilder
    from tests.run_directories import write_run

    m = FakeAllocator(total=GIB)
    training = Training(m, activation=96 * MIB)
    with pytest.raises(DeviceFull):
        for _ in range(3):
            training.step()
    r = RecordBuilder()
    r.steps(3, 10)
    r.event(
        "oom",
        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
        snapshot="memory_snapshot.pickle",
    )
    run = write_run(tmp_path / "run", {0: r.build()})
    m.write(run / "rank0" / "memory_snapshot.pickle")
    opened = open_run(run)
    assert opened.snapshots[0].events.height == len(m.events)
    (run / "rank0" / "memory_snapshot.pickle").write_bytes(PROGRAMS["GLOBAL"])
    opened = open_run(run)
    assert "not only plain values" in opened.problems[0]
    noted = opened.snapshots[0].exception  # the snapshot is refused: the text alone is left
    assert noted is not None and noted.request == 2 * GIB
    assert not RAN


def test_out_of_memory_ranks_show_their_snapshot_or_text(tmp_path: Path) -> None:
    from advisor.testing.record import RecordBuilder
    from tests.run_directories import write_run

    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 8 GiB"
    ranks = {}
    for number in range(3):
        r = RecordBuilder()
        r.steps(3, 10)
        if number < 2:
            r.event("oom", message=message, allocated=3 * GIB, reserved=5 * GIB)
        ranks[number] = r.build()
    run = write_run(tmp_path / "run", ranks)
    trained_allocator(1).write(run / "rank0" / "memory_snapshot.pickle")
    opened = open_run(run)
    assert sorted(opened.snapshots) == [0, 1] and not opened.problems
    assert opened.snapshots[0].exception is None
    noted = opened.snapshots[1].exception
    assert noted is not None and noted.capacity == 8 * GIB
    assert (noted.allocated, noted.reserved) == (3 * GIB, 5 * GIB)  # as the recorder noted them
    report = advisor.analyze(run)
    assert [each.name for each in report.memory_ranks] == ["rank 0", "rank 1"]


# -- damage -------------------------------------------------------------------------------------


def mutant(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    way = chance.randrange(6)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:2] + data[at:]
    if way == 2:
        changed = bytearray(data)
        for _ in range(chance.choice([1, 1, 5, 50])):
            changed[chance.randrange(2, len(changed))] = chance.randrange(256)
        return bytes(changed)
    if way == 3:
        end = min(len(data), at + chance.randrange(200))
        return data[:at] + data[at:end] * chance.choice([2, 3, 500]) + data[end:]
    if way == 4:
        return data[:at] + chance.randbytes(chance.choice([1, 4, 40])) + data[at:]
    return data[:at] + chance.choice(list(PROGRAMS.values()))[2:] + data[at:]


VALUES = [None, True, -1, 0, 1 << 63, 1 << 70, 0.5, "", "x" * 5000, [], {}, (), [[]], {"a": 1},
          (1, 2, 3), "\x1b[31m<script>\u202e", 1 << 40]  # fmt: skip


def replace_values(value: Any, chance: random.Random) -> Any:
    """Values of other kinds at random places of a snapshot."""
    for _ in range(chance.choice([1, 3, 30])):
        at = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(at[key], dict | list) and chance.random() < 0.9:
                at = at[key]
                continue
            at[key] = chance.choice(VALUES)
            break
    return value


def test_a_damaged_snapshot_ends_in_a_report_or_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m = trained_allocator(3, leak=MIB)
    data = m.pickled()
    file = tmp_path / "snapshot.pickle"
    for number in range(MUTANTS):
        chance = random.Random(number)
        if number % 2:
            damaged = mutant(data, chance)
        else:
            damaged = pickle.dumps(replace_values(pickle.loads(data), chance))
        file.write_bytes(damaged)
        capsys.readouterr()
        started = time.process_time()
        form = chance.choice(["terminal", "json", "html", "markdown"])
        try:
            code = cli.run(["analyze", str(file), "--format", form])
        except Exception as error:
            raise AssertionError(f"mutant {number}: {error!r}") from error
        output, complaints = capsys.readouterr()
        assert code in (0, 2), number
        assert "the rule failed" not in output and "Traceback" not in complaints, number
        assert complaints.count("\n") <= 1, number
        assert "<script>" not in output and "\x1b[31m" not in output, number
        assert time.process_time() - started < 20, number
    assert not RAN


def test_kibibytes_are_small() -> None:
    """The pools are distinguished by what was asked for."""
    m = FakeAllocator()
    with m.at(*LOOP):
        m.alloc(3 * KIB)
        m.alloc(3 * MIB)
    snapshot = read_snapshot([m.pickled()], "x")
    assert dict(zip(snapshot.segments["large"], snapshot.segments["total"], strict=True)) == {
        False: 2 * MIB,
        True: 20 * MIB,
    }
