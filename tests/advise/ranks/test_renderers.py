"""The report of a job in words: one page, nothing left out in JSON, names that stay names."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import msgspec
import pytest

from advisor.advise.ranks import views
from advisor.advise.ranks.sentences import sure
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.measure.ranks.job_report import JobReport, Row
from advisor.render.formats import JOBS

Make = Callable[..., JobReport]


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
            self.shades.append(dict(attrs)["class"] or "")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "title":
            self.titles.append(data)


def test_a_job_of_a_thousand_ranks_is_one_page_of_a_terminal(make_job: Make) -> None:
    shown = JOBS.render("terminal", make_job(1024))
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 66
    for words in (
        "Rank 7 computes 20% slower",
        "1,024 of 1,026 ranks read · 128 hosts",
        "rank 7: slower at the same compute",
        "the others wait 11.5 ms a step · last at 97% of its collectives",
        "11.5 ms a step (11 to 12 ms) · 12% of the median step · rank 7",
        "rank 7 as fast as the median: 11.5 ms a step",
        "2 ranks (1024-1025): access denied",
        "a rule: nothing of it was recorded",
    ):
        assert words in shown, words


def test_json_holds_all_of_it(make_job: Make) -> None:
    report = make_job(16)
    assert JobReport.from_json(JOBS.render("json", report).encode()) == report


def test_markdown_tells_the_groups_in_a_table(make_job: Make) -> None:
    shown = JOBS.render("markdown", make_job(64))
    assert "| most | 0-6, 8-63 | 63 | 100 ms | 60 ms | 30 ms | 2 ms | 8 ms |" in shown
    assert "#### 1. Rank 7 is slower than the others" in shown


@pytest.mark.parametrize("form", ["html", "markdown", "terminal"])
def test_a_name_stays_text_wherever_it_stands(make_job: Make, nasty: str, form: str) -> None:
    shown = JOBS.render(form, make_job(16, nasty=f"{nasty}\x1b[31m"))
    assert "\x1b" not in shown
    if form != "terminal":
        assert "<img" not in shown
        assert "&lt;img" in shown


def test_html_loads_nothing_and_runs_nothing(make_job: Make, nasty: str) -> None:
    page = Page(JOBS.render("html", make_job(32, nasty=nasty)))
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(v.startswith("#") for n, v in page.attributes if n in ("href", "src"))
    assert ("http-equiv", "Content-Security-Policy") in page.attributes


def test_the_map_has_a_cell_a_rank_and_class_and_the_odd_one_stands_out(make_job: Make) -> None:
    text = JOBS.render("html", make_job(1024))
    page = Page(text)
    assert len([look for look in page.shades if look.startswith("h")]) == 1024 * 4
    assert len(text) < 2_000_000
    # rank 7 computes 12 ms longer and waits 12 ms less; the scale ends at 5 % of 100 ms
    strongest = [look for look in page.shades if look in ("h4", "h-4")]
    assert strongest == ["h4", "h-4"]
    (cell,) = [one for one in page.titles if one.startswith("rank 7 · node-000 · compute")]
    found = re.search(r"compute ([\d.]+) ms a step, ([\d.]+) ms more than the median rank", cell)
    assert found is not None
    assert 71.6 <= float(found[1]) <= 72.4
    assert 11 <= float(found[2]) <= 13


def test_of_very_many_ranks_the_map_shows_those_that_differ_most(make_job: Make) -> None:
    report = make_job(100)
    report.rows[40] = Row(40, "h", "p", 150e6, [110e6, 30e6, 2e6, 8e6])
    heat = views.heat_map(report, most=10)
    assert heat is not None
    assert len(heat.rows) == 10
    assert 40 in [row.rank for row in heat.rows]
    assert [row.rank for row in heat.rows] == sorted(row.rank for row in heat.rows)
    assert heat.note == "Shown are the 10 of 100 ranks that differ most."


def test_what_a_rank_did_not_measure_has_no_colour_and_says_so(make_job: Make) -> None:
    report = make_job(20)
    row = report.rows[3]
    report.rows[3] = Row(row.rank, row.host, row.path, row.step_ns, [None, *row.values[1:]])
    heat = views.heat_map(report)
    assert heat is not None
    assert heat.tint(report.rows[3], 0) is None
    assert heat.words(report.rows[3], 0).endswith(f"compute {t.NOT_MEASURED}")
    others = sorted(one.values[0] for one in report.rows if one.values[0] is not None)
    assert heat.medians[0] == others[len(others) // 2]
    page = Page(JOBS.render("html", report))
    assert page.shades.count("hx") == 1
    assert JobReport.from_json(report.to_json()).rows[3].values[0] is None


def test_a_report_that_is_nested_without_end_is_one_line() -> None:
    with pytest.raises(AdvisorError, match="not a report of a job: nested too deeply"):
        JobReport.from_json(b'{"beyond":' + b"[" * 200_000)


def steps(*ms: float) -> JobReport:
    rows = [Row(rank, "", "", each * 1e6, [each * 1e6]) for rank, each in enumerate(ms)]
    return JobReport(classes=["compute"], rows=rows)


def test_every_rank_is_in_one_range_of_the_histogram() -> None:
    bins = views.histogram(steps(98.1, 98.4, 98.5, 99.0, 101.9, 102.0))
    # 3.9 ms in some eight ranges: of 0.5 ms each, from 98.0
    assert [(one.low / 1e6, one.ranks) for one in bins if one.ranks] == [
        (98.0, 2),
        (98.5, 1),
        (99.0, 1),
        (101.5, 1),
        (102.0, 1),
    ]
    assert bins[0].words == "98.0 to 98.5 ms"


@pytest.mark.parametrize(
    ("ms", "words"),
    [((100.0, 100.1, 100.2), ["100.0 to 100.2 ms"]), ((5.0,), ["5 ms"]), ((), []), ((0.0,), [])],
)
def test_ranks_that_are_all_alike_are_one_range(ms: tuple[float, ...], words: list[str]) -> None:
    assert [one.words for one in views.histogram(steps(*ms))] == words


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


def test_certainty_is_not_told_as_more_than_it_is() -> None:
    assert sure(0.95) == "sure by 95%"
    assert sure(1.0) == "sure by more than 99%"
    assert sure(None) == "how sure is not measured"


def test_a_report_of_nothing_is_no_traceback() -> None:
    for form in JOBS.bundled:
        assert JOBS.render(form, JobReport()).endswith("\n")
    with pytest.raises(AdvisorError, match="cannot be written as sarif; there are html, json"):
        JOBS.renderer("sarif")


def test_rows_that_do_not_fit_their_classes_are_left_out(make_job: Make) -> None:
    report = make_job(4)
    data = msgspec.json.decode(report.to_json())
    data["rows"][1][4] = [1.0]
    odd = JobReport.from_json(msgspec.json.encode(data))
    heat = views.heat_map(odd)
    assert heat is not None
    assert [row.rank for row in heat.rows] == [0, 2, 3]
    assert JOBS.render("html", odd)
