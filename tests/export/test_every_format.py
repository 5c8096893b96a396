"""Every profiler's traces work wherever PyTorch's do: redaction, export and back, HTML, what-if,
comparison."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import advisor
from advisor import cli
from advisor.read.registry import bundled_readers, reader_of
from advisor.read.source import ByteSource
from advisor.testing.allocator import FakeAllocator, Training
from tests.corpus_analyses import RECORDED
from tests.read import profiler_files as files
from tests.read import xspace_writer as xspace

SECRET = b"/home/gracehop/x/k.py"
"""A kernel of that name: as long as what it stands in the place of, so that files stay sound."""


def mark_thorough(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.thorough)


def _xplane(folder: Path) -> Path:
    path = folder / "host.xplane.pb"
    path.write_bytes(xspace.jax_training())
    return path


FORMATS: dict[str, tuple[Callable[[Path], Path], bytes]] = {
    "nsys": (lambda folder: files.nsys(folder / "run.sqlite"), b"void second<int>(int)"),
    "nsys 2020": (lambda folder: files.nsys(folder / "run.sqlite", 2020), b"void second<int>(int)"),
    "xplane": (_xplane, b"volta_sgemm_128x64_nn"),
    "rpd": (lambda folder: files.rpd(folder / "run.rpd"), b"void second<int>(int)"),
    "rocpd": (lambda folder: files.rocpd(folder / "run.db"), b"void second<int>(int)"),
    "rocpd 4": (lambda folder: files.rocpd(folder / "run.db", 4), b"void second<int>(int)"),
    "rocprofv3": (
        lambda folder: files.rocprof_json(folder / "run_results.json"),
        b"void second<int>(int)",
    ),
}
"""Format: how to make a small file, and a kernel's name in it."""
NO_KERNELS = {"tensorrt"}
"""Formats whose rows are layers."""
SAME_ROWS = {"xla-timeline": "xplane"}
"""Formats that another reader turns into the same rows."""


def test_no_tool_s_format_is_left_out(tmp_path: Path) -> None:
    tried = set()
    for name, (make, _) in FORMATS.items():
        (tmp_path / name).mkdir()
        tried.add(reader_of(ByteSource(str(make(tmp_path / name)))).name)
    tools = {reader.name for reader in bundled_readers() if reader.tool is not None}
    assert {SAME_ROWS.get(name, name) for name in tools} - NO_KERNELS == tried


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in ("nsys", "xplane", "rpd", "rocprofv3") else mark_thorough(kind)
        for kind in FORMATS
    ],
)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in which one kernel's name tells a user and a folder: the same for all tests."""
    make, kernel = FORMATS[request.param]
    folder = tmp_path_factory.mktemp("files")
    RECORDED.append(folder)
    path = make(folder)
    data = path.read_bytes()
    assert kernel in data and len(kernel) == len(SECRET)
    path.write_bytes(data.replace(kernel, SECRET))
    return path


def run(*arguments: object) -> int:
    return cli.run([str(argument) for argument in arguments])


@pytest.mark.parametrize("suffix", ["json", "html", "md", "sarif"])
def test_redacted_report_holds_no_user_name(file: Path, suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"out.{suffix}"
    assert run("analyze", file, "-o", out, "--csv", tmp_path / "open") == 0
    tables = "".join(path.read_text() for path in (tmp_path / "open").iterdir())
    assert "gracehop" in tables  # else what follows proves nothing
    assert run("analyze", file, "-o", out, "--csv", tmp_path / "shut", "--redact") == 0
    tables = "".join(path.read_text() for path in (tmp_path / "shut").iterdir())
    for text in (out.read_text(), tables):
        assert "gracehop" not in text
        assert str(tmp_path) not in text and str(file.parent) not in text


def test_redacted_trace_holds_no_user_name(file: Path, tmp_path: Path) -> None:
    plain, shut = tmp_path / "plain.json", tmp_path / "shut.json"
    assert run("export", file, "--perfetto", plain) == 0
    assert run("export", file, "--perfetto", shut, "--redact") == 0
    assert "gracehop" in plain.read_text()
    assert "gracehop" not in shut.read_text()
    events = [len(json.loads(path.read_text())["traceEvents"]) for path in (plain, shut)]
    assert events[0] == events[1]


@pytest.mark.parametrize(("packed", "redact"), [("", []), (".gz", ["--redact"])])
def test_the_exported_trace_is_analyzed_as_the_file_is(
    file: Path, packed: str, redact: list[str], tmp_path: Path
) -> None:
    out = tmp_path / f"out.json{packed}"
    assert run("export", file, "--perfetto", out, *redact) == 0
    one, other = advisor.analyze(str(file)), advisor.analyze(str(out))
    assert other.scope.step_ns == one.scope.step_ns > 0
    assert other.busy_share == pytest.approx(one.busy_share, rel=1e-9)
    assert (other.busy_share or 0) > 0.1
    for field in ("step_source", "steps_used", "framework", "device", "device_name"):
        assert getattr(other.scope, field) == getattr(one.scope, field), field
    assert [f.rule for f in other.findings] == [f.rule for f in one.findings]
    assert [f.fix for f in other.findings] == [f.fix for f in one.findings]
    assert {(p.name, p.ns) for p in other.families} == {(p.name, p.ns) for p in one.families}


def test_no_step_of_another_program_is_named_as_pytorchs_are(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run("export", file, "--perfetto", out) == 0
    assert run("analyze", file, "--csv", tmp_path / "csv", "-o", tmp_path / "r.json") == 0
    files = [out, *(tmp_path / "csv").iterdir()]
    assert [path.name for path in files if "ProfilerStep" in path.read_text()] == []


def test_html_page_of_every_format_is_complete(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run("report", file, "--html", page) == 0
    text = page.read_text()
    assert "<html" in text and text.rstrip().endswith("</html>")
    assert file.name in text


def test_half_the_kernel_time_saves_at_most_half(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("whatif", file, "-e", "scale kernel 0.5", "--format", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    kernels = sum(part.ns for part in advisor.analyze(str(file)).families if part.name != "copy")
    (edit,) = answer["edits"]
    assert edit["selected"] > 0
    assert 0 < edit["gain_ns"] <= 0.5 * kernels * 1.001
    assert answer["edited_step_ns"] < answer["measured_step_ns"]


@pytest.mark.usefixtures("no_shared_analysis")
def test_file_has_no_difference_from_itself(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", file, file, "--format", "json") == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["steps"]["difference_ns"] == 0
    assert all(one["before"] == one["after"] for one in comparison["amounts"])
    assert {one["change"] for one in comparison["findings"]} <= {"remaining"}


@pytest.mark.parametrize("kind", ["nsys 2020", "rpd", "rocpd"])
def test_format_without_steps_gets_its_own_marking_advice(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(files, "ITERATIONS", 1)
    file = FORMATS[kind][0](tmp_path)
    assert run("compare", file, file) == 0
    assert run("gate", file, file) == 2
    assert run("project", file, "--gpu", "h200", "--recorded-gpu", "a100-80gb") in (0, 2)
    captured = capsys.readouterr()
    for text in map(" ".join, (captured.out.split(), captured.err.split())):
        assert "name a range with --steps" in text
        assert not TORCH.search(text) and "profile_memory" not in text
        assert "ms per step" not in text


def test_partial_iteration_is_not_called_an_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two recordings may begin anywhere in it: their periods are no pairs."""
    paths = [files.nsys(tmp_path / f"{name}.sqlite") for name in ("one", "other")]
    for number, path in enumerate(paths):
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE NVTX_EVENTS")
            late = f"{number} * ((correlationId - 1) / 4) * ((correlationId - 1) / 4) * 1000"
            for table in ("KERNEL", "MEMCPY", "RUNTIME"):
                db.execute(
                    f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET start = start + {late}, "
                    f"end = end + {late}"
                )
    assert run("compare", *paths) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing marks the steps" in text.lower()
    assert "pairs of" not in text
    assert run("gate", *paths) == 2  # what nothing marks is no step to decide on
    assert "nothing marks the steps" in capsys.readouterr().err


def test_lines_fit_the_terminal(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for more in ([], ["--operators"]):
        assert run("analyze", file, *more) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if "://" not in line) <= 80  # links are whole


TORCH = re.compile(
    r"torch\.(?!org|profiler)|DataLoader|aten::|num_workers|pin_memory|profiler\.step|\bsynchronize\(\)"
)


def test_other_formats_get_no_pytorch_advice(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("analyze", file) == 0
    text = capsys.readouterr().out
    advice = text[text.index("What to change") : text.index("Not shown")]
    assert not TORCH.search(advice), TORCH.search(advice)
    links = [link for f in advisor.analyze(str(file)).findings for link in f.references]
    assert not [link for link in links if "torch" in link]
    if file.suffix in (".rpd", ".db") or "results" in file.name:
        assert not re.search(r"\bcu(da)?[A-Z]|NCCL", advice)


# -- memory snapshots -----------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    m = FakeAllocator()
    training = Training(m)
    for _ in range(4):
        training.step()
    return m.write(tmp_path / "memory.pickle")


@pytest.mark.parametrize("suffix", ["json", "html", "md", "sarif"])
def test_a_snapshot_s_report_is_redacted_too(snapshot: Path, suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"out.{suffix}"
    assert run("analyze", snapshot, "-o", out) == 0
    assert "/home/ada" in out.read_text()
    assert run("analyze", snapshot, "-o", out, "--redact") == 0
    assert "/home/ada" not in out.read_text()
    assert "train.py" in out.read_text()


@pytest.mark.parametrize(
    "line",
    [
        ["export", "{}", "--perfetto", "out.json"],
        ["whatif", "{}"],
        ["project", "{}", "--gpu", "h100"],
        ["compare", "{}", "{}"],
    ],
)
def test_timing_commands_refuse_a_snapshot_in_one_line(
    line: list[str],
    snapshot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(*(part.format(snapshot) for part in line))
    captured = capsys.readouterr()
    assert code == 2 or line[0] == "compare"
    assert "Traceback" not in captured.err
    if code == 2:
        assert len(captured.err.strip().splitlines()) == 1
