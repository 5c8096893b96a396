"""The JSON: versioned, whole, read back as it was, and nothing a terminal obeys in it."""

from __future__ import annotations

import json as standard
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor import analyze
from advisor.advise.report_charts import build_charts
from advisor.core.errors import AdvisorError
from advisor.core.ranks import Ranks
from advisor.core.report import SCHEMA, Report
from advisor.core.report_replay import Replay
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA = Path(__file__).resolve().parents[1] / "data"


def test_a_report_reads_back_as_it_was(
    report: Callable[..., Report], ranks: Callable[..., Ranks]
) -> None:
    full = report(12, ranks=ranks(3))
    assert Report.from_json(REPORTS.render("json", full)) == full


def test_a_report_with_hostile_names_reads_back_as_it_was(
    report: Callable[..., Report], hostile_name: str
) -> None:
    name = hostile_name.encode("utf-8", "replace").decode()
    full = report(2, name)
    text = REPORTS.render("json", full)
    assert Report.from_json(text) == full
    assert standard.loads(text) == full.to_dict()
    assert all(char == "\n" or 32 <= ord(char) < 127 or ord(char) > 0x9F for char in text)


def test_the_pictures_are_in_it_as_everybody_draws_them(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):  # 11 ms, of which the device waits 10 for a loader
        with b.step():
            b.loader_wait(10_000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 900)
            b.sync()
    report = analyze(b.write(tmp_path / "trace.json"))
    read = Report.from_json(REPORTS.render("json", report))
    assert read.charts == build_charts(report)
    charts = standard.loads(report.to_json())["charts"]
    bar, stairs = charts["bar"], charts["fix_sequence"]
    assert charts["ranks"] is None
    parts = [*bar["work"], *bar["idle"]]
    assert {part["key"] for part in parts} >= {"compute", "loader"}
    assert sum(part["ns"] for part in parts) == pytest.approx(report.scope.step_ns)
    assert len({part["look"]["colour"] for part in parts}) == len(parts)
    assert stairs["measured"]["left_ns"] == report.step_ns
    # without the wait for the loader the step still waits for the device at its end
    assert [stair["priority"] for stair in stairs["fixes"]] == [1, 2]
    assert stairs["fixes"][0]["saved_ns"] == report.findings[0].marginal_gain_ns


def test_a_report_of_version_1_is_read() -> None:
    """The report was written by ``advisor analyze --format json --price 3.60`` of a recorded
    run: steps of 6 ms, of which the device waits 5 for a loader without workers."""
    text = (DATA / "reports" / "version1.json").read_bytes()
    old = standard.loads(text)
    assert old["schema"] == "advisor.report/1"
    read = Report.from_json(text)
    assert read.schema == SCHEMA and read.verdict == old["verdict"]
    assert [f.rule for f in read.findings] == ["single-process-loader", "explicit-synchronize"]
    loader, folded = read.findings
    assert loader.impact is not None and loader.impact.gain_ns == 4_797_007
    assert (loader.priority, loader.marginal_gain_ns, folded.priority) == (1, 4_797_007, None)
    assert folded.folded_under == loader.rule and folded.edits
    assert read.step is not None
    assert (read.step.ns, read.step.window_slowdown) == (6_007_000, old["step"]["longer"])
    assert [check.text for check in read.passed] == [check["text"] for check in old["good"]]
    assert read.cost is not None and [fix.rule for fix in read.cost.fixes] == [loader.rule]
    assert [fix.priority for fix in read.cost.fixes] == [1]
    assert read.charts is not None and read.charts.fix_sequence is not None
    assert [stair.priority for stair in read.charts.fix_sequence.fixes] == [1]
    assert Report.from_json(read.to_json()) == read
    assert "4.8 ms" in REPORTS.render("terminal", read)
    damaged = {**old, "findings": [1, {"worth": "much"}], "risks": None}
    with pytest.raises(AdvisorError, match="not a report"):
        Report.from_json(standard.dumps(damaged))


def test_a_report_of_version_2_is_read(report: Callable[..., Report]) -> None:
    """Fields that version 3 calls by other names."""
    now = standard.loads(REPORTS.render("json", report()))
    now["findings"][0] |= {"offloaded_ns": 5.0, "after_fix": "a-rule"}
    now["findings"][0]["costs_more_than_recorded"] = True
    now["findings"][0]["impact"] |= {"bound_ns": 7, "is_run_gain": True, "is_job_gain": True}
    factors = {"factor": 0.5, "best_factor": 0.25, "worst_factor": 0.75}
    now["findings"][0]["edits"] = [{"op": "scale", "select": {"on": "gpu"}, **factors}]
    now["scope"] |= {"launched_before_ns": 11, "queue_delay_ns": 13}
    before = standard.loads(standard.dumps(now)) | {"schema": "advisor.report/2"}
    before["serving"] = before.pop("inference", None)
    first, impact = before["findings"][0], before["findings"][0]["impact"]
    first["moved_ns"], first["pays_after"] = first.pop("offloaded_ns"), first.pop("after_fix")
    first["known_cost"] = first.pop("costs_more_than_recorded")
    for new, old in (("bound_ns", "most_ns"), ("is_run_gain", "of_run"), ("is_job_gain", "of_job")):
        impact[old] = impact.pop(new)
    (edit,) = first["edits"]
    edit["factor_low"], edit["factor_high"] = edit.pop("best_factor"), edit.pop("worst_factor")
    before["scope"]["earlier_ns"] = before["scope"].pop("launched_before_ns")
    before["scope"]["behind_ns"] = before["scope"].pop("queue_delay_ns")
    before["notes"].append({**first, "impact": {"currency": "unpriced", "reason": "as before"}})
    now["notes"].append(
        {**now["findings"][0], "impact": {"currency": "unknown", "reason": "as before"}}
    )
    old, new = (Report.from_json(standard.dumps(each)) for each in (before, now))
    assert old == new and old.findings[0].impact is not None
    assert [(e.best_factor, e.worst_factor) for e in old.findings[0].edits] == [(0.25, 0.75)]
    assert (old.findings[0].impact.bound_ns, old.scope.queue_delay_ns) == (7, 13)
    assert old.findings[0].costs_more_than_recorded


def test_another_schema_is_refused(report: Callable[..., Report]) -> None:
    text = REPORTS.render("json", report()).replace(SCHEMA, "advisor.report/999")
    with pytest.raises(AdvisorError, match=r"advisor\.report/999"):
        Report.from_json(text)


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"schema": 1}'])
def test_file_that_is_no_report_is_one_line_error(text: str) -> None:
    with pytest.raises(AdvisorError, match="not a report"):
        Report.from_json(text)


def test_every_field_in_the_json_is_in_the_documentation(
    report: Callable[..., Report], ranks: Callable[..., Ranks], replay: Callable[..., Replay]
) -> None:
    documented = (DOCS / "report-schema.md").read_text(encoding="utf-8")
    by_name = {"critical", "critical_after", "events_dropped"}  # keyed by what was measured

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            inside = [names(item) for key, item in value.items() if key not in by_name]
            return set(value).union(*inside)
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    full = standard.loads(REPORTS.render("json", report(2, ranks=ranks(2), replay=replay())))
    assert len(names(full)) > 90
    assert [name for name in sorted(names(full)) if f"| `{name}` |" not in documented] == []
    assert SCHEMA in documented
