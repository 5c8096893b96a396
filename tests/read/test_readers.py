"""A door for other formats: a reader that some package installs is found, and all the rest works.

The reader below is the whole of what such a package holds, with the entry point that names it.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import advisor
from advisor import cli
from advisor.advise.program_wording import mark_steps, record_with
from advisor.core.errors import AdvisorError
from advisor.core.trace import TraceMeta
from advisor.export.chrome import write_tables
from advisor.read import read_trace, registry
from advisor.read.build import build_trace
from advisor.read.formats.kineto.reader import KinetoReader
from advisor.read.registry import read_bytes

TOY = '''
import polars as pl

from advisor.read.build import build_trace
from advisor.read.reader import Reader, ReaderClaim, Tool
from advisor.core.trace import TraceMeta

HEAD = b"what,kind,name,lane,start_ns,length_ns,id"


class Toy(Reader):
    """A row for each event: host or device, on a lane, with the id of its launch or kernel."""

    name = "toy"
    description = "a toy table (.csv)"
    suffixes = (".csv",)
    tool = Tool("toyprof run", "toy_mark() around each step", "toy_range()")

    def sniff(self, head, path):
        return ReaderClaim.SURE if head.startswith(HEAD) else ReaderClaim.NO

    def read(self, source, options):
        rows = pl.read_csv(b"".join(source.blocks()), schema_overrides={"lane": pl.String})
        rows = rows.rename({"start_ns": "ts", "length_ns": "dur", "id": "correlation"})
        host = rows.filter(pl.col("what") == "host").rename({"lane": "thread"})
        device = rows.filter(pl.col("what") == "device").with_columns(
            device=pl.lit(0), stream=pl.col("lane").cast(pl.Int64)
        )
        host = host.with_columns(
            call=pl.when(pl.col("name") == "enqueue").then(pl.lit("launch"))
            .when(pl.col("name") == "drain").then(pl.lit("sync_device"))
        )
        meta = TraceMeta(path=source.path, bytes_read=source.bytes_read, start_ns=0)
        return build_trace(meta, host=host, device=device)
'''
HEAD = "what,kind,name,lane,start_ns,length_ns,id"
START = 1_700_000_000_123_456_789
"""An instant that a float of microseconds, and one of nanoseconds, would round."""
STEPS = 5


def table() -> str:
    """Five steps of 1 ms. In each a layer enqueues ten kernels of 20 us, 40 us apart, with names
    and calls that no PyTorch trace has, and the host then waits for the device to drain."""
    rows = [HEAD]
    for step in range(STEPS):
        at = START + step * 1_000_000
        rows.append(f"host,annotation,ProfilerStep#{step},loop,{at},1000000,")
        rows.append(f"host,op,net::layer,loop,{at + 1_000},400000,")
        for number in range(10):
            launch, one = at + 2_000 + number * 40_000, step * 10 + number
            rows.append(f"host,runtime,enqueue,loop,{launch},5000,{one}")
            rows.append(f"device,kernel,toy_gemm,7,{launch + 10_001},20000,{one}")
        rows.append(f"host,runtime,drain,loop,{at + 450_000},500000,")
    return "\n".join([rows[0], *rows[:0:-1]]) + "\n"  # a reader may give rows in any order


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the reader, installed as pip leaves it."""
    site = tmp_path / "site"
    (site / "toy_reader-1.0.dist-info").mkdir(parents=True)
    (site / "toy_reader.py").write_text(TOY)
    info = site / "toy_reader-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[advisor.readers]\ntoy = toy_reader:Toy\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    registry.installed_readers.cache_clear()
    yield
    registry.installed_readers.cache_clear()
    sys.modules.pop("toy_reader", None)


@pytest.fixture
def path(toy: None, tmp_path: Path) -> Path:
    file = tmp_path / "run.csv"
    file.write_text(table())
    return file


def test_the_toy_reader_is_as_short_as_was_promised() -> None:
    assert len(TOY.strip().splitlines()) <= 60


def test_reader_gives_nanoseconds_stacks_and_launches(path: Path) -> None:
    trace = read_trace(str(path))
    assert (trace.meta.format, trace.meta.start_ns, trace.meta.clock) == ("toy", START, "unix")
    assert trace.meta.events_read == STEPS * 23
    assert trace.meta.bytes_read == path.stat().st_size
    # by hand: the first kernel starts 2,000 + 10,001 ns after the first step
    assert trace.gpu["ts"][:2].to_list() == [12_001, 52_001]
    assert trace.gpu["launch"].null_count() == 0
    launch = trace.cpu[trace.gpu["launch"]]
    assert launch["name"].cast(pl.String).unique().to_list() == ["enqueue"]
    assert launch["call"].cast(pl.String).unique().to_list() == ["launch"]
    assert launch["correlation"].to_list() == trace.gpu["correlation"].to_list()
    around = trace.cpu[trace.gpu["op"]]
    assert around["name"].cast(pl.String).unique().to_list() == ["net::layer"]
    outer = trace.cpu[around["parent"]]
    assert outer["name"].cast(pl.String).to_list() == [f"ProfilerStep#{n // 10}" for n in range(50)]


def test_advice_on_recording_is_for_its_tool(path: Path) -> None:
    meta = read_trace(str(path)).meta
    assert record_with("activities=[CPU, CUDA]", meta) == "Record with toyprof run."
    assert mark_steps("toy", None).startswith("put toy_mark() around each step")


def test_traces_of_a_custom_reader_work_in_every_command(
    path: Path,
) -> None:
    report = advisor.analyze(path)
    assert report.scope.step_source == "ProfilerStep"
    assert report.scope.steps_found == STEPS
    assert report.scope.step_ns == 1_000_000
    shares = {part.name: part.ns for part in report.time}
    assert shares["compute"] == 200_000  # ten kernels of 20 us
    assert shares["idle"] == 800_000
    waits = advisor.Analysis(read_trace(str(path))).syncs["kind"].cast(pl.String)
    assert waits.to_list() == ["device"] * STEPS  # as its ``call`` says; no name of CUDA does
    # a kernel twice as fast saves at most half of its time, whatever the replay thinks
    result = advisor.whatif(advisor.open(path), ["scale kernel:toy_gemm 0.5", "remove sync"])
    assert result.edits[0].selected == 50
    assert 0 <= result.edits[0].gain_ns <= 100_000
    assert result.edits[1].selected == STEPS


def test_export_is_a_profiler_trace_with_the_same_rows(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from advisor.cli import run

    target = tmp_path / "out.json.gz"
    assert run(["export", str(path), "--perfetto", str(target), "--no-progress"]) == 0
    assert "of ours" in capsys.readouterr().err
    written = json.loads(gzip.decompress(target.read_bytes()))
    assert {"steps", "idle gaps"} <= {
        event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"
    }
    before, after = read_trace(str(path)), read_trace(str(target))
    assert after.meta.format == "toy"  # as the file says that we wrote
    assert after.meta.start_ns == before.meta.start_ns
    # calls too, though PyTorch's reader tells them by CUDA's names, which these have not
    same = ["ts", "dur", "kind", "name", "parent", "depth", "call", "correlation"]
    assert_frame_equal(before.cpu[same], after.cpu[same], categorical_as_str=True)
    assert_frame_equal(before.gpu, after.gpu, categorical_as_str=True)


def test_a_redacted_export_has_no_names_of_users(toy: None, tmp_path: Path) -> None:
    from advisor.cli import run

    file = tmp_path / "run.csv"
    file.write_text(table().replace("net::layer", "/home/jemima/net.py"))
    target = tmp_path / "out.json"
    assert run(["export", str(file), "--perfetto", str(target), "--redact", "--no-progress"]) == 0
    assert "jemima" not in target.read_text()
    assert "toy_gemm" in target.read_text()


def test_a_folder_and_packed_files_of_it_are_found(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "rank0.csv").write_text(path.read_text())
    (folder / "rank1.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    (folder / "notes.txt").write_text("not looked at")
    run = advisor.open(folder)
    assert run.ranks == [0, 1]
    assert run.problems == ()


def test_unknown_format_error_points_to_the_formats(
    toy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    see = "'advisor analyze --help' lists the formats"
    unknown = "unknown format .it begins with 'GIF89a...'."
    with pytest.raises(AdvisorError, match=f"^picture.gif: {unknown}; {see}$"):
        read_bytes(b"GIF89a...", "picture.gif")
    tables = "of CSV files, advisor reads those of ncu --csv --page raw"
    with pytest.raises(AdvisorError, match=f"^picture.csv: {unknown}; {tables}; {see}$"):
        read_bytes(b"GIF89a...", "picture.csv")
    with pytest.raises(AdvisorError, match=f"^x: an SQLite file .*; {see}$"):
        read_bytes(b"SQLite format 3\0", "x")
    assert cli.run(["analyze", "--help"]) == 0
    output = capsys.readouterr().out
    assert "Formats:\n  a PyTorch profiler trace (.json, .json.gz or .json.zst)\n" in output
    assert [one.description in output for one in registry.all_readers()].count(False) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("return ReaderClaim.SURE", "return 1 / 0"),
        ("rows = rows.rename", "rows = nonsense.rename"),
        ("host.with_columns(", 'host.drop("name").with_columns('),
    ],
)
def test_failing_reader_is_one_line_error(
    toy: None, tmp_path: Path, fault: str, message: str
) -> None:
    (tmp_path / "site" / "toy_reader.py").write_text(TOY.replace(fault, message))
    with pytest.raises(AdvisorError, match=r"^x\.csv: the reader 'toy' failed \(\w+Error: .*\)$"):
        read_bytes(table().encode(), "x.csv")


def test_reader_without_a_trace_is_one_line_error(toy: None, tmp_path: Path) -> None:
    (tmp_path / "site" / "toy_reader.py").write_text(
        TOY.replace("return build_trace", "build_trace")
    )
    with pytest.raises(
        AdvisorError, match=r"^x\.csv: the reader 'toy' failed \(it returned no Trace\)$"
    ):
        read_bytes(table().encode(), "x.csv")


@pytest.mark.parametrize(
    "text", ["import no_such_module_anywhere", "Toy = 5", "class Toy: pass", "raise KeyError(1)"]
)
def test_a_reader_that_cannot_be_loaded_is_named(toy: None, tmp_path: Path, text: str) -> None:
    (tmp_path / "site" / "toy_reader.py").write_text(text)
    with pytest.raises(AdvisorError, match=r"^reader package toy_reader:Toy: cannot be loaded"):
        read_bytes(b"GIF89a", "x")
    # what our own reader is sure of does not depend on it
    events = b'{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1}]}'
    assert read_bytes(events).cpu.height == 1


@pytest.mark.parametrize(
    "name", ["alexnet", "mi250_train", "event_sync_multi_stream", "two_ranks_rank0"]
)
def test_rows_of_a_real_trace_join_as_they_do_in_its_own_reader(
    shared_trace: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    """The same rows without their joins, in another order, given as a reader gives them; and as
    they come back from an export of the tables."""
    original = read_trace(shared_trace(name))
    host = original.cpu.drop("parent", "depth", "call").with_columns(
        process=original.threads["pid"].gather(original.cpu["thread"]),
        thread=original.threads["tid"].gather(original.cpu["thread"]),
    )
    names = {
        (p, t): n for p, t, n in original.threads.select("pid", "tid", "name").iter_rows() if n
    }
    built = build_trace(
        TraceMeta(path=original.meta.path, start_ns=original.meta.start_ns),
        host=host.sort("ts", "dur", "name", descending=[True, False, True]),
        device=original.gpu.drop("launch", "op").sort("ts", "stream", descending=True),
        sync=original.sync,
        memory=original.memory,
        inputs=original.inputs,
        comms=original.comms,
        thread_names=names,
    )
    target = tmp_path / "out.json"
    write_tables(built, target)
    restored = read_trace(str(target))
    assert (restored.meta.start_ns, restored.meta.end_ns) == (
        original.meta.start_ns,
        original.meta.end_ns,
    )
    for trace in (built, restored):
        assert_frame_equal(trace.sync, original.sync)
        assert trace.comms.rows() == original.comms.rows()
        for table in ("cpu", "gpu"):
            before, after = (
                getattr(one, table).drop("thread", strict=False) for one in (original, trace)
            )
            joins = ["parent", "depth", "call"] if table == "cpu" else ["launch", "op"]
            # rows that start at one instant and last equally long may change places
            keys = ["ts", "dur", "kind", "name", "correlation"]
            same = before.with_columns(pl.col("name").cast(pl.String)).sort(keys)
            other = after.with_columns(pl.col("name").cast(pl.String)).sort(keys)
            columns = [c for c in before.columns if c not in (*joins, "inputs", "comm")]
            assert_frame_equal(same[columns], other[columns], categorical_as_str=True)
            assert before[joins].null_count().rows() == after[joins].null_count().rows()
        assert trace.cpu["depth"].sum() == original.cpu["depth"].sum()
        counts = [one.cpu["call"].value_counts().sort("call").rows() for one in (original, trace)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("ts", None, "no start time"),
        ("ts", 1 << 62, "absurd start time"),
        ("ts", START + (2 * 86_400) * 10**9, "absurd start time"),
        ("dur", None, "no duration"),
        ("dur", -1, "negative duration"),
        ("dur", 1 << 60, "absurd duration"),
    ],
)
def test_rows_without_sane_times_are_left_out_and_counted(
    column: str, value: int | None, reason: str
) -> None:
    rows = {"ts": [START, START + 5, START + 9], "dur": [9, 3, 1]}
    rows[column][1] = value  # type: ignore[call-overload]
    host = pl.DataFrame(rows).with_columns(kind=pl.lit("op"), name=pl.lit("f"), thread=pl.lit("a"))
    trace = build_trace(TraceMeta(path="x"), host=host)
    assert trace.cpu["ts"].to_list() == [0, 9]
    assert trace.meta.events_dropped == {reason: 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "operator"}, "kind 'operator' is not one of op, annotation"),
        ({"call": "enqueue"}, "call 'enqueue' is not one of launch, graph_launch"),
        ({"name": None}, "lacks the column 'name'"),
    ],
)
def test_invalid_reader_table_is_named_in_the_error(
    change: dict[str, str | None], message: str
) -> None:
    row = {"ts": 1, "dur": 1, "kind": "op", "name": "f", "thread": "a", **change}
    host = pl.DataFrame([{key: value for key, value in row.items() if value is not None}])
    with pytest.raises(ValueError, match=message):
        build_trace(TraceMeta(path="x"), host=host)


def test_a_file_without_a_usable_row_is_one_line_error() -> None:
    with pytest.raises(AdvisorError, match=r"^x: no usable event in it; record the trace again$"):
        build_trace(TraceMeta(path="x"), host=None)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        (b'{"traceEvents": [', "SURE"),
        (b'\xef\xbb\xbf  [{"ph": "X"}]', "SURE"),
        (b'{"schemaVersion": 1,', "PERHAPS"),
        (b"[1, 2]", "PERHAPS"),
        (b"   ", "PERHAPS"),  # what it is comes later
        (b"what,kind", "NO"),
        (b'{\0"\0', "NO"),
    ],
)
def test_our_own_reader_is_sure_only_of_events(text: bytes, claim: str) -> None:
    assert KinetoReader().sniff(text, "x.csv").name == claim
