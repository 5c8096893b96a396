"""No report of a public real trace contradicts itself, whatever it says."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import polars as pl
import pytest
from rich.cells import cell_len

from advisor.advise import engine
from advisor.advise.engine import AnalysisResult, Options
from advisor.advise.finding_text import (
    gain_conditions,
    is_large_note,
    ranked_findings,
    share_of_note,
)
from advisor.advise.gain_reasons import LATE_CAUSES
from advisor.advise.report_charts import build_chosen_fix_sequence, build_fix_sequence
from advisor.advise.report_text import describe_all_fixes, step_after_fixes
from advisor.core import text as t
from advisor.core.charts import StepAfterFix
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.render.formats import REPORTS
from advisor.render.formats.terminal import MAX_SCREEN_LINES
from advisor.replay.selection import selected_gpu
from benchmarks.public_traces import CORPUS
from tests.corpus_analyses import analyze_cached

LARGE = 1_500_000
"""Bytes of a file whose report takes long; other tests read those."""
NOT_PYTHON = r";\s*(//.*)?$|^(vllm|python|torchrun|export|nvcc|sglang|advisor) "
"""Patterns of code in C++ and in a shell."""
NEVER = {
    "a share of minus nothing": r"[-−]0 ?%",
    "a share of the whole above it": r"\b(10[1-9]|1[1-9]\d|[2-9]\d\d|\d{4,}) ?% of "
    r"(what is|the step|the recording|attainable|kernel time|device work)\b",
    "a step without length": r"\b(Step|step of|a) 0 (ms|s|µs|ns)\b",
    "a value that is none": r"(?<!or )\b(None|nan|inf)\b(?! ?[,)=])",
    "one of many": r"(?<![\d.,])1 (fixes|findings|checks|limits|steps|launches|waits)\b",
    "a sentence that needs two readings": r"between its first and its last work|which pay from|"
    r"queued kernels do not run|none alone|confidence in the cause|[Nn]o fix is known for",
    "a limit of nothing": r"limited by [^.]* and [^.]*\((<1|0|1|2|3|4)%\)",
}


def files() -> list[Path]:
    result = [
        path
        for path in CORPUS.rglob("*")
        if path.name.endswith((".json.gz", ".sqlite", ".sqlite.gz", ".rpd", ".pb"))
    ]
    runs = (path.parent for path in CORPUS.glob("h100/*/manifest.json"))
    return sorted([*(p for p in result if p.stat().st_size <= LARGE), *runs])


@pytest.fixture(scope="module", params=files(), ids=lambda p: str(p.relative_to(CORPUS)))
def result(request: pytest.FixtureRequest) -> AnalysisResult:
    try:
        return analyze_cached(str(request.param))
    except AdvisorError as error:
        pytest.skip(f"no trace of steps: {error}")


@pytest.fixture(scope="module")
def report(result: AnalysisResult) -> Report:
    return result.report


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))


def test_faster_host_keeps_gpu_gains_and_raises_no_launch_gain(
    result: AnalysisResult,
) -> None:
    """Idle time that launches cause shrinks with a faster host. Where the GPU sets the pace, the
    host is behind none of its work."""
    device_bound = any(a.is_device_bound for a in result.analyses.values())
    for finding in result.report.findings:
        impact = finding.impact
        if impact is None or not finding.edits:
            continue
        if any(edit.op == "drop_launch" for edit in finding.edits):
            assert impact.high_by != "faster host", finding.rule
        elif device_bound:
            assert impact.low_by != "faster host", finding.rule


def test_a_range_holds_its_point_and_stays_within_the_step(report: Report) -> None:
    wrong = []
    for finding in report.findings:
        impact = finding.impact
        if impact is None or impact.currency != "step_time" or impact.gain_ns is None:
            continue
        low, high = impact.low_ns, impact.high_ns
        ends = (impact.gain_ns if low is None else low, impact.gain_ns if high is None else high)
        if not ends[0] <= impact.gain_ns <= ends[1] <= 1.001 * report.step_ns:
            wrong.append((finding.rule, ends, impact.gain_ns, report.step_ns))
    assert not wrong


def test_host_fix_leaves_at_least_the_device_work(
    result: AnalysisResult,
) -> None:
    """A gain, the upper end of its range included, leaves all device work that it does not
    change; waits for other ranks inside collectives may end."""
    report, a = result.report, next(iter(result.analyses.values()))
    if a.device_id is None:
        return
    step = report.step_ns if report.step is None else report.step.reference_ns
    busy = a.device_busy(a.in_window).total / max(1, a.step_count)
    if a.breakdown.busy.total / max(1, a.step_count) > step:
        return  # the run's steps are shorter than the window's device work: other steps
    wrong = []
    for finding in report.findings:
        impact, edits = finding.impact, finding.edits
        if impact is None or impact.currency != "step_time" or impact.is_job_gain or not edits:
            continue
        if any(e.select.on == "gpu" or e.op in ("resize", "remove_skew") for e in edits):
            continue
        high = impact.high_ns or impact.gain_ns or 0
        if high > 1.001 * (step - busy):
            wrong.append((finding.rule, high, step, busy))
    assert not wrong


def test_the_busy_share_is_of_the_step_beside_it(result: AnalysisResult, report: Report) -> None:
    """``GPU busy 67% of a 134 ms step``: the device's time in a step of the window, over these."""
    match = re.search(r"busy (\d+)% of an? ([\d.]+ (?:s|ms|µs)) ", report.verdict)
    a = result.main
    if match is None or a.device_id is None:
        return
    number, unit = match[2].split()
    step = float(number) * {"s": 1e9, "ms": 1e6, "µs": 1e3}[unit]
    assert int(match[1]) / 100 == pytest.approx(
        a.breakdown.busy.total / max(1, a.step_count) / step, abs=0.04
    )


def test_work_that_no_fix_changes_keeps_the_device_busy(result: AnalysisResult) -> None:
    """``With all fixes: …, GPU busy 98%``: at least with the work that no ranked fix selects. So
    it is with work of one name that a fix moves beside other work: that stays in order."""
    report, a = result.report, result.main
    if report.replay is None or report.replay.busy_after_ns is None or a.device_id is None:
        return
    remaining, moved = a.in_window.copy(), ~a.in_window
    for finding in ranked_findings(report):
        for edit in finding.edits:
            if edit.op in ("resize", "remove_skew"):
                return
            if edit.select.on == "gpu":
                remaining &= ~selected_gpu(a, edit.select)
                if edit.op == "overlap":
                    moved |= a.in_window & selected_gpu(a, edit.select)
            else:
                return  # calls are removed with the work that they launch
    untouched = a.device_busy(remaining).total / max(1, a.step_count)
    by_name = a.trace.gpu.filter(moved).group_by("name").agg(pl.col("dur").sum())["dur"]
    in_order = float(by_name.max() or 0) / max(1, a.step_count)  # type: ignore[arg-type]
    assert report.replay.busy_after_ns >= 0.98 * max(untouched, in_order)


def test_notes_do_not_deny_gains_of_fixes(result: AnalysisResult) -> None:
    report, a = result.report, result.main
    fixed = [
        selected_gpu(a, edit.select)
        for finding in ranked_findings(report)
        for edit in finding.edits
        if edit.op == "overlap"
    ]
    for note in report.notes:
        reason = "" if note.impact is None else note.impact.reason
        for edit in note.edits:
            if edit.op == "overlap" and "gains little" in reason:
                selected = selected_gpu(a, edit.select)
                assert not any((selected & ~other).sum() == 0 for other in fixed), note.rule


def test_all_fixes_leave_unselected_device_work(result: AnalysisResult, text: str) -> None:
    """The step time with all fixes is the last of the steps after each, and no shorter than the
    work that is left."""
    report, a = result.report, next(iter(result.analyses.values()))
    stairs = build_fix_sequence(report)
    if stairs is None:
        return
    after = stairs.fixes[-1].left_ns
    assert after == pytest.approx(step_after_fixes(report))
    if report.replay is not None:
        remaining_share = report.replay.step_after_ns / report.replay.measured_ns
        assert remaining_share == pytest.approx(after / report.step_ns)
    match = re.search(r"With (?:this fix|all fixes): [\d.]+ \S+ → ([\d.]+ \S+) ", text)
    assert match is None or match[1] == t.format_duration(after)
    fixes = ranked_findings(report)
    edits = [edit for finding in fixes for edit in finding.edits]
    selected = any(e.select.on == "gpu" or e.op in ("resize", "remove_skew") for e in edits)
    is_job_gain = any(f.impact is not None and f.impact.is_job_gain for f in fixes)
    busy = a.device_busy(a.in_window).total / max(1, a.step_count)
    if a.device_id is not None and not selected and not is_job_gain and busy <= report.step_ns:
        assert after >= 0.999 * busy


def test_shared_gpu_is_marked_beside_its_name(report: Report, text: str) -> None:
    shared = any(note.rule == "gpu-shared" for note in report.notes)
    device = re.search(r" device +GPU .*?( run | steps | window )", text)
    assert shared == bool(device and re.search("other process(es)? uses?", device[0]))


def test_phase_limit_ignores_host_time_added_by_the_profiler(
    report: Report,
) -> None:
    """The share of the host in the run's own step is what leaves the device idle there."""
    if report.step is None or report.step.busy_share is None or report.inference is None:
        return
    phases = report.inference.phases
    if len(phases) == 1 and phases[0].limit == "host":
        assert phases[0].limit_share == pytest.approx(1 - report.step.busy_share, abs=0.05)
    if len(phases) == 1 and report.step.busy_share > 0.6:
        assert phases[0].limit != "host"


def test_verdict_with_a_small_first_gain_gives_the_total_gain(
    report: Report,
) -> None:
    result = [f.impact for f in ranked_findings(report) if f.impact is not None]
    gains = [i.gain_ns or 0 for i in result if i.currency == "step_time" and i.unit == "step"]
    if report.status != "bottlenecks" or len(gains) < 2 or max(gains) < 2 * gains[0]:
        return
    faster = re.search(r"\(((?:(?:up to|perhaps) )?[\d.]+× faster)\)", describe_all_fixes(report))
    assert faster and report.verdict.endswith(f" ({faster[1]}).")
    assert len(textwrap.wrap(report.verdict, 80)) <= 4


def test_verdict_gives_the_range_of_its_gain(report: Report) -> None:
    for finding in ranked_findings(report)[:1]:
        spread = t.format_gain_range(finding)
        if spread is not None and re.search("A fix (saves|may save) ", report.verdict):
            assert f"range {spread})" in report.verdict


@pytest.mark.parametrize("name", ["h100/host_metric", "h100/gpt2_eager_attention", "dlrm_8ranks"])
def test_saving_of_fixes_is_independent_of_selection_order(name: str) -> None:
    """A fix that is offered saves what the step lacks to that of both; alone, its own gain."""
    result = analyze_cached(str(CORPUS / name))
    report = result.report
    full = build_fix_sequence(report)
    assert full is not None
    first, second, *_ = numbers = [stair.priority for stair in full.fixes]
    gain = {f.priority: f.impact.gain_ns for f in report.findings if f.impact is not None}

    def chosen_stairs(*kept: int | None) -> dict[int | None, StepAfterFix]:
        stairs = build_chosen_fix_sequence(report, kept, result.estimator)
        assert stairs is not None
        return {stair.priority: stair for stair in stairs.fixes}

    none, both = chosen_stairs(), chosen_stairs(*numbers)
    assert [none[n].saved_ns for n in (first, second)] == [gain[first], gain[second]]
    assert [both[n].left_ns for n in numbers] == [stair.left_ns for stair in full.fixes]
    of_two = sum(stair.saved_ns for stair in full.fixes[:2])
    for kept, offered in ((first, second), (second, first)):
        stairs = chosen_stairs(kept)
        assert stairs[kept].saved_ns + stairs[offered].saved_ns == pytest.approx(of_two)


def test_insufficient_data_excludes_critical_findings(report: Report, text: str) -> None:
    grave = [f.rule for f in report.findings if f.severity in ("critical", "warning")]
    assert "too few for advice" not in text or not grave


@pytest.mark.parametrize("what", NEVER)
def test_reports_hold_no_impossible_sentences(text: str, what: str) -> None:
    match = re.search(NEVER[what], text)
    assert match is None, text[max(0, match.start() - 80) : match.end() + 40]


def test_no_device_is_unknown_beside_its_name(report: Report, text: str) -> None:
    if report.scope.device_name:
        assert "model not recorded" not in text


def test_shapes_are_requested_only_where_none_are_recorded(report: Report, text: str) -> None:
    assert "no input shapes" not in text or "GEMM shapes" not in text


def test_stacks_slow_no_host_that_recorded_none(text: str) -> None:
    if "without Python stacks" in text:
        assert "with_stack=True shows it" not in text


def test_report_without_steps_has_no_per_step_figures(report: Report) -> None:
    """Summaries and fixes of a recording without steps are of the recording."""
    if report.scope.step_source != "whole trace":
        return
    sentences = [
        s for f in report.findings for s in (f.summary, f.fix) if s and "of each step" in s
    ]
    assert not sentences


def test_snippets_of_python_can_be_pasted(report: Report) -> None:
    """Each is whole: nothing is left open, alternatives are comments or statements."""
    wrong = []
    for finding in report.findings:
        code = finding.code or ""
        if not code or re.search(NOT_PYTHON, code, re.MULTILINE):
            continue
        try:
            ast.parse(code)
        except SyntaxError as error:
            wrong.append((finding.rule, error.msg, code))
    assert not wrong


def test_fix_starts_with_the_action(report: Report) -> None:
    """A short report shows no other: it refers to nothing before it, and is not cut."""
    begins = r"(?:First|Then|Otherwise|Or|Also|Too|It|This|That|These|Those|They|Run \d+|\d+)\b"
    sentences = [t.first_sentence(each.fix) for each in (*report.findings, *report.notes)]
    assert not [each for each in sentences if re.match(begins, each) or each.endswith("…")]


def test_code_for_unrecorded_collectives_is_not_shown() -> None:
    """All-to-alls have most of the exposed time; all-gathers and all-reduces have the rest."""
    result = analyze_cached(str(CORPUS / "two_ranks_rank0.json.gz")).report.findings
    finding = next(f for f in result if f.rule == "exposed-communication")
    assert finding.code is not None
    assert "alltoall_pooled" in finding.code
    assert "DDP" not in finding.code


@pytest.mark.parametrize(
    ("name", "says", "denies"),
    [
        # 180 launches of the same names, grids and order in each of five steps, until their
        # gradients are sparse
        ("wide_embedding", "launches: .* instead of this fix", "differ from step to step"),
        ("conv_heuristics", "keeps channels-last order", "batch norm reaches"),  # it has none
        (
            "vocabulary",
            "run in FP32, others in BF16",
            "without mixed precision",
        ),  # 84 of 477 kernels
        ("latent_sampler", "pass 5 16.9 ms", "tokens/s 8"),  # the eight are class labels
        ("points_max_split", "3 of 4 steps call the driver", "Each step calls the driver"),
        ("citation_gcn", "indexing 89% of device work", "embedding"),  # gathers of a graph
        (
            "citation_gcn",
            "aten::gather takes most device time: 67% of the step, at 8%",
            "with_stack",
        ),
        # its events hold samples of lines 63 and 66, and its manifest the command
        (
            "host_metric",
            "stack samples point to host_metric.py:66",
            "no Python stacks were|train.py",
        ),
        ("ping_pong", "stack samples point to ping_pong.py:31", "line not recorded|ncu -k"),
        ("ping_pong", "Run aten::clamp on the GPU", "cupy"),
        ("voice_stream", "advisor record --deep", "with_stack=True"),
    ],
)
def test_a_claim_agrees_with_its_file(name: str, says: str, denies: str) -> None:
    report = analyze_cached(str(CORPUS / "h100" / name)).report
    text = re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))
    assert re.search(says, text)
    assert not re.search(denies, text)


@pytest.mark.parametrize(
    ("name", "says", "denies"),
    [
        # 116 MiB of 79 GiB; 7% busy, so faster kernels would only wait longer
        ("h100_bert_small_inference", "memory peak", r"What held the memory|ncu -k| or Every step"),
        ("mi300_torch_compile", "compute 12.5 ms", "11 ns"),
        ("old_capitalised_categories", "One-off costs", "alone takes 1.41 ms"),
        # a possibility beside an advice of 6.21 ms
        ("a100_train_6steps", "possibly 3.82 to 12.6 ms", "about 10.9 ms"),
        # 1 GiB * 63/64 in the mean 53.1 ms is 19.9 GB/s; the faster call has 24.9
        ("two_ranks_rank0", r"best 24\.9", "ncu -k"),
        (
            "pairs/loader_autograd_workers4",
            "for Volta and Turing; later GPUs run",
            "does not name its GPU|no TF32",
        ),
    ],
)
def test_report_states_key_facts_once(name: str, says: str, denies: str) -> None:
    report = analyze_cached(str(CORPUS / f"{name}.json.gz")).report
    text = re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))
    assert re.search(says, text)
    assert not re.search(denies, text)


MAX_LINES = 4
"""Longest verdict, in lines of 80 columns."""
RETIRED = (
    "no rule has a fix", "fewer bits", "Fixing this alone", "python train.py", "cudnn attention",
    "uint8 images", "the range is assumed", "off by as much", "no longer written",
    "if the link is recorded", "argsort", "go on coming", "stored operand", "GPU only c",
    "made again in each", "ends too", "as the others.", "possibilities", "most of all",
)  # fmt: skip
"""Words that readers from outside did not understand, or that belong to another program."""


def test_the_verdict_takes_four_lines(report: Report) -> None:
    assert len(textwrap.wrap(report.verdict, 80)) <= MAX_LINES, report.verdict


def test_a_verdict_points_at_a_note_on_several_times_as_much(report: Report) -> None:
    first = report.findings[0].share_of_step if report.findings else 0.0
    large = [n for n in report.notes if is_large_note(n, report)]
    if report.status == "bottlenecks" and first and large:
        note = max(large, key=lambda n: share_of_note(n, report))
        if share_of_note(note, report) >= 3 * first:
            unproven = f"Unproven, for {t.format_share(share_of_note(note, report))} of the step: "
            assert f"{unproven}{t.lower_first(t.first_clause(note.fix))}" in report.verdict


def test_line_on_hidden_findings_names_the_main_limit(report: Report) -> None:
    lines = REPORTS.render("terminal", report, width=80).splitlines()
    last = lines[-1]
    assert ("Not shown" not in "".join(lines)) or last.startswith("Not shown (--details): ")
    missing = [item.missing for item in report.not_checked if item.missing]
    if report.main_limit or missing:
        assert any(f" ({name})" in last for name in (report.main_limit, *missing))


def test_a_report_fits_a_screen(report: Report) -> None:
    lines = REPORTS.render("terminal", report, width=80).splitlines()
    assert len(lines) <= MAX_SCREEN_LINES, len(lines)
    assert max(map(cell_len, lines)) <= 80 or "://" in "".join(lines)


@pytest.mark.parametrize(
    "source",
    [
        CORPUS / "dlrm_8ranks",
        *sorted((CORPUS / "memory").glob("*.gz")),
        *sorted((CORPUS.parent / "data/recorded").glob("*.slow")),
    ],
    ids=lambda path: str(path.name),
)
def test_rank_memory_and_host_reports_fit_a_screen(source: Path) -> None:
    test_a_report_fits_a_screen(engine.analyze(str(source), Options(config={})))


def test_time_of_the_runs_steps_is_not_called_that_of_profiled_ones(report: Report) -> None:
    """36.5 ms "of the mean step" were "for the profiled step" in the note beside it."""
    for finding in report.findings:
        notes = " ".join(gain_conditions(finding, report))
        assert "of the mean step" not in finding.summary or "for the profiled step" not in notes


def test_words_that_readers_stumbled_over_are_gone(text: str) -> None:
    assert [words for words in RETIRED if words in text] == []


def test_no_two_notes_are_alternatives_to_each_other(report: Report) -> None:
    groups = [each.alternatives for each in report.notes if each.alternatives]
    ranked = {each.alternatives for each in report.findings}
    assert len(groups) == len(set(groups)) and not ranked & set(groups)


def test_waiting_host_gets_no_passed_check_on_waiting(report: Report) -> None:
    waits = sum(part.share for part in report.host if part.name == "sync")
    praised = any("makes the host wait" in check.text for check in report.passed)
    assert not praised or waits < 0.05


def test_low_use_of_the_peak_is_of_steps_of_matrix_work(report: Report) -> None:
    """78% copies beside 8% of products, and products in an eighth of the step, were such steps."""
    if any(note.rule == "low-mfu" for note in report.notes):
        matrix = {"gemm", "convolution", "attention"}
        share = sum(part.share for part in report.families if part.name in matrix)
        assert share * (report.busy_share or 0) > 0.25


def test_links_match_the_advised_collective(report: Report) -> None:
    for finding in report.findings:
        if "all-to-all" in finding.fix and "all_to_all" in finding.code:
            assert not any("ddp" in link or "fsdp" in link for link in finding.references)


def test_host_running_ahead_bounds_gain_of_faster_kernels() -> None:
    """The host's own steps of ads_ranker take 8.49 ms while profiled; the step had 12 ms, and 6.3
    to 6.8 with the cure."""
    result = analyze_cached(str(CORPUS / "h100/ads_ranker"))
    (finding,) = [f for f in result.report.findings if f.rule == "dense-embedding-gradient"]
    assert finding.impact is not None and finding.impact.gain_ns is not None
    assert step_after_fixes(result.report) >= 0.9 * (result.report.host_step_ns or 0) - 1.4e6
    assert (finding.impact.low_ns or 0) <= 5.2e6 and (finding.impact.high_ns or 0) >= 5.7e6


def test_idle_time_selected_by_two_edits_counts_once() -> None:
    """The profiler takes 1.5 ms of the 75.5 ms of idle time in b200_eager, and compiling 0.4 ms."""
    result = analyze_cached(str(CORPUS / "b200_eager.json.gz"))
    (finding,) = [f for f in result.report.findings if f.rule == "launch-bound"]
    gaps = result.main.gaps
    idle = gaps.filter(~gaps["cause"].is_in(["profiler", "compile"]))["dur"].sum()
    assert finding.impact is not None and finding.impact.high_ns is not None
    assert finding.impact.high_ns <= idle / result.main.step_count


def test_dense_layer_fix_saves_idle_time_of_dense_layers() -> None:
    result = analyze_cached(str(CORPUS / "dlrm_8ranks"))
    (finding,) = [f for f in result.report.findings if f.rule == "launch-bound"]
    assert "only the dense layers" in finding.fix
    (dense,) = [e.value for e in finding.evidence if e.label == "of it, in dense layers"]
    (idle,) = [e.value for e in finding.evidence if e.label == "idle for launches"]
    assert finding.impact is not None and 0 < float(dense or 0) < float(idle or 0) / 2
    assert (finding.impact.high_ns or 0) < float(idle or 0)  # other ranks gain too
    assert not {place.op for place in finding.where} & {"aten::copy_", "record_param_comms"}


def test_incompatible_fixes_are_alternatives() -> None:
    """Sizes of sparse gradients vary from step to step, and CUDA graphs need the same ones."""
    report = analyze_cached(str(CORPUS / "h100/wide_embedding")).report
    assert [f.rule for f in ranked_findings(report)] == ["dense-embedding-gradient"]
    graphs = [f for f in report.findings if f.needs == "sizes repeat"]
    assert {f.folded_under for f in graphs} == {"dense-embedding-gradient"}
    text = re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))
    assert text.count("instead of this fix") == 1


def test_copy_savings_beyond_copy_time_are_late_launches(report: Report) -> None:
    """A copy that blocks the host until the GPU is done delays the launches after it."""
    late = sum(cause.ns for cause in report.idle if cause.cause in LATE_CAUSES)
    text = re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))
    for finding in report.findings:
        if finding.rule != "pageable-copies" or finding.impact is None:
            continue
        copy_ns = sum(float(e.value or 0) for e in finding.evidence[:2])
        saved = max(finding.impact.gain_ns or 0, finding.marginal_gain_ns or 0)
        assert saved <= 1.05 * copy_ns + late
        assert saved <= 1.5 * copy_ns or "late launches leave the GPU idle" in text


def test_host_fixes_leave_work_launched_before_the_recording() -> None:
    """An H100 trains a radiance field: 27.7 ms of work per step, 1.03 of it launched before."""
    result = analyze_cached(str(CORPUS / "h100" / "nerf_scene"))
    (a,) = result.analyses.values()
    busy = a.breakdown.busy.total / a.step_count
    assert busy > a.device_busy(a.in_window).total / a.step_count + 1e6
    assert len(ranked_findings(result.report)) == 2
    assert step_after_fixes(result.report) == pytest.approx(busy, rel=1e-3)
