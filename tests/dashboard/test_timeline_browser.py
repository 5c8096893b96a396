"""Timeline in a browser: the canvas, and wheel, keys, search and links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from advisor.dashboard.timeline.detail_levels import ALL_CATEGORIES
from advisor.testing import TraceBuilder

HOSTILE = "<img src=x onerror=document.title='owned'><b>"

STATE = """() => { const t = advisorTimeline.current;
  return {x0: t.x0, x1: t.x1, begin: t.data.info.first_ns, finish: t.data.info.last_ns,
          chosen: t.selectedSlice &&
            (({name, ts, dur, id}) => ({name, ts, dur, id}))(t.selectedSlice),
          finding: t.finding, query: t.query, range: t.range, width: t.width}; }"""
HIDDEN_SLICES = """() => { const t = advisorTimeline.current, rows = t.layout.byLane;
  return fetch(t.data.buildUrl('view', {x0: t.data.info.first_ns, x1: t.data.info.last_ns, px: 100,
      lanes: t.data.info.groups.flatMap(g => Array.from({length: g.count}, (_, i) => g.first + i))
        .filter(lane => rows[lane] === undefined).join()}))
    .then(r => r.arrayBuffer()).then(b => new DataView(b).getUint32(28, true)); }"""
IS_SETTLED = """() => new Promise(done => {
  const t = advisorTimeline.current, began = performance.now();
  const later = () => performance.now() - began > 20000 ? done(false) : setTimeout(look, 20);
  const look = () => {
    if (t.urlTimer || t.data.pending) { later(); }  // 250 ms after the view
    else { t.whenSettled().then(
      () => t.urlTimer || t.data.pending ? later() : still(4, t.x0, t.x1)); }
  };
  // a zoom by key moves for 140 ms: the view is where it was for some frames
  const still = (frames, x0, x1) => {
    if (t.x0 !== x0 || t.x1 !== x1 || t.urlTimer || t.data.pending) { later(); }
    else if (frames) { requestAnimationFrame(() => still(frames - 1, x0, x1)); }
    else { done(true); }
  };
  setTimeout(() => done(false), 21000);
  look(); })"""
# colors of the canvas as [hex, pixels], most frequent first; a blend counts as another color
COLORS = """() => { const c = advisorTimeline.current.canvas, all = {};
  const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(c, 0, 0);
  const d = copy.getImageData(0, 0, c.width, c.height).data;
  for (let i = 0; i < d.length; i += 4) {
    const key = (d[i] << 16) | (d[i + 1] << 8) | d[i + 2]; all[key] = (all[key] || 0) + 1; }
  return Object.entries(all).sort((a, b) => b[1] - a[1]).slice(0, 400)
    .map(([k, n]) => ['#' + Number(k).toString(16).padStart(6, '0'), n]); }"""


def wait_for_view(page: Any) -> dict[str, Any]:
    """Wait until all requested data are on the canvas. Return the state of the view."""
    page.locator(".tl-canvas").first.wait_for(state="attached")
    assert page.evaluate(IS_SETTLED), "the view is not painted in time"
    result: dict[str, Any] = page.evaluate(STATE)
    return result


def read_colors(page: Any) -> Counter[str]:
    return Counter(dict(page.evaluate(COLORS)))


def move_pointer_to(page: Any, ts: float, group: str) -> None:
    """Move the pointer to an instant in the first lane of a group."""
    x, y = page.evaluate(
        """([ts, key]) => { const t = advisorTimeline.current;
           const g = t.data.info.groups.find(g => g.key === key);
           const row = t.layout.rows[t.layout.byLane[g.first]];
           const box = t.overlay.getBoundingClientRect();
           return [box.left + (ts - t.x0) / (t.x1 - t.x0) * t.width,
                   box.top + row.y - t.scroll + row.h / 2]; }""",
        [ts, group],
    )
    page.mouse.move(x, y)


@pytest.fixture
def a100(dashboard_of: Any, open_tab: Any, shared_trace: Callable[[str], str]) -> Any:
    tab = open_tab(dashboard_of(shared_trace("a100_train_6steps")))
    yield tab
    assert tab.problems == []


@pytest.fixture
def fresh_a100(dashboard_of: Any, open_tab: Any, shared_trace: Callable[[str], str]) -> Any:
    """Open the A100 trace in a new browser context, without loaded scripts."""
    tab = open_tab(dashboard_of(shared_trace("a100_train_6steps")), fresh=True)
    yield tab
    assert tab.problems == []


def test_every_kind_of_lane_is_painted(a100: Any) -> None:
    page = a100.open("/timeline")
    state = wait_for_view(page)
    assert (state["x0"], state["x1"]) == (state["begin"], state["finish"])
    labels = page.locator(".tl-label .tl-text").all_inner_texts()
    assert labels[:3] == ["Steps", "Phases", "GPU idle, by cause"]
    assert {"GPU 3 · stream 7", "Collectives", "Copies and memsets", "Main thread 3113936"} <= set(
        labels
    )
    pixels = read_colors(page)
    by_key = {c.key: c.color for c in ALL_CATEGORIES}
    for key in ("step", "phase-forward", "gpu-communication", "copy-htod", "host-op"):
        assert pixels[by_key[key]] > 100, key
    assert len(pixels) > 50, "narrow slices are blended into many colors"


def test_the_wheel_scrolls_zooms_with_ctrl_and_pans_with_shift(
    a100: Any,
) -> None:
    a100.page.set_viewport_size({"width": 1440, "height": 600})
    page = a100.open("/timeline")
    before = wait_for_view(page)
    at = before["begin"] + 0.25 * (before["finish"] - before["begin"])
    move_pointer_to(page, at, "steps")
    page.mouse.wheel(0, 300)
    page.wait_for_function("() => advisorTimeline.current.body.scrollTop > 20")
    scrolled = wait_for_view(page)
    assert (scrolled["x0"], scrolled["x1"]) == (before["x0"], before["x1"])
    page.keyboard.down("Control")
    for _ in range(5):
        page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    zoomed = wait_for_view(page)
    span = zoomed["x1"] - zoomed["x0"]
    assert span < 0.2 * (before["x1"] - before["x0"])
    assert (at - zoomed["x0"]) / span == pytest.approx(0.25, abs=0.02)
    page.keyboard.down("Shift")
    page.mouse.wheel(0, 200)
    page.keyboard.up("Shift")
    panned = wait_for_view(page)
    assert panned["x1"] - panned["x0"] == pytest.approx(span, rel=1e-6)
    assert panned["x0"] > zoomed["x0"]
    assert read_colors(page), "painted after moving"


def test_keys_zoom_pan_fit_and_show_help(a100: Any) -> None:
    page = a100.open("/timeline")
    whole = wait_for_view(page)
    page.locator(".tl-stage").focus()
    page.keyboard.press("w")
    page.keyboard.press("w")
    near = wait_for_view(page)
    assert near["x1"] - near["x0"] < 0.8 * (whole["x1"] - whole["x0"])
    page.keyboard.press("d")
    assert wait_for_view(page)["x0"] > near["x0"]
    page.keyboard.press("ArrowLeft")
    assert wait_for_view(page)["x0"] == pytest.approx(near["x0"], abs=2)
    page.keyboard.press("s")
    assert wait_for_view(page)["x1"] - wait_for_view(page)["x0"] > near["x1"] - near["x0"]
    page.keyboard.press("f")
    fitted = wait_for_view(page)
    assert (fitted["x0"], fitted["x1"]) == (whole["x0"], whole["x1"])
    page.keyboard.press("?")
    assert page.locator(".tl-help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".tl-help").is_visible()


def test_search_counts_matches_and_steps_through_them(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.classList.contains('tl-search')")
    page.keyboard.type("ncclkernel_sendrecv")
    page.keyboard.press("Enter")
    first = wait_for_view(page)
    assert "ncclKernel_SendRecv" in first["chosen"]["name"]
    hits = page.locator(".tl-match-count").inner_text()
    assert re.fullmatch(r"1 of \d+", hits)
    page.keyboard.press("Enter")
    second = wait_for_view(page)
    assert second["chosen"]["ts"] > first["chosen"]["ts"]
    page.keyboard.press("Shift+Enter")
    assert wait_for_view(page)["chosen"]["id"] == first["chosen"]["id"]
    assert first["x0"] <= first["chosen"]["ts"] <= first["x1"]
    page.locator(".tl-search").fill("no such kernel")
    page.keyboard.press("Enter")
    page.get_by_text("no match").wait_for()


def test_the_timeline_button_of_a_finding_selects_the_worst_instance(a100: Any) -> None:
    page = a100.open("/findings")
    page.get_by_text("Show on the timeline").first.click()
    page.locator(".tl-stage").wait_for()
    state = wait_for_view(page)
    report = page.evaluate("() => advisorTimeline.current.data.info.findings")
    finding = next(f for f in report if f["key"] == state["finding"])
    place = finding["places"][0]
    assert state["x0"] < place["ts"] and place["ts"] + place["dur"] < state["x1"]
    assert (state["chosen"]["ts"], state["chosen"]["dur"]) == (place["ts"], place["dur"])
    assert page.locator(".tl-focus").input_value() == finding["key"]


def test_a_focused_finding_dims_all_other_events(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    color_by_key = {c.key: c.color for c in ALL_CATEGORIES}
    before = read_colors(page)
    page = a100.open("/timeline?focus=exposed-communication")
    state = wait_for_view(page)
    assert state["finding"] == "exposed-communication"
    after = read_colors(page)
    assert after[color_by_key["gpu-communication"]] > 100
    assert before[color_by_key["step"]] > 1000 > after[color_by_key["step"]]


def test_a_link_reproduces_the_view(
    a100: Any, dashboard_of: Any, open_tab: Any, shared_trace: Any
) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    page.locator(".tl-search").fill("addmm")
    page.keyboard.press("Enter")
    page.locator(".tl-stage").focus()
    page.keyboard.press("s")
    state = wait_for_view(page)
    query = parse_qs(urlsplit(page.url).query)
    assert {"x0", "x1", "q", "sel"} <= set(query)
    second_tab = open_tab(dashboard_of(shared_trace("a100_train_6steps")), fresh=True)
    reproduced = wait_for_view(second_tab.open(page.url.removeprefix(second_tab.address)))
    assert reproduced["x0"] == pytest.approx(state["x0"], abs=2)
    assert reproduced["x1"] == pytest.approx(state["x1"], abs=2)
    assert (reproduced["chosen"]["id"], reproduced["query"]) == (state["chosen"]["id"], "addmm")
    assert second_tab.problems == []


@pytest.mark.parametrize(
    "query",
    [
        "x0=abc&x1=9",
        "x0=5&x1=1",
        "rank=999",
        "rank=x",
        "focus=no-such-rule",
        "sel=99999999999",
        "x0=-99999999999999999&x1=99999999999999999",
        "q=" + "x" * 300,
        "focus=%3Cimg%3E&finding=[]",
    ],
)
def test_an_invalid_address_still_shows_the_timeline(a100: Any, query: str) -> None:
    page = a100.open(f"/timeline?{query}")
    state = wait_for_view(page)
    assert state["x1"] > state["x0"]
    assert sum(read_colors(page).values()) > 0
    a100.problems[:] = [w for w in a100.problems if "400" not in w]


def test_a_click_shows_details_and_links_to_the_launch(a100: Any) -> None:
    page = a100.open("/timeline?focus=exposed-communication")
    state = wait_for_view(page)
    assert page.locator(".tl-side h2").first.inner_text() == state["chosen"]["name"]
    side = page.locator(".tl-side").inner_text()
    assert "Launched by" in side and "cudaLaunchKernel" in side
    page.locator(".tl-side .tl-link").first.click()
    launch = wait_for_view(page)
    assert launch["chosen"]["name"] == "cudaLaunchKernel"
    assert launch["x0"] <= launch["chosen"]["ts"] <= launch["x1"]
    page.keyboard.press("Escape")
    assert wait_for_view(page)["chosen"] is None


def test_hovering_shows_wide_slices_and_cells(a100: Any) -> None:
    page = a100.open("/timeline")
    state = wait_for_view(page)
    move_pointer_to(page, state["begin"] + 40e6, "steps")
    card = page.locator(".tl-card")
    card.wait_for(state="visible")
    assert "ProfilerStep#1009" in card.inner_text()
    first = page.evaluate(
        "() => advisorTimeline.current.data.fetchJson('search', {q: 'fbgemm_gpu'})"
    )
    move_pointer_to(page, first["ts"], "stream:3:7")
    page.locator(".tl-card", has_text="longest of").or_(
        page.locator(".tl-card", has_text="here")
    ).first.wait_for(timeout=5000)


def test_a_dragged_range_has_the_statistics_of_the_analysis(
    a100: Any, dashboard_of: Any, shared_trace: Any
) -> None:
    page = a100.open("/timeline")
    before = wait_for_view(page)
    box = page.locator(".tl-overlay").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 80, steps=4)
    page.mouse.up()
    page.locator(".tl-stats").first.wait_for()
    state = wait_for_view(page)
    x0, x1 = state["range"]
    assert x1 - x0 == pytest.approx(200 / before["width"] * (state["x1"] - state["x0"]), rel=0.02)
    busy_text = page.locator(".tl-headline strong").inner_text()
    a = dashboard_of(shared_trace("a100_train_6steps")).session.entries[0].loaded.main
    idle = a.gaps
    idle_ns = sum(
        max(0, min(ts + dur, x1) - max(ts, x0))
        for ts, dur in zip(idle["ts"].to_list(), idle["dur"].to_list(), strict=True)
    )
    assert float(busy_text.removesuffix("%")) == pytest.approx(
        100 * (1 - idle_ns / (x1 - x0)), abs=0.2
    )
    page.keyboard.press("z")
    zoomed = wait_for_view(page)
    assert (zoomed["x0"], zoomed["x1"]) == (pytest.approx(x0, abs=2), pytest.approx(x1, abs=2))


def test_a_drag_on_the_axis_zooms(a100: Any) -> None:
    page = a100.open("/timeline")
    before = wait_for_view(page)
    box = page.locator(".tl-axis").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 10, steps=3)
    page.mouse.up()
    after = wait_for_view(page)
    assert after["x1"] - after["x0"] == pytest.approx(
        100 / before["width"] * (before["x1"] - before["x0"]), rel=0.02
    )


def _check_labels_do_not_overlap(page: Any) -> None:
    boxes = sorted(page.evaluate(LABEL_BOXES))
    assert len(boxes) > 5 and all(end - top >= 24 for top, end in boxes)
    assert all(end <= top for (_, end), (top, _) in pairwise(boxes))


LABEL_BOXES = """() => [...document.querySelectorAll(".tl-labels .tl-label")].map(
  node => node.getBoundingClientRect()).map(box => [box.top, box.bottom])"""


def test_groups_collapse_and_expand_with_the_keyboard(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    label = page.get_by_role("button", name="Main thread 3113936", exact=True)
    _check_labels_do_not_overlap(page)
    assert label.get_attribute("aria-expanded") == "true"
    rows = "() => advisorTimeline.current.layout.rows.length"
    before = page.evaluate(rows)
    label.focus()
    page.keyboard.press("Enter")
    wait_for_view(page)
    assert (
        page.get_by_role("button", name="Main thread 3113936", exact=True).get_attribute(
            "aria-expanded"
        )
        == "false"
    )
    assert page.evaluate(rows) < before


def test_the_table_lists_visible_slices_and_works_with_the_keyboard(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    summary = page.get_by_text("Table of visible slices")
    summary.focus()
    page.keyboard.press("Enter")
    rows = page.locator(".tl-table tbody tr")
    rows.first.wait_for()
    assert rows.count() == 100

    def caption_count() -> int:
        result = re.search(
            r"([\d,]+) visible slices", page.locator(".tl-table caption").inner_text()
        )
        return int(result[1].replace(",", "")) if result else -1

    # all slices but those of the thread that starts collapsed
    hidden = page.evaluate(HIDDEN_SLICES)
    assert caption_count() == 125_003 - hidden
    assert hidden > 0
    button = page.locator(".tl-table tbody button").nth(5)
    name = button.inner_text()
    button.focus()
    page.keyboard.press("Enter")
    state = wait_for_view(page)
    assert state["chosen"]["name"].startswith(name.split("…")[0][:20])
    page.evaluate("place => advisorTimeline.current.showPlace(place)", state["chosen"])
    # the view and the table move, and the focus stays on that slice
    page.wait_for_function(
        """([id, all]) => document.activeElement.dataset.slice === String(id)
             && !document.querySelector(".tl-table caption").innerText.includes(all)""",
        arg=[state["chosen"]["id"], f"{125_003 - hidden:,}"],
    )
    assert 0 < caption_count() < 125_003 - hidden


def test_the_canvas_follows_the_theme(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    light = read_colors(page).most_common(1)[0][0]
    page.locator("#theme-switch").click()
    wait_for_view(page)
    dark = read_colors(page).most_common(1)[0][0]
    assert sum(bytes.fromhex(light[1:])) > 600 > 200 > sum(bytes.fromhex(dark[1:]))


def test_a_trace_without_device_work_shows_the_host_and_a_note(
    dashboard_of: Any, open_tab: Any, shared_trace: Any
) -> None:
    tab = open_tab(dashboard_of(shared_trace("no_gpu_rank")))
    page = tab.open("/timeline")
    wait_for_view(page)
    assert "not recorded" in page.locator(".tl-status").inner_text()
    page.locator(".tl-stage").focus()
    page.keyboard.press("p")
    assert "The trace has no GPU work" in page.locator(".tl-side").inner_text()
    assert not any("stream" in text for text in page.locator(".tl-label").all_inner_texts())
    assert read_colors(page)[next(c.color for c in ALL_CATEGORIES if c.key == "host-op")] > 100
    assert tab.problems == []


def test_a_rank_can_be_selected(dashboard_of: Any, open_tab: Any, two_ranks: Any) -> None:
    tab = open_tab(dashboard_of(two_ranks()))
    page = tab.open("/timeline?rank=1")
    wait_for_view(page)
    choice = page.get_by_label("Rank")
    assert choice.input_value() == "1"
    choice.select_option("0")
    wait_for_view(page)
    page.wait_for_timeout(400)
    assert parse_qs(urlsplit(page.url).query)["rank"] == ["0"]
    assert page.evaluate("() => advisorTimeline.current.data.info.rank") == 0
    assert tab.problems == []


def test_the_timeline_has_the_full_width_until_the_panel_is_opened(a100: Any) -> None:
    page = a100.open("/timeline")
    wide = wait_for_view(page)["width"]
    assert wide > 1100
    assert not page.locator(".tl-side").is_visible()
    page.locator(".tl-button", has_text="Panel").click()
    assert "Colors in view" in page.locator(".tl-side").inner_text()
    assert wait_for_view(page)["width"] < wide - 300
    page.reload()  # the panel stays open
    wait_for_view(page)
    assert page.locator(".tl-side").is_visible()
    page.locator(".tl-stage").focus()
    page.keyboard.press("p")
    wait_for_view(page)
    assert not page.locator(".tl-side").is_visible()
    move_pointer_to(page, 0.5 * (wide and wait_for_view(page)["finish"]), "steps")
    page.mouse.down()
    page.mouse.up()  # details open the panel, and deselecting closes it
    page.locator(".tl-side").wait_for()
    page.keyboard.press("Escape")
    page.locator(".tl-side").wait_for(state="hidden")


def test_pinned_lanes_stay_while_the_others_scroll(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    pin = page.get_by_role("button", name="Pin to the top: GPU 3 · stream 7")
    pin.focus()
    page.keyboard.press("Enter")
    wait_for_view(page)
    assert "pin=stream%3A3%3A7" in page.url
    label = page.locator(".tl-pins .tl-label", has_text="GPU 3 · stream 7")
    before = label.bounding_box()
    page.evaluate("() => { advisorTimeline.current.body.scrollTop = 150; }")
    state = wait_for_view(page)
    assert label.bounding_box() == before
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == (
        "Unpin GPU 3 · stream 7"
    )
    # a click selects from the pinned lane, not from the lane that scrolled under it
    result = page.evaluate(
        """() => { const t = advisorTimeline.current, row = t.layout.rows.find(r => r.isPinned);
          return [t.rowAt(row.y + 2).lane, row.lane, t.layout.pinnedHeight]; }"""
    )
    assert result[0] == result[1]
    kernel = next(c.color for c in ALL_CATEGORIES if c.key == "gpu-communication")
    assert read_colors(page)[kernel] > 100
    page.reload()
    assert wait_for_view(page)["x1"] == state["x1"]
    assert page.locator(".tl-pins .tl-label").count() == 1
    page.locator(".tl-pins .tl-pin").click()
    assert page.locator(".tl-pins .tl-label").count() == 0


COMPARED = """() => { const t = advisorTimeline.current, p = t.compared;
  return {x0: p.x0, x1: p.x1, offset: p.offset, begin: p.data.info.first_ns, rank: p.data.rank,
          run: p.run, slices: p.answer ? p.answer.slices.n + p.answer.runs.n : 0,
          who: [t.runCaption.innerText, p.runCaption.innerText]}; }"""


def test_two_ranks_or_runs_share_one_zoom(
    dashboard_of: Any, open_tab: Any, two_ranks: Any, shared_trace: Any
) -> None:
    dashboard = dashboard_of(two_ranks())
    tab = open_tab(dashboard)
    page = tab.open("/timeline")
    wait_for_view(page)
    page.locator(".tl-compare").select_option("rank:1")
    page.wait_for_function("() => (advisorTimeline.current.compared || {}).answer")
    page.locator(".tl-stage").first.focus()
    page.keyboard.press("w")
    top = wait_for_view(page)
    below = page.evaluate(COMPARED)
    assert below["rank"] == 1
    assert below["slices"] > 100
    assert below["x1"] - below["x0"] == pytest.approx(top["x1"] - top["x0"])
    assert below["x0"] - top["x0"] == pytest.approx(below["offset"])
    # a collective of both ranks ends at the same position
    analyses = dashboard.session.entries[0].loaded.analyses
    ends = [
        max(end for end in (a.collectives["ts"] + a.collectives["dur"]).to_list())
        for a in analyses.values()
    ]
    assert abs(ends[1] - ends[0] - below["offset"]) < 5e6
    page.locator(".tl-compared .tl-stage").focus()  # the lower timeline also moves the upper one
    page.keyboard.press("d")
    moved = wait_for_view(page)
    assert moved["x0"] > top["x0"]
    second_tab = open_tab(dashboard, fresh=True)
    second_page = second_tab.open(page.url.removeprefix(dashboard.address))
    second_page.wait_for_function("() => (advisorTimeline.current.compared || {}).answer")
    assert second_page.evaluate(COMPARED)["rank"] == 1
    assert tab.problems == [] == second_tab.problems

    name = "pairs/loader_profiler_workers"
    runs = dashboard_of(shared_trace(f"{name}0"), shared_trace(f"{name}4"))
    tab = open_tab(runs)
    page = tab.open("/timeline?beside=run:1")
    wait_for_view(page)
    page.wait_for_function("() => (advisorTimeline.current.compared || {}).answer")
    below = page.evaluate(COMPARED)
    starts = [int(e.loaded.main.spans.start[0]) for e in runs.session.entries]
    assert below["offset"] == starts[1] - starts[0]
    assert "workers0" in below["who"][0]
    assert "workers4" in below["who"][1] and "first analysed step" in below["who"][1]
    page.locator(".tl-compare").select_option("")
    assert page.locator(".tl-stage").count() == 1
    wait_for_view(page)
    assert "beside" not in page.url
    assert tab.problems == []


def test_library_frames_can_be_hidden_and_labels_start_with_functions(
    dashboard_of: Any, open_tab: Any, shared_trace: Any
) -> None:
    tab = open_tab(dashboard_of(shared_trace("h100_bert_small_inference")))
    page = tab.open("/timeline?libraries=1")
    wait_for_view(page)
    rows = """() => { const d = advisorTimeline.current.data;
      const g = d.info.groups.find(g => g.kind === 'thread');
      return [g.count, d.info.slices, d.labels.filter(Boolean).length]; }"""
    lanes_with, slices_with, _ = page.evaluate(rows)
    label = page.evaluate(
        """() => { const d = advisorTimeline.current.data;
          const i = d.names.findIndex(n => /module\\.py\\(\\d+\\): _call_impl/.test(n));
          return [d.names[i], d.labels[i]]; }"""
    )
    assert label[1].startswith("_call_impl · module.py:")
    page.locator(".tl-button", has_text="Hide library frames").click()
    page.wait_for_function("() => (advisorTimeline.current.data.info || {}).libraries === false")
    wait_for_view(page)
    lanes_without, slices_without, _ = page.evaluate(rows)
    assert lanes_without < lanes_with / 2 and slices_without < slices_with
    assert "libraries" not in page.url  # the default is not in the address
    result = "q => advisorTimeline.current.data.fetchJson('search', {q: q}).then(a => a.total)"
    assert page.evaluate(result, "torch/nn/modules/module.py") == 0
    assert page.evaluate(result, "aten::") > 50
    assert tab.problems == []


def test_the_table_shows_the_selected_rank(
    dashboard_of: Any, open_tab: Any, two_ranks: Any
) -> None:
    """The view stays the same, so the request only differs in the rank."""
    tab = open_tab(dashboard_of(two_ranks()))
    page = tab.open("/timeline?rank=1")
    wait_for_view(page)
    page.get_by_text("Table of visible slices").click()
    page.locator(".tl-table tbody tr").first.wait_for()
    wait_for_view(page)
    texts = "() => document.querySelector('.tl-table tbody').innerText"
    before = page.evaluate(texts)
    page.get_by_label("Rank").select_option("0")
    page.wait_for_function(f"before => ({texts})() !== before", arg=before)
    assert tab.problems == []


def test_hostile_names_are_shown_as_text(
    dashboard_of: Any, open_tab: Any, tmp_path_factory: Any
) -> None:
    b = TraceBuilder(gpu="A100", rank=0)
    for _ in range(3):
        with b.step(), b.op(HOSTILE, [[64, 64]], "float"):
            b.launch(HOSTILE, 500, blocks=16)
            b.sync()
    tab = open_tab(dashboard_of(b.write(tmp_path_factory.mktemp("hostile") / "x.json")))
    page = tab.open("/timeline")
    wait_for_view(page)
    page.locator(".tl-search").fill("<img")
    page.keyboard.press("Enter")
    state = wait_for_view(page)
    assert state["chosen"]["name"] == HOSTILE
    assert page.locator(".tl-side h2").first.inner_text() == HOSTILE
    page.get_by_text("Table of visible slices").click()
    page.locator(".tl-table tbody tr").first.wait_for()
    move_pointer_to(page, state["chosen"]["ts"] + 10, "steps")
    assert page.locator("#timeline img, #timeline b").count() == 0
    assert page.title() != "owned"
    assert tab.problems == []


def test_labels_are_above_the_lanes_on_a_narrow_screen(
    dashboard_of: Any, open_tab: Any, shared_trace: Any
) -> None:
    tab = open_tab(dashboard_of(shared_trace("a100_train_6steps")), width=390)
    page = tab.open("/timeline")
    wait_for_view(page)
    assert page.evaluate("() => advisorTimeline.current.isNarrow")
    _check_labels_do_not_overlap(page)
    width = page.evaluate("() => advisorTimeline.current.width")
    assert width > 300
    assert len(read_colors(page)) > 50
    assert page.evaluate("() => document.querySelector('.timeline-page').scrollWidth") <= 390
    assert tab.problems == []


def test_the_timeline_starts_before_the_frame_and_moves_into_it(fresh_a100: Any) -> None:
    page = fresh_a100.page
    page.route("**/_dash-layout*", lambda route: (page.wait_for_timeout(1500), route.continue_()))
    page.goto(fresh_a100.address + "/timeline")
    page.locator(".tl-early .tl-canvas").wait_for(state="attached")
    early = wait_for_view(page)
    assert early["x1"] > early["x0"]
    page.locator("#content #timeline .tl-canvas").wait_for(state="attached")
    wait_for_view(page)
    assert page.locator(".tl-canvas").count() == 1
    assert page.locator(".tl-early").count() == 0
    assert len(read_colors(page)) > 50


def test_the_timeline_is_painted_before_the_scripts_of_the_frame_are_requested(
    fresh_a100: Any,
) -> None:
    page = fresh_a100.open("/timeline")
    wait_for_view(page)
    painted, frame_ready = page.evaluate(
        "() => ['advisor-timeline-painted', 'advisor-frame-ready'].map("
        "  name => performance.getEntriesByName(name)[0].startTime)"
    )
    requests = page.evaluate(
        "() => performance.getEntriesByType('resource').map(one => [one.name, one.startTime])"
    )
    dash_requests = [time for name, time in requests if "/_dash-component-suites/" in name]
    timeline_scripts = [
        name for name, _ in requests if "/assets/timeline/" in name and ".js" in name
    ]
    assert len(dash_requests) > 8
    assert min(dash_requests) > painted
    assert frame_ready > max(dash_requests)
    assert len(timeline_scripts) == len(set(timeline_scripts)) == 9
    assert fresh_a100.problems == []


def test_the_frame_appears_even_if_the_timeline_cannot_be_drawn(a100: Any) -> None:
    page = a100.page
    page.route("**/_advisor/timeline/*", lambda route: route.abort())
    page.goto(a100.address + "/timeline")
    page.locator("main h1").first.wait_for(state="attached")
    page.get_by_role("link", name="Overview").click()
    page.locator(".page-overview main h1").wait_for(state="attached")
    assert all("ERR_FAILED" in problem for problem in a100.problems)  # only the refused requests
    a100.problems.clear()


def test_leaving_the_page_removes_the_timeline(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    page.get_by_role("link", name="Overview").click()
    page.locator(".tl-stage").wait_for(state="detached")
    assert page.evaluate("() => advisorTimeline.current") is None
    page.get_by_role("link", name="Timeline").click()
    wait_for_view(page)
    assert page.locator(".tl-stage").count() == 1


def test_touch_pans_and_pinches(fresh_a100: Any) -> None:
    page = fresh_a100.open("/timeline")
    before = wait_for_view(page)
    page.locator(".tl-stage").focus()
    page.keyboard.press("w")
    near = wait_for_view(page)
    box = page.locator(".tl-overlay").bounding_box()
    touch = page.context.new_cdp_session(page)
    touch.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def dispatch_touch(kind: str, *xs: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": i} for i, x in enumerate(xs)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    dispatch_touch("touchStart", 300)
    for x in (280, 240, 200):
        dispatch_touch("touchMove", x)
    dispatch_touch("touchEnd")
    panned = wait_for_view(page)
    span = near["x1"] - near["x0"]
    assert panned["x0"] - near["x0"] == pytest.approx(100 / near["width"] * span, rel=0.05)
    dispatch_touch("touchStart", 250, 350)
    for half in (60, 80, 100):
        dispatch_touch("touchMove", 300 - half, 300 + half)
    dispatch_touch("touchEnd")
    pinched = wait_for_view(page)
    assert pinched["x1"] - pinched["x0"] == pytest.approx(span / 2, rel=0.05)
    assert pinched["range"] is None
    assert before["begin"] == pinched["begin"]


def test_zooms_are_not_animated_with_reduced_motion(a100: Any) -> None:
    page = a100.open("/timeline")
    page.emulate_media(reduced_motion="reduce")
    before = wait_for_view(page)
    span = page.evaluate(
        "() => { const t = advisorTimeline.current; t.zoom(0.5, 0.5, true); return t.x1 - t.x0; }"
    )
    assert span == pytest.approx((before["x1"] - before["x0"]) / 2)


def test_a_slice_can_be_selected_with_the_keyboard_alone(a100: Any) -> None:
    page = a100.open("/timeline")
    wait_for_view(page)
    page.locator(".tl-stage").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => new URLSearchParams(location.search).has('sel')")
    assert page.locator(".tl-side h2").first.inner_text()
