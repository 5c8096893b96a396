"""Make a trace of any size: a real one (or a built one) repeated with shifted times and ids.

The text of the source is kept as it is, number by number, so that the result has the layout, the
mix of events and the white space of a real file. Memory does not depend on the size made.

    python benchmarks/make_big.py big.json.gz --mb 400 [--source trace.json.gz]
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from public_traces import find

from advisor.read.formats.kineto.json_pieces import scan_list
from advisor.read.source import ByteSource
from advisor.testing import TraceBuilder

DEFAULT = "a100_train_6steps"

# Numbers that grow from copy to copy. Keys of one group share one number space.
_GROUPS = {
    "ts": (b"ts",),
    "correlation": (b"correlation", b"id", b"wait_on_cuda_event_record_corr_id"),
    "external": (b"External id", b"external id", b"Record function id"),
    "index": (b"Ev Idx", b"Profiler Event Index"),
    "python": (b"Python id", b"Python parent id"),
    "sequence": (b"Sequence number", b"Seq"),
    "step": (b"ProfilerStep#",),
}
_GROUP_OF = {key: group for group, keys in _GROUPS.items() for key in keys}
_NUMBER = re.compile(
    rb'"(' + b"|".join(k for k in _GROUP_OF if not k.endswith(b"#")) + rb')":\s*(\d+)'
    rb"|(ProfilerStep#)(\d+)"
)
_DUR = re.compile(rb'"dur":\s*(\d+)')


@dataclass
class Template:
    """The source's text cut at the numbers that change."""

    head: bytes
    parts: list[bytes]
    """Fixed text and numbers in turn; the numbers are at ``places``."""
    places: list[int]
    values: list[int]
    groups: list[str]
    shift: dict[str, int]
    """Growth of each group of ids from one copy to the next."""
    tail: bytes
    size: int
    """Bytes of one copy."""
    events: int

    def copy(self, number: int) -> bytes:
        """The events of one copy, comma separated."""
        shift = {group: by * number for group, by in self.shift.items()}
        for place, value, group in zip(self.places, self.values, self.groups, strict=True):
            self.parts[place] = b"%d" % (value + shift[group])
        return b"".join(self.parts)


def default_source() -> bytes:
    """A public real trace where there are some, else one from TraceBuilder."""
    path = find(f"{DEFAULT}.json.gz")
    return unpack(str(path)) if path else built()


def unpack(path: str) -> bytes:
    """The uncompressed text of a trace file."""
    return b"".join(ByteSource(path).blocks())


def built(steps: int = 60) -> bytes:
    """A training loop of about five megabytes, written by TraceBuilder."""
    b = TraceBuilder(gpu="A100", rank=0, world_size=8)
    for _ in range(steps):
        with b.step():
            b.loader_wait(300)
            for layer in range(60):
                with (
                    b.op("aten::linear", [[64, 1024], [1024, 1024], [1024]]),
                    b.op("aten::addmm", [[1024], [64, 1024], [1024, 1024]]),
                ):
                    b.launch(f"ampere_sgemm_128x64_tn_{layer % 7}", 60, blocks=128)
                with b.op("aten::relu", [[64, 1024]]):
                    b.launch("void at::native::vectorized_elementwise_kernel<4, relu>(int)", 8)
            b.collective("allreduce", 4 << 20, 900)
            with b.op("aten::copy_", [[64, 3, 224, 224]]):
                b.copy("HtoD", 38_535_168)
    return b.json()


def template(text: bytes) -> Template:
    """Cut a trace's text at its changing numbers. Raises ValueError: no list of events."""
    start = re.search(rb'"traceEvents"\s*:\s*\[', text)
    if start is None:
        raise ValueError("no traceEvents")
    body = text[start.end() :]
    commas, end, _ = scan_list(body)
    if end is None:
        raise ValueError("the source is truncated")
    events = body[:end]
    parts: list[bytes] = []
    places: list[int] = []
    values: list[int] = []
    groups: list[str] = []
    position = 0
    for match in _NUMBER.finditer(events):
        number = 2 if match.group(1) else 4
        parts.append(events[position : match.start(number)])
        places.append(len(parts))
        parts.append(b"")
        values.append(int(match.group(number)))
        groups.append(_GROUP_OF[match.group(number - 1)])
        position = match.end(number)
    parts.append(events[position:])
    shift: dict[str, int] = {}
    for group in _GROUPS:
        group_values = [v for v, g in zip(values, groups, strict=True) if g == group]
        shift[group] = (max(group_values) - min(group_values) + 1) if group_values else 0
    longest = max((int(m.group(1)) for m in _DUR.finditer(events)), default=0)
    shift["ts"] += min(longest, 1_000_000)
    return Template(
        head=text[: start.end()],
        parts=parts,
        places=places,
        values=values,
        groups=groups,
        shift=shift,
        tail=body[end:],
        size=len(events),
        events=len(commas) + 1,
    )


def make(path: Path, megabytes: float, text: bytes) -> tuple[int, int]:
    """Write whole copies of ``text`` until about ``megabytes``, compressed where the name says so;
    (copies, uncompressed bytes)."""
    form = template(text)
    copies = max(1, round(megabytes * 1e6 / form.size))
    size = len(form.head) + len(form.tail)
    packed = path.suffix == ".gz"
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as out:
        out.write(form.head)
        for number in range(copies):
            block = form.copy(number)
            if number:
                block = b"," + block
            size += len(block)
            out.write(block)
        out.write(form.tail)
    return copies, size


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=float, default=400, help="uncompressed size, 10^6 bytes")
    parser.add_argument("--source", help="trace to repeat; default: a public real one, else built")
    args = parser.parse_args()
    text = unpack(args.source) if args.source else default_source()
    copies, size = make(args.out, args.mb, text)
    print(
        f"{args.out}: {copies} copies, {size / 1e6:.0f} MB of JSON, "
        f"{args.out.stat().st_size / 1e6:.0f} MB on disk",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
