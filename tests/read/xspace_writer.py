"""Writer of XSpace messages, and reader field by field: both independent of what is tested."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def varint_field(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value)


def bytes_field(key: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return varint(key << 3 | 2) + varint(len(raw)) + raw


@dataclass
class Line:
    plane: Plane
    id: int
    name: str
    events: list[bytes] = field(default_factory=list)

    def event(self, name: str, ts_ns: float, dur_ns: float, **stats: Any) -> None:
        body = varint_field(1, self.plane.meta(name))
        body += varint_field(2, round(ts_ns * 1000)) + varint_field(3, round(dur_ns * 1000))
        for key, value in stats.items():
            body += bytes_field(4, self.plane.stat(key, value))
        self.events.append(body)

    def encode(self) -> bytes:
        body = varint_field(1, self.id) + bytes_field(2, self.name) + varint_field(3, 0)
        return body + b"".join(bytes_field(4, event) for event in self.events)


@dataclass
class Plane:
    name: str
    lines: list[Line] = field(default_factory=list)
    metas: dict[str, int] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str) -> Line:
        self.lines.append(Line(self, len(self.lines) + 1, name))
        return self.lines[-1]

    def meta(self, name: str) -> int:
        return self.metas.setdefault(name, len(self.metas) + 1)

    def stat(self, key: str, value: Any) -> bytes:
        body = varint_field(1, self.stats.setdefault(key, len(self.stats) + 1))
        if isinstance(value, int):
            return body + varint_field(4, value)
        if isinstance(value, float):
            return body + varint(2 << 3 | 1) + struct.pack("<d", value)
        if value.startswith("->"):  # by reference, as the profiler writes what repeats
            return body + varint_field(7, self.stats.setdefault(value[2:], len(self.stats) + 1))
        return body + bytes_field(5, value)

    def encode(self) -> bytes:
        own = [bytes_field(6, self.stat(key, value)) for key, value in self.own.items()]
        body = varint_field(1, 0) + bytes_field(2, self.name)
        body += b"".join(bytes_field(3, line.encode()) for line in self.lines)
        for key, names in ((4, self.metas), (5, self.stats)):
            for name, code in names.items():
                body += bytes_field(
                    key,
                    varint_field(1, code)
                    + bytes_field(2, varint_field(1, code) + bytes_field(2, name)),
                )
        return body + b"".join(own)


def space(*planes: Plane, host: str = "worker0") -> bytes:
    return b"".join(bytes_field(1, plane.encode()) for plane in planes) + bytes_field(4, host)


V100 = {
    "clock_rate": 1530000,
    "core_count": 80,
    "memory_bandwidth": 898048000000,
    "memory_size": 16945512448,
    "compute_cap_major": 7,
    "compute_cap_minor": 0,
}


def jax_training(steps: int = 6, *, marks: bool = True, shift_ns: int = 0) -> bytes:
    """A JAX program on one GPU: each step of 10 ms copies a batch from pageable memory (1 ms) and
    runs one module of two kernels (3 + 2 ms); its profile has the derived lines too."""
    host, gpu = Plane("/host:CPU"), Plane("/device:GPU:0", own=dict(V100))
    python, copies = host.line("python"), gpu.line("Stream #14(MemcpyH2D)")
    work = gpu.line("Stream #13(Compute)")
    derived = {name: gpu.line(name) for name in ("Steps", "XLA Modules", "XLA Ops")}
    module = {"hlo_module": "->jit_train_step"}
    for step in range(steps):
        t, call = shift_ns + step * 10_000_000, step * 3
        if marks:
            python.event("train", t, 9_990_000, step_num=step, _r=1)
        python.event("$train.py:12 batch", t + 10_000, 2_000_000)
        details = "kind_src:pageable kind_dst:device size:4194304 dest:0 async:1"
        copy = {"correlation_id": call + 1, "memcpy_details": details}
        python.event("cuMemcpyHtoDAsync_v2", t + 2_100_000, 100_000, **copy)
        copies.event("MemcpyH2D", t + 2_300_000, 1_000_000, **copy)
        python.event("PjitFunction(train_step)", t + 2_300_000, 300_000)
        for nth, (op, start, dur) in enumerate(
            (("dot.1", 3_400_000, 3_000_000), ("fusion.2", 6_400_000, 2_000_000))
        ):
            link = {"correlation_id": call + 2 + nth}
            python.event("cuLaunchKernel", t + 2_400_000 + nth * 50_000, 20_000, **link)
            kernel = f"->regs:32 static_shared:0 dynamic_shared:1024 grid:16{nth},2,1 block:128,1,1"
            work.event("volta_sgemm_128x64_nn" if not nth else "loop_fusion_2", t + start, dur,
                       **link, kernel_details=kernel, hlo_op=op, **module)  # fmt: skip
        python.event("PjRtBuffer::Await", t + 2_700_000, 7_000_000)
        derived["Steps"].event(str(step), t + 2_300_000, 6_100_000)
        derived["XLA Modules"].event("jit_train_step(1)", t + 3_400_000, 5_000_000)
        derived["XLA Ops"].event("dot.1", t + 3_400_000, 3_000_000)
    return space(host, gpu)


# -- reading, field by field ----------------------------------------------------------------------


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def take_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = take_varint()
        if key & 7 == 0:
            yield key >> 3, take_varint()
        elif key & 7 == 1:
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        else:
            assert key & 7 == 2
            size = take_varint()
            yield key >> 3, data[at : at + size]
            at += size


def message(data: bytes) -> dict[int, list[Any]]:
    result: dict[int, list[Any]] = {}
    for key, value in fields(data):
        result.setdefault(key, []).append(value)
    return result


def device_events(data: bytes) -> list[tuple[str, str, str, int, int, dict[str, Any]]]:
    """Plane, stream, name, start and duration (ps) and stats of all events on streams of GPUs."""
    result = []
    for plane in map(message, message(data).get(1, [])):
        name = plane[2][0].decode()
        if not name.startswith("/device:GPU"):
            continue
        names, stat_names = (
            {
                entry[1][0]: message(entry[2][0]).get(2, [b""])[0].decode()
                for entry in map(message, plane.get(key, []))
            }
            for key in (4, 5)
        )
        for line in map(message, plane.get(3, [])):
            stream = line[2][0].decode()
            if not stream.lower().startswith("stream"):
                continue
            base = line.get(3, [0])[0] * 1000
            for event in map(message, line.get(4, [])):
                stats = {}
                for stat in map(message, event.get(4, [])):
                    value = next(v[0] for k, v in stat.items() if k != 1)
                    if 7 in stat:
                        value = stat_names[stat[7][0]]
                    stats[stat_names[stat[1][0]]] = (
                        value.decode() if isinstance(value, bytes) else value
                    )
                start, dur = base + event.get(2, [0])[0], event.get(3, [0])[0]
                result.append((name, stream, names[event[1][0]], start, dur, stats))
    return result
