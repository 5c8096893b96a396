"""Files that are read by nobody here: what they are, and what to do instead."""

from __future__ import annotations

import re

from advisor.read.plain_pickle import looks_like_pickle

_UTF16 = (b"{\0", b"[\0", b"\0{", b"\0[")
_LOOK = 1 << 16
"""Bytes in which a format's signs are looked for."""
PROFILE = "record with torch.profiler or nsys profile, and give that file"

_SIGNS: tuple[tuple[str, str, str], ...] = (
    (
        r'^\s*\{.{0,2000}"\$schema"\s*:\s*"[^"]*speedscope|"exporter"\s*:\s*"speedscope',
        "a speedscope profile, samples of stacks without GPU work",
        PROFILE,
    ),
    (
        r'^\s*\[\s*\{\s*"(?:frame|children|metrics)"\s*:',
        "a profile of Triton's Proton (.hatchet), sums of kernels without times",
        PROFILE,
    ),
    (
        r'^\s*\[\s*\{\s*"start(?:In|Compute|H2d)?Ms"|^[fp]trt',
        "a file of TensorRT (an engine, or times of whole inferences)",
        "give the layer times: trtexec --exportProfile=run.profile.json "
        "--exportLayerInfo=run.graph.json --profilingVerbosity=detailed --separateProfileRun",
    ),
    (
        r'^\s*\{.*?"(?:CudaEvent|NvtxEvent|TraceProcessEvent|OsrtEvent|StringTable)"\s*:'
        r'|^\s*\{\s*"Type"\s*:\s*(?:\d|"String")',
        "JSON lines of nsys export",
        "export with nsys export --type sqlite, and give the .sqlite file",
    ),
    (
        r"^==\d+== .{0,200}(?:NVPROF|Profiling)|^==\d+==.{0,2000}\"Start\",\"Duration\"",
        "text of nvprof",
        "record with nsys profile, export with nsys export --type sqlite, and give the .sqlite "
        "file",
    ),
    (
        r'^"?(?:Index|Kind|Domain|Name|Correlation_Id)"?,.{0,400}'
        r'"?(?:Start_Timestamp|BeginNs|TotalDurationNs|DurationNs)"?',
        "a CSV table of rocprof",
        "record with rocprofv3 --output-format rocpd (or json), and give that file",
    ),
    (
        r"^.{0,40}brain\.Event:\d",
        "an event file of TensorBoard, which holds scalars",
        "give the profile beside it: plugins/profile/*/*.xplane.pb or *.pt.trace.json.gz",
    ),
    (
        r"^\s{0,999}<(?:!doctype html|html)",
        "a web page",
        "give the address of the file itself; perhaps one must log in first",
    ),
    (
        r"^version https://git-lfs\.github\.com/",
        "a pointer of Git LFS in place of the file",
        "fetch the file itself: git lfs pull",
    ),
)
"""Pattern of how a file begins, what it is, what to do."""
_KINDS = tuple((re.compile(p.encode(), re.DOTALL | re.I), what, cure) for p, what, cure in _SIGNS)


def kind_of(start: bytes, path: str = "") -> tuple[str, str | None] | None:
    """What it is, and what to do about it when that is more than to give something else; ``None``:
    it cannot be said. ``path``: for formats whose first bytes are those of others too."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or start[:2] in _UTF16:
        return "not UTF-8 text (UTF-16?)", "convert it to UTF-8"
    if start.startswith(b"SQLite format 3"):
        if b"CUPTI_ACTIVITY_KIND" in start and b"StringIds" not in start:
            return "a profile of nvprof (.nvvp, .nvprof)", (
                "record with nsys profile, export with nsys export --type sqlite, and give the "
                ".sqlite file"
            )
        return "an SQLite file without the tables of a profiler that is known", None
    if looks_like_pickle(start):
        return "a pickle (a memory snapshot?)", None
    if start[257:262] == b"ustar":
        return "a tar archive", "unpack it and give the file or folder in it"
    if start[:1] == b"\n" and path.lower().endswith((".pftrace", ".perfetto-trace")):
        return "a Perfetto trace (protobuf)", (
            "give the profiler's own file: rocprofv3 --output-format rocpd (or json), or the JSON "
            "of torch.profiler"
        )
    if path.endswith((".py", ".ipynb")):
        return "a program, no recording of one", "run it with advisor record, or advisor lint"
    head = start[:_LOOK].removeprefix(b"\xef\xbb\xbf")
    return next(((what, cure) for pattern, what, cure in _KINDS if pattern.search(head)), None)
