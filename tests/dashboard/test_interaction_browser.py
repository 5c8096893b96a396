"""Using it: themes, keyboard, links that reproduce a view, filters, narrow windows, and axe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from advisor.advise import finding_text
from advisor.advise.report_charts import build_chosen_fix_sequence
from advisor.core.text import format_duration
from advisor.dashboard.app import create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access
from advisor.testing import TraceBuilder

sys.path.insert(0, str(Path(__file__).parent))
from run_by_hand import write_run

pytest.importorskip("dash")


@pytest.fixture(scope="module")
def h100(shared_trace: Callable[[str], str]) -> str:
    return shared_trace("h100_bert_small_inference")


@pytest.fixture(scope="module")
def pair(shared_trace: Callable[[str], str]) -> tuple[str, str]:
    name = "pairs/loader_profiler_workers"
    return shared_trace(f"{name}0"), shared_trace(f"{name}4")


@pytest.fixture(scope="module")
def ranks(two_ranks: Callable[[], Path]) -> str:
    return str(two_ranks())


def theme(page: Any) -> str:
    found: str = page.evaluate("document.documentElement.getAttribute('data-theme')")
    return found


def background(page: Any) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_the_theme_is_the_systems_until_one_is_chosen_and_then_stays(
    h100: str, show: Any, tab: Any
) -> None:
    t = tab(show(h100), dark=True, fresh=True)
    page = t.open("/")
    assert theme(page) == "dark"
    dark = background(page)
    page.locator("#theme-switch").focus()
    page.keyboard.press("Space")
    assert theme(page) == "light"
    assert background(page) != dark
    page.reload()
    page.locator("main h1").wait_for()
    assert theme(page) == "light"
    t.open("/kernels")
    assert theme(page) == "light"
    assert t.wrong == []


def test_an_address_without_a_page_keeps_the_header(h100: str, show: Any, tab: Any) -> None:
    t = tab(show(h100), dark=True)
    page = t.open("/no-such-page")
    assert t.wrong and all("404" in said for said in t.wrong)
    assert page.locator("main h1").inner_text() == "Page not found"
    page.locator("#theme-switch").click()
    assert theme(page) == "light"
    page.locator("header .brand").click()
    page.locator(".page-overview main h1").wait_for()


@pytest.mark.parametrize("page", ["", "findings", "kernels", "memory"])
def test_a_run_that_does_not_exist_is_named_above_the_first(
    page: str, h100: str, show: Any, tab: Any
) -> None:
    t = tab(show(h100))
    t.open(f"/{page}?run=9")
    assert t.text("main [role=alert]").startswith("There is no run 9 here.")
    t.settle()
    assert t.wrong == []


def test_a_fix_that_is_unticked_gives_its_time_back_and_the_others_are_estimated_anew(
    pair: tuple[str, str], show: Any, tab: Any
) -> None:
    shown = show(pair[0])
    result = shown.session.entries[0].loaded.result
    _, second = finding_text.ranked_findings(result.report)[:2]
    t = tab(shown)
    page = t.open("/")
    ticks, stairs = page.locator(".stair input"), page.locator(".stair .after-figures")
    ticks.nth(0).uncheck()
    alone = second.impact.gain_ns
    stairs.nth(2).get_by_text(f"−{format_duration(alone)}").wait_for()
    stairs_of = partial(build_chosen_fix_sequence, result.report, estimator=result.estimator)
    all_but_first, every = (stairs_of(n).fixes[-1].left_ns for n in (range(2, 99), range(99)))
    after = format_duration(all_but_first - every)
    assert stairs.nth(1).inner_text().split("\n")[1] == f"(−{after})"
    assert page.locator("#outlook").inner_text().startswith("With the ticked fixes: ")
    for tick in ticks.all():
        tick.uncheck()
    page.locator("#outlook", has_text="Without a fix").wait_for()
    step = format_duration(result.report.step_ns)
    assert all(line.startswith(step) for line in stairs.all_inner_texts())
    assert t.wrong == []


def test_a_link_restores_which_fixes_are_ticked(pair: tuple[str, str], show: Any, tab: Any) -> None:
    t = tab(show(pair[0]))
    page = t.open("/")
    page.locator(".stair input").first.uncheck()
    page.locator("#outlook", has_text="With the ticked fixes").wait_for()
    page.wait_for_url("**/?without=1")
    rows = page.locator(".stairs").inner_text()
    t.open(page.url.removeprefix(t.address))
    assert not page.locator(".stair input").first.is_checked()
    assert page.locator(".stairs").inner_text() == rows
    assert page.locator("#outlook").inner_text().startswith("With the ticked fixes")
    for path in (".to-findings a", ".lines .title", ".bar a"):
        page.locator(path).first.click()
        page.wait_for_url("**without=1*")
        page.locator(".page-overview").wait_for(state="detached")
        page.locator(".to-overview a").click()
        page.locator(".stairs").wait_for()
        assert not page.locator(".stair input").first.is_checked()
        assert page.locator(".stairs").inner_text() == rows
    page.locator(".stair input").first.check()
    page.wait_for_url("**/")
    page.locator(".to-findings a").click()
    page.wait_for_url("**/findings")
    page.locator(".to-overview a").click()
    page.locator(".stairs").wait_for()
    page.locator(".stair input").first.uncheck()
    page.wait_for_url("**/?without=1")
    page.locator(".to-findings a").click()
    page.wait_for_url("**/findings?without=1")
    for argument in ("", "x", "99", "1e9,-1,,", "²", "without", "%00", "1&without=2", "1" * 5000):
        t.open(f"/?without={argument}")
        assert page.locator(".stair input").count() == page.locator(
            ".stair input:checked"
        ).count() + (argument.startswith("1&"))
    assert t.wrong == []


def test_a_part_of_the_step_leads_to_its_longest_stretch(
    pair: tuple[str, str], show: Any, tab: Any
) -> None:
    shown = show(pair[0])
    gaps = shown.session.entries[0].loaded.main.gaps.filter(pl.col("cause") == "loader")
    t = tab(shown)
    page = t.open("/")
    part = page.locator(".bar a.part-loader")
    part.hover()
    page.locator(".legend tr.part-loader.highlighted").wait_for()
    part.click()
    page.wait_for_url("**/timeline?**")
    t.settle()
    longest = gaps.sort("dur").tail(1)["ts"].item()
    assert f"focus={longest}" in page.url
    assert t.wrong == []


def test_all_of_it_can_be_reached_with_the_keyboard(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100)).open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    link = page.locator("nav a", has_text="Findings")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/findings")
    page.locator("article.finding").first.wait_for()
    assert page.locator("nav .here").inner_text() == "Findings"


def test_after_a_link_of_the_menu_the_focus_is_in_the_new_page(
    h100: str, show: Any, tab: Any
) -> None:
    page = tab(show(h100)).open("/")
    page.click(".side .to-kernels a")
    page.wait_for_selector(".side .to-kernels.here")
    page.wait_for_function("document.activeElement.id === 'content'")
    current = page.locator(".side [aria-current=page]")
    assert current.count() == 1 and "Kernels" in current.inner_text()


def test_a_kernel_is_chosen_with_the_keyboard_and_found_on_the_timeline(
    h100: str, show: Any, tab: Any
) -> None:
    t = tab(show(h100))
    page = t.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    page.locator("#kernel-grid [row-index='1'] [col-id=name]").click()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    name = page.locator("#kernel-grid [row-index='2'] [col-id=name] .lengths").get_attribute(
        "data-full"
    )
    page.locator(".detail code", has_text=name[:30]).wait_for()
    page.wait_for_function(  # what is told of it comes into view
        "() => document.querySelector('.detail').getBoundingClientRect().bottom <= innerHeight + 1"
    )
    page.locator(".detail a").click()
    page.wait_for_url("**/timeline?**")
    assert "x0=" in page.url and "x1=" in page.url
    t.settle()
    assert t.wrong == []


def test_a_figure_below_the_window_waits_until_it_is_near(h100: str, show: Any, tab: Any) -> None:
    t = tab(show(h100))
    page = t.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    assert page.locator(".js-plotly-plot").count() == 0
    page.locator(".figure").last.scroll_into_view_if_needed()
    page.locator(".js-plotly-plot .iciclelayer").wait_for(timeout=5_000)  # not by the time
    t.open("/kernels")
    page.locator(".figure").first.wait_for(state="attached")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.locator(".js-plotly-plot").nth(1).wait_for(state="attached", timeout=5_000)
    assert t.wrong == []


# links within a text may be of its height
SMALL = """() => [...document.querySelectorAll("main :is(a, button, input)")].filter(node => {
  const box = node.getBoundingClientRect();
  return box.width && (box.height < 24 || box.width < 24)
    && !node.closest(".lines, .modebar, p, [target=_blank]");
}).map(node => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("width", [1440, 390])
def test_what_is_clicked_is_24_pixels_high(h100: str, show: Any, tab: Any, width: int) -> None:
    t = tab(show(h100), width=width)
    for path in ("/", "/findings", "/timeline"):
        page = t.open(path)
        t.settle()
        parts = "part-" if path == "/" else "nothing"  # of the bar: their names lead there, too
        assert [node for node in page.evaluate(SMALL) if parts not in node] == [], path
    assert all(
        box["height"] >= 24 and box["width"] >= 24
        for box in (each.bounding_box() for each in t.open("/").locator(".stair input").all())
    )


def test_the_field_above_a_grid_filters_it(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100)).open("/kernels")
    rows = page.locator("#kernel-grid .ag-center-cols-container .ag-row")
    rows.first.wait_for()
    before = rows.count()
    page.fill("#kernel-grid-search", "flash")
    page.locator("#kernel-grid .ag-row", has_text="gemm").first.wait_for(state="detached")
    assert 0 < rows.count() < before
    assert all("flash" in text.lower() for text in rows.all_inner_texts())


def test_the_tab_key_leaves_a_grid_at_once(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100)).open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    page.focus(".save-csv[data-grid=kernel-grid]")
    for key, place in (("Tab", ".ag-header"), ("ArrowDown", ".ag-row"), ("Tab", "")):
        page.keyboard.press(key)
        inside = f"!!document.activeElement.closest('#kernel-grid {place}')"
        page.wait_for_function(inside if place else f"!({inside})")


def test_in_forced_colours_data_keep_theirs(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100)).open("/")
    page.emulate_media(forced_colors="active")
    for drawn in (".bar > *", ".swatch", "nav .icon"):
        style = f"getComputedStyle(document.querySelector('{drawn}')).backgroundColor"
        assert page.evaluate(style) != background(page), drawn
    width = "parseFloat(getComputedStyle(document.querySelector('.here a')).borderTopWidth)"
    assert page.evaluate(width) > 0
    page.emulate_media(forced_colors="none")


def test_the_field_above_the_runs_of_a_folder_filters_them(
    tmp_path: Path, served: Any, tab: Any
) -> None:
    paths = [str(write_run(tmp_path / name, steps=80)) for name in ("third", "second", "first")]
    with served(DashboardSession(paths, folder=str(tmp_path)).load()) as shown:
        t = tab(shown, width=390)
        page = t.open("/runs")
        rows = page.locator("tbody tr:visible")
        assert rows.count() == 3
        page.fill("#runs-search", " SEC read")
        page.locator("tbody tr", has_text="third").wait_for(state="hidden")
        assert rows.count() == 1 and rows.first.inner_text().startswith("second")
        rows.first.locator("a").click()
        page.locator(".page-overview header .run-name", has_text="second").wait_for()
        assert t.wrong == []


def test_kernels_that_differ_look_different_and_are_copied_whole(
    pair: tuple[str, str], show: Any, tab: Any
) -> None:
    shown = show(pair[0])
    t = tab(shown)
    t.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = t.open("/kernels")
    cells = page.locator("#kernel-grid [col-id=name] .lengths")
    cells.first.wait_for()
    told = [text for text in cells.all_inner_texts() if text.strip()]
    full = cells.evaluate_all("cells => cells.map(cell => cell.dataset.full)")
    known = set(shown.session.entries[0].loaded.main.hot_kernels["name"].cast(str))
    assert set(full) <= known
    assert len(told) == len(set(told)) > 8
    assert any("…" in text for text in told)
    for text in told:  # what a person sees of it is not cut off once more
        cell = page.locator("#kernel-grid [col-id=name] .lengths > span:visible", has_text=text)
        assert cell.first.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    at = next(i for i, text in enumerate(told) if "…" in text)
    cells.nth(at).click()
    page.keyboard.press("Control+c")
    assert page.evaluate("navigator.clipboard.readText()") == full[at]
    cells.nth(at).evaluate(
        "cell => getSelection().setBaseAndExtent("
        "  cell.closest('.ag-row'), 0, cell.closest('.ag-row').nextSibling, 1)"
    )
    page.keyboard.press("Control+c")
    assert full[at] in page.evaluate("navigator.clipboard.readText()")
    assert t.wrong == []


def test_a_grid_below_the_fold_is_filled_when_it_is_opened_again(
    h100: str, show: Any, tab: Any
) -> None:
    t = tab(show(h100))
    for _ in t.walk("kernels", "overview", "kernels"):
        pass
    t.page.wait_for_function(
        """() => { const grid = document.querySelector("#op-grid");
          const cell = grid.querySelector(".ag-center-cols-container .ag-cell");
          const widths = [...grid.querySelectorAll(".ag-header-cell")].map(c => c.offsetWidth);
          return cell && getComputedStyle(cell).visibility === "visible" && grid.offsetWidth > 300
            && Math.abs(widths.reduce((a, b) => a + b) - grid.offsetWidth) < 25; }"""
    )


def test_show_me_leads_to_the_worst_instance(h100: str, show: Any, tab: Any) -> None:
    shown = show(h100)
    finding = shown.session.entries[0].loaded.report.findings[0]
    worst = next(place for place in finding.where if place.ts_ns is not None)
    t = tab(shown)
    page = t.open("/findings")
    page.locator(".button.main").first.click()
    page.wait_for_url("**/timeline?**")
    query = dict(part.split("=") for part in page.url.partition("?")[2].split("&"))
    assert int(query["x0"]) <= worst.ts_ns
    assert worst.ts_ns + (worst.dur_ns or 0) <= int(query["x1"])
    t.settle()
    assert t.wrong == []


def test_a_link_reproduces_the_view(ranks: str, show: Any, tab: Any) -> None:
    shown = show(ranks)
    one, other = tab(shown), tab(shown, fresh=True)
    page = one.open("/kernels")
    page.locator(".choices a", has_text="1").click()
    page.wait_for_url("**/kernels?rank=1")
    page.locator(".choices a.chosen", has_text="1").wait_for()
    table = page.locator("table.data").first.inner_text()
    again = other.open(page.url.removeprefix(shown.address))
    assert again.locator(".choices a.chosen").inner_text() == "1"
    assert again.locator("table.data").first.inner_text() == table
    page.go_back()
    page.locator(".choices a.chosen", has_text="0").wait_for()


def test_a_category_keeps_its_findings_and_stays_in_the_address(
    ranks: str, show: Any, tab: Any
) -> None:
    shown = show(ranks)
    report = shown.session.entries[0].loaded.report
    everything = [f for f in report.findings if f.folded_under is None] + report.risks
    wanted = everything[0].category
    page = tab(shown).open(f"/findings?category={wanted}")
    titles = page.locator("article.finding h2").all_inner_texts()
    assert titles == [f.title for f in everything if f.category == wanted]


def test_a_link_to_a_finding_puts_it_into_view(ranks: str, show: Any, tab: Any) -> None:
    shown = show(ranks)
    page = tab(shown).open("/")
    last = page.locator(".lines a.title").last
    title = last.inner_text()
    last.click()
    page.locator("article.finding").first.wait_for()
    target = page.locator("article.finding", has=page.locator("h2", has_text=title))
    target.wait_for()
    page.wait_for_timeout(200)
    box = target.bounding_box()
    assert box is not None and -5 <= box["y"] < 900


def test_code_is_copied_whole(h100: str, show: Any, tab: Any) -> None:
    shown = show(h100)
    finding = shown.session.entries[0].loaded.report.findings[0]
    t = tab(shown)
    t.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = t.open("/findings")
    page.locator(".code .copy").first.click()
    page.locator(".code .copy", has_text="Copied").wait_for()
    name = page.locator(".code pre").first.get_attribute("aria-label")
    assert name == f"Code: {finding.title}"
    assert page.evaluate("navigator.clipboard.readText()").strip() == finding.code.strip()


def test_at_390_pixels_nothing_is_cut_off(ranks: str, show: Any, tab: Any) -> None:
    t = tab(show(ranks), width=390)
    for module in t.walk():
        wide = t.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, module


def test_before_and_after_are_identified_by_sign_word_and_one_scale(
    pair: tuple[str, str], show: Any, tab: Any
) -> None:
    t = tab(show(*pair))
    page = t.open("/compare")
    before, after = (
        page.locator(".strip-line .bar").nth(i).bounding_box()["width"] for i in (0, 1)
    )
    # with workers the host runs ahead: from the first kernel of a step to the next one's, 117.3 ms
    assert after / before == pytest.approx(117.3 / 154.8, rel=0.02)
    idle = page.locator(".compared tr", has_text="data loader")
    assert idle.locator(".change.better").inner_text().split() == ["▼", "−30.6", "ms", "better"]
    was, now = (idle.locator(f".two-bars {look}").bounding_box() for look in (".before", ".after"))
    assert was["width"] > 20 > now["width"]
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth")
    for part in page.locator(".compared td:visible").all():  # all there without scrolling
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert t.wrong == []


def test_the_page_of_a_recorded_run_fits_a_narrow_window(
    recorded_run: Callable[[], Path], show: Any, tab: Any
) -> None:
    t = tab(show(recorded_run()), width=390)
    t.open("/run")
    t.settle()
    assert t.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    wide = t.page.evaluate(
        """() => [...document.querySelectorAll(".scroll")].filter(
          box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 80))"""
    )
    assert wide == []


def test_a_chart_has_its_numbers_as_a_table(
    recorded_run: Callable[[], Path], show: Any, tab: Any
) -> None:
    shown = show(recorded_run())
    t = tab(shown)
    page = t.open("/run")
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    card = page.locator(".card", has=page.get_by_role("heading", name="Steps", exact=True))
    assert not card.locator(".figure-data table").count()
    card.locator(".figure-data summary").focus()
    page.keyboard.press("Enter")
    heads = card.locator(".figure-data thead th").all_inner_texts()
    assert heads[:3] == ["step", "step", "while profiled"]
    rows = [
        row.locator("th, td").all_inner_texts()
        for row in card.locator(".figure-data tbody tr").all()
    ]
    recorded = shown.session.entries[0].loaded.main.recorded
    assert [int(row[0]) for row in rows] == [step.n for step in recorded.steps]
    for row, ns, profiled in zip(rows, recorded.durations, recorded.profiled, strict=True):
        assert float(row[1]) == pytest.approx(ns / 1e6, rel=1e-3)
        assert row[2] == (row[1] if profiled else "–")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    assert [item["id"] for item in found if item["impact"] in ("serious", "critical")] == []
    assert t.wrong == []


def test_evidence_is_open_where_there_is_room_and_one_touch_away_on_a_telephone(
    ranks: str, show: Any, tab: Any
) -> None:
    page = tab(show(ranks)).open("/findings")
    assert page.locator("table.evidence").first.is_visible()
    page = tab(show(ranks), width=390).open("/findings")
    assert not page.locator("table.evidence").first.is_visible()
    page.locator("details.evidence-fold summary").first.click()
    assert page.locator("table.evidence").first.is_visible()


def test_on_paper_there_is_no_navigation_and_no_dark_ground(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100), dark=True).open("/findings")
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not page.locator("#theme-switch").is_visible()
    assert background(page) == "rgb(255, 255, 255)"


def test_on_paper_a_grid_has_all_its_columns(h100: str, show: Any, tab: Any) -> None:
    t = tab(show(h100))
    page = t.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 between its margins
    table = page.locator("table.on-paper").first
    heads = table.locator("th").all_inner_texts()
    assert heads[0] == "Kernel" and heads[-1] == "Launched by" and len(heads) > 8
    known = page.evaluate("dash_ag_grid.getApi('kernel-grid').getDisplayedRowCount()")
    assert table.locator("tbody tr").count() == known
    assert table.bounding_box()["width"] <= 718
    assert not page.locator("#kernel-grid .ag-row").first.is_visible()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("table.on-paper").count() == 0
    assert t.wrong == []


def test_in_the_dark_pale_figures_are_deep(h100: str, show: Any, tab: Any) -> None:
    page = tab(show(h100), dark=True).open("/kernels")
    layer = page.locator(".iciclelayer", has_text="all GPU")
    layer.wait_for()
    assert "invert" in layer.evaluate("layer => getComputedStyle(layer).filter")
    page.locator("#theme-switch").click()
    assert layer.evaluate("layer => getComputedStyle(layer).filter") == "none"


def test_a_figure_is_saved_as_png(h100: str, show: Any, tab: Any) -> None:
    t = tab(show(h100))
    page = t.open("/kernels")
    button = page.locator(".figure .modebar-btn").first
    button.wait_for(state="attached")
    with page.expect_download() as waiting:
        button.dispatch_event("click")
    assert Path(waiting.value.path()).read_bytes().startswith(b"\x89PNG")
    t.open("/")  # what is drawn with HTML is saved as well
    with page.expect_download() as waiting:
        page.locator(".save-picture").first.click()
    saved = Path(waiting.value.path()).read_bytes()
    assert saved.startswith(b"\x89PNG") and len(saved) > 5_000
    width = int.from_bytes(saved[16:20], "big")
    assert width == pytest.approx(2 * page.locator(".card").first.bounding_box()["width"], abs=2)
    assert t.wrong == []


@pytest.mark.parametrize("dark", [False, True], ids=["light, two ranks", "dark, one with stacks"])
def test_axe_finds_nothing_serious(dark: bool, ranks: str, h100: str, show: Any, tab: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    t = tab(show(h100 if dark else ranks), dark=dark, fresh=True)
    bad = []
    for module in t.walk():
        if module == "kernels":
            t.page.locator(".ag-row").first.wait_for()
        # a grid draws its header's cells a moment after the row that they are in
        t.page.wait_for_function(
            "() => [...document.querySelectorAll('.ag-root-wrapper')].every(grid => {"
            "  const rows = [...grid.querySelectorAll('.ag-header-row-column')];"
            "  return !grid.querySelector('.ag-delay-render')"
            "    && rows.length && rows.every(row => row.children.length); })"
        )
        found = axe.run(t.page).response
        if "color-contrast" not in {item["id"] for item in found["passes"]}:
            # axe gives up on the rows that a grid keeps outside its window: without those
            only = {"runOnly": ["color-contrast"]}
            again = axe.run(t.page, {"exclude": [".ag-body"]}, only).response
            assert "color-contrast" in {item["id"] for item in again["passes"]}, module
            found["violations"] += again["violations"]
        bad += [
            (module, item["id"], node["html"][:160], node.get("failureSummary", "")[:200])
            for item in found["violations"]
            if item["impact"] in ("serious", "critical")
            for node in item["nodes"][:2]
        ]
    assert bad == []


# -- while a run is being read -------------------------------------------------------------------


def test_the_progress_page_turns_into_the_run(h100: str, tab: Any, served: Any) -> None:

    with served(DashboardSession([h100])) as shown:
        t = tab(shown)
        page = t.open("/")
        assert t.text("main h1") == "Reading the trace"
        shown.session.start()
        page.locator("main .page-head", has_text="GPU busy").wait_for()
        assert t.wrong == []


def test_a_file_that_is_not_a_trace_is_reported_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("hello")
    session = DashboardSession([str(bad)]).load()
    assert session.entries[0].state == "failed"
    assert str(bad) in session.entries[0].failure_reason
    assert "\n" not in session.entries[0].failure_reason
    status = create_app(session, Access()).server.test_client().get("/_advisor/status").json
    assert status["done"] and status["entries"][0]["state"] == "failed"


def test_of_many_ranks_one_is_searched_for(show: Any, tab: Any, tmp_path: Path) -> None:
    for number in range(12):
        b = TraceBuilder()
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch(f"kernel_of_rank_{number}", 900)
            b.sync()
        b.write(tmp_path / f"rank{number}.json")
    t = tab(show(tmp_path))
    page = t.open("/kernels")
    page.locator("#kernel-grid .ag-row", has_text="kernel_of_rank_0").wait_for()
    page.locator("#rank-select").fill("11")
    page.get_by_role("option").filter(visible=True).first.wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/kernels?rank=11")
    page.locator("#kernel-grid .ag-row", has_text="kernel_of_rank_11").wait_for()
    assert t.wrong == []
