"""``advisor report`` and ``advisor export``: what they write, where, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.core.report import Report
from advisor.testing import TraceBuilder

Run = Callable[..., tuple[int, str, str]]
STARTS = {
    "html": "<!DOCTYPE html>",
    "sarif": "{",
    "github": "::notice title=advisor::",
    "markdown": "**",
    "json": "{",
    "terminal": "GPU busy",
}


def test_html_is_one_file_with_the_timeline(advisor: Run, slow_trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    assert advisor("report", slow_trace, "--html", target) == (0, "", "")
    text = target.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "stream 7" in text
    assert len(text) < 200_000


@pytest.mark.parametrize("form", STARTS)
@pytest.mark.parametrize("command", ["report", "analyze"])
def test_both_commands_know_every_format(
    advisor: Run, slow_trace: Path, command: str, form: str
) -> None:
    code, out, err = advisor(command, slow_trace, "--format", form)
    assert (code, err) == (0, "")
    assert out.startswith(STARTS[form])


@pytest.mark.parametrize(("name", "form"), [("r.html", "html"), ("r.sarif", "sarif")])
def test_the_suffix_chooses(
    advisor: Run, slow_trace: Path, tmp_path: Path, name: str, form: str
) -> None:
    assert advisor("analyze", slow_trace, "-o", tmp_path / name)[0] == 0
    text = (tmp_path / name).read_text()
    assert text.startswith(STARTS[form])
    assert ("2.1.0" in text) == (form == "sarif")


def test_html_and_another_format_at_once(advisor: Run, slow_trace: Path, tmp_path: Path) -> None:
    html, other = tmp_path / "r.html", tmp_path / "r.md"
    assert advisor("report", slow_trace, "--html", html, "-o", other)[:2] == (0, "")
    assert html.read_text().startswith("<!DOCTYPE")
    assert other.read_text().startswith("**")
    code, _, err = advisor("report", slow_trace, "--html", html, "-o", html)
    assert code == 2
    assert "same file" in err


def test_a_saved_report_is_read_back(advisor: Run, slow_trace: Path, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    assert advisor("analyze", slow_trace, "-o", saved)[0] == 0
    code, out, _ = advisor("report", saved, "--format", "json")
    assert code == 0
    assert Report.from_json(out) == Report.from_json(saved.read_text())
    assert advisor("report", saved, "--html", tmp_path / "r.html")[0] == 0
    saved.write_text('{"schema": "advisor.report/2", "status": 3}')
    code, out, err = advisor("report", saved)
    assert (code, out) == (2, "")
    assert "not a report" in err


@pytest.fixture
def private_trace(tmp_path: Path) -> Path:
    """A trace with a token, a user and a folder in its names."""
    folder = tmp_path / "jdoe17"
    folder.mkdir()
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.python("/home/jdoe17/secret-project/train.py(12): step"):
            b.loader_wait(5000, workers=0)
            with b.op("aten::mm_hf_aB3dE5gH7jK9mN1p", [[512, 512], [512, 512]], "float"):
                b.launch("gemm WANDB_API_KEY=hunter2", 900)
            b.sync()
    return b.write(folder / "trace.json")


@pytest.mark.parametrize("form", STARTS)
def test_redacted_reports_hold_no_private_data(
    advisor: Run, private_trace: Path, form: str
) -> None:
    code, out, _ = advisor("analyze", private_trace, "--format", form, "--redact")
    assert code == 0
    for private in ("hf_aB3dE5gH7jK9mN1p", "hunter2", "jdoe17", "secret-project"):
        assert private not in out


def test_export_writes_a_trace_with_our_tracks(
    advisor: Run, slow_trace: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.json.gz"
    code, out, err = advisor("export", slow_trace, "--perfetto", target)
    assert (code, out) == (0, "")
    assert err.count("\n") == 1
    before, after = (
        json.loads(advisor("analyze", path, "--format", "json")[1]) for path in (slow_trace, target)
    )
    assert before["verdict"] == after["verdict"]
    assert before["findings"] == after["findings"]


def test_redacted_export_holds_no_private_data(
    advisor: Run, private_trace: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    assert advisor("export", private_trace, "--perfetto", target, "--redact")[0] == 0
    text = target.read_text()
    for private in ("hf_aB3dE5gH7jK9mN1p", "hunter2", "jdoe17", "secret-project"):
        assert private not in text
    assert "train.py(12): step" in text
    assert any(e.get("cat") == "advisor" for e in json.loads(text)["traceEvents"])
    assert advisor("export", private_trace, "--perfetto", target, "--no-tracks")[0] == 0
    assert json.loads(target.read_text()) == json.loads(private_trace.read_text())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["export", "-", "--perfetto", "x.json"], "reads a trace twice"),
        (["export", "{trace}"], "no --perfetto is given"),
        (["export", "{trace}", "-o", "x.txt"], "ends in .json, .gz, .zst"),
        (["analyze", "{trace}", "--window", "3"], "no window 3 (windows present: 0)"),
        (["analyze", "{trace}", "--max-size", "1"], "unpacks to more than 1 byte;"),
        (["export", "{trace}", "--perfetto", "{trace}"], "that is an input"),
        (["export", "{trace}", "--perfetto", "no/where.json"], "no folder"),
        (["export", "nowhere.json", "--perfetto", "x.json"], "no such file"),
        (["export", "{trace}", "--perfetto", "x.json", "--max-size", "100"], "--max-size"),
        (["report", "nowhere.json", "--html", "x.html"], "no such file"),
        (["report", "{trace}", "--html", "{trace}"], "that is an input"),
        (["report", "{trace}", "--html", "no/where.html"], "no folder"),
        (["report", "{trace}", "--format", "pdf"], "pdf"),
    ],
)
def test_bad_input_is_one_line_error_with_exit_code_2(
    advisor: Run, slow_trace: Path, arguments: list[str], complaint: str
) -> None:
    code, out, err = advisor(*(a.format(trace=slow_trace) for a in arguments))
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert not Path("x.json").exists()


PREDICTIONS = {
    "whatif": ["scale kernel:WANDB_API_KEY=hunter2 0.5"],
    "whatif without edits": [],
    "whatif --precision": ["--precision", "int8"],
    "project": ["--gpu", "h200"],
}


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("form", ["terminal", "json", "html"])
def test_redacted_predictions_hold_no_private_data(
    advisor: Run, private_trace: Path, kind: str, form: str
) -> None:
    options = PREDICTIONS[kind] + (["--format", form] if kind != "whatif without edits" else [])
    words = [kind.split(maxsplit=1)[0], private_trace, *options]
    private = ("hf_aB3dE5gH7jK9mN1p", "hunter2", "jdoe17", "secret-project")
    code, plain, err = advisor(*words)
    assert code == 0, err
    code, out, _ = advisor(*words, "--redact")
    assert code == 0 and not [text for text in private if text in out]
    assert len(out.splitlines()) == len(plain.splitlines())
    if kind == "whatif":
        assert "hunter2" in plain  # as the edit names it
