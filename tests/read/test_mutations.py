"""Damaged and hostile traces by the thousand: no exception but our own, no hang, no memory gone.

All are read; ``ADVISOR_MUTATIONS=2000`` runs so many through the whole analysis too (a hundred
otherwise).
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from advisor.core.errors import AdvisorError
from advisor.read import ReadOptions, read_trace
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder
from benchmarks.public_traces import find

READINGS = int(os.environ.get("ADVISOR_MUTATIONS", "400"))
ANALYSES = int(os.environ.get("ADVISOR_MUTATIONS", "60"))
CHUNK = 100
SECONDS = 5.0
"""CPU time that one trace of some ten kilobytes may take."""
HANG_SECONDS = 120
GROWTH = 256 << 20
"""Bytes that memory may grow by for one trace."""

REAL = ("event_sync", "triton_example", "old_capitalised_categories", "event_sync_multi_stream")
HOSTILE_NAMES = [
    "\x00", "\x1b[31m", "\x1b]0;x\x07", "<script>alert(1)</script>", "=cmd()", "%s%n{0}", "\ud800x",
    "[bold red]x[/]", "[/]", "[link=file:///etc/passwd]", "../../etc/passwd", "\u202e", "\ufeff",
    "\ud7ff\ue000", "a" * 9000, "\n\r\t", "`$(x)`", "|||", "ProfilerStep#999999999999999999999",
    "ProfilerStep#-1", "ProfilerStep#", "enumerate(DataLoader)#x.__next__", "Optimizer.step#",
    "ncclDevKernel_AllReduce", "aten::mm", "Memcpy HtoD (", "cudaMemcpyAsync", "nn.Module: ",
    "(((((((((", "a(b): c", "x.py(99999999999999999999): f", "[memory]", "", " ",
    "advisor::step", "Torch-Compiled Region: ", "void f<" + "x<" * 500,
]  # fmt: skip
NUMBERS = [
    0, -0.0, -1, 1, 1e-300, 1e300, -1e300, 1 << 31, 1 << 32, 1 << 53, 1 << 62, 1 << 63, 1 << 64,
    -(1 << 63), -(1 << 62), 10**30, 1661203462584767, 1661203462584767.125, 0.1, 5e-324,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, [], {}, [[]], [None], "", "x", "1", "-1", "nan", "1e5", [1, 2], {"a": 1},
]  # fmt: skip


# -- what is mutated ----------------------------------------------------------------------------


def sound_traces() -> list[bytes]:
    """Small traces with everything that the reader and the rules look at."""
    result = []
    for gpu, sync_rows in (("A100", True), ("H100", False), (None, False)):
        b = TraceBuilder(gpu, rank=0, world_size=8, cuda_sync_rows=sync_rows)
        for step in range(4):
            with b.step():
                b.loader_wait(900, workers=step % 2)
                b.copy("HtoD", 1 << 20, pinned=False)
                with b.python("train.py(12): forward"), b.range("forward"):
                    for _ in range(3):
                        with b.op("aten::mm", [[64, 128], [128, 61]], "float", sequence=step):
                            b.launch("ampere_sgemm_128x64_nn", 30, blocks=130)
                        with b.op("aten::softmax", [[8, 64, 64]]):
                            b.launch("softmax_warp_forward", 9)
                b.collective("allreduce", 4 << 20, 100)
                b.graph_launch([("a", 3), ("b", 4)])
                b.memory(512, 512 * (step + 1), 4096)
                b.call("cudaMalloc", 50)
                b.item()
                with b.range("Optimizer.step#Adam.step"), b.op("aten::add_", [[64]]):
                    b.launch("vectorized_elementwise_kernel", 5)
                b.overhead("Buffer Flush", 10)
        result.append(b.json())
    return result


@pytest.fixture(scope="session")
def seeds() -> list[bytes]:
    """Texts to mutate: built ones always, real ones where they are."""
    real = [find(f"{name}.json.gz") for name in REAL]
    return [*sound_traces(), *(gzip.decompress(path.read_bytes()) for path in real if path)]


# -- how ----------------------------------------------------------------------------------------


def cut_off(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def lose_the_start(text: bytes, chance: random.Random) -> bytes:
    return text[chance.randrange(len(text)) :]


def flip_bytes(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.choice([1, 1, 2, 5, 50, 500])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def flip_structure(text: bytes, chance: random.Random) -> bytes:
    """Bytes that mean something to JSON, in the place of others that do."""
    data = bytearray(text)
    places = [i for i, b in enumerate(data) if b in b'"{}[],:\\']
    for _ in range(chance.choice([1, 2, 5, 20])):
        data[chance.choice(places)] = chance.choice(b'"{}[],:\\ 0')
    return bytes(data)


def lose_a_stretch(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + text[at + chance.randrange(1, 3000) :]


def repeat_a_stretch(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    stretch = text[at : at + chance.randrange(1, 3000)]
    return text[:at] + stretch * chance.choice([2, 3, 40]) + text[at:]


def insert_garbage(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    garbage = chance.choice([
        chance.randbytes(50), b"\0" * 500, b"[" * 3000, b'{"a":' * 3000, b'"' * 99, b"\\" * 99,
        b"NaN", b"Infinity", b"-", b"1e999", b'{"ph":"X"},', b"\xff\xfe\xfd", b"\xed\xa0\x80",
        rb"\ud800", b"9" * 5000, b" " * 100_000, b"/* comment */", b"}, {", b'}, {"ph"', b"]}",
    ])  # fmt: skip
    return text[:at] + garbage + text[at:]


def swap_quotes(text: bytes, chance: random.Random) -> bytes:
    return text.replace(b'"', b"'") if chance.random() < 0.3 else text.replace(b'"', b"'", 9)


def other_encoding(text: bytes, chance: random.Random) -> bytes:
    decoded = text.decode("utf-8", "replace")
    return decoded.encode(chance.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le", "utf-7"]))


def concatenate(text: bytes, chance: random.Random) -> bytes:
    return text + chance.choice([b"", b"\n", b",", b"\0" * 100]) + text


def damage_packing(text: bytes, chance: random.Random) -> bytes:
    packed = bytearray(gzip.compress(text))
    for _ in range(chance.choice([0, 1, 3])):
        packed[chance.randrange(len(packed))] = chance.randrange(256)
    if chance.random() < 0.5:
        packed = packed[: chance.randrange(len(packed))]
    return bytes(packed) + chance.choice([b"", b"x", bytes(9), zlib.compress(text)])


def change_values(text: bytes, chance: random.Random) -> bytes:
    """Wrong types and absurd values in any field of any event."""
    document = msgspec.json.decode(text)
    events = document["traceEvents"]
    for _ in range(chance.choice([1, 3, 30, 300])):
        event = chance.choice(events)
        target = chance.choice([event, event, event.get("args")])
        if isinstance(target, dict) and target:
            key = chance.choice(list(target))
            if chance.random() < 0.15:
                del target[key]
            else:
                target[key] = chance.choice([*VALUES, *NUMBERS, *HOSTILE_NAMES])
    return to_json(document)


def change_a_field_everywhere(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    events = document["traceEvents"]
    inside = chance.random() < 0.6
    targets = [e.get("args") if inside else e for e in events]
    keys = sorted({key for target in targets if isinstance(target, dict) for key in target})
    key = chance.choice(keys)
    value = chance.choice([*VALUES, *NUMBERS, *HOSTILE_NAMES])
    for target in targets:
        if isinstance(target, dict) and key in target:
            target[key] = value
    return to_json(document)


def hostile_names(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    for event in document["traceEvents"]:
        if chance.random() < 0.3:
            event["name"] = chance.choice(HOSTILE_NAMES)
        if chance.random() < 0.03:
            event["cat"] = chance.choice([*HOSTILE_NAMES, "kernel", "cpu_op", "cuda_sync"])
    return to_json(document)


def change_the_head(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    for _ in range(chance.choice([1, 3])):
        key = chance.choice([
            "traceEvents", "deviceProperties", "distributedInfo", "baseTimeNanoseconds",
            "record_shapes", "with_stack", "cuda_runtime_version", chance.choice(HOSTILE_NAMES),
        ])  # fmt: skip
        rank = {"rank": chance.choice(NUMBERS), "world_size": -1}
        document[key] = chance.choice([*VALUES, *NUMBERS, [{"id": n} for n in NUMBERS], rank])
    return to_json(document)


def change_devices(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    for device in document.get("deviceProperties", []):
        for key in list(device):
            if chance.random() < 0.4:
                device[key] = chance.choice([*VALUES, *NUMBERS, *HOSTILE_NAMES])
    return to_json(document)


def change_times(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    for event in document["traceEvents"]:
        if "ts" in event and chance.random() < 0.4:
            event["ts"] = event["ts"] + chance.choice([-5000, -7, 0, 3, 900, 1e7]) * chance.random()
        if "dur" in event and chance.random() < 0.4:
            event["dur"] = event["dur"] * chance.choice([0, 0.5, 3, 1000])
    return to_json(document)


def collide_ids(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    few = [chance.randrange(5) for _ in range(3)]
    for event in document["traceEvents"]:
        for key in ("correlation", "External id", "stream", "device"):
            if (
                isinstance(event.get("args"), dict)
                and key in event["args"]
                and chance.random() < 0.5
            ):
                event["args"][key] = chance.choice(few)
    return to_json(document)


def shuffle_and_repeat(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    events = document["traceEvents"]
    chance.shuffle(events)
    document["traceEvents"] = events[: chance.randrange(len(events) + 1)] * chance.choice([1, 2, 5])
    return to_json(document)


def keep_some_kinds(text: bytes, chance: random.Random) -> bytes:
    document = msgspec.json.decode(text)
    kinds = sorted({str(event.get("cat")) for event in document["traceEvents"]})
    kept = set(chance.sample(kinds, chance.randrange(1, len(kinds) + 1)))
    document["traceEvents"] = [e for e in document["traceEvents"] if str(e.get("cat")) in kept]
    return to_json(document)


def nest_deeply(text: bytes, chance: random.Random) -> bytes:
    """A call stack of thousands, and a value nested as deep."""
    document = msgspec.json.decode(text)
    deep = chance.choice([50, 1500, 5000])
    document["traceEvents"] += [
        {"ph": "X", "cat": chance.choice(["cpu_op", "python_function"]), "name": f"f{i % 9}",
         "pid": 1, "tid": 77, "ts": 1000 + i, "dur": 2 * deep - 2 * i, "args": {"External id": i}}
        for i in range(deep)
    ]  # fmt: skip
    packed = to_json(document)
    depth = chance.choice([10, 500, 20_000])
    value = chance.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    return packed.replace(b'"args": {', b'"args": {"Input Dims": ' + value + b", ", 2)


def to_json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


MUTATORS: list[Callable[[bytes, random.Random], bytes]] = [
    cut_off, lose_the_start, flip_bytes, flip_structure, lose_a_stretch, repeat_a_stretch,
    insert_garbage, swap_quotes, other_encoding, concatenate, damage_packing, change_values,
    change_values, change_a_field_everywhere, change_a_field_everywhere, hostile_names,
    change_the_head, change_devices, change_times, collide_ids, shuffle_and_repeat, keep_some_kinds,
    nest_deeply,
]  # fmt: skip


NOT_FOR_THIS_TEXT = (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError,
                     ValueError, RecursionError)  # fmt: skip


def make_mutant(number: int, seeds: list[bytes]) -> tuple[str, bytes]:
    """Make the mutation of a number: its story, and the bytes."""
    chance = random.Random(number)
    text = chance.choice(seeds)
    story = []
    for step in range(chance.choice([1, 1, 1, 2, 3])):
        mutate = chance.choice(MUTATORS)
        try:
            changed = mutate(text, chance) if text else text
        except NOT_FOR_THIS_TEXT:
            if step == 0:
                raise
            continue  # the text is too damaged already for this one
        story.append(mutate.__name__)
        text = changed
    return f"{number}: {' + '.join(story)}", text


# -- what must hold -----------------------------------------------------------------------------


def read_only(path: Path) -> None:
    """Run the reader alone."""
    read_trace(str(path), ReadOptions(processes=1))


def analyze_fully(path: Path) -> None:
    """Read a file and render every form of report."""
    from advisor.advise.engine import Options, analyze
    from advisor.advise.rule_runner import RULE_FAILED

    report = analyze(str(path), Options(config={}))
    assert not [note.why for note in report.not_checked if note.why.startswith(RULE_FAILED)]
    REPORTS.render("terminal", report)
    REPORTS.render("markdown", report)
    json.loads(REPORTS.render("json", report))


class HangError(Exception):
    """A call that did not return in time."""


@contextmanager
def time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (its peak) of this process, bytes; 0: not known here."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def reset_peak_memory() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of memory cannot be measured here")


def check_bytes(under_test: Callable[[Path], None], story: str, data: bytes, path: Path) -> str:
    """Write these bytes to a file and return what :func:`hold` says."""
    path.write_bytes(data)
    return check_file(under_test, story, path)


def check_file(under_test: Callable[[Path], None], story: str, path: Path) -> str:
    """Run it; "read", or the one line that says why not. Anything else fails the test."""
    reset_peak_memory()
    memory, started = resident("VmRSS"), time.process_time()
    try:
        with time_limit():
            under_test(path)
        outcome = "read"
    except AdvisorError as error:
        outcome = str(error)
        assert outcome, story
        assert "\n" not in outcome, story
    except Exception as error:
        raise AssertionError(f"mutation {story} raised {type(error).__name__}") from error
    assert time.process_time() - started < SECONDS, story
    assert resident("VmHWM") - memory < GROWTH, story
    return outcome


@pytest.mark.parametrize("chunk", range(READINGS // CHUNK))
def test_a_mutated_trace_is_read_or_refused_in_a_line(
    chunk: int, seeds: list[bytes], tmp_path: Path
) -> None:
    outcomes = [
        check_bytes(read_only, *make_mutant(number, seeds), tmp_path / "trace.json")
        for number in range(chunk * CHUNK, (chunk + 1) * CHUNK)
    ]
    assert outcomes.count("read") > CHUNK // 3  # else the mutations prove nothing


@pytest.mark.skipif(util.find_spec("advisor.advise.engine") is None, reason="no engine yet")
@pytest.mark.parametrize("chunk", range(-(-ANALYSES // 20)))
def test_a_mutated_trace_is_analyzed_or_refused_in_a_line(
    chunk: int, seeds: list[bytes], tmp_path: Path
) -> None:
    for number in range(chunk * 20, min((chunk + 1) * 20, ANALYSES)):
        # numbers of their own: those that are only refused by the reader show nothing new
        check_bytes(analyze_fully, *make_mutant(10_000 + number, seeds), tmp_path / "trace.json")


def test_every_mutator_changes_something(seeds: list[bytes]) -> None:
    for mutate in MUTATORS:
        changed = sum(mutate(seeds[0], random.Random(n)) != seeds[0] for n in range(10))
        assert changed >= 3, mutate.__name__


@pytest.mark.skipif(util.find_spec("advisor.advise.engine") is None, reason="no engine yet")
def test_a_trace_of_allocations_alone_is_analyzed(tmp_path: Path) -> None:
    """A damaged file leaves this where everything else is dropped: a graph without an edge."""
    args = {"Device Type": 0, "Device Id": -1, "Addr": 1, "Bytes": 64, "Total Allocated": 64}
    event = {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "s": "t",
        "pid": 1,
        "tid": 1,
    }
    events = [{**event, "ts": 10 * n, "args": args} for n in range(5)]
    assert (
        check_bytes(
            analyze_fully, "memory", to_json({"traceEvents": events}), tmp_path / "trace.json"
        )
        == "read"
    )
