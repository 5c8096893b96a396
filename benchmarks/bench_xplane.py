"""Reading XPlane files, beside what protobuf takes for the same bytes.

Two floors: protobuf's parser alone, which leaves objects that nobody has looked at, and the same
with the names, times and stats of all events read from them, which is what tables are made of.

    python benchmarks/bench_xplane.py FILE.xplane.pb [--times 10]      (needs protobuf)

The file is repeated: two messages in a row are one with the planes of both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIELDS = {
    "XSpace": (("planes", 1, "XPlane"),),
    "XPlane": (("lines", 3, "XLine"),),
    "XLine": (("events", 4, "XEvent"),),
    "XEvent": (
        ("metadata_id", 1, ""),
        ("offset_ps", 2, ""),
        ("duration_ps", 3, ""),
        ("stats", 4, "XStat"),
    ),
    "XStat": (("metadata_id", 1, ""), ("int64_value", 4, "")),
}


def message_class() -> Any:
    """The message, as far as it is needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="xspace.proto", package="x", syntax="proto3")
    for name, members in FIELDS.items():
        message = file.message_type.add(name=name)
        for member, number, kind in members:
            one = message.field.add(name=member, number=number)
            one.label = field.LABEL_REPEATED if kind else field.LABEL_OPTIONAL
            one.type = field.TYPE_MESSAGE if kind else field.TYPE_INT64
            if kind:
                one.type_name = f".x.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("x.XSpace"))


def read_columns(space: Any) -> int:
    """All columns of all events, as lists; returns the number of events."""
    count = 0
    for plane in space.planes:
        for line in plane.lines:
            events = line.events
            columns = (
                [e.metadata_id for e in events],
                [e.offset_ps for e in events],
                [e.duration_ps for e in events],
                [[(s.metadata_id, s.int64_value) for s in e.stats] for e in events],
            )
            count += len(columns[0])
    return count


def best(work: Callable[[], object], runs: int = 3) -> float:
    """CPU seconds of the fastest of some runs."""
    times = []
    for _ in range(runs):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return min(times)


def main() -> None:
    """Measure and print a table."""
    from advisor.read.formats.xplane.host_events import STATS
    from advisor.read.formats.xplane.xspace import XSpace
    from advisor.read.protobuf import PADDING
    from advisor.read.registry import read_bytes

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("file", type=Path)
    arguments.add_argument("--times", type=int, default=10)
    args = arguments.parse_args()
    data = args.file.read_bytes() * args.times
    space = message_class()

    def decode() -> None:
        xspace = XSpace(data + bytes(PADDING), len(data))
        for plane in xspace.planes:
            xspace.read(plane, STATS)

    parse = best(lambda: space.FromString(data))
    rows = (
        ("protobuf: parse", parse),
        (
            "protobuf: parse, read names, times and stats",
            best(lambda: read_columns(space.FromString(data))),
        ),
        ("advisor: columns of all events", best(decode)),
        ("advisor: file to tables, joined", best(lambda: read_bytes(data, "bench.xplane.pb"))),
    )
    print(f"{len(data) / 1e6:.0f} MB, {read_columns(space.FromString(data)):,} events")
    for name, seconds in rows:
        print(
            f"{name:50} {seconds:6.2f} s  {seconds / parse:5.1f} x  {seconds / rows[1][1]:4.2f} x"
        )


if __name__ == "__main__":
    main()
