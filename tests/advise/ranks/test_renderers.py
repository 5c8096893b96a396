"""The report of a job in words: one page, nothing left out in JSON, names that stay names."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import msgspec
import pytest

from advisor.advise.ranks import rank_charts
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.ranks import Outlier, RankLine, Ranks
from advisor.core.report import Report, Scope
from advisor.render.formats import REPORTS

Make = Callable[..., Ranks]


def report_of(ranks: Ranks) -> Report:
    """A report of these ranks, in which nothing else is said."""
    scope = Scope(
        rank=0,
        step_source="ProfilerStep",
        steps_found=3,
        steps_used=3,
        outliers=[],
        span_ns=300_000_000,
        step_ns=100e6,
        step_min_ns=99_000_000,
        step_max_ns=101_000_000,
        step_median_ns=100e6,
        device=0,
        device_name=None,
        device_known=False,
        devices_seen=1,
    )
    return Report(status="limited", verdict="A job", inputs=[], scope=scope, ranks=ranks)


def render(form: str, ranks: Ranks) -> str:
    return REPORTS.render(form, report_of(ranks))


class Page(HTMLParser):
    """Tags, attributes and text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.titles: list[str] = []
        self.shades: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "rect":
            look = dict(attrs).get("class") or ""
            self.shades += [look] if look.startswith("h") else []

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "title":
            self.titles.append(data)


def test_a_job_of_a_thousand_ranks_is_a_page_of_a_terminal(make_job: Make) -> None:
    text = render("terminal", make_job(1024))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 66
    for words in (
        "similar ranks",
        "computes longer",
        "rank 7 as fast as the median: saves 11.5 ms per step (11 to 12 ms)",
        "2 ranks (1024-1025): access denied",
        "a rule: nothing of it was recorded",
    ):
        assert words in text, words


def test_json_holds_all_of_it(make_job: Make) -> None:
    ranks = make_job(16)
    assert Report.from_json(render("json", ranks)).ranks == ranks


def test_markdown_tells_the_groups_in_a_table(make_job: Make) -> None:
    text = render("markdown", make_job(64))
    assert "| most | 0-6, 8-63 | 63 | 100 ms | 60 ms | 30 ms | 2 ms | 8 ms |" in text
    assert "- rank 7 as fast as the median: saves 11.5 ms per step (11 to 12 ms)" in text


@pytest.mark.parametrize("form", ["html", "markdown", "terminal"])
def test_a_name_stays_text_wherever_it_stands(make_job: Make, hostile_name: str, form: str) -> None:
    text = render(form, make_job(16, nasty=f"{hostile_name}\x1b[31m"))
    assert "\x1b" not in text
    if form != "terminal":
        assert "<img" not in text
        assert "&lt;img" in text


def test_html_loads_no_resources_and_runs_no_scripts(make_job: Make, hostile_name: str) -> None:
    page = Page(render("html", make_job(32, nasty=hostile_name)))
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(v.startswith("#") for n, v in page.attributes if n in ("href", "src"))
    assert ("http-equiv", "Content-Security-Policy") in page.attributes


def test_rank_map_has_a_cell_per_class_and_marks_the_outlier(make_job: Make) -> None:
    text = render("html", make_job(1024))
    page = Page(text)
    assert len(page.shades) == 1024 * 4
    assert len(text) < 2_000_000
    # rank 7 computes 12 ms longer and waits 12 ms less; the scale ends at 5% of 100 ms
    strongest = [look for look in page.shades if look in ("h4", "h-4")]
    assert strongest == ["h4", "h-4"]
    (cell,) = [one for one in page.titles if one.startswith("rank 7 · node-000 · compute")]
    match = re.search(r"compute ([\d.]+) ms per step, ([\d.]+) ms more than the median rank", cell)
    assert match is not None
    assert 71.6 <= float(match[1]) <= 72.4
    assert 11 <= float(match[2]) <= 13


def test_large_rank_map_shows_the_most_different_ranks(
    make_job: Make, make_line: Callable[..., RankLine]
) -> None:
    report = make_job(100)
    report.lines[40] = make_line(40, 150e6, [110e6, 30e6, 2e6, 8e6])
    heat_map = rank_charts.build_heat_map(report, limit=10)
    assert heat_map is not None
    assert len(heat_map.lines) == 10
    assert 40 in [row.rank for row in heat_map.lines]
    assert [row.rank for row in heat_map.lines] == sorted(row.rank for row in heat_map.lines)
    assert heat_map.note == "Shown are the 10 of 100 ranks that differ most."


def test_unmeasured_rank_cell_has_no_color_but_a_label(make_job: Make) -> None:
    report = make_job(20)
    report.lines[3].time[0] = None
    heat_map = rank_charts.build_heat_map(report)
    assert heat_map is not None
    assert heat_map.tint(report.lines[3], 0) is None
    assert heat_map.title(report.lines[3], 0).endswith(f"compute {t.NOT_MEASURED}")
    others = sorted(one.time[0] for one in report.lines if one.time[0] is not None)
    assert heat_map.medians[0] == others[len(others) // 2]
    page = Page(render("html", report))
    assert page.shades.count("hx") == 1
    restored = Report.from_json(render("json", report)).ranks
    assert restored is not None and restored.lines[3].time[0] is None


def test_waiting_ranks_are_drawn_differently_from_slow_ones(
    make_line: Callable[..., RankLine],
) -> None:
    """The rank that all wait for is the one that is marked and red; those that wait are grey."""
    late = Outlier(
        unit="rank", name="3", ranks="3", kind="host", moves=False, excess_ns=4e6, waited_ns=9e6
    )
    lines = [make_line(rank, 20e6, [10e6, 10e6]) for rank in range(3)]
    report = Ranks(
        lines=[*lines, make_line(3, 20e6, [19e6, 1e6])],
        classes=["host", rank_charts.WAITING],
        aligned=True,
        alignment_error_ns=None,
        note="",
        outliers=[late],
    )
    heat_map = rank_charts.build_heat_map(report)
    assert heat_map is not None
    assert heat_map.columns() == ["0", "1", "2", "3 late"]
    assert heat_map.tint(report.lines[3], 0) == 1.0
    assert (heat_map.is_effect(0), heat_map.is_effect(1)) == (False, True)
    assert heat_map.tint(lines[0], 1) == 1.0 and "Grey" in heat_map.note


def test_endlessly_nested_report_is_one_line_error() -> None:
    with pytest.raises(AdvisorError, match="not a report: nested too deeply"):
        Report.from_json(b'{"beyond":' + b"[" * 200_000)


def steps(make_line: Callable[..., RankLine], *ms: float) -> Ranks:
    lines = [make_line(rank, each * 1e6, [each * 1e6]) for rank, each in enumerate(ms)]
    return Ranks(lines=lines, aligned=False, alignment_error_ns=None, note="", classes=["compute"])


def test_every_rank_is_in_one_range_of_the_histogram(
    make_line: Callable[..., RankLine],
) -> None:
    bins = rank_charts.build_histogram(steps(make_line, 98.1, 98.4, 98.5, 99.0, 101.9, 102.0))
    # 3.9 ms in some eight ranges: of 0.5 ms each, from 98.0
    assert [(one.low / 1e6, one.ranks) for one in bins if one.ranks] == [
        (98.0, 2),
        (98.5, 1),
        (99.0, 1),
        (101.5, 1),
        (102.0, 1),
    ]
    assert bins[0].label == "98.0 to 98.5 ms"


@pytest.mark.parametrize(
    ("ms", "words"),
    [((100.0, 100.1, 100.2), ["100.0 to 100.2 ms"]), ((5.0,), ["5 ms"]), ((), []), ((0.0,), [])],
)
def test_equal_ranks_share_one_histogram_range(
    make_line: Callable[..., RankLine], ms: tuple[float, ...], words: list[str]
) -> None:
    assert [one.label for one in rank_charts.build_histogram(steps(make_line, *ms))] == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (98e6, 98.5e6, "98.0 to 98.5 ms"),
        (1e9, 3e9, "1 to 3 s"),
        (10e6, 20e6, "10 to 20 ms"),
        (100.02e6, 100.04e6, "100.02 to 100.04 ms"),
        (900.0, 1100.0, "0.9 to 1.1 µs"),
        (10.0, 12.0, "10 to 12 ns"),
    ],
)
def test_the_edges_of_a_range_differ_where_its_ranks_do(
    low: float, high: float, words: str
) -> None:
    assert t.format_bin(low, high) == words


def test_significance_is_never_rounded_to_certainty() -> None:
    assert rank_charts.format_significance(0.95) == "95%"
    assert rank_charts.format_significance(1.0) == "more than 99%"
    assert rank_charts.format_significance(None) == t.NOT_MEASURED


def test_ranks_without_statements_are_rendered(
    make_line: Callable[..., RankLine],
) -> None:
    for form in ("terminal", "markdown", "html"):
        assert render(form, steps(make_line)).endswith("\n")


def test_inconsistent_rank_lines_are_left_out(make_job: Make) -> None:
    ranks = make_job(4)
    data = msgspec.to_builtins(ranks)
    data["lines"][1]["time"] = [1.0]
    damaged = msgspec.convert(data, Ranks)
    heat_map = rank_charts.build_heat_map(damaged)
    assert heat_map is not None
    assert [line.rank for line in heat_map.lines] == [0, 2, 3]
    assert render("html", damaged)
