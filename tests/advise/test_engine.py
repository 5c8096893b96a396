"""The engine: order by what each finding adds, folding, failing rules, configuration."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

import advisor
from advisor.advise import report_text
from advisor.advise.engine import Options, analyze, analyze_in_full
from advisor.advise.report_charts import build_fix_sequence
from advisor.advise.rule_loading import load_rules, read_config
from advisor.advise.rule_runner import RULE_FAILED, run_rules
from advisor.core.errors import AdvisorError
from advisor.core.finding import Edit, Finding, Outcome, Select, SkippedCheck
from advisor.core.rule import Evidence, HostCheck, Rule, VerdictRole
from advisor.core.trace import Run
from advisor.read.registry import read_bytes
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder
from benchmarks.public_traces import CORPUS


class FailingRule(Rule):
    """A rule of a user's that has a bug in it, and must not take the others down with it at all."""

    id = "broken"
    title = "Something"
    category = "host"

    def check(self, a: object) -> Iterator[Outcome]:
        """Raise an error."""
        raise ZeroDivisionError("oops")
        yield


class FindingRule(Rule):
    """Kernels of a name could be gone: a rule made for these tests, with a gain we can foresee."""

    category = "kernel"
    validated = "real traces"
    title = "Slow kernels"
    pattern = ""
    group = ""

    def check(self, a: object) -> Iterator[Outcome]:
        """Yield a finding for every trace."""
        yield Finding(
            rule=self.id,
            title=self.title,
            summary="seen",
            fix="remove",
            verify="look",
            evidence=[Evidence("seen", 1, "count")],
            edits=[Edit(op="remove", select=Select(on="gpu", name=self.pattern))],
            alternatives=self.group,
        )


def rule(rule_id: str, pattern: str, group: str = "", confidence: float = 0.8) -> Rule:
    attributes = {"id": rule_id, "pattern": pattern, "group": group, "confidence": confidence}
    cls = type(rule_id, (FindingRule,), attributes)
    instance = cls()
    assert isinstance(instance, Rule)
    return instance


def two_kernels(small_us: float = 1000) -> Run:
    """Four steps of a device that is always busy: 3 ms of one kernel, 1 ms of another."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            for name, us in (("big_kernel", 3000), ("small_kernel", small_us)):
                with b.op("aten::mm"):
                    b.launch(name, us)
            b.sync()
    return Run(traces={(-1, 0): b.trace()})


def report(run: Run, rules: list[Rule], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr("advisor.advise.engine.load_rules", lambda *_: rules)
    return analyze(run, Options(config={}))


def test_a_run_shows_its_counts_and_not_its_tables(tmp_path: Path) -> None:
    b = TraceBuilder()
    with b.step():
        b.run("aten::mm", "gemm", 300)
    run = advisor.open(b.write(tmp_path / "rank0.json"))
    assert re.fullmatch(r"<Run: 1 rank, 1 window, \d+ events>", repr(run))


def test_a_rule_that_fails_is_contained_and_said() -> None:
    trace = two_kernels().traces[-1, 0]
    from advisor.measure import Analysis

    result = run_rules(-1, Analysis(trace), [FailingRule()])
    assert [type(n) for n in result.skipped] == [SkippedCheck]
    assert result.skipped[0].why == (
        f"{RULE_FAILED} (ZeroDivisionError: oops at test_engine.py:"
        f"{FailingRule.check.__code__.co_firstlineno + 2})"
    )


def test_findings_are_ordered_by_added_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(two_kernels(), [rule("small", "^small"), rule("big", "^big")], monkeypatch)
    assert [(f.rule, f.priority) for f in result.findings] == [("big", 1), ("small", 2)]  # type: ignore[attr-defined]
    gains = [f.impact.gain_ns for f in result.findings]  # type: ignore[attr-defined]
    # 3 ms and 1 ms of device work, one launch call less each
    assert gains[0] == pytest.approx(3.0e6, rel=0.02)
    assert gains[1] == pytest.approx(1.0e6, rel=0.02)


@pytest.mark.parametrize(
    ("small_us", "confidence", "first"),
    [(2900, 0.9, "small"), (2600, 0.9, "big"), (2600, 0.99, "small"), (2000, 0.99, "big")],
    ids=["equal gains", "equal confidences", "neither, more certain", "neither, larger"],
)
def test_larger_gain_outweighs_slightly_higher_confidence(
    small_us: float, confidence: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger gain is of 3 ms, with a confidence of 80%."""
    rules = [rule("small", "^small", confidence=confidence), rule("big", "^big")]
    result = report(two_kernels(small_us), rules, monkeypatch)
    assert result.findings[0].rule == first  # type: ignore[attr-defined]


def test_window_gains_are_ordered_at_run_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gain of the record is of the run's step already; others come from a profiled one."""
    rules = [rule("small", "^small"), rule("big", "^big")]

    def scale_gains(findings: list[Finding], *_: object) -> list[float]:
        return [4.0 if finding.rule == "small" else 1.0 for finding in findings]

    monkeypatch.setattr("advisor.advise.priority.scales_to_run", scale_gains)
    result = report(two_kernels(), rules, monkeypatch)
    assert [f.rule for f in result.findings] == ["small", "big"]  # type: ignore[attr-defined]


def test_code_shared_by_two_fixes_is_not_saved_twice() -> None:
    """H100: pinning each batch is also what the sampled stacks show in that line."""
    report = analyze_in_full(str(CORPUS / "h100/pin_each_step")).report
    hot = next(f for f in report.findings if f.rule == "sampled-hot-spot")
    assert (hot.priority, hot.folded_under) == (None, report.findings[0].rule)
    assert hot.title == "Line 28 of pin_each_step.py leaves the GPU idle"


def test_gain_between_steps_is_found_once_and_in_no_step_table() -> None:
    """H100: validation every 8 steps, outside of them."""
    report = analyze_in_full(str(CORPUS / "h100/seg_val_hist")).report
    first = report.findings[0]
    assert (first.rule, first.impact and first.impact.unit) == ("periodic-work", "run")
    (pauses,) = (f for f in report.findings if f.rule == "time-between-steps")
    assert (pauses.priority, pauses.folded_under) == (None, "periodic-work")
    stairs = build_fix_sequence(report)
    assert stairs is not None
    assert 1 not in [stair.priority for stair in stairs.fixes]
    description = report_text.describe_all_fixes(report)
    assert description.endswith("Fix 1 saves 1.44 s over the run, outside these steps.")


def test_fixes_with_gains_of_their_own_have_code_of_their_own() -> None:
    """H100: transposes ask for channels-last order, slow convolutions for a search besides."""
    report = analyze_in_full(str(CORPUS / "h100/conv_heuristics")).report
    code = {f.rule: f.code for f in report.findings}
    assert code["slow-convolution"].startswith("torch.backends.cudnn.benchmark = True")
    assert "channels_last" not in code["slow-convolution"]
    assert "channels_last" in code["layout-transposes"]


def test_unprofiled_host_time_is_a_lower_bound_of_a_gain() -> None:
    """H100: 6.0 ms of device work go; the host's own 7.4 ms are left of a step of 9.18 ms, where
    the profiler makes them 11.4."""
    impact = analyze_in_full(str(CORPUS / "h100/doc_finder")).report.findings[0].impact
    assert impact is not None and impact.low_ns is not None
    assert 0.5e6 < impact.low_ns < 1.8e6


def test_partly_recorded_cost_is_bounded_by_device_work() -> None:
    report = analyze_in_full(str(CORPUS / "h100/compiled_breaks")).report
    first = report.findings[0]
    assert first.costs_more_than_recorded and first.impact is not None
    assert first.impact.high_by == "device work"
    busy = report.step_ns - (first.impact.high_ns or 0)
    assert busy == pytest.approx(1.87e6, rel=0.02)


def test_collective_seen_by_two_ranks_is_saved_once(
    shared_file: Callable[[str], str],
) -> None:
    """Hidden under compute it saves 373 µs; rank 0 shows it on the compute stream, rank 1 that it
    takes 8% of the step."""
    report = analyze(shared_file("nsys/mfu_2gpu_after.sqlite"), Options(config={}))
    collectives = [f for f in report.findings if f.category in ("communication", "distributed")]
    assert [f.folded_under for f in collectives] == [None, collectives[0].rule]


def test_pace_is_that_of_the_unprofiled_step() -> None:
    """H100: the device works for 8.04 ms of a step of 8.7, or of a profiled one of 17.2."""
    report = analyze_in_full(str(CORPUS / "h100/latent_sampler")).report
    assert report.verdict.startswith(
        "GPU busy 93% of an 8.7 ms inference step (47% while profiled)"
    )
    assert report.replay is not None
    assert max(report.replay.critical, key=report.replay.critical.__getitem__) == "compute"
    assert not any(note.rule == "batch-headroom" for note in report.notes)


def test_explained_finding_is_folded_under_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = report(two_kernels(), [rule("all", "kernel"), rule("small", "^small")], monkeypatch)
    assert [(f.rule, f.folded_under) for f in result.findings] == [  # type: ignore[attr-defined]
        ("all", None),
        ("small", "all"),
    ]


def test_one_of_several_alternatives_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [rule("small", "^small", "fuse"), rule("big", "^big", "fuse")]
    result = report(two_kernels(), rules, monkeypatch)
    assert [(f.rule, f.priority, f.folded_under) for f in result.findings] == [  # type: ignore[attr-defined]
        ("big", 1, None),
        ("small", None, "big"),
    ]


def test_busy_device_with_unknown_rates_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = report(two_kernels(), [], monkeypatch)
    assert result.status == "limited"  # type: ignore[attr-defined]
    assert "in kernels, not in waits. How close most kernels come to the limits" in result.verdict  # type: ignore[attr-defined]


def test_a_user_can_switch_a_rule_off_and_move_its_threshold(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.advisor.rules.launch-bound]\nmin_share = 0.5\n"
        "[tool.advisor.rules.fp32-matmul]\nenabled = false\n"
    )
    rules = {r.id: r for r in load_rules(config=read_config(tmp_path))}
    assert rules["launch-bound"].min_share == 0.5  # type: ignore[attr-defined]
    assert "fp32-matmul" not in rules


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tool.advisor.rules.no-such-rule]\nx = 1\n", "no such rule"),
        ("[tool.advisor.rules.launch-bound]\nno_option = 1\n", "no option"),
        ("[tool.advisor.rules.gc-pauses]\neach_step = 1\n", "no option 'each_step'"),
        ("[tool.advisor.rules.double-precision]\nfactor = 0.1\n", "cannot be set"),
        ('[tool.advisor.rules.launch-bound]\nmin_share = "a"\n', "must be a number"),
        ("[tool.advisor.rules]\nlaunch-bound = 3\n", "must be tables"),
        ("[tool.advisor", "cannot be read"),
    ],
)
def test_a_wrong_configuration_is_one_line_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AdvisorError, match=why):
        load_rules(config=read_config(tmp_path))


def test_rules_of_a_folder_are_loaded_and_bad_ones_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from advisor.core.rule import Rule\n"
        "class Mine(Rule):\n    '''Mine.'''\n    id = 'mine'\n    category = 'host'\n"
        "    def check(self, a):\n        return iter(())\n"
    )
    assert "mine" in {r.id for r in load_rules(tmp_path, {})}
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(AdvisorError, match=r"bad\.py: ZeroDivisionError"):
        load_rules(tmp_path, {})


def test_run_without_device_reports_its_slowest_operators() -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("aten::linear", host_us=9.5), b.op("aten::mm", host_us=29.5):
            pass
        with b.step(), b.op("aten::mm", host_us=9.5):
            pass
    report = analyze(Run(traces={(-1, 0): b.trace()}), Options(config={}))
    # own time: linear 9.5 + 0.5 after what is inside; a step is on average half of both
    result = [(o.name, o.ns / 1e3, o.share, o.count) for o in report.operators]
    assert result == [("aten::mm", 20.0, 0.8, 1.0), ("aten::linear", 5.0, 0.2, 0.5)]
    assert "ops      aten::mm 80% of operators' time · aten::linear 20%" in REPORTS.render(
        "terminal", report
    )


def test_rules_without_shapes_are_listed_as_one_skipped_check(
    shared_trace: Callable[[str], str],
) -> None:
    ids = {rule.id for rule in load_rules() if rule.needs_shapes}
    for name, has_shapes in (("linear_2080ti_launch_bound", False), ("a100_train_6steps", True)):
        report = analyze(shared_trace(name))
        named = [{*check.rule.split(", ")} for check in report.not_checked if check.rule]
        assert len(ids) > 20 and any(ids <= each for each in named) != has_shapes


def test_rules_that_compare_shapes_say_so_where_none_are_recorded() -> None:
    for rule in load_rules():
        source = inspect.getsource(sys.modules[type(rule).__module__])
        if re.search(r"\b(inputs_at|calls_by_inputs)\(", source):
            assert rule.needs_shapes or 'missing="no shapes"' in source, rule.id


def test_small_traces_get_no_advice_except_examples() -> None:
    b = TraceBuilder()
    for number in range(3):
        with b.step(number):
            b.launch("gemm", 100)
            b.sync()
    for trace, is_limited in ((read_bytes(b.json()), True), (b.trace(), False)):
        limits = analyze(Run({(-1, 0): trace}), Options(config={})).limits
        assert any("too few to tell" in line for line in limits) is is_limited


def test_every_verdict_role_is_declared_by_a_rule() -> None:
    """Nothing above the rules names one: each part that the verdict takes has a rule."""
    rules = load_rules(config={})
    assert {each.verdict_role for each in rules} == {*get_args(VerdictRole)}
    assert {each.host_check for each in rules} == {*get_args(HostCheck)}
    assert [each.id for each in rules if type(each).cite_ranks is not Rule.cite_ranks] == [
        "exposed-communication"
    ]
    known = {each.id for each in rules if "-" in each.id}
    package = Path(advisor.__file__).parent
    for folder in ("advise", "compare", "tune", "render", "export", "dashboard", "mcp", "cli"):
        for path in (package / folder).rglob("*.py"):
            named = known & set(re.findall(r"[\"'`]([a-z0-9-]+)[\"'`]", path.read_text()))
            assert not named, f"{path} names {named}"


@pytest.mark.parametrize("text", ["import no_such_module_anywhere", "raise KeyError(1)"])
def test_a_rule_package_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "toy_rules.py").write_text(text)
    info = tmp_path / "toy_rules-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-rules\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[advisor.rules]\ntoy = toy_rules\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdvisorError, match=r"^rule package toy_rules: cannot be loaded"):
        load_rules()
