"""The HTML report: one file that loads nothing, runs nothing, and shows every name as a name."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from advisor.advise.engine import analyze_in_full
from advisor.core.finding import Finding
from advisor.core.report import HotLine, Report
from advisor.core.text import split_sentences, split_verdict
from advisor.measure.steps.step_lanes import CELLS, build_step_lanes
from advisor.render import figures
from advisor.render.document import Document, Grid, Paragraph, Section
from advisor.render.formats import REPORTS
from advisor.render.formats.html import MAX_TITLE, Html, block, style
from advisor.render.html import esc
from advisor.testing import TraceBuilder

Make = Callable[..., Report]
VOID = {"meta", "br", "hr", "link", "img", "input"}
OURS = set(
    """
        html head meta title style body a header main nav section footer h1 h2 h3 h4 p span b
        small div dl dt dd ul li table thead tbody tr th td svg rect path text article pre code
        details summary
        """.split()
)


class Page(HTMLParser):
    """The tags, attributes and texts of a page, which must be nested soundly."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All text of the page."""
        return " ".join("".join(self.texts).split())


def test_content_policy_allows_only_the_pages_own_styles(report: Make) -> None:
    page = Page(REPORTS.render("html", report()))
    (policy,) = [
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert "script-src" not in policy
    assert "unsafe-eval" not in policy


def test_page_loads_no_resources_and_runs_no_scripts(report: Make) -> None:
    page = Page(REPORTS.render("html", report(3)))
    for tag, attrs in page.tags:
        assert tag in OURS
        assert not {"src", "srcset", "data", "action", "style"} & attrs.keys(), (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")]
        if tag == "a":
            assert (attrs["href"] or "").startswith(("#", "https://"))
    assert "url(" not in style()
    assert "@import" not in style()


def test_hostile_names_stay_names(report: Make, hostile_name: str) -> None:
    page = Page(REPORTS.render("html", report(2, hostile_name)))
    assert {tag for tag, _ in page.tags} <= OURS
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    text = REPORTS.render("html", report(2, hostile_name))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    text.encode("utf-8")


def test_a_kernel_that_is_an_image_tag_is_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(5000, workers=0)
            with b.op(name, [[512, 512]], "float"):
                b.launch(name, 900, stream=7)
            b.sync()
    result = analyze_in_full(b.write(tmp_path / "x.json"))
    text = REPORTS.render("html", result.report, analysis=result.main)
    page = Page(text)
    assert "<img" not in text
    assert not any(tag == "img" for tag, _ in page.tags)
    for rendered in (text, result.report._repr_html_()):
        assert "<img" not in rendered


def test_a_script_of_a_rule_is_not_a_link(report: Make, finding: Callable[..., Finding]) -> None:
    bad = ["javascript:alert(1)", "data:text/html,x", 'https://x.org/" onclick="alert(1)']
    page = Page(REPORTS.render("html", report(findings=[finding(references=bad)])))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert [link for link in links if link and not link.startswith("#")] == [bad[2]]


def test_a_report_with_endless_names_stays_below_a_megabyte(report: Make) -> None:
    text = REPORTS.render("html", report(12, "x" * 200_000))
    assert len(text.encode()) < 1_000_000


def test_page_has_every_part_of_the_report(report: Make, replay: Callable[..., object]) -> None:
    result = report(3, replay=replay())
    text = Page(REPORTS.render("html", result)).text
    for wanted in (
        result.verdict,
        "400 ms",
        "82%",  # busy
        "38%",  # MFU
        "30 GiB of 40 GiB",
        "Finding number 2 of the step",
        "20 ms (10–20 ms), 5%",
        "5% (XProf)",
        "step(quick=True)",
        "Profile again: the wait is gone.",
        "train.py:42",
        "record_shapes=True",
        "the loader can be made faster",
    ):
        assert wanted in text


def test_first_fix_is_above_the_figures_with_a_link(report: Make) -> None:
    first = report(3)
    source = REPORTS.render("html", first)
    assert 'First fix: </b><a href="#f1">' in source
    assert source.index("First fix") < source.index('class="tiles"')
    assert 'id="f1"' in source
    assert "First fix" not in REPORTS.render("html", report(0))


def test_links_of_the_contents_lead_to_sections(report: Make) -> None:
    page = Page(REPORTS.render("html", report(3)))
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert "#what-to-change" in links and len(set(ids)) == len(ids)
    assert {str(href)[1:] for href in links if str(href).startswith("#")} <= set(ids)


def test_sections_of_one_title_have_addresses_of_their_own() -> None:
    titles = ("GPU 0", "GPU 0", "Main", "gpu 0")
    parts = [Section(title, [Paragraph("text")]) for title in titles]
    page = Page(Html().draw(Document("", parts, name="report")))
    ids = [str(attrs["id"]) for _, attrs in page.tags if attrs.get("id")]
    links = [str(attrs["href"])[1:] for tag, attrs in page.tags if tag == "a"]
    assert len(set(ids)) == len(ids) == len(titles) + 1
    assert links == ["main", *(each for each in ids if each != "main")]


def test_one_legend_explains_the_bar_and_the_lanes_of_a_step(tmp_path: Path) -> None:
    b = TraceBuilder(launch_us=5, latency_us=0)
    for _ in range(3):
        with b.step():
            with b.op("aten::mm"):
                b.launch("ampere_sgemm", 1000, stream=7)
            b.sync()
            b.host(3000)
    result = analyze_in_full(b.write(tmp_path / "step.json"))
    page = Page(REPORTS.render("html", result.report, analysis=result.main))
    assert "A typical step" in page.text and "stream 7" in page.text
    assert "idle: outside operators" in page.text and "idle: unknown" not in page.text
    classes = [str(attrs.get("class")) for tag, attrs in page.tags if tag == "span"]
    keys = [name for name in classes if name.startswith("key ")]
    assert len(keys) > 1 and len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("dur_ns", "step_ns", "ticks"),
    [
        (14.5e6, 2.5e6, ["0", "2.5 ms", "5 ms", "7.5 ms", "10 ms", "12.5 ms"]),
        (20e6, 5e6, ["0", "5 ms", "10 ms", "15 ms"]),
        (99e3, 20e3, ["0", "20 µs", "40 µs", "60 µs", "80 µs"]),
    ],
)
def test_an_axis_has_round_times(dur_ns: float, step_ns: float, ticks: list[str]) -> None:
    drawn = str(figures._draw_axis(dur_ns))
    assert re.findall(r">([^<>]+)</text>", drawn) == ticks
    places = [float(x) for x in re.findall(r'x="([\d.]+)%"', drawn)]
    expected = [100 * number * step_ns / dur_ns for number in range(len(ticks))]
    assert places == pytest.approx(expected, abs=0.01)


def test_long_table_shows_top_rows_and_all_on_demand() -> None:
    rows = [[f"rank {number}", f"{number} ms"] for number in range(40)]
    drawn = block(Grid(["rank", "step"], rows, short=rows[30:33]))
    visible, details, folded = drawn.partition("<details>")
    assert details and "All 40 rows" in folded
    assert [f"{n} ms<" in visible for n in (29, 30, 32, 33)] == [False, True, True, False]
    assert all(f">{n} ms<" in folded for n in range(40))
    assert "<details>" not in block(Grid(["rank", "step"], rows[:16], short=rows[:3]))


def test_stairs_decrease_by_the_added_gain_of_fixes(report: Make) -> None:
    # 400 ms; finding 1 saves 40, then finding 2 saves 20 / 2, finding 3 saves 13.33 / 2
    text = Page(REPORTS.render("html", report(3))).text
    assert "360 ms" in text
    assert "350 ms" in text
    assert "343 ms" in text


def test_unmeasured_values_are_shown_as_not_measured(report: Make) -> None:
    text = Page(REPORTS.render("html", report(0, mfu=None, memory_peak_bytes=None))).text
    assert text.count("not measured") >= 2
    assert "0 B" not in text


def test_hot_lines_are_shown_as_code(report: Make) -> None:
    line = HotLine(
        file="/srv/train.py",
        line=7,
        text="<b>x = y.item()</b>",
        function=None,
        share=0.25,
        python=0.2,
        native=0.05,
        system=0.0,
    )
    page = Page(REPORTS.render("html", report(hot_lines=[line])))
    assert "<b>x = y.item()</b>" in page.text
    assert "train.py:7" in page.text
    assert "25%" in page.text


def test_headings_and_tables_can_be_walked(report: Make) -> None:
    page = Page(REPORTS.render("html", report(2)))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert max(np.diff(levels)) <= 1
    for tag, attrs in page.tags:
        if tag == "th":
            assert attrs.get("scope") in ("col", "row")
        if tag == "svg":
            assert attrs.get("role") == "img" or attrs.get("aria-hidden") == "true"
    anchors = {attrs.get("id") for _, attrs in page.tags}
    targets = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert all(link[1:] in anchors for link in targets if link and link.startswith("#"))


# -- the strip ----------------------------------------------------------------------------------


def test_the_strip_is_where_the_work_is() -> None:
    b = TraceBuilder(launch_us=5, latency_us=0)
    for _ in range(3):
        with b.step():
            with b.op("aten::mm"):
                b.launch("ampere_sgemm", 1000, stream=7)
            b.sync()
            b.host(3000)
    lanes = build_step_lanes(b.analysis())
    assert lanes is not None
    (work, idle) = lanes.lanes
    assert work.label == "stream 7"
    assert work.busy == pytest.approx(1000e3 / lanes.dur_ns, rel=0.01)
    assert idle.busy == pytest.approx(1 - work.busy, abs=0.01)
    cells = sum(run.last - run.first for run in work.runs)
    # a cell at either end of a run counts when a tenth of it is taken
    assert cells == pytest.approx(CELLS * work.busy, abs=2 * len(work.runs))
    assert {run.kind for run in work.runs} == {"compute"}
    assert all(0 <= run.first < run.last <= CELLS for lane in lanes.lanes for run in lane.runs)


def test_a_lone_short_kernel_is_seen() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.host(50_000)
            with b.op("aten::add"):
                b.launch("tiny", 2)
            b.host(50_000)
    lanes = build_step_lanes(b.analysis())
    assert lanes is not None
    assert sum(run.last - run.first for run in lanes.lanes[0].runs) == 1


def test_page_without_device_work_has_no_strip(tmp_path: Path) -> None:
    b = TraceBuilder(None)
    for _ in range(3):
        with b.step(), b.op("aten::mm"):
            b.host(100)
    assert build_step_lanes(b.analysis()) is None
    result = analyze_in_full(b.write(tmp_path / "cpu.json"))
    page = Page(REPORTS.render("html", result.report, analysis=result.main))
    assert "on the host's main thread" in page.text


@pytest.mark.parametrize("name", ["a100_train_6steps", "h100_bert_small_inference"])
def test_a_real_trace_makes_a_small_sound_page(
    shared_trace: Callable[[str], str], name: str
) -> None:
    result = analyze_in_full(shared_trace(name))
    text = REPORTS.render("html", result.report, analysis=result.main)
    assert len(text.encode()) < 200_000
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= OURS
    assert "".join(split_verdict(result.report.verdict, MAX_TITLE)) in page.text
    for finding in result.report.findings:
        assert finding.title in page.text


# -- notebooks ----------------------------------------------------------------------------------


def test_a_notebook_shows_the_verdict_and_the_findings(report: Make) -> None:
    result = report(7)
    text = result._repr_html_()
    page = Page(text)
    assert "".join(split_sentences(result.verdict, MAX_TITLE)) in page.text
    assert "Finding number 5" in page.text
    assert "2 more findings" in page.text
    assert len(text) < 20_000
    assert not any(tag in ("script", "style", "link", "img") for tag, _ in page.tags)


def test_hostile_names_stay_names_in_a_notebook(report: Make, hostile_name: str) -> None:
    page = Page(REPORTS.render("notebook", report(2, hostile_name)))
    assert {tag for tag, _ in page.tags} <= OURS
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]


def test_a_healthy_report_has_no_table(report: Make) -> None:
    healthy = replace(report(0), not_checked=[])
    assert "<table" not in healthy._repr_html_()


def test_quotes_cannot_end_an_attribute() -> None:
    assert '"' not in esc('x" onclick="y')
    assert "'" not in esc("x' onclick='y")


def test_a_long_name_in_a_heading_wraps() -> None:
    for heading in ("h1", "h2", "h3"):
        assert re.search(rf"^{heading} \{{[^}}]*overflow-wrap: anywhere", style(), re.MULTILINE)
