"""``advisor compare``: its exit codes, its gate, its formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cli.compare import parse_share
from advisor.compare import Comparison
from advisor.core.errors import AdvisorError
from advisor.testing import TraceBuilder

Run = Callable[..., tuple[int, str, str]]
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m `|` @team ::error::"


def write_trace(
    path: Path, kernel_us: float, name: str = "ampere_sgemm_128x64_nn", steps: int = 6
) -> Path:
    """Steps of one kernel; their lengths differ by a microsecond."""
    b = TraceBuilder()
    for number in range(steps):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.host(number % 2)
            b.launch(name, kernel_us)
            b.sync()
    return b.write(path)


@pytest.fixture
def fast_trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "fast.json", 1000)


@pytest.fixture
def slow_trace(tmp_path: Path) -> Path:
    """A trace about 10% slower than the fast one."""
    return write_trace(tmp_path / "slow.json", 1100)


@pytest.mark.parametrize(("bound", "code"), [("5%", 1), ("0.05", 1), ("15%", 0), ("0%", 1)])
def test_gate_fails_on_significantly_slower_steps(
    advisor: Run, fast_trace: Path, slow_trace: Path, bound: str, code: int
) -> None:
    exit_code, _, err = advisor("compare", fast_trace, slow_trace, "--fail-if-slower", bound)
    assert exit_code == code
    assert err.startswith("slower: " if code else "not slower: ") and "% more time; up to " in err
    share = f"{float(bound.rstrip('%')) / (100 if '%' in bound else 1):.1%}"
    assert f"; up to {share} more is allowed (95% confidence); exit code {code}" in err
    assert err.count("\n") == 1
    exit_code, _, err = advisor("compare", slow_trace, fast_trace, "--fail-if-slower", bound)
    assert exit_code == 0 and err.startswith("not slower: ") and "% less time; " in err


def test_gate_passes_when_the_interval_reaches_below_the_bound(
    advisor: Run, fast_trace: Path, tmp_path: Path
) -> None:
    b = TraceBuilder()
    for us in (800, 1000, 1200, 1400, 1600, 800):  # 13% slower on average, and all over the place
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch("ampere_sgemm_128x64_nn", us)
            b.sync()
    code, out, err = advisor(
        "compare", fast_trace, b.write(tmp_path / "b.json"), "--fail-if-slower", "5%"
    )
    assert code == 0 and err.startswith("not shown to be slower: ")
    assert "No difference in step time can be shown" in out


def test_a_gate_that_cannot_measure_does_not_let_through(
    advisor: Run, fast_trace: Path, tmp_path: Path
) -> None:
    other = write_trace(tmp_path / "two.json", 1000, steps=2)
    code, out, err = advisor("compare", fast_trace, other, "--fail-if-slower", "5%")
    assert code == 2
    assert "too few" in err
    assert err.count("\n") == 1
    assert "aten::mm" not in err
    assert "Step times are not compared" in " ".join(out.split())
    assert advisor("compare", fast_trace, other)[0] == 0


def test_terminal_text_keeps_to_the_width(advisor: Run, fast_trace: Path, slow_trace: Path) -> None:
    code, out, err = advisor("compare", fast_trace, slow_trace)
    assert (code, err) == (0, "")
    assert out.startswith("Slower: ")
    assert max(map(len, out.splitlines())) <= 80
    assert "aten::mm" in out


def test_noise_and_statistics_are_counted_and_shown_with_details(
    advisor: Run, fast_trace: Path, slow_trace: Path
) -> None:
    code, short, _ = advisor("compare", fast_trace, slow_trace)
    assert code == 0 and "bootstrap" not in short and "95% confidence" in short
    assert "figures within noise, statistics." in " ".join(short.split())
    full = advisor("compare", fast_trace, slow_trace, "--details")[1]
    assert "bootstrap" in full and "Within noise" in full and "Not shown" not in full


def test_json_is_a_comparison(advisor: Run, fast_trace: Path, slow_trace: Path) -> None:
    code, out, _ = advisor("compare", fast_trace, slow_trace, "--format", "json")
    assert code == 0
    c = Comparison.from_json(out)
    assert json.loads(out)["schema"] == "advisor.comparison/2"
    assert c.steps.verdict == "slower"
    assert c.steps.share == pytest.approx(0.1, abs=0.01)


def test_the_format_follows_the_suffix(
    advisor: Run, fast_trace: Path, slow_trace: Path, tmp_path: Path
) -> None:
    assert advisor("compare", fast_trace, slow_trace, "-o", tmp_path / "c.md")[:2] == (0, "")
    assert (tmp_path / "c.md").read_text().startswith("**Slower: ")
    assert "| mean |" in (tmp_path / "c.md").read_text()


def test_hostile_names_stay_names(advisor: Run, fast_trace: Path, tmp_path: Path) -> None:
    other = write_trace(tmp_path / "x.json", 3000, HOSTILE)
    for form in ("terminal", "markdown", "json"):
        code, out, _ = advisor("compare", fast_trace, other, "--format", form)
        assert code == 0
        assert "\x1b" not in out
        if form == "markdown":
            assert "<img" not in out
            assert "@team" not in out


def test_redacted_comparison_holds_no_private_data(advisor: Run, tmp_path: Path) -> None:
    folder = tmp_path / "jdoe17"
    folder.mkdir()
    name = "gemm TOKEN=hunter2 /home/jdoe17/x.cu"
    one, other = write_trace(folder / "a.json", 1000), write_trace(folder / "b.json", 3000, name)
    for form in ("terminal", "markdown", "json"):
        code, out, _ = advisor("compare", one, other, "--format", form, "--redact")
        assert code == 0
        assert "hunter2" not in out
        assert "jdoe17" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{fast}", "nowhere.json"], "no such file"),
        (["{fast}", "{fast}", "--fail-if-slower", "5"], "did you mean 5%"),
        (["{fast}", "{fast}", "--fail-if-slower", "fast"], "give a share"),
        (["{fast}", "{fast}", "-o", "{fast}"], "that is an input"),
        (["-", "-"], "standard input"),
        (["{fast}"], "no AFTER is given: advisor compare "),
        (["{fast}", "{fast}", "--window", "3"], "no window 3"),
    ],
)
def test_bad_input_is_one_line_error_with_exit_code_2(
    advisor: Run, fast_trace: Path, arguments: list[str], complaint: str
) -> None:
    code, out, err = advisor("compare", *(a.format(fast=fast_trace) for a in arguments))
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["5", "-1%", "x", "", "1e3%", "%"])
def test_parse_share_rejects_invalid_shares(text: str) -> None:
    with pytest.raises(AdvisorError):
        parse_share(text)
    assert parse_share("2.5%") == 0.025


# -- saved reports ------------------------------------------------------------------------------


@pytest.fixture
def save(advisor: Run, tmp_path: Path) -> Callable[[Path], Path]:
    """Save what ``analyze --format json`` writes for a trace."""

    def make(trace: Path) -> Path:
        target = tmp_path / f"{trace.stem}.report.json"
        assert advisor("analyze", trace, "--format", "json", "-o", target)[0] == 0
        return target

    return make


def test_saved_reports_are_compared_in_their_stored_data(
    advisor: Run, fast_trace: Path, slow_trace: Path, save: Callable[[Path], Path]
) -> None:
    reports = save(fast_trace), save(slow_trace)
    for before, after, only in (
        (*reports, "of both runs"),
        (fast_trace, reports[1], "of the run after"),
        (reports[0], slow_trace, "of the run before"),
    ):
        comparison = Comparison.from_json(advisor("compare", before, after, "--format", "json")[1])
        from_traces = Comparison.from_json(
            advisor("compare", fast_trace, slow_trace, "--format", "json")[1]
        )
        assert only in comparison.limits[0] and "not compared" in comparison.limits[0]
        assert (comparison.before.path, comparison.after.path) == (str(before), str(after))
        assert comparison.steps.verdict == from_traces.steps.verdict == "slower"
        assert comparison.steps == from_traces.steps
        assert (comparison.work, comparison.kernels, comparison.realised.rules) == ([], [], [])
        assert [a.name for a in comparison.amounts] == [a.name for a in from_traces.amounts]
    for form in ("terminal", "markdown"):
        assert "Only a saved report" in " ".join(
            advisor("compare", *reports, "--format", form)[1].split()
        )


def test_the_gate_works_on_saved_reports(
    advisor: Run, fast_trace: Path, slow_trace: Path, save: Callable[[Path], Path], tmp_path: Path
) -> None:
    reports = save(fast_trace), save(slow_trace)
    assert advisor("compare", *reports, "--fail-if-slower", "5%")[0] == 1
    assert advisor("compare", *reports[::-1], "--fail-if-slower", "5%")[0] == 0
    few = save(write_trace(tmp_path / "few.json", 1000, steps=2))
    code, _, err = advisor("compare", few, reports[1], "--fail-if-slower", "5%")
    assert code == 2 and "too few" in err


def write_waiting_trace(folder: Path) -> Path:
    """Write a trace whose steps wait for a loader without workers."""
    b = TraceBuilder()
    for _ in range(6):
        with b.step():
            b.loader_wait(3000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 1000)
            b.sync()
    return b.write(folder / "waiting.json")


def test_finding_of_one_saved_report_is_neither_fixed_nor_new(
    advisor: Run, tmp_path: Path, save: Callable[[Path], Path], fast_trace: Path
) -> None:
    waiting = save(write_waiting_trace(tmp_path))
    comparison = Comparison.from_json(
        advisor("compare", waiting, save(fast_trace), "--format", "json")[1]
    )
    (unmatched,) = [item for item in comparison.findings if "loader" in item.rule]
    assert unmatched.change == "unchecked" and "too small to report" in unmatched.reason
    assert not comparison.findings_with("fixed") and not comparison.findings_with("new")
    back = Comparison.from_json(
        advisor("compare", save(fast_trace), waiting, "--format", "json")[1]
    )
    assert [i.change for i in back.findings if i.rule == unmatched.rule] == ["unchecked before"]


def test_a_rank_cannot_be_chosen_in_a_saved_report(
    advisor: Run, fast_trace: Path, save: Callable[[Path], Path]
) -> None:
    code, _, err = advisor("compare", save(fast_trace), fast_trace, "--rank", "0")
    assert code == 2 and "--rank" in err


def test_a_saved_report_in_place_of_a_trace_is_recognised(
    advisor: Run, fast_trace: Path, save: Callable[[Path], Path]
) -> None:
    for command in (("analyze",), ("whatif", "remove sync")):
        code, _, err = advisor(command[0], save(fast_trace), *command[1:])
        assert code == 2 and "open a saved report with advisor report" in err


def test_findings_that_were_not_checked_are_in_the_verdict(
    advisor: Run, tmp_path: Path, save: Callable[[Path], Path], fast_trace: Path
) -> None:
    out = advisor("compare", save(write_waiting_trace(tmp_path)), fast_trace)[1]
    assert "not checked on both sides." in " ".join(out.split()).partition("before ")[0]


def test_both_sides_take_the_gpu_that_a_trace_does_not_name(
    advisor: Run, shared_trace: Callable[[str], str]
) -> None:
    path = shared_trace("pairs/loader_profiler_workers0")
    out = advisor("compare", path, path, "--recorded-gpu", "v100")[1]
    assert out.count("NVIDIA V100 SXM2 16GB") == 2 and "not recorded" not in out


def test_a_recording_on_the_cpu_has_no_unknown_gpu(advisor: Run, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(6):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.host(1000)
    path = b.write(tmp_path / "cpu.json")
    out = advisor("compare", path, path)[1]
    assert "cpu.json · CPU" in out and "GPU" not in out.partition("Step times")[0]
