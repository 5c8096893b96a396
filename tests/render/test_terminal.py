"""The terminal report: fits, reads top down, shows no name as anything but text."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from advisor.advise import finding_text
from advisor.advise.engine import analyze
from advisor.advise.rule_loading import load_rules
from advisor.core import text as t
from advisor.core.finding import Edit, Evidence, Finding, Impact, Location, Select
from advisor.core.ranks import Ranks
from advisor.core.report import Report
from advisor.core.report_replay import Replay
from advisor.core.report_time import Family
from advisor.core.text import first_clause
from advisor.render.document import (
    Card,
    Code,
    Document,
    FieldList,
    Grid,
    RenderOptions,
    TextField,
)
from advisor.render.formats import REPORTS
from advisor.render.formats.terminal import MAX_SCREEN_LINES, Page, Terminal
from advisor.replay.project.precision import INFERENCE, TRAINING
from advisor.testing import TraceBuilder

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Make = Callable[..., Report]


def max_width(text: str) -> int:
    return max(cell_len(ANSI.sub("", line)) for line in text.split("\n"))


def section(text: str, title: str) -> str:
    """The lines under a heading."""
    start = text.index(f"\n{title}")
    end = re.compile(r"^\S.* ─{3,}$", re.MULTILINE).search(text, start + len(title) + 81)
    return text[start : end.start() if end else len(text)]


@pytest.mark.parametrize("findings", [0, 1, 12])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("more", [{}, {"details": True}, {"brief": True}])
def test_every_line_fits(
    report: Make, ranks: Callable[..., Ranks], findings: int, width: int, colour: bool, more: Any
) -> None:
    result = report(findings, ranks=ranks(3))
    text = REPORTS.render("terminal", result, width=width, colour=colour, **more)
    assert max_width(text) <= width


def test_a_row_is_as_wide_as_its_own_gain_allows(report: Make) -> None:
    """A card with a long reason above it does not shorten the titles of those below."""
    result = report(0)
    risk = Finding(
        summary="why", title="Steps grow", impact=Impact(currency="risk", reason="x" * 60)
    )
    step = Finding(
        summary="why",
        title="Some steps take much longer",
        impact=Impact(currency="run_time", gain_ns=10**8, low_ns=0, high_ns=10**8),
    )
    text = REPORTS.render("terminal", replace(result, risks=[risk, risk, risk, step]))
    assert "Some steps take much longer" in text


def test_long_title_beside_a_gain_is_complete(report: Make) -> None:
    title = "Resident memory of the process grows from step to step"
    risk = Finding(
        summary="why", title=title, impact=Impact(currency="risk", reason="out in 4,030 steps")
    )
    lines = REPORTS.render("terminal", replace(report(3), risks=[risk]), width=80).split("\n")
    row = next(number for number, line in enumerate(lines) if line == f" ∙  {title}")
    assert lines[row + 1] == "risk: out in 4,030 steps".rjust(80)


def test_heading_is_complete_and_long_aside_moves_below() -> None:
    page = Page(60, colour=False)
    page.section("Where the step's time goes on the main thread", "profiled step, 92.2 ms")
    page.section("Where the time goes", "profiled step, 92.2 ms")
    _, head, aside, _, next_line = page.getvalue().split("\n")[:5]
    assert head.startswith("Where the step's time goes on the main thread ──")
    assert aside == "  profiled step, 92.2 ms"
    assert next_line.startswith("Where the time goes · profiled step, 92.2 ms ──")


@pytest.mark.parametrize("stacks", [False, True])
def test_first_finding_has_a_line_or_a_recording_option(stacks: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.python("train.py(12): step") if stacks else nullcontext():
            b.loader_wait(9000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("gemm", 900)
            b.sync()
    report = analyze(b.write(tmp_path / "trace.json"))
    text = REPORTS.render("terminal", report)
    assert report.findings
    assert ("line not recorded; with_stack=True shows it" in text) != stacks


@pytest.mark.parametrize("findings", [0, 1, 2, 3, 6])
def test_report_fits_a_screen_and_counts_omissions(
    report: Make, replay: Callable[..., Replay], findings: int
) -> None:
    result = report(findings, replay=replay())
    text = REPORTS.render("terminal", result)
    assert len(text.splitlines()) <= 45
    words = " ".join(text.split())
    assert re.search(r"Not shown \(--details\): .*1 skipped check, 1 limit\b", words)
    for number in range(1, findings + 1):
        assert f" {number}  Finding number {number} of the step" in text
    full = REPORTS.render("terminal", result, details=True)
    assert "Not shown" not in full
    assert full.count("    verify   ") == findings


@pytest.mark.parametrize("options", [{"brief": True}, {"top": 0}])
def test_a_gain_in_a_row_has_its_range_however_long_the_title(
    report: Make, options: dict[str, Any]
) -> None:
    result = report().findings[0]
    long_titled = replace(
        report(), findings=[replace(result, title="A title " + "of many words " * 3)]
    )
    text = REPORTS.render("terminal", long_titled, **options)
    assert finding_text.describe_gain(result) in text
    assert re.search(r"\(.*–.*\)", finding_text.describe_gain(result))


def test_brief_is_the_verdict_and_three_rows(report: Make) -> None:
    result = report(5)
    lines = REPORTS.render("terminal", result, brief=True).splitlines()
    assert lines[0] == result.verdict
    rows, fixes = lines[1:7:2], lines[2:7:2]
    assert [line[:23] for line in rows] == [f" {n}  Finding number {n} of" for n in (1, 2, 3)]
    assert lines[1].endswith("up to 40 ms (20–40 ms), 10%")
    assert fixes == ["    Do the other thing instead of this"] * 3
    assert lines[7:] == ["    2 more fixes: run without --brief."]


@pytest.mark.parametrize(
    ("fix", "clause"),
    [
        (
            "Set num_workers=2 to load in workers: the step needs 1. More.",
            "Set num_workers=2 to load in workers",
        ),
        ("Call F.gelu(x), which is one kernel.", "Call F.gelu(x)"),
        ("Work on whole batches, so that one read serves all.", "Work on whole batches"),
        ("Use it: the rest.", "Use it: the rest"),
    ],
)
def test_brief_fix_shows_action_without_reason(fix: str, clause: str) -> None:
    assert first_clause(fix) == clause


def test_caveats_of_several_fixes_stand_once_above_them(report: Make) -> None:
    three_fixes, shared, assumed = report(3), "only 2 of 9 steps measured", "the queue is long"
    one = replace(
        three_fixes.findings[0],
        confidence_notes=[shared, "of the first alone"],
        assumptions=[assumed],
    )
    other = replace(three_fixes.findings[1], confidence_notes=[shared])
    full = REPORTS.render(
        "terminal",
        replace(three_fixes, findings=[one, other, three_fixes.findings[2]]),
        details=True,
    )
    above, below = full.split(one.title + "\n", 1)
    assert f"caveats  of several fixes: {shared}" in above and shared not in below
    assert f"of the first alone; assumes: {assumed}" in " ".join(below.split())
    assert "of several fixes" not in REPORTS.render("terminal", report(1), details=True)


def test_a_fix_has_one_price_in_every_format(report: Make) -> None:
    price = "up to 20 ms (10–20 ms), 5%"
    for form in ("terminal", "markdown", "html", "notebook"):
        assert price in REPORTS.render(form, report(2)), form


def test_possibly_zero_gain_names_its_condition(
    report: Make, finding: Callable[..., Finding]
) -> None:
    impact = Impact(
        currency="step_time", gain_ns=10_800_000, low_ns=0, high_ns=10_800_000, share=0.027,
        method="replay",
    )  # fmt: skip
    one = finding(1, impact=impact, assumptions=["two CPU cores are free"])
    text = REPORTS.render("terminal", report(findings=[one]))
    assert "up to 10.8 ms, 3%" in text
    assert "no gain unless two CPU cores are free" in text


@pytest.mark.parametrize("width", [80, 120])
def test_hostile_names_fit_and_stay_names(
    report: Make, replay: Callable[..., Replay], hostile_name: str, width: int
) -> None:
    full = report(2, hostile_name, replay=replay(critical={hostile_name: 1.0}))
    full.notes = full.findings[1:]
    full.risks = full.findings[:1]
    plain = REPORTS.render("terminal", full, width=width)
    assert max_width(plain) <= width
    for char in plain.replace("\n", ""):
        assert unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    colored = REPORTS.render("terminal", full, width=width, colour=True)
    assert ANSI.sub("", colored) == plain
    assert "\x1b" not in ANSI.sub("", colored)


def test_markup_in_a_name_is_shown_not_obeyed(report: Make) -> None:
    name = "[bold red]hot[/bold red] :fire:"
    text = REPORTS.render("terminal", report(1, name), colour=True)
    assert name in ANSI.sub("", text)


def test_color_is_off_by_default(report: Make) -> None:
    assert "\x1b" not in REPORTS.render("terminal", report(3))
    assert "\x1b" in REPORTS.render("terminal", report(3), colour=True)


def test_only_labels_are_dim(report: Make) -> None:
    lines = REPORTS.render("terminal", report(1), colour=True).split("\n")
    assert lines[0].startswith("\x1b[1;33mGPU busy 82%")
    (why,) = [line for line in lines if "why      " in ANSI.sub("", line)]
    assert re.match(r"\x1b\[2m    why      \x1b\[0mEach step waits", why)


def test_sections_are_verdict_time_findings_and_details(report: Make) -> None:
    text = REPORTS.render("terminal", report(2), details=True)
    order = [
        "GPU busy 82%",
        "NVIDIA A100",
        "Where the step's time goes",
        "What to change",
        "Passed checks",
        "Skipped checks",
        "Limits of this trace",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert places[0] == 0


def test_finding_shows_all_of_its_parts_in_order(report: Make) -> None:
    text = section(REPORTS.render("terminal", report(1), details=True), "What to change")
    for part in (
        "up to 40 ms (20–40 ms), 10%",
        "advisor is 80% sure of the cause",
        "/home/me/project/train.py:42 in train_step",
        "aten::item",
        "share of the step 10%, limit 5% (XProf)",
        "bandwidth not measured",
        "Do the other thing",
        "│ step(quick=True)",
        "Profile again",
        "only 2 steps measured",
    ):
        assert part in text, part


def test_index_subtracts_gains_one_after_another(report: Make) -> None:
    # By hand: 400 - 40 = 360; 20 alone, 10 after the first: 350; 13.33 / 2 = 6.67: 343.3.
    text = section(REPORTS.render("terminal", report(3), details=True), "Step time after")
    lefts = re.findall(r"^  [123][.] .* ([\d.]+) ms$", text, re.MULTILINE)
    assert lefts == ["360", "350", "343"]


def test_replay_shows_limit_and_accuracy(
    report: Make, replay: Callable[..., Replay], finding: Callable[..., Finding]
) -> None:
    impact = Impact(currency="step_time", gain_ns=40_000_000, share=0.1, method="replay")
    fixed = finding(1, impact=impact, marginal_gain_ns=56_700_000)
    full = report(findings=[fixed], replay=replay())
    text = REPORTS.render("terminal", full, details=True)
    # By hand: 300 of 401 ms are 75%, 101 are 25%.
    assert "critical path: 75% on the host" in text
    unprofiled = report(findings=[fixed], replay=replay(unprofiled=True))
    assert "critical path without the profiler: 75%" in REPORTS.render("terminal", unprofiled)
    assert "25% on GPU compute" in text
    # 400 - 56.7 is 343.3, 400 / 343.3 is 1.165, 300 / 343.3 is 0.874
    after = "With this fix: 400 ms → 343 ms (1.17× faster), GPU busy 87%."
    assert after in " ".join(text.split())
    assert "within 1.2% of the measured steps" in " ".join(text.split())
    assert "predicts 98% of 9,450 starts of GPU work within 5 µs" in " ".join(text.split())
    assert "up to" not in text
    assert "'Up to'" in REPORTS.render("terminal", report(1), details=True)


def test_finding_depending_on_another_names_it(
    report: Make, finding: Callable[..., Finding]
) -> None:
    late = finding(2, after_fix="rule-1", marginal_gain_ns=9_000_000)
    text = " ".join(
        REPORTS.render("terminal", report(findings=[finding(1), late]), details=True).split()
    )
    assert "gains only after 'Finding number 1 of the step'" in text
    assert "no gain by itself, about 9 ms after fix 1" in text


def test_finding_of_another_rank_names_the_rank(
    report: Make, finding: Callable[..., Finding]
) -> None:
    other = finding(1, other_rank=True, trace_rank=7)
    assert "On rank 7: " in REPORTS.render("terminal", report(findings=[other]))
    other_rank = finding(1, trace_rank=7)
    assert "On rank 7" not in REPORTS.render("terminal", report(findings=[other_rank]))


def test_wide_code_moves_left_before_it_is_folded(
    report: Make, finding: Callable[..., Finding]
) -> None:
    line = "x" * 70
    text = REPORTS.render("terminal", report(1, findings=[finding(1, code=f"a = 1\n{line}")]))
    assert f"\n    code\n    │ a = 1\n    │ {line}\n" in text
    text = REPORTS.render("terminal", report(1, findings=[finding(1, code="y" * 90)]))
    assert "y" * 90 in "".join(re.findall(r"│ +(y+)$", text, re.MULTILINE))


def test_code_folds_between_words_with_its_comment_above(
    report: Make, finding: Callable[..., Finding]
) -> None:
    code = (
        "  run(first_argument, second_argument, third_argument, a_fourth_argument_and);"
        "          // once, at the end"
    )
    text = REPORTS.render("terminal", report(1, findings=[finding(1, code=code)]))
    assert "│   // once, at the end\n" in text
    assert (
        "│   run(first_argument, second_argument, third_argument,\n"
        "    │       a_fourth_argument_and);\n"
    ) in text


def test_a_wide_page_has_longer_names_and_links_are_whole_on_any(
    report: Make, finding: Callable[..., Finding]
) -> None:
    link = f"https://docs.nvidia.com/{'a' * 70}"
    one = finding(1, where=[Location(kernel=f"{'k' * 59}_tail")], references=[link])
    narrow, wide = (
        REPORTS.render("terminal", report(findings=[one]), width=width, details=True)
        for width in (80, 100)
    )
    assert f"{'k' * 59}_tail" in wide and f"{'k' * 59}_tail" not in narrow
    assert all(f" {link}\n" in page for page in (narrow, wide))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_folded_python_is_the_same_program(width: int) -> None:
    kept = "  # leave: " + ", ".join(["transformer.layers.0–23 > attention > projection"] * 3)
    programs = [text.format(kept=kept) for each in (INFERENCE, TRAINING) for text in each.values()]
    for rule in load_rules(config={}):
        attributes = [vars(cls) for cls in type(rule).__mro__]
        programs += [each["code"] for each in attributes if isinstance(each.get("code"), str)]
        cases = [case for each in attributes for case in each.get("cases", {}).values()]
        programs += [case["code"] for case in cases if "code" in case]
    compiled = 0
    for code in programs:
        try:
            tree = ast.dump(ast.parse(code))
        except SyntaxError:  # for a shell, or of C++
            continue
        page = Page(width, colour=False)
        page.code("", code)
        printed = page.getvalue()
        assert max_width(printed) <= width
        assert ast.dump(ast.parse(re.sub(r"(?m)^ +│ ?", "", printed))) == tree
        compiled += 1
    assert compiled > 100


def test_a_column_of_dashes_leaves_its_room_to_the_names() -> None:
    name = "TimesformerForVideoClassification"
    head = ["phase", "steps", "batch", "tokens", "step", "per token", "tokens/s", "busy", "limit"]
    rows = [[name, "1", "–", "–", "120 ms", "–", "–", "99%", "memory 88%"]]
    document = Document("", [Grid(head, rows, optional=(3, 6))], name="phases")
    lines = Terminal().draw(document, RenderOptions(width=80)).split("\n")
    assert lines[0].split() == ["phase", "steps", "step", "tokens/s", "busy", "limit"]
    assert lines[1].split() == [name, "1", "120", "ms", "–", "99%", "memory", "88%"]
    rows.append(["decode", "2", "8", "8", "1 ms", "–", "–", "–", "–"])
    lines = Terminal().draw(document, RenderOptions(width=80)).split("\n")
    assert "batch" in lines[0] and "per token" not in lines[0]
    wide = Terminal().draw(document, RenderOptions(width=120)).split("\n")
    assert wide[0].split() == " ".join(head).split()


def test_table_shortens_locations_but_not_figures() -> None:
    page = Page(40, colour=False)
    place = "/home/someone/projects/a/very/long/way/train.py:14 · gradients"
    page.table(["line", "bytes", "of it"], [[place, "90 MiB", "40%"], ["a.py:3", "1 KiB", "<1%"]])
    head, first, second = page.getvalue().splitlines()
    assert head.endswith("  bytes  of it") and second.endswith("  1 KiB    <1%")
    assert first == "  …rain.py:14 · gradients  90 MiB    40%"
    assert {len(line) for line in (head, first, second)} == {40}


@pytest.mark.parametrize(("lines", "rows"), [(6, 6), (20, 6), (20, 12), (20, 18)])
def test_free_lines_show_reasons_and_then_code_of_later_fixes(lines: int, rows: int) -> None:
    def card(number: int, *, main: bool = False) -> Card:
        fields = [TextField("why", [f"Reason {number}."]), TextField("fix", [f"Action {number}."])]
        code = "\n".join(f"call_{number}({n})" for n in range(lines if number == 1 else 4))
        content = [FieldList(fields), Code(code)]
        return Card(f"Card {number}", content, number=str(number), main=main)

    figures = [TextField(f"f{n}", [f"figure {n}"], spare=1 + n % 5) for n in range(rows)]
    cards = [card(1), card(2), card(3, main=True)]
    text = Terminal().draw(Document("Slow.", [FieldList(figures), *cards], name="report"))
    assert text.count("\n") <= MAX_SCREEN_LINES
    assert all(f"Reason {n}" in text and f"Action {n}" in text for n in (1, 2, 3))
    assert "call_3(0)" in text  # of the largest fix, before figures that are spare
    if text.count("\n") <= MAX_SCREEN_LINES - 4:
        assert "call_2(0)" in text


def test_a_place_is_shown_once(report: Make, finding: Callable[..., Finding]) -> None:
    one = finding(1)
    one = replace(one, where=[*one.where, *one.where, Location(op="aten::other")])
    text = REPORTS.render("terminal", report(1, findings=[one]), details=True)
    assert text.count("/home/me/project/train.py") == 1
    assert "aten::other" in text


def test_one_finding_needs_no_index(report: Make) -> None:
    one, two = (REPORTS.render("terminal", report(n), details=True) for n in (1, 2))
    assert "step then" not in one
    assert "step then" in two


def test_top_option_hides_details_and_keeps_the_index(report: Make) -> None:
    text = section(REPORTS.render("terminal", report(12), top=3), "What to change")
    assert text.count("    fix ") == 3
    assert "9 more in detail (--top 12)" in text
    assert all(f"\n{number:>2}  Finding number {number} " in text for number in range(1, 13))


def test_gains_below_two_percent_have_their_own_heading(
    report: Make, finding: Callable[..., Finding]
) -> None:
    small = [finding(number) for number in (6, 7)]
    text = REPORTS.render("terminal", report(findings=small))
    assert "What to change" not in text
    lines = section(text, "Small gains")
    assert lines.count("    fix ") == 2
    assert all(f"\n{number:>2}  Finding number {number} " in lines for number in (6, 7))
    assert "    fix " in REPORTS.render("terminal", report(findings=small), details=True)


def test_known_cost_is_shown_with_unknown_or_minimum_gain(
    report: Make, finding: Callable[..., Finding]
) -> None:
    unknown = Impact(currency="unknown", reason="record a run without it")
    least = Impact(
        currency="step_time", gain_ns=4_000_000, low_ns=4_000_000, share=0.01,
        method="lower bound (replay)",
    )  # fmt: skip
    ranged = replace(least, low_ns=2_000_000)
    for impact, text in (
        (unknown, "unknown: record a run"),
        (least, "at least 4 ms, 1%"),
        (ranged, "about 4 ms (2 ms or more), 1%"),
    ):
        one = finding(1, impact=impact, costs_more_than_recorded=True)
        rendered = section(REPORTS.render("terminal", report(findings=[one])), "What to change")
        assert text in rendered
        assert "    fix " in rendered


def test_symptom_is_unnumbered_below_its_cause(
    report: Make, finding: Callable[..., Finding]
) -> None:
    cause = finding(1, alternatives="fuse")
    folded = {"priority": None, "folded_under": "rule-1"}
    symptom = finding(2, title="The symptom", **folded)
    rival = finding(3, title="The alternative", alternatives="fuse", **folded)
    text = section(
        REPORTS.render("terminal", report(1, findings=[cause, symptom, rival]), details=True),
        "What to change",
    )
    assert re.search(r"^    also +The symptom\b", text, re.MULTILINE)
    assert re.search(r"also The symptom( \([^)]*\))?: up to 20 ms", " ".join(text.split()))
    assert re.search(r"^    or +The alternative", text, re.MULTILINE)
    assert text.count("    fix ") == 1


def test_a_healthy_run_shows_no_empty_sections(report: Make) -> None:
    healthy = report(0, verdict="Healthy: nothing stands out.", not_checked=[], limits=[])
    text = REPORTS.render("terminal", healthy, details=True)
    assert text.startswith("Healthy")
    for title in ("What to change", "Skipped checks", "Limits", "Notes", "Ranks", "'Up to'"):
        assert title not in text


def test_without_device_work_the_bar_is_the_hosts(report: Make) -> None:
    cpu_only = report(0, time=[], idle=[], families=[], busy_share=None, mfu=None)
    cpu_only.scope.device = cpu_only.scope.device_name = None
    text = REPORTS.render("terminal", cpu_only)
    assert "on the host's main thread" in text
    assert re.search(r"^  █ (CPU )?operators +200 ms +50%$", text, re.MULTILINE)
    assert "GPU 0" not in text
    assert "MFU" not in text


def test_report_without_host_events_omits_the_host(report: Make) -> None:
    text = REPORTS.render("terminal", report(0, host=[], idle=[]), details=True)
    assert "on the GPU" in text
    assert "  host " not in text


def test_unmeasured_values_are_not_shown_as_zero(report: Make) -> None:
    text = REPORTS.render("terminal", report(0, mfu=None, memory_peak_bytes=None))
    assert "MFU not measured" in text
    assert "memory peak not measured" in text


def test_truncated_trace_is_reported_at_the_top(report: Make) -> None:
    cut = report(1)
    cut.inputs[0].truncated = True
    assert "cut off" in REPORTS.render("terminal", cut).split("Where the step")[0]


def test_a_trace_without_steps_is_called_a_recording(report: Make) -> None:
    recording = report(1)
    recording.scope.step_source = "whole trace"
    impact = recording.findings[0].impact
    assert impact is not None
    recording.findings[0] = replace(recording.findings[0], impact=replace(impact, per="recording"))
    text = REPORTS.render("terminal", recording)
    assert "Where the recording's time goes" in text
    assert "up to 40 ms of the recording (20–40 ms), 10%" in text


def test_rank_columns_without_values_are_left_out(
    report: Make, ranks: Callable[..., Ranks]
) -> None:
    text = section(REPORTS.render("terminal", report(1, ranks=ranks(2))), "Ranks")
    assert re.search(r"^ +1 +401 ms +80% +20 ms +70 ms +5% +1 ms$", text, re.MULTILINE)
    text = section(REPORTS.render("terminal", report(1, ranks=ranks(2, aligned=False))), "Ranks")
    assert re.search(r"^ +1 +401 ms$", text, re.MULTILINE)
    assert "arrives last" not in text
    assert "Skew is not measured" in text


def test_the_ranks_that_hold_up_many_others_are_shown(
    report: Make, ranks: Callable[..., Ranks]
) -> None:
    text = section(REPORTS.render("terminal", report(1, ranks=ranks(64))), "Ranks")
    numbers = [int(n) for n in re.findall(r"^ +(\d+) +\d+ ms", text, re.MULTILINE)]
    assert numbers == list(range(56, 64))
    assert "56 more ranks" in text


def test_risks_are_ranked_apart_from_time(report: Make, finding: Callable[..., Finding]) -> None:
    impact = Impact(currency="risk", reason="97% of the memory is taken")
    risk = finding(1, title="Near capacity", impact=impact, priority=None)
    text = REPORTS.render("terminal", report(1, risks=[risk]), details=True)
    assert "risk     97% of the memory is taken" in section(text, "Memory and risks")
    assert "Near capacity" not in section(text, "What to change")


def test_note_explains_its_missing_rank(report: Make, finding: Callable[..., Finding]) -> None:
    notes = [
        finding(3, title="A guess", validation="synthetic"),
        finding(1, title="A chance", informational=True, validation="real traces", confidence=0.42),
        finding(2, title="A cost", impact=Impact(currency="unknown", reason="of the recording")),
    ]
    text = REPORTS.render("terminal", report(0, notes=notes), details=True)
    unproven = text[text.index("Large but unproven") :]
    words = " ".join(unproven.split())
    assert re.search(r"A chance gain possibly [\d.to ]+ ms note a possibility \(advisor is", words)
    words = re.sub(r"gain possibly [\d.to ]+ ms ", "", words)
    assert "A chance note a possibility (advisor is 42% sure of the cause)" in words
    assert "A cost note of the recording" in words
    assert "A guess note not proven on real traces, and may gain nothing" in words
    assert unproven.count("    fix ") == 3


def test_findings_of_example_proven_rules_are_marked(
    report: Make, finding: Callable[..., Finding]
) -> None:
    text = REPORTS.render(
        "terminal", report(findings=[finding(1, validation="synthetic")]), details=True
    )
    assert "not proven on real traces" in " ".join(section(text, "What to change").split())


def test_note_with_larger_gain_explains_its_missing_rank(report: Make, finding: Make) -> None:
    fields = {"informational": True, "validation": "real traces", "confidence": 0.42}
    big = finding(1, "a chance", priority=None, **fields)
    result = report(2, notes=[big])
    assert big.impact.gain_ns >= result.findings[-1].impact.gain_ns
    why = "a possibility (advisor is 42% sure of the cause)"
    for page in (
        REPORTS.render("terminal", result, width=120, details=True),
        REPORTS.render("html", result),
        REPORTS.render("markdown", result),
    ):
        assert why in page
        assert "too little" not in page
        assert t.format_duration(big.impact.gain_ns) in page[page.index("a chance") :]


@pytest.mark.parametrize(("ms", "replayed"), [(120, False), (60, False), (120, True)])
def test_a_note_about_much_of_the_step_is_not_a_detail(
    report: Make, finding: Make, ms: int, replayed: bool
) -> None:
    note = finding(
        2,
        title="Messages are stored",
        informational=True,
        priority=None,
        evidence=[Evidence("time in them", ms * 1_000_000, "ns", per="step")],
        impact=Impact(currency="unknown", reason="not in the trace"),
        edits=[Edit(op="remove", select=Select(on="gpu"))] if replayed else [],
    )
    text = REPORTS.render("terminal", report(1, notes=[note]))
    on_page = "Large but unproven" in text
    assert on_page == (ms == 120 and not replayed)
    assert on_page == ("note     not in the trace" in text)
    assert ("1 note" in text) != on_page


def test_device_work_shares_add_up_and_name_their_total(report: Make) -> None:
    result = report(0, families=[Family("gemm", 30e6, 0.75, 3), Family("copy", 10e6, 0.25, 1)])
    text = REPORTS.render("terminal", result, width=120, details=True)
    assert "gemm 75% of device work · copy 25%" in text
