"""The timeline in a browser: what is painted, and what wheel, keys, search and links do."""

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
HIDDEN = """() => { const t = advisorTimeline.current, rows = t.layout.byLane;
  return fetch(t.data.buildUrl('view', {x0: t.data.info.first_ns, x1: t.data.info.last_ns, px: 100,
      lanes: t.data.info.groups.flatMap(g => Array.from({length: g.count}, (_, i) => g.first + i))
        .filter(lane => rows[lane] === undefined).join()}))
    .then(r => r.arrayBuffer()).then(b => new DataView(b).getUint32(28, true)); }"""
SETTLED = """() => new Promise(done => {
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
# colours of the canvas as [hex, pixels], most frequent first; what is blended is another colour
COLOURS = """() => { const c = advisorTimeline.current.canvas, all = {};
  const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(c, 0, 0);
  const d = copy.getImageData(0, 0, c.width, c.height).data;
  for (let i = 0; i < d.length; i += 4) {
    const key = (d[i] << 16) | (d[i + 1] << 8) | d[i + 2]; all[key] = (all[key] || 0) + 1; }
  return Object.entries(all).sort((a, b) => b[1] - a[1]).slice(0, 400)
    .map(([k, n]) => ['#' + Number(k).toString(16).padStart(6, '0'), n]); }"""


def settle(page: Any) -> dict[str, Any]:
    """Wait until what is asked of the server is on the canvas; the view's state."""
    page.locator(".tl-canvas").first.wait_for(state="attached")
    assert page.evaluate(SETTLED), "the view is not painted in time"
    found: dict[str, Any] = page.evaluate(STATE)
    return found


def colours(page: Any) -> Counter[str]:
    return Counter(dict(page.evaluate(COLOURS)))


def pointer_on(page: Any, ts: float, group: str) -> None:
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
def a100(show: Any, tab: Any, shared_trace: Callable[[str], str]) -> Any:
    made = tab(show(shared_trace("a100_train_6steps")))
    yield made
    assert made.wrong == []


@pytest.fixture
def fresh(show: Any, tab: Any, shared_trace: Callable[[str], str]) -> Any:
    """The same in a browser that was never here: its scripts are yet to come."""
    made = tab(show(shared_trace("a100_train_6steps")), fresh=True)
    yield made
    assert made.wrong == []


def test_every_kind_of_lane_is_painted(a100: Any) -> None:
    page = a100.open("/timeline")
    state = settle(page)
    assert (state["x0"], state["x1"]) == (state["begin"], state["finish"])
    labels = page.locator(".tl-label .tl-text").all_inner_texts()
    assert labels[:3] == ["Steps", "Phases", "GPU idle, by cause"]
    assert {"GPU 3 · stream 7", "Collectives", "Copies and memsets", "Main thread 3113936"} <= set(
        labels
    )
    seen = colours(page)
    by_key = {c.key: c.color for c in ALL_CATEGORIES}
    for key in ("step", "phase-forward", "gpu-communication", "copy-htod", "host-op"):
        assert seen[by_key[key]] > 100, key
    assert len(seen) > 50, "narrow slices are blended into many colours"


def test_the_wheel_scrolls_with_ctrl_it_zooms_where_the_pointer_is_and_with_shift_it_pans(
    a100: Any,
) -> None:
    a100.page.set_viewport_size({"width": 1440, "height": 600})
    page = a100.open("/timeline")
    before = settle(page)
    at = before["begin"] + 0.25 * (before["finish"] - before["begin"])
    pointer_on(page, at, "steps")
    page.mouse.wheel(0, 300)
    page.wait_for_function("() => advisorTimeline.current.body.scrollTop > 20")
    scrolled = settle(page)
    assert (scrolled["x0"], scrolled["x1"]) == (before["x0"], before["x1"])
    page.keyboard.down("Control")
    for _ in range(5):
        page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    zoomed = settle(page)
    span = zoomed["x1"] - zoomed["x0"]
    assert span < 0.2 * (before["x1"] - before["x0"])
    assert (at - zoomed["x0"]) / span == pytest.approx(0.25, abs=0.02)
    page.keyboard.down("Shift")
    page.mouse.wheel(0, 200)
    page.keyboard.up("Shift")
    panned = settle(page)
    assert panned["x1"] - panned["x0"] == pytest.approx(span, rel=1e-6)
    assert panned["x0"] > zoomed["x0"]
    assert colours(page), "painted after moving"


def test_keys_zoom_pan_fit_and_escape(a100: Any) -> None:
    page = a100.open("/timeline")
    whole = settle(page)
    page.locator(".tl-stage").focus()
    page.keyboard.press("w")
    page.keyboard.press("w")
    near = settle(page)
    assert near["x1"] - near["x0"] < 0.8 * (whole["x1"] - whole["x0"])
    page.keyboard.press("d")
    assert settle(page)["x0"] > near["x0"]
    page.keyboard.press("ArrowLeft")
    assert settle(page)["x0"] == pytest.approx(near["x0"], abs=2)
    page.keyboard.press("s")
    assert settle(page)["x1"] - settle(page)["x0"] > near["x1"] - near["x0"]
    page.keyboard.press("f")
    fitted = settle(page)
    assert (fitted["x0"], fitted["x1"]) == (whole["x0"], whole["x1"])
    page.keyboard.press("?")
    assert page.locator(".tl-help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".tl-help").is_visible()


def test_search_counts_goes_to_the_next_and_back(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.classList.contains('tl-search')")
    page.keyboard.type("ncclkernel_sendrecv")
    page.keyboard.press("Enter")
    first = settle(page)
    assert "ncclKernel_SendRecv" in first["chosen"]["name"]
    hits = page.locator(".tl-match-count").inner_text()
    assert re.fullmatch(r"1 of \d+", hits)
    page.keyboard.press("Enter")
    second = settle(page)
    assert second["chosen"]["ts"] > first["chosen"]["ts"]
    page.keyboard.press("Shift+Enter")
    assert settle(page)["chosen"]["id"] == first["chosen"]["id"]
    assert first["x0"] <= first["chosen"]["ts"] <= first["x1"]
    page.locator(".tl-search").fill("no such kernel")
    page.keyboard.press("Enter")
    page.get_by_text("no match").wait_for()


def test_show_me_on_the_findings_page_leads_to_the_worst_instance(a100: Any) -> None:
    page = a100.open("/findings")
    page.get_by_text("Show on the timeline").first.click()
    page.locator(".tl-stage").wait_for()
    state = settle(page)
    report = page.evaluate("() => advisorTimeline.current.data.info.findings")
    finding = next(f for f in report if f["key"] == state["finding"])
    place = finding["places"][0]
    assert state["x0"] < place["ts"] and place["ts"] + place["dur"] < state["x1"]
    assert (state["chosen"]["ts"], state["chosen"]["dur"]) == (place["ts"], place["dur"])
    assert page.locator(".tl-focus").input_value() == finding["key"]


def test_a_finding_in_focus_dims_all_but_its_events(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    colour = {c.key: c.color for c in ALL_CATEGORIES}
    before = colours(page)
    page = a100.open("/timeline?focus=exposed-communication")
    state = settle(page)
    assert state["finding"] == "exposed-communication"
    after = colours(page)
    assert after[colour["gpu-communication"]] > 100
    assert before[colour["step"]] > 1000 > after[colour["step"]]


def test_a_link_reproduces_the_view(a100: Any, show: Any, tab: Any, shared_trace: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    page.locator(".tl-search").fill("addmm")
    page.keyboard.press("Enter")
    page.locator(".tl-stage").focus()
    page.keyboard.press("s")
    state = settle(page)
    query = parse_qs(urlsplit(page.url).query)
    assert {"x0", "x1", "q", "sel"} <= set(query)
    other = tab(show(shared_trace("a100_train_6steps")), fresh=True)
    again = settle(other.open(page.url.removeprefix(other.address)))
    assert again["x0"] == pytest.approx(state["x0"], abs=2)
    assert again["x1"] == pytest.approx(state["x1"], abs=2)
    assert (again["chosen"]["id"], again["query"]) == (state["chosen"]["id"], "addmm")
    assert other.wrong == []


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
def test_an_address_of_nonsense_shows_the_timeline_all_the_same(a100: Any, query: str) -> None:
    page = a100.open(f"/timeline?{query}")
    state = settle(page)
    assert state["x1"] > state["x0"]
    assert sum(colours(page).values()) > 0
    a100.wrong[:] = [w for w in a100.wrong if "400" not in w]


def test_a_click_tells_what_it_is_and_draws_the_launch(a100: Any) -> None:
    page = a100.open("/timeline?focus=exposed-communication")
    state = settle(page)
    assert page.locator(".tl-side h2").first.inner_text() == state["chosen"]["name"]
    side = page.locator(".tl-side").inner_text()
    assert "Launched by" in side and "cudaLaunchKernel" in side
    page.locator(".tl-side .tl-link").first.click()
    launch = settle(page)
    assert launch["chosen"]["name"] == "cudaLaunchKernel"
    assert launch["x0"] <= launch["chosen"]["ts"] <= launch["x1"]
    page.keyboard.press("Escape")
    assert settle(page)["chosen"] is None


def test_hovering_says_what_is_there_wide_or_narrow(a100: Any) -> None:
    page = a100.open("/timeline")
    state = settle(page)
    pointer_on(page, state["begin"] + 40e6, "steps")
    card = page.locator(".tl-card")
    card.wait_for(state="visible")
    assert "ProfilerStep#1009" in card.inner_text()
    first = page.evaluate(
        "() => advisorTimeline.current.data.fetchJson('search', {q: 'fbgemm_gpu'})"
    )
    pointer_on(page, first["ts"], "stream:3:7")
    page.locator(".tl-card", has_text="longest of").or_(
        page.locator(".tl-card", has_text="here")
    ).first.wait_for(timeout=5000)


def test_a_dragged_range_has_the_statistics_of_the_analysis(
    a100: Any, show: Any, shared_trace: Any
) -> None:
    page = a100.open("/timeline")
    before = settle(page)
    box = page.locator(".tl-overlay").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 80, steps=4)
    page.mouse.up()
    page.locator(".tl-stats").first.wait_for()
    state = settle(page)
    x0, x1 = state["range"]
    assert x1 - x0 == pytest.approx(200 / before["width"] * (state["x1"] - state["x0"]), rel=0.02)
    shown = page.locator(".tl-headline strong").inner_text()
    a = show(shared_trace("a100_train_6steps")).session.entries[0].loaded.main
    idle = a.gaps
    inside = sum(
        max(0, min(ts + dur, x1) - max(ts, x0))
        for ts, dur in zip(idle["ts"].to_list(), idle["dur"].to_list(), strict=True)
    )
    assert float(shown.removesuffix("%")) == pytest.approx(100 * (1 - inside / (x1 - x0)), abs=0.2)
    page.keyboard.press("z")
    zoomed = settle(page)
    assert (zoomed["x0"], zoomed["x1"]) == (pytest.approx(x0, abs=2), pytest.approx(x1, abs=2))


def test_a_drag_on_the_axis_zooms(a100: Any) -> None:
    page = a100.open("/timeline")
    before = settle(page)
    box = page.locator(".tl-axis").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 10, steps=3)
    page.mouse.up()
    after = settle(page)
    assert after["x1"] - after["x0"] == pytest.approx(
        100 / before["width"] * (before["x1"] - before["x0"]), rel=0.02
    )


def _names_do_not_overlap(page: Any) -> None:
    boxes = sorted(page.evaluate(NAMES))
    assert len(boxes) > 5 and all(end - top >= 24 for top, end in boxes)
    assert all(end <= top for (_, end), (top, _) in pairwise(boxes))


NAMES = """() => [...document.querySelectorAll(".tl-labels .tl-label")].map(
  node => node.getBoundingClientRect()).map(box => [box.top, box.bottom])"""


def test_lanes_fold_and_unfold_by_keyboard(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    label = page.get_by_role("button", name="Main thread 3113936", exact=True)
    _names_do_not_overlap(page)
    assert label.get_attribute("aria-expanded") == "true"
    rows = "() => advisorTimeline.current.layout.rows.length"
    before = page.evaluate(rows)
    label.focus()
    page.keyboard.press("Enter")
    settle(page)
    assert (
        page.get_by_role("button", name="Main thread 3113936", exact=True).get_attribute(
            "aria-expanded"
        )
        == "false"
    )
    assert page.evaluate(rows) < before


def test_the_table_lists_what_is_in_view_and_is_reached_by_keyboard(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    summary = page.get_by_text("Table of visible slices")
    summary.focus()
    page.keyboard.press("Enter")
    rows = page.locator(".tl-table tbody tr")
    rows.first.wait_for()
    assert rows.count() == 100

    def counted() -> int:
        found = re.search(
            r"([\d,]+) visible slices", page.locator(".tl-table caption").inner_text()
        )
        return int(found[1].replace(",", "")) if found else -1

    # all but those of the thread that starts folded
    hidden = page.evaluate(HIDDEN)
    assert counted() == 125_003 - hidden
    assert hidden > 0
    button = page.locator(".tl-table tbody button").nth(5)
    name = button.inner_text()
    button.focus()
    page.keyboard.press("Enter")
    state = settle(page)
    assert state["chosen"]["name"].startswith(name.split("…")[0][:20])
    page.evaluate("place => advisorTimeline.current.showPlace(place)", state["chosen"])
    # the view moves there, the table with it, and the focus stays on that slice
    page.wait_for_function(
        """([id, all]) => document.activeElement.dataset.slice === String(id)
             && !document.querySelector(".tl-table caption").innerText.includes(all)""",
        arg=[state["chosen"]["id"], f"{125_003 - hidden:,}"],
    )
    assert 0 < counted() < 125_003 - hidden


def test_the_picture_follows_the_theme(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    light = colours(page).most_common(1)[0][0]
    page.locator("#theme-switch").click()
    settle(page)
    dark = colours(page).most_common(1)[0][0]
    assert sum(bytes.fromhex(light[1:])) > 600 > 200 > sum(bytes.fromhex(dark[1:]))


def test_a_trace_without_device_work_shows_the_host_and_says_what_is_missing(
    show: Any, tab: Any, shared_trace: Any
) -> None:
    made = tab(show(shared_trace("no_gpu_rank")))
    page = made.open("/timeline")
    settle(page)
    assert "not recorded" in page.locator(".tl-status").inner_text()
    page.locator(".tl-stage").focus()
    page.keyboard.press("p")
    assert "The trace has no GPU work" in page.locator(".tl-side").inner_text()
    assert not any("stream" in text for text in page.locator(".tl-label").all_inner_texts())
    assert colours(page)[next(c.color for c in ALL_CATEGORIES if c.key == "host-op")] > 100
    assert made.wrong == []


def test_ranks_can_be_chosen(show: Any, tab: Any, two_ranks: Any) -> None:
    made = tab(show(two_ranks()))
    page = made.open("/timeline?rank=1")
    settle(page)
    choice = page.get_by_label("Rank")
    assert choice.input_value() == "1"
    choice.select_option("0")
    settle(page)
    page.wait_for_timeout(400)
    assert parse_qs(urlsplit(page.url).query)["rank"] == ["0"]
    assert page.evaluate("() => advisorTimeline.current.data.info.rank") == 0
    assert made.wrong == []


def test_the_picture_has_the_width_and_the_panel_comes_when_asked(a100: Any) -> None:
    page = a100.open("/timeline")
    wide = settle(page)["width"]
    assert wide > 1100
    assert not page.locator(".tl-side").is_visible()
    page.locator(".tl-button", has_text="Panel").click()
    assert "Colors in view" in page.locator(".tl-side").inner_text()
    assert settle(page)["width"] < wide - 300
    page.reload()  # what was chosen stays
    settle(page)
    assert page.locator(".tl-side").is_visible()
    page.locator(".tl-stage").focus()
    page.keyboard.press("p")
    settle(page)
    assert not page.locator(".tl-side").is_visible()
    pointer_on(page, 0.5 * (wide and settle(page)["finish"]), "steps")
    page.mouse.down()
    page.mouse.up()  # details open it, letting go of them shuts it
    page.locator(".tl-side").wait_for()
    page.keyboard.press("Escape")
    page.locator(".tl-side").wait_for(state="hidden")


def test_pinned_lanes_stay_while_the_others_scroll(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    pin = page.get_by_role("button", name="Pin to the top: GPU 3 · stream 7")
    pin.focus()
    page.keyboard.press("Enter")
    settle(page)
    assert "pin=stream%3A3%3A7" in page.url
    label = page.locator(".tl-pins .tl-label", has_text="GPU 3 · stream 7")
    before = label.bounding_box()
    page.evaluate("() => { advisorTimeline.current.body.scrollTop = 150; }")
    state = settle(page)
    assert label.bounding_box() == before
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == (
        "Unpin GPU 3 · stream 7"
    )
    # what is there to click is the pinned lane, not what scrolled under it
    found = page.evaluate(
        """() => { const t = advisorTimeline.current, row = t.layout.rows.find(r => r.isPinned);
          return [t.rowAt(row.y + 2).lane, row.lane, t.layout.pinnedHeight]; }"""
    )
    assert found[0] == found[1]
    kernel = next(c.color for c in ALL_CATEGORIES if c.key == "gpu-communication")
    assert colours(page)[kernel] > 100
    page.reload()
    assert settle(page)["x1"] == state["x1"]
    assert page.locator(".tl-pins .tl-label").count() == 1
    page.locator(".tl-pins .tl-pin").click()
    assert page.locator(".tl-pins .tl-label").count() == 0


PARTNER = """() => { const t = advisorTimeline.current, p = t.partner;
  return {x0: p.x0, x1: p.x1, shift: p.shift, begin: p.data.info.first_ns, rank: p.data.rank,
          run: p.run, slices: p.answer ? p.answer.slices.n + p.answer.runs.n : 0,
          who: [t.runCaption.innerText, p.runCaption.innerText]}; }"""


def test_two_ranks_and_two_runs_are_under_each_other_with_one_zoom(
    show: Any, tab: Any, two_ranks: Any, shared_trace: Any
) -> None:
    shown = show(two_ranks())
    t = tab(shown)
    page = t.open("/timeline")
    settle(page)
    page.locator(".tl-compare").select_option("rank:1")
    page.wait_for_function("() => (advisorTimeline.current.partner || {}).answer")
    page.locator(".tl-stage").first.focus()
    page.keyboard.press("w")
    top = settle(page)
    below = page.evaluate(PARTNER)
    assert below["rank"] == 1
    assert below["slices"] > 100
    assert below["x1"] - below["x0"] == pytest.approx(top["x1"] - top["x0"])
    assert below["x0"] - top["x0"] == pytest.approx(below["shift"])
    # a collective that both are in ends at one place of the picture
    analyses = shown.session.entries[0].loaded.analyses
    ends = [
        max(end for end in (a.collectives["ts"] + a.collectives["dur"]).to_list())
        for a in analyses.values()
    ]
    assert abs(ends[1] - ends[0] - below["shift"]) < 5e6
    page.locator(".tl-partner .tl-stage").focus()  # from below it moves the upper one too
    page.keyboard.press("d")
    moved = settle(page)
    assert moved["x0"] > top["x0"]
    again = tab(shown, fresh=True)
    other = again.open(page.url.removeprefix(shown.address))
    other.wait_for_function("() => (advisorTimeline.current.partner || {}).answer")
    assert other.evaluate(PARTNER)["rank"] == 1
    assert t.wrong == [] == again.wrong

    name = "pairs/loader_profiler_workers"
    runs = show(shared_trace(f"{name}0"), shared_trace(f"{name}4"))
    t = tab(runs)
    page = t.open("/timeline?beside=run:1")
    settle(page)
    page.wait_for_function("() => (advisorTimeline.current.partner || {}).answer")
    below = page.evaluate(PARTNER)
    starts = [int(e.loaded.main.spans.start[0]) for e in runs.session.entries]
    assert below["shift"] == starts[1] - starts[0]
    assert "workers0" in below["who"][0]
    assert "workers4" in below["who"][1] and "first analysed step" in below["who"][1]
    page.locator(".tl-compare").select_option("")
    assert page.locator(".tl-stage").count() == 1
    settle(page)
    assert "beside" not in page.url
    assert t.wrong == []


def test_frames_of_libraries_are_hidden_and_functions_come_before_files(
    show: Any, tab: Any, shared_trace: Any
) -> None:
    t = tab(show(shared_trace("h100_bert_small_inference")))
    page = t.open("/timeline?libraries=1")
    settle(page)
    rows = """() => { const d = advisorTimeline.current.data;
      const g = d.info.groups.find(g => g.kind === 'thread');
      return [g.count, d.info.slices, d.labels.filter(Boolean).length]; }"""
    deep, many, _ = page.evaluate(rows)
    label = page.evaluate(
        """() => { const d = advisorTimeline.current.data;
          const i = d.names.findIndex(n => /module\\.py\\(\\d+\\): _call_impl/.test(n));
          return [d.names[i], d.labels[i]]; }"""
    )
    assert label[1].startswith("_call_impl · module.py:")
    page.locator(".tl-button", has_text="Hide library frames").click()
    page.wait_for_function("() => (advisorTimeline.current.data.info || {}).libraries === false")
    settle(page)
    flat, fewer, _ = page.evaluate(rows)
    assert flat < deep / 2 and fewer < many
    assert "libraries" not in page.url  # as without a choice
    found = "q => advisorTimeline.current.data.fetchJson('search', {q: q}).then(a => a.total)"
    assert page.evaluate(found, "torch/nn/modules/module.py") == 0
    assert page.evaluate(found, "aten::") > 50
    assert t.wrong == []


def test_the_table_is_that_of_the_rank_that_is_chosen(show: Any, tab: Any, two_ranks: Any) -> None:
    """The view stays where it was, so what is asked for is the same but for the rank."""
    made = tab(show(two_ranks()))
    page = made.open("/timeline?rank=1")
    settle(page)
    page.get_by_text("Table of visible slices").click()
    page.locator(".tl-table tbody tr").first.wait_for()
    settle(page)
    texts = "() => document.querySelector('.tl-table tbody').innerText"
    before = page.evaluate(texts)
    page.get_by_label("Rank").select_option("0")
    page.wait_for_function(f"before => ({texts})() !== before", arg=before)
    assert made.wrong == []


def test_a_hostile_name_is_text(show: Any, tab: Any, tmp_path_factory: Any) -> None:
    b = TraceBuilder(gpu="A100", rank=0)
    for _ in range(3):
        with b.step(), b.op(HOSTILE, [[64, 64]], "float"):
            b.launch(HOSTILE, 500, blocks=16)
            b.sync()
    made = tab(show(b.write(tmp_path_factory.mktemp("hostile") / "x.json")))
    page = made.open("/timeline")
    settle(page)
    page.locator(".tl-search").fill("<img")
    page.keyboard.press("Enter")
    state = settle(page)
    assert state["chosen"]["name"] == HOSTILE
    assert page.locator(".tl-side h2").first.inner_text() == HOSTILE
    page.get_by_text("Table of visible slices").click()
    page.locator(".tl-table tbody tr").first.wait_for()
    pointer_on(page, state["chosen"]["ts"] + 10, "steps")
    assert page.locator("#timeline img, #timeline b").count() == 0
    assert page.title() != "owned"
    assert made.wrong == []


def test_on_a_narrow_screen_labels_have_lines_of_their_own(
    show: Any, tab: Any, shared_trace: Any
) -> None:
    made = tab(show(shared_trace("a100_train_6steps")), width=390)
    page = made.open("/timeline")
    settle(page)
    assert page.evaluate("() => advisorTimeline.current.isNarrow")
    _names_do_not_overlap(page)
    width = page.evaluate("() => advisorTimeline.current.width")
    assert width > 300
    assert len(colours(page)) > 50
    assert page.evaluate("() => document.querySelector('.timeline-page').scrollWidth") <= 390
    assert made.wrong == []


def test_the_picture_begins_before_the_frame_and_moves_into_it(fresh: Any) -> None:
    page = fresh.page
    page.route("**/_dash-layout*", lambda route: (page.wait_for_timeout(1500), route.continue_()))
    page.goto(fresh.address + "/timeline")
    page.locator(".tl-early .tl-canvas").wait_for(state="attached")
    early = settle(page)
    assert early["x1"] > early["x0"]
    page.locator("#content #timeline .tl-canvas").wait_for(state="attached")
    settle(page)
    assert page.locator(".tl-canvas").count() == 1
    assert page.locator(".tl-early").count() == 0
    assert len(colours(page)) > 50


def test_the_picture_does_not_wait_for_the_scripts_of_the_frame(fresh: Any) -> None:
    page = fresh.open("/timeline")
    settle(page)
    painted, begun = page.evaluate(
        "() => ['advisor-timeline-painted', 'advisor-frame-ready'].map("
        "  name => performance.getEntriesByName(name)[0].startTime)"
    )
    asked = page.evaluate(
        "() => performance.getEntriesByType('resource').map(one => [one.name, one.startTime])"
    )
    suites = [at for name, at in asked if "/_dash-component-suites/" in name]
    own = [name for name, _ in asked if "/assets/timeline/" in name and ".js" in name]
    assert len(suites) > 8
    assert min(suites) > painted
    assert begun > max(suites)
    assert len(own) == len(set(own)) == 9
    assert fresh.wrong == []


def test_a_trace_that_cannot_be_drawn_still_gets_its_frame(a100: Any) -> None:
    page = a100.page
    page.route("**/_advisor/timeline/*", lambda route: route.abort())
    page.goto(a100.address + "/timeline")
    page.locator("main h1").first.wait_for(state="attached")
    page.get_by_role("link", name="Overview").click()
    page.locator(".page-overview main h1").wait_for(state="attached")
    assert all("ERR_FAILED" in what for what in a100.wrong)  # what was refused here, and no more
    a100.wrong.clear()


def test_leaving_the_page_takes_the_timeline_along(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    page.get_by_role("link", name="Overview").click()
    page.locator(".tl-stage").wait_for(state="detached")
    assert page.evaluate("() => advisorTimeline.current") is None
    page.get_by_role("link", name="Timeline").click()
    settle(page)
    assert page.locator(".tl-stage").count() == 1


def test_fingers_pan_and_pinch(fresh: Any) -> None:
    page = fresh.open("/timeline")
    before = settle(page)
    page.locator(".tl-stage").focus()
    page.keyboard.press("w")
    near = settle(page)
    box = page.locator(".tl-overlay").bounding_box()
    touch = page.context.new_cdp_session(page)
    touch.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def fingers(kind: str, *xs: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": i} for i, x in enumerate(xs)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 300)
    for x in (280, 240, 200):
        fingers("touchMove", x)
    fingers("touchEnd")
    panned = settle(page)
    span = near["x1"] - near["x0"]
    assert panned["x0"] - near["x0"] == pytest.approx(100 / near["width"] * span, rel=0.05)
    fingers("touchStart", 250, 350)
    for half in (60, 80, 100):
        fingers("touchMove", 300 - half, 300 + half)
    fingers("touchEnd")
    pinched = settle(page)
    assert pinched["x1"] - pinched["x0"] == pytest.approx(span / 2, rel=0.05)
    assert pinched["range"] is None
    assert before["begin"] == pinched["begin"]


def test_who_wants_less_motion_gets_none(a100: Any) -> None:
    page = a100.open("/timeline")
    page.emulate_media(reduced_motion="reduce")
    before = settle(page)
    moved = page.evaluate(
        "() => { const t = advisorTimeline.current; t.zoom(0.5, 0.5, true); return t.x1 - t.x0; }"
    )
    assert moved == pytest.approx((before["x1"] - before["x0"]) / 2)


def test_a_slice_is_chosen_by_the_keyboard_alone(a100: Any) -> None:
    page = a100.open("/timeline")
    settle(page)
    page.locator(".tl-stage").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => new URLSearchParams(location.search).has('sel')")
    assert page.locator(".tl-side h2").first.inner_text()
