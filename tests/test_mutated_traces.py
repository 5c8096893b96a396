"""2,000 mutated traces: no traceback, no failing rule, no hang, bounded memory.

All are read; every second one also goes through all rules and renderers, or every one when
``ADVISOR_ALL_MUTATIONS`` is set (some five minutes on one core).
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from advisor.advice.engine import FAILED, Options, analyze
from advisor.errors import AdvisorError
from advisor.ingest.kineto import read_bytes
from advisor.report.data import Report
from advisor.testing import TraceBuilder
from advisor.trace import Run

CHUNKS, EACH = 40, 50
ALL = bool(os.environ.get("ADVISOR_ALL_MUTATIONS"))
SECONDS = 5.0
"""A small trace takes well under a tenth of a second: this is a hang, not a slow machine."""
MEGABYTES = 600
"""What a chunk may add to the peak of the process."""

REAL = (
    "event_sync",
    "event_sync_multi_stream",
    "mi250_train",
    "mi300_torch_compile",
    "triton_example",
    "old_capitalised_categories",
)
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, -1e308, 2**63, -(2**63), 2**70, 1e-320, "", "7", "x" * 5000),
    *(
        "\x00\x1b[31m",
        "../../etc/passwd",
        "<img src=x onerror=alert(1)>",
        "[red]",
        "%s%n",
        "\u202e",
    ),
    *([], {}, [[]], [1, "a", None], {"a": {"b": []}}, [0] * 300),
    *("((((", "aten::", "nccl", "ProfilerStep#", "Memcpy HtoD (", "NaN"),
)


def built() -> bytes:
    """A small trace with some of everything."""
    b = TraceBuilder(rank=1, world_size=4, cuda_sync_rows=True)
    for _ in range(4):
        with b.step():
            b.loader_wait(900, workers=0)
            b.copy("HtoD", 1 << 20, pinned=False)
            with b.range("## forward ##"), b.python("train.py(12): forward"):
                for _ in range(4):
                    with b.op("aten::mm", [[256, 256], [256, 256]], "float", sequence=3):
                        b.launch("ampere_sgemm_128x64_nn", 40)
            with b.thread(77), b.op("autograd::engine::evaluate_function: MmBackward0", sequence=3):
                b.launch("sm80_xmma_gemm_bf16", 60)
            b.collective("allreduce", 1 << 20, 80, wait=True)
            b.call("cudaMalloc", 30)
            b.graph_launch([("a", 5), ("b", 6)])
            b.memory(1 << 20, 1 << 21, 1 << 22)
            b.overhead("Buffer Flush", 20)
            b.item()
    return b.json()


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> list[bytes]:
    """The built trace, and small real ones where they are present."""
    found = [built()]
    shared: Callable[[str], str] = request.getfixturevalue("shared_trace")
    for name in REAL:
        try:
            path = shared(name)
        except pytest.skip.Exception:
            continue
        with gzip.open(path) as file:
            found.append(file.read())
    return found


def walk(value: Any, rng: random.Random) -> None:
    """Replace something somewhere inside a decoded trace."""
    events = value.get("traceEvents") if isinstance(value, dict) else value
    for _ in range(rng.choice((1, 1, 3, 30))):
        if rng.random() < 0.1 and isinstance(value, dict):
            value[rng.choice([*value, "baseTimeNanoseconds", "distributedInfo"])] = rng.choice(
                HOSTILE
            )
            continue
        if not isinstance(events, list) or not events:
            return
        event = rng.choice(events)
        if not isinstance(event, dict):
            continue
        target = event
        if isinstance(event.get("args"), dict) and rng.random() < 0.5:
            target = event["args"]
        if not target:
            continue
        key = rng.choice(list(target))
        deed = rng.random()
        if deed < 0.6:
            target[key] = rng.choice(HOSTILE)
        elif deed < 0.7:
            del target[key]
        elif deed < 0.8:
            events.append(json.loads(json.dumps(event)))
        elif deed < 0.9 and isinstance(target[key], int | float):
            target[key] = target[key] * rng.choice((-1, 0, 1e3, 1e9, 1e-9))
        else:
            target[rng.choice(("ts", "dur", "name", "External id", "Input Dims", "grid"))] = (
                rng.choice(HOSTILE)
            )


def mutate(text: bytes, rng: random.Random) -> bytes:
    """One mutated trace."""
    deed = rng.random()
    if deed < 0.5:
        value = json.loads(text)
        walk(value, rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        return gzip.compress(text, 1) if rng.random() < 0.1 else text
    data = bytearray(text)
    at = rng.randrange(len(data))
    if deed < 0.6:
        return bytes(data[:at])
    if deed < 0.75:
        for _ in range(rng.choice((1, 5, 200))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif deed < 0.82:
        end = min(len(data), at + rng.randrange(1, 4000))
        data[at:at] = data[at:end]  # a repeated block
    elif deed < 0.89:
        del data[at : at + rng.randrange(1, 4000)]
    elif deed < 0.94:
        data[at:at] = rng.choice(
            (b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b"\xff\xfe", b"]}", b"}{")
        )
    else:
        packed = bytearray(gzip.compress(text, 1))
        for _ in range(3):
            packed[rng.randrange(len(packed))] = rng.randrange(256)
        return bytes(packed[: rng.randrange(20, len(packed) + 1)])
    return bytes(data)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_mutated_trace_gives_a_report_or_one_line(chunk: int, sources: list[bytes]) -> None:
    from advisor.report.markdown import render as markdown
    from advisor.report.terminal import render as terminal

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reports = 0
    for number in range(EACH):
        seed = chunk * EACH + number
        rng = random.Random(seed)
        text = mutate(sources[seed % len(sources)], rng)
        begin = time.perf_counter()
        try:
            trace = read_bytes(text, f"mutated-{seed}.json")
            if seed % 2 and not ALL:
                assert time.perf_counter() - begin < SECONDS, seed
                continue
            report = analyze(Run(traces={(-1, 0): trace}), Options(config={}))
        except AdvisorError as error:
            assert "\n" not in str(error)
            continue
        failed = [n.why for n in report.not_checked if n.why.startswith(FAILED)]
        assert not failed, (seed, failed)
        assert Report.from_json(report.to_json()) == report, seed
        assert "\x1b" not in terminal(report) and "\x00" not in markdown(report), seed
        assert time.perf_counter() - begin < SECONDS, seed
        reports += 1
    assert reports, "every mutation was refused: the test tests nothing"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES
