"""``advisor analyze``: its exit codes, its one-line errors, where its report goes."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import advisor as advisor_package
from advisor.cli.analyze import reaches_severity
from advisor.cli.options import parse_size, parse_steps
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.testing import TraceBuilder

Run = Callable[..., tuple[int, str, str]]


def one_line(err: str) -> str:
    """The line of an error, which must be the only one."""
    assert err.startswith("advisor: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.strip()


def test_report_goes_to_stdout_and_stderr_stays_empty(advisor: Run, slow_trace: Path) -> None:
    code, out, err = advisor("analyze", slow_trace)
    assert (code, err) == (0, "")
    assert "NVIDIA A100-SXM4-80GB" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_a_report(advisor: Run, slow_trace: Path) -> None:
    code, out, err = advisor("analyze", slow_trace, "--format", "json")
    assert (code, err) == (0, "")
    report = Report.from_json(out)
    assert report.scope.steps_found == 4
    assert report.inputs[0].path == str(slow_trace)


def test_markdown_has_headings_and_a_table(advisor: Run, slow_trace: Path) -> None:
    code, out, _ = advisor("analyze", slow_trace, "--format", "markdown")
    assert code == 0
    assert "### Where the step's time goes" in out
    assert "| idle |" in out


@pytest.mark.parametrize(
    ("name", "start"), [("r.json", "{"), ("r.md", "**"), ("r.txt", "GPU"), ("r", "GPU")]
)
def test_the_format_follows_the_suffix_of_the_output(
    advisor: Run, slow_trace: Path, tmp_path: Path, name: str, start: str
) -> None:
    code, out, err = advisor("analyze", slow_trace, "--output", tmp_path / name)
    assert (code, out, err) == (0, "", "")
    assert (tmp_path / name).read_text().startswith(start)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert [p.name for p in slow_trace.parent.iterdir()] == ["slow.json"]


def test_a_suffix_of_no_format_writes_nothing(
    advisor: Run, slow_trace: Path, tmp_path: Path
) -> None:
    code, _, err = advisor("analyze", slow_trace, "-o", tmp_path / "r.docx")
    assert code == 2 and err.startswith("advisor: r.docx: no format has this suffix")
    assert not (tmp_path / "r.docx").exists()


def test_a_named_format_wins_over_the_suffix(
    advisor: Run, slow_trace: Path, tmp_path: Path
) -> None:
    advisor("analyze", slow_trace, "-o", tmp_path / "r.txt", "--format", "json")
    assert json.loads((tmp_path / "r.txt").read_text())["schema"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"hello, world", ""),
        (b'{"a": 1}', ""),
        (b'{"traceEvents": []}', "no events"),
    ],
    ids=["missing", "empty", "not JSON", "no traceEvents", "no events"],
)
def test_bad_input_is_one_line_error_with_exit_code_2(
    advisor: Run, tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    code, out, err = advisor("analyze", path)
    assert (code, out) == (2, "")
    line = one_line(err)
    assert "trace.json" in line
    assert complaint in line


def test_a_folder_without_traces_is_one_line_error(advisor: Run, tmp_path: Path) -> None:
    code, _, err = advisor("analyze", tmp_path)
    assert code == 2
    assert "an empty directory" in one_line(err)
    (tmp_path / "notes.md").write_text("loss 0.3")
    code, _, err = advisor("analyze", tmp_path)
    assert code == 2
    assert "without traces" in one_line(err)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.xyz", b"hello"),
        ("core.bin", bytes(range(256)) * 16),
        ("empty.json", b""),
        ("other.json", b'{"a": 1}'),
        ("train.py", b"print(1)"),
        ("data.db", b"SQLite format 3\0"),
        ("folder/README.md", b"text"),
        ("empty/", b""),
    ],
)
@pytest.mark.parametrize("command", [["analyze"], ["dashboard", "--no-browser"]])
def test_file_that_is_no_trace_is_refused_in_two_lines(
    advisor: Run, name: str, content: bytes, command: list[str]
) -> None:
    path = Path(name)
    (path if name.endswith("/") else path.parent).mkdir(exist_ok=True)
    if not name.endswith("/"):
        path.write_bytes(content)
    code, out, err = advisor(*command, path.parts[0])
    assert (code, out) == (2, "")
    assert len(one_line(err)) <= 2 * 80, err


@pytest.mark.parametrize(
    "command", [["analyze"], ["whatif"], ["project", "--gpu", "h200"], ["fit", "--gpu", "h200"]]
)
def test_every_command_refuses_a_folder_of_unrelated_traces(
    advisor: Run, shared_trace: Callable[[str], str], command: list[str]
) -> None:
    Path("mixed").mkdir()
    for name in ("alexnet", "h100_qwen_inference"):
        shutil.copy(shared_trace(name), "mixed")
    code, out, err = advisor(*command, "mixed")
    assert (code, out) == (2, "")
    assert "mixed: these 2 files do not look like ranks or windows of one run" in one_line(err)


def test_folder_with_traces_of_two_processes_is_refused(advisor: Run) -> None:
    Path("both").mkdir()
    for name in ("loader_before", "loader_after"):
        recordings = Path(advisor_package.__file__).parent / "sample_workloads" / "recordings"
        shutil.copy(recordings / f"{name}.json.gz", "both")
    code, out, err = advisor("analyze", "both")
    assert (code, out) == (2, "")
    assert "different processes wrote them ('advisor compare' compares two)" in one_line(err)


def test_an_escape_sequence_in_a_file_name_is_not_obeyed(advisor: Run, tmp_path: Path) -> None:
    code, _, err = advisor("analyze", tmp_path / "\x1b[31mred\nline\x07.json")
    assert code == 2
    assert "\x1b" not in one_line(err)
    assert "\x07" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze"],
        ["analyze", "x", "--nonsense"],
        ["analyze", "x", "--format", "pdf"],
        ["analyze", "x", "--rank", "first"],
        ["analyze", "x", "--rank", "-1"],
        ["analyze", "x", "--top", "-1"],
        ["analyze", "x", "--fail-on", "info"],
        ["analyze", "x", "--steps", "3"],
        ["analyze", "x", "--steps", "5:3"],
        ["analyze", "x", "--steps", "a:b"],
        ["analyze", "x", "--max-size", "huge"],
        ["analyze", "x", "--max-size", "0"],
        ["nonsense"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_misuse_is_one_line_error_with_exit_code_2(advisor: Run, arguments: list[str]) -> None:
    code, out, err = advisor(*arguments)
    assert (code, out) == (2, "")
    one_line(err)


def test_steps_outside_the_trace_are_one_line_error(advisor: Run, slow_trace: Path) -> None:
    code, out, err = advisor("analyze", slow_trace, "--steps", "10:12")
    assert (code, out) == (2, "")
    assert "--steps selects none of the 4 steps" in one_line(err)


def test_steps_option_selects_the_measured_steps(advisor: Run, slow_trace: Path) -> None:
    _, out, _ = advisor("analyze", slow_trace, "--steps", "1:3", "--format", "json")
    assert Report.from_json(out).scope.steps_used == 2


def test_missing_rank_is_one_line_error(advisor: Run, slow_trace: Path) -> None:
    code, _, err = advisor("analyze", slow_trace, "--rank", "7")
    assert code == 2
    assert "rank 7" in one_line(err)


def test_missing_window_is_one_line_error(advisor: Run, slow_trace: Path) -> None:
    code, _, err = advisor("analyze", slow_trace, "--window", "7")
    assert code == 2
    assert "window 7" in one_line(err)


def test_trace_over_the_size_limit_error_names_the_option(advisor: Run, slow_trace: Path) -> None:
    code, _, err = advisor("analyze", slow_trace, "--max-size", "1k")
    assert code == 2
    assert "--max-size" in one_line(err)


def test_missing_rules_folder_is_one_line_error(advisor: Run, slow_trace: Path) -> None:
    code, _, err = advisor("analyze", slow_trace, "--rules", "/nowhere")
    assert code == 2
    assert "/nowhere" in one_line(err)


def test_fail_on_exits_with_1_and_still_shows_the_report(advisor: Run, slow_trace: Path) -> None:
    _, out, _ = advisor("analyze", slow_trace, "--format", "json")
    severities = {finding.severity for finding in Report.from_json(out).findings}
    code, output, err = advisor("analyze", slow_trace, "--fail-on", "warning")
    assert code == (1 if severities & {"warning", "critical"} else 0)
    assert (output != "", err) == (True, "")


def test_fail_on_a_healthy_trace_is_exit_code_0(advisor: Run, busy_trace: Path) -> None:
    code, _, _ = advisor("analyze", busy_trace, "--fail-on", "warning")
    assert code == 0


@pytest.mark.parametrize(
    ("severity", "warning", "critical"),
    [("info", False, False), ("warning", True, False), ("critical", True, True)],
)
def test_fail_on_counts_only_causes_and_risks(
    advisor: Run, busy_trace: Path, severity: str, warning: bool, critical: bool
) -> None:
    def make_finding(**changes: object) -> Finding:
        fields = {"rule": "r", "title": "t", "summary": "s", "fix": "f", "severity": severity}
        return Finding(**fields, **changes)  # type: ignore[arg-type]

    report = Report.from_json(advisor("analyze", busy_trace, "--format", "json")[1])
    for findings, risks in (([make_finding()], []), ([], [make_finding()])):
        report.findings, report.risks = findings, risks
        assert reaches_severity(report, "warning") is warning
        assert reaches_severity(report, "critical") is critical
    report.findings, report.risks, report.notes = (
        [make_finding(folded_under="x")],
        [],
        [make_finding()],
    )
    assert not reaches_severity(report, "warning")


# -- where the report goes ----------------------------------------------------------------------


def test_an_input_is_never_written_over(advisor: Run, slow_trace: Path, tmp_path: Path) -> None:
    slow_trace = Path(shutil.copy(slow_trace, tmp_path))
    before = slow_trace.read_bytes()
    (tmp_path / "link.json").symlink_to(slow_trace)
    for output in (slow_trace, tmp_path / "link.json", tmp_path / "." / "slow.json"):
        code, _, err = advisor("analyze", slow_trace, "--output", output)
        assert code == 2
        assert "input" in one_line(err)
    code, _, err = advisor("analyze", tmp_path, "--output", slow_trace)
    assert code == 2
    assert "input" in one_line(err)
    assert slow_trace.read_bytes() == before


@pytest.mark.parametrize("output", ["no/such/folder/r.json", "."])
def test_impossible_output_is_one_line_error(advisor: Run, slow_trace: Path, output: str) -> None:
    code, out, err = advisor("analyze", slow_trace, "--output", output)
    assert (code, out) == (2, "")
    assert "--output" in one_line(err)


def test_failed_write_keeps_the_old_file(
    advisor: Run, slow_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out" / "report.json"
    output.parent.mkdir()
    output.write_text("the last one")

    def raise_disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    code, _, err = advisor("analyze", slow_trace, "--output", output)
    assert code == 2
    assert "No space left" in one_line(err)
    assert output.read_text() == "the last one"
    assert list(output.parent.iterdir()) == [output]


def test_bad_input_keeps_the_last_report(advisor: Run, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    output.write_text("the last one")
    assert advisor("analyze", tmp_path / "missing.json", "--output", output)[0] == 2
    assert output.read_text() == "the last one"


def test_report_replaces_a_linked_file_and_keeps_its_mode(
    advisor: Run, slow_trace: Path, tmp_path: Path
) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    assert advisor("analyze", slow_trace, "-o", link, "--format", "json")[0] == 0
    assert link.is_symlink()
    assert Report.from_json(real.read_text())
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_device_is_written_to_not_replaced(advisor: Run, slow_trace: Path) -> None:
    assert advisor("analyze", slow_trace, "--output", os.devnull)[0] == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)  # noqa: PTH116


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "range_"),
    [(None, None), ("2:8", (2, 8)), ("2:", (2, None)), (":8", (None, 8)), (":", (None, None))],
)
def test_a_range_of_steps(text: str | None, range_: object) -> None:
    assert parse_steps(text) == range_


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, None),
        ("1000", 1000),
        ("16G", 16_000_000_000),
        ("500mb", 500_000_000),
        ("1.5G", 1_500_000_000),
        ("2 T", 2_000_000_000_000),
    ],
)
def test_a_size(text: str | None, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1X", "G", "1e9", "nan", "9" * 40])
def test_nonsense_is_not_a_size(text: str) -> None:
    with pytest.raises(AdvisorError, match="--max-size"):
        parse_size(text)


def test_operators_option_lists_rates_instead_of_the_report(
    advisor: Callable[..., Any], tmp_path: Path
) -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            with b.op("aten::add", [[8192, 8192], [8192, 8192]], "c10::BFloat16"):
                b.launch("void at::native::vectorized_elementwise_kernel<4>", 500)
            b.sync()
    path = b.write(tmp_path / "trace.json")
    result = advisor("analyze", path, "--by", "operator")
    assert advisor("analyze", path, "--operators") == result, "the option of 0.2 still works"
    for former in (("--gpu", "a100 sxm4 80gb"), ("--gpu=a100 sxm4 80gb",)):
        assert advisor("analyze", path, "--operators", *former) == result
    assert result.code == 0
    # 3 x 134 MB in 0.5 ms are 805 GB/s; a triad reaches 1,725 on such an A100
    assert "805 GB/s 1,725 GB/s" in " ".join(result.out.split())
    assert "What to change" not in result.out
    refused = advisor("analyze", path, "--by", "operator", "--format", "json")
    assert refused.code == 2
    assert refused.err.count("\n") == 1 and "--by" in refused.err


def test_layers_are_listed_instead_of_the_report(
    advisor: Callable[..., Any], tmp_path: Path
) -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            for number in range(4):
                with b.python(f"nn.Module: Block_{number}"):
                    b.run("aten::mm", "gemm", 900 if number == 2 else 300)
            b.sync()
    path = b.write(tmp_path / "trace.json")
    result = advisor("analyze", path, "--by", "layer")
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    assert "Block_0–3 4 1.8 ms 100%" in " ".join(result.out.split())
    assert "What to change" not in result.out
    report = json.loads(advisor("analyze", path, "--format", "json").out)["layers"]
    assert report["source"] == "module events" and report["layers"][0]["ns"] == 1.8e6
    refused = advisor("analyze", path, "--by", "layer", "--format", "json")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "--by" in refused.err


def test_recording_without_layers_gets_one_line_of_advice(
    advisor: Callable[..., Any], tmp_path: Path
) -> None:
    b = TraceBuilder()
    with b.step():
        b.run("aten::mm", "gemm", 300)
        b.sync()
    result = advisor("analyze", b.write(tmp_path / "trace.json"), "--by", "layer")
    text = " ".join(result.out.split())
    assert result.code == 0 and text.startswith("No layers were recorded.") and "with_stack" in text


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("analyze slow.json --brief --details", "--brief and --details: choose one"),
        ("report slow.json --details --brief", "--brief and --details: choose one"),
        ("analyze --detials slow.json", "No such option: --detials. Did you mean --details?"),
        ("analyze notes.md", "notes.md: unknown format (it begins with '# A heading');"),
        ("analyze slow.json --rank 3", "rank 3 (no trace says its rank); leave out --rank"),
        ("analyze slow.json --steps 90:", "steps; give 0:"),
        ("analyze slow.json --top x", "'x' must be an integer"),
        ("analyze slow.json --recorded-gpu foo100", "such as 'h100 sxm', 'a100 80gb' or"),
        ("analyze slow.json slow.json", "slow.json is given twice; to compare two runs:"),
        ("analyze slow.json --format pdf", "pdf: a report is written as one of agent, github"),
        (
            "analyze slow.json -o x.pdf",
            "x.pdf: no format has this suffix; --format: agent, github,",
        ),
        ("slow.json", "slow.json is not a command: advisor analyze slow.json"),
        ("whatif scale work 0.5", "no trace is given: advisor whatif TRACE 'scale work 0.5'"),
        ("gate notes.md slow.json", "no baseline: notes.md: unknown format"),
        ("gate keys.json slow.json", "no baseline: keys.json: neither a saved baseline nor a tr"),
        ("analyze slow.json --top", "requires an argument. See 'advisor analyze --help'"),
        ("analyze slow.json --steps (", "neither a range A:B of step numbers, such as 2:8, nor a"),
        ("compare a b c", "too many arguments (c): advisor compare BEFORE AFTER (see 'advisor"),
        ("window nosuch", "nosuch: no such file or directory"),
        ("mcp nosuch", "nosuch: no such file or directory"),
        ("whatif slow.json --window 3", "no window 3 (windows present: 0)"),
        ("project slow.json --gpu h100 --window 3", "no window 3 (windows present: 0)"),
        ("fit slow.json --gpu h100 --window 3", "no window 3 (windows present: 0)"),
        (
            "gate slow.json",
            "no RUN is given: advisor gate slow.json RUN; first, advisor",
        ),
        ("gate --save kept.json", "no RUN is given: advisor gate --save kept.json RUN"),
        ("gate", "advisor gate --save baseline.json RUN writes the baseline"),
        ("gate", "no BASELINE and RUN are given: advisor gate baseline.json RUN; first, "),
        ("gate a b c", "3 paths are given: advisor gate baseline.json RUN; first, "),
        ("analyze", "no PATH is given: advisor analyze PATH..., --memory-snapshot FILE or "),
        ("project slow.json", "no GPU is given: add --gpu NAME, --all or --gpus N"),
        ("whatif", "no TRACE is given: advisor whatif TRACE [EDIT]..."),
        ("try", "no PROGRAM is given: advisor try [--] PROGRAM [ARGS]... | RUN"),
        ("record", "no PROGRAM is given: advisor record train.py"),
        ("analyze setup.toml", "setup.toml: unknown format (it begins with '[build-system]');"),
        ("analyze slow.json other.json", "different processes wrote them ('advisor compare'"),
        ("analyze notes.txt", "notes.txt: unknown format (it begins with 'Monday'), and no log"),
        ("analyze slow.json --top 0", "0 is not in the range x>=1"),
        ("analyze slow.json --steps foo", "no range is named like 'foo'; there"),
        ("whatif slow.json foo", "no verb 'foo'; there are remove, scale,"),
        ("whatif slow.json remove", "write VERB TARGET[:PATTERN]"),
        ("explain launch-bound", "for a rule: advisor rules show launch-bound"),
    ],
)
def test_errors_name_the_wrong_value(
    advisor: Run, slow_trace: Path, typed: str, message: str
) -> None:
    shutil.copy(slow_trace, "slow.json")
    Path("notes.txt").write_text("Monday\nit was slow\n")
    Path("keys.json").write_text('{"a": 1}')
    Path("notes.md").write_text("# A heading\n\nand text")
    Path("setup.toml").write_text('[build-system]\nrequires = ["setuptools"]\n')
    Path("other.json").write_text(re.sub(r'"pid": ?1000', '"pid":77', slow_trace.read_text()))
    code, out, err = advisor(*typed.split())
    assert (code, out) == (2, "")
    assert message in one_line(err)


def test_other_files_of_a_folder_are_named(advisor: Run, slow_trace: Path) -> None:
    folder = Path("mixed")
    folder.mkdir()
    shutil.copy(slow_trace, folder / "slow.json")
    for number in range(6):
        (folder / f"junk{number}.json").write_text('{"a": 1}')
    for paths in (["mixed"], [slow_trace, "mixed/junk0.json"]):
        code, _, err = advisor("analyze", *paths)
        assert code == 0
        assert "left out: mixed/junk0.json: JSON without traceEvents (its keys: a);" in err
    assert advisor("analyze", "mixed")[2].splitlines()[-1].endswith("2 more (see --details)")


def test_files_of_other_gpus_are_named(advisor: Run) -> None:
    for gpu in ("A100", "H100"):
        b = TraceBuilder(gpu=gpu)
        for _ in b.steps():
            b.run("aten::mm", "gemm", 900)
            b.sync()
        b.write(Path(f"{gpu}.json"))
    code, _, err = advisor("analyze", "A100.json", "H100.json")
    assert code == 2 and "(A100.json) and" in err and "(H100.json)" in err


def test_export_takes_output_and_demo_brief(advisor: Run, slow_trace: Path) -> None:
    assert advisor("export", slow_trace, "-o", "x.json")[0] == 0
    assert Path("x.json").exists()
    code, out, _ = advisor("demo", "--brief")
    assert code == 0 and len(out.splitlines()) < 20


def test_truncated_file_fails_the_gate(advisor: Run) -> None:
    recordings = Path(advisor_package.__file__).parent / "sample_workloads/recordings"
    with gzip.open(recordings / "loader_before.json.gz") as file:
        Path("cut.json").write_bytes(file.read(60_000))
    assert advisor("analyze", "cut.json")[0] == 0
    code, _, err = advisor("analyze", "cut.json", "--fail-on", "warning")
    assert code == 2 and "--fail-on: the file is truncated" in err


def test_whatif_without_an_edit_offers_edits_of_findings(advisor: Run, slow_trace: Path) -> None:
    code, out, err = advisor("whatif", slow_trace)
    assert (code, err) == (0, "")
    first, _, heading, target, *rest, legend = out.splitlines()
    title, edits = rest[-2:]
    assert legend == "    (a..b..c: the optimistic, the central and the pessimistic value)"
    assert first.startswith("Give an edit, such as: ") and first.endswith("'remove gap:loader'")
    assert heading == "Targets of this trace, per step:"
    # by hand: each step waits 10 ms; with the report's name of the cause
    assert target.split() == ["gap:loader", "10", "ms", "data", "loader"]
    assert '    "parallelize loader 8"' in rest  # all waits, without their pattern
    assert re.match(r" ?\d+  [A-Z]", title)
    pasted = shlex.split(edits)
    assert advisor("whatif", slow_trace, *pasted)[0] == 0
    code, out, err = advisor("whatif", slow_trace, "--format", "json")
    assert (code, out) == (2, "") and "no edit is given" in err


def test_whatif_offers_edits_of_findings_without_work_of_a_gpu(advisor: Run) -> None:
    run = Path(__file__).parents[1] / "data/recorded/second_forward.slow"
    code, out, err = advisor("whatif", run)
    assert (code, err) == (0, "")
    first, _, heading, title, edits, legend = out.splitlines()
    assert ".." in edits and legend.strip().startswith("(a..b..c: the optimistic")
    assert heading == "What this trace's fixes change, to paste:"
    assert title == " 1  The forward pass runs twice in each step"
    assert first.endswith(edits.strip())
    assert advisor("whatif", run, *shlex.split(edits))[0] == 0


def test_whatif_names_fixes_whose_edits_it_does_not_list(
    advisor: Run, shared_file: Callable[[str], str]
) -> None:
    code, out, err = advisor("whatif", shared_file("h100/ping_pong"))
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "Fixes whose edits are not listed:",
        " 1  Data makes a round trip through the host",
        "    3 edits, too long to paste.",
    ]
    run = Path(__file__).parents[1] / "data/recorded/contention.slow"
    code, out, err = advisor("whatif", run)
    assert (code, err) == (0, "")
    first, _, heading, title, reason = out.splitlines()
    assert first.startswith("Write an edit: ") and heading == "Fixes whose edits are not listed:"
    assert re.match(r" 1  [A-Z]", title) and reason == "    No edit describes this fix."


def test_whatif_takes_an_edit_without_quotes(advisor: Run, slow_trace: Path) -> None:
    plain = advisor("whatif", slow_trace, "scale", "work", "0.5")
    assert plain[0] == 0 and plain == advisor("whatif", slow_trace, "scale work 0.5")


def test_top_is_the_number_of_fixes_of_a_brief_report_too(advisor: Run) -> None:
    output = advisor("demo", "--brief")[1]
    trace = Path(advisor_package.__file__).parent / "sample_workloads/recordings"
    one = advisor("analyze", trace / "loader_before.json.gz", "--brief", "--top", 1)[1]
    assert len(re.findall(r"^ \d  ", output, re.M)) == 3
    assert len(re.findall(r"^ \d  ", one, re.M)) == 1 and "3 more fixes" in one
