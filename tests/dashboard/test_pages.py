"""Every page, in a browser, on very different recordings: nothing breaks, and the figures are those
of ``advisor analyze --format json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest

from advisor import cli
from advisor.core.report_steps import EQUAL_STEP_SHARE
from advisor.core.text import host_label, split_verdict
from advisor.dashboard.app import PAGES
from advisor.dashboard.pages.distributed import _split_small as folded
from advisor.render.formats.html import MAX_TITLE
from advisor.testing import TraceBuilder

SCALES = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
AMOUNT = re.compile(r"([\d,]+(?:\.\d+)?) (ns|µs|ms|s)\b")


def parse(text: str) -> tuple[float, float]:
    """The first duration in a text, ns, and how much rounding may have taken."""
    match = AMOUNT.search(text)
    assert match is not None, text
    digits, scale = match[1].replace(",", ""), SCALES[match[2]]
    decimals = len(digits.partition(".")[2])
    return float(digits) * scale, 0.5001 * scale / 10**decimals


def agrees(text: str, ns: float) -> bool:
    """The duration shown is the one measured, rounded."""
    shown, error = parse(text)
    return abs(shown - ns) <= error


def analysed(path: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``advisor analyze --format json`` says."""
    capsys.readouterr()
    assert cli.run(["analyze", str(path), "--format", "json", "--no-progress"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def recording(
    shared_trace: Callable[[str], str],
    two_ranks: Callable[[], Path],
    truncated: Callable[[], Path],
    cpu_run: Callable[[], Path],
    recorded_run: Callable[[], Path],
) -> Callable[[str], str]:
    """A recording by the name of the test's parameter; the same path each time."""
    made: dict[str, str] = {}
    sources = {
        "two ranks": two_ranks,
        "truncated": truncated,
        "profiled on a CPU": cpu_run,
        "recorded on a CPU": recorded_run,
    }

    def get(name: str) -> str:
        if name not in made:
            made[name] = str(sources[name]()) if name in sources else shared_trace(name)
        return made[name]

    return get


RECORDINGS = (
    "a100_train_6steps",
    pytest.param("h100_bert_small_inference", marks=pytest.mark.thorough),
    "two ranks",
    "recorded on a CPU",
    pytest.param("profiled on a CPU", marks=pytest.mark.thorough),
    pytest.param("no_gpu_rank", marks=pytest.mark.thorough),
    "truncated",
    pytest.param("mi210_gpu_only", marks=pytest.mark.thorough),
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_page_opens_without_an_error_and_shows_the_figures_of_analyze(
    name: str, recording: Any, show: Any, tab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One visit for all that is claimed of a recording: reading it, and loading the pages, take
    longer than looking at them."""
    path = recording(name)
    report = analysed(path, capsys)
    t = tab(show(path))
    claims = {
        "overview": [_the_overview_shows_the_figures],
        "findings": [_the_findings_are_shown],
        "kernels": [_the_families_are_shown],
    }
    if name in ("h100_bert_small_inference", "two ranks", "recorded on a CPU"):
        claims["findings"] += [_there_are_findings]
    if name == "two ranks":
        claims["distributed"] = [_the_ranks_are_shown]
    if name == "recorded on a CPU":
        claims["run"] = [_what_the_recorder_measured_is_shown]
    if name == "truncated":
        claims["overview"] += [_it_is_told_that_the_file_is_cut]
    if name == "no_gpu_rank":
        claims["overview"] += [_the_main_thread_stands_for_the_device]
        claims["kernels"] += [_device_work_is_not_measured]
    seen = []
    for module in t.walk():
        body = t.text("body")
        assert "This page failed" not in body, (module, body)
        # what a formatter was not meant to see
        assert not re.search(r"\b(None|nan|NaN|undefined|\[object)\b", body), (module, body)
        for claim in claims.pop(module, []):
            claim(t, report)
        assert t.wrong == [], module
        seen.append(module)
    assert seen == [page.module for page in PAGES] and not claims
    assert t.wrong == []


def test_pages_open_by_their_address_too(recording: Any, show: Any, tab: Any) -> None:
    """Those that no other test opens so."""
    t = tab(show(recording("two ranks")))
    paths = {page.module: page.path for page in PAGES}
    for module in ("memory", "distributed", "run", "compare"):
        t.open(paths[module])
        assert t.page.locator(f".page-{module} main h1").count() == 1, module
        assert "This page failed" not in t.text("body"), module
        t.settle()
        assert t.wrong == [], module


def _step_ns(report: dict[str, Any]) -> float:
    """The step that a report leads with: the run's own where there is one."""
    own = report["step"]
    if own is None:
        return float(report["scope"]["step_ns"])
    varies = abs(own["mean_ns"] / own["ns"] - 1) >= 0.1
    return float(own["mean_ns"] if varies else own["ns"])


def _busy_share(report: dict[str, Any]) -> Any:
    """The share of the run's own step where the profiled one is far longer or shorter."""
    own = report["step"]
    if own is None or own["busy_share"] is None:
        return report["busy_share"]
    far = abs(own["window_ns"] / _step_ns(report) - 1) >= 0.2
    return own["busy_share"] if far else report["busy_share"]


def _mfu(report: dict[str, Any]) -> float | None:
    """MFU of the step that leads: that of the run, unless its steps vary."""
    own, mfu = report["step"], report["mfu"]
    if mfu is None or own is None or own["window_ns"] is None or own["busy_share"] is None:
        return mfu
    far = abs(own["window_ns"] / _step_ns(report) - 1) >= EQUAL_STEP_SHARE
    return mfu * own["window_ns"] / _step_ns(report) if far else mfu


def _the_overview_shows_the_figures(t: Any, report: dict[str, Any]) -> None:
    said = t.page.locator(".page-overview .page-head :is(h1, .lead)").all_inner_texts()
    assert " ".join(said) == " ".join(filter(None, split_verdict(report["verdict"], MAX_TITLE)))
    tiles = _tiles(t)
    unit = "Recording" if report["scope"]["step_source"] == "whole trace" else "Step"
    assert agrees(tiles[unit], _step_ns(report))
    assert not any(name.startswith(("Profiled", "Median")) for name in tiles)
    if report["time"]:
        _same_share(tiles["GPU busy"], _busy_share(report))
        _same_share(tiles["MFU"], _mfu(report))
    else:  # of a program without GPU work nothing is named that does not apply
        assert (_busy_share(report), _mfu(report)) == (None, None)
        assert not {"GPU busy", "MFU"} & set(tiles)
    if report["communication_ns"] is None:
        assert "Communication" not in tiles
    else:
        assert agrees(tiles["Communication"], report["communication_ns"])
    _same_bar(t, report)
    _same_staircase(t, report)
    _the_fix_is_named(t, report)


def _tiles(t: Any) -> dict[str, str]:
    return dict(
        zip(
            t.page.locator(".tile dt").all_inner_texts(),
            t.page.locator(".tile dd").all_inner_texts(),
            strict=True,
        )
    )


def _same_share(text: str, share: float | None) -> None:
    first = text.split("\n", maxsplit=1)[0]
    if share is None:
        assert first == "not measured"
    elif 0 < share < 0.005:
        assert first == "<1%"
    else:
        assert abs(float(first.removesuffix("%")) / 100 - share) <= 0.005001


def _same_bar(t: Any, report: dict[str, Any]) -> None:
    """The legend's durations: work, and idle causes, small ones summed."""
    tables = [
        [row.split("\t") for row in table.inner_text().split("\n") if "\t" in row]
        for table in t.page.locator(".legend table").all()
    ]
    if report["time"]:
        work = [part for part in report["time"] if part["name"] != "idle" and part["ns"] > 0]
        idle = sum(part["ns"] for part in report["time"] if part["name"] == "idle")
    else:
        work, idle = report["host"], 0.0
        tables = [[row for table in tables for row in table]]
        if tables[0][-1][0] == "smaller parts":
            ns, error = parse(tables[0].pop()[1])
            few = len(tables[0])
            assert len(work) - few > 1  # small ones, of which several are summed
            assert abs(ns - sum(part["ns"] for part in work[few:])) <= error
            work = work[:few]
    assert len(tables[0]) == len(work)
    for row, part in zip(tables[0], work, strict=True):
        assert agrees(row[1], part["ns"]), (row, part)
    if idle:
        shown = [parse(row[1]) for row in tables[1]]
        assert abs(sum(ns for ns, _ in shown) - idle) <= sum(error for _, error in shown)


def _the_fix_is_named(t: Any, report: dict[str, Any]) -> None:
    """Each line of the overview says what to do: the beginning of the finding's fix."""
    shown = t.page.locator(".lines .fix").all_inner_texts()
    listed = [f for f in report["findings"] if f["folded_under"] is None][:5] + report["risks"]
    assert len(shown) == len(listed)
    for text, finding in zip(shown, listed, strict=True):
        assert 10 < len(text) <= 203
        assert finding["fix"].startswith(text.removesuffix(" …").rstrip())


def _same_staircase(t: Any, report: dict[str, Any]) -> None:
    """Each stair is the one before it less the finding's marginal gain."""
    ranked = [f for f in report["findings"] if f["folded_under"] is None]
    stairs = t.page.locator(".stair .after-figures").all_inner_texts()
    if not ranked:
        assert stairs == []
        return
    left = _step_ns(report)
    assert agrees(stairs[0], left)
    for text, finding in zip(stairs[1:], ranked, strict=True):
        left -= finding["marginal_gain_ns"]
        assert agrees(text, max(left, 0.0)) or left < 50_000, (text, left)


def _the_findings_are_shown(t: Any, report: dict[str, Any]) -> None:
    shown = _shown(report)
    cards = t.page.locator("article.finding").all()
    assert len(cards) == len(shown)
    for card, finding in zip(cards, shown, strict=True):
        text = card.inner_text()
        assert card.locator("h2").inner_text() == finding["title"]
        assert finding["fix"] in text and finding["summary"] in text
        if finding["code"]:
            assert finding["code"].strip() == card.locator("pre").inner_text().strip()
        gain = finding["impact"]["gain_ns"]
        if gain is not None:
            assert agrees(card.locator(".saving strong").inner_text(), gain)
        for fact in finding["evidence"]:
            assert fact["label"] in text


def _there_are_findings(t: Any, report: dict[str, Any]) -> None:
    assert _shown(report)


def _shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in report["findings"] if f["folded_under"] is None] + report["risks"]


def _the_families_are_shown(t: Any, report: dict[str, Any]) -> None:
    if not report["families"]:
        assert "not measured" in t.text(".empty")
        # a grid draws its header's cells a moment after the grid
        t.page.locator("#op-grid .ag-header-cell").first.wait_for()
        columns = t.page.locator("#op-grid .ag-header-cell").all_inner_texts()
        assert not any("Device" in column for column in columns), columns
        return
    rows = t.page.locator("table.data").first.locator("tbody tr").all_inner_texts()
    shown = {row.split("\t")[0].strip(): row.split("\t") for row in rows}
    assert set(shown) == {family["name"] for family in report["families"]}
    for family in report["families"]:
        cells = shown[family["name"]]
        assert agrees(cells[2], family["ns"])
        _same_share(cells[3], family["share"])


def _the_ranks_are_shown(t: Any, report: dict[str, Any]) -> None:
    lines = report["ranks"]["lines"]
    rows = t.page.locator("table.data").first.locator("tbody tr").all_inner_texts()
    assert len(rows) == len(lines) == 2
    for row, line in zip(rows, lines, strict=True):
        cells = row.split("\t")
        assert cells[0].strip() == f"rank {line['rank']}"
        assert agrees(cells[1], line["step_ns"])
        assert agrees(cells[3], line["communication_ns"])
        assert agrees(cells[6], line["caused_wait_ns"]) or line["caused_wait_ns"] == 0


def _what_the_recorder_measured_is_shown(t: Any, report: dict[str, Any]) -> None:
    recorded = report["recorded"]
    tiles = _tiles(t)
    assert tiles["Steps"].split("\n")[0] == str(recorded["steps"]) == "64"
    assert agrees(tiles["Step"], _step_ns(report))
    assert tiles["Throughput"].split("\n")[0] == f"{recorded['samples_per_second']:,.0f}/s"
    rows = [
        row.split("\t")
        for row in t.page.locator("div.legend").first.inner_text().split("\n")
        if "\t" in row
    ]
    shown = {row[0]: row[1] for row in rows}
    assert {phase["name"] for phase in recorded["phases"]} >= {"data", "forward", "backward"}
    for phase in recorded["phases"]:
        assert agrees(shown[host_label(phase["name"])], phase["ns"]), (phase, shown)


def _it_is_told_that_the_file_is_cut(t: Any, report: dict[str, Any]) -> None:
    assert "truncated" in t.text(".banner")


def _the_main_thread_stands_for_the_device(t: Any, report: dict[str, Any]) -> None:
    assert "main thread" in t.text("main")


def _device_work_is_not_measured(t: Any, report: dict[str, Any]) -> None:
    assert "not measured" in t.text(".empty")


# -- hostile names -------------------------------------------------------------------------------

HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "{{constructor.constructor('window.pwned=1')()}}",
    "\x1b[31mred\u202e reversed",
)


def test_names_that_are_markup_are_only_shown(show: Any, tab: Any, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.range(HOSTILE[1]):
            for name in HOSTILE:
                with b.op(name, [[512, 512], [512, 512]], "float"):
                    b.launch(name, 900)
            b.sync()
    t = tab(show(b.write(tmp_path / "<b>hostile.json")))
    page = t.page
    for module in t.walk():
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("b", has_text=re.compile(r"^hostile\.json$")).count() == 0
        assert page.evaluate("window.pwned") is None, module
    t.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    cells = page.locator("#kernel-grid [data-full]").evaluate_all(
        "cells => cells.map(cell => cell.dataset.full)"
    )
    shown = page.locator("#kernel-grid [col-id=name]").all_inner_texts()
    assert any(text.startswith("<img") for text in shown)
    assert HOSTILE[0] in cells
    assert any("\\x1b[31mred\\u202e reversed" in cell for cell in cells)
    page.locator("#kernel-grid .ag-row").first.click()
    page.locator(".detail").wait_for()
    assert page.evaluate("window.pwned") is None
    assert t.wrong == []


def test_small_collectives_are_summed_and_nothing_is_lost() -> None:
    rows = pl.DataFrame(
        {
            "kind": [f"kind {i}" for i in range(13)],
            "dur": [900, 60, 40, *[5] * 10],
            "exposed": [0, 60, 0, *[0] * 10],
        }
    )
    large, small = folded(rows, (pl.col("dur"), pl.col("exposed")))
    assert large["kind"].to_list() == ["kind 0", "kind 1", "kind 2"]
    assert small["dur"].sum() == 50
    # one small row is no shorter as "1 other"
    large, small = folded(rows.head(4), (pl.col("dur"), pl.col("exposed")))
    assert (large.height, small.height) == (4, 0)
    many = pl.DataFrame({"kind": range(100), "dur": [10] * 100})
    large, small = folded(many, (pl.col("dur"),))
    assert large.height == 40
    assert large["dur"].sum() + small["dur"].sum() == 1000


def test_the_memory_page_draws_a_snapshot_as_the_report_tells_it(tmp_path: Path) -> None:
    """Bytes by category at the moment, and the blocks of the segments, add up to the report's."""
    from advisor.dashboard import memory_cards, page_view
    from advisor.dashboard.app import create_app, has_content
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import memory as page
    from advisor.dashboard.pages import overview
    from advisor.dashboard.server import Access
    from advisor.testing.allocator import GIB, MIB, FakeAllocator, Training

    m = FakeAllocator(total=4 * GIB)
    m.label = "<script>"
    training = Training(m, leak=4 * MIB)
    for _ in range(9):
        training.step()
    session = DashboardSession([str(m.write(tmp_path / "memory.pickle"))]).load()
    loaded = session.entries[0].loaded
    assert loaded is not None, session.entries[0].failure_reason
    (peak,), (told,) = loaded.main.peak_memories, loaded.report.memory
    drawn = memory_cards._timeline_figure(peak, peak.timeline(50))
    at = int(peak.timeline(50)["event"].index_of(peak.event) or 0)
    assert drawn.layout.yaxis.title.text == "MiB"  # less than one GiB
    stacked = {line.name: line.y[at] * MIB for line in drawn.data if line.stackgroup}
    assert {name: held for name, held in stacked.items() if held} == {
        each.category: each.bytes for each in told.categories
    }
    bars = memory_cards._segment_figure(peak).data
    assert sum(sum(bar.x) for bar in bars) * MIB == pytest.approx(
        sum(p.reserved for p in told.pools)
    )
    assert all("<script>" not in words for bar in bars for (words,) in bar.customdata)
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/memory"):
        assert "Left behind by each step" in str(page.layout())
        shown = [item.module for item in PAGES if has_content(item, page_view.view())]
        assert shown == ["overview", "findings", "memory"]
    with app.server.test_request_context("/"):
        first = str(overview.layout())
        assert "What held the memory at the peak" in first and "Step" not in first
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of("memory/h100_fragments.pickle.gz"))]).load()
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/"):
        texts = list(_texts(overview.layout()))
    # what to do first stands under the verdict, and what it frees beside the finding
    assert texts.index("First fix: ") < texts.index("What held the memory at the peak")
    assert any(text.startswith("frees ") and text.endswith("GiB") for text in texts)


def test_counters_and_compiled_kernels_are_tables_of_the_overview_or_beside_kernels(
    tmp_path: Path,
) -> None:
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import kernels, overview
    from advisor.dashboard.server import Access
    from benchmarks.public_traces import path_of

    alone = path_of("ncu/sparse_matmul_a10g.ncu-rep.gz")
    session = DashboardSession([str(alone)]).load()
    with create_app(session, Access.for_host("127.0.0.1", "t" * 20)).server.test_request_context(
        "/"
    ):
        first = str(overview.layout())
    assert "Kernels with hardware counters" in first and "smem_blocking<32>" in first
    assert "10.8 ms" in first and "GPU busy" not in first

    trace = tmp_path / "trace.json"
    b = TraceBuilder()
    with b.step():
        with b.op("aten::mm"):
            b.launch("matmul_kernel", 900, threads=128, registers=255, shared=0)
        b.sync()
    b.write(trace)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "matmul_kernel.json").write_text(
        '{"name": "matmul_kernel", "num_warps": 4, "num_stages": 2, "shared": 0}'
    )
    (cache / "matmul_kernel.ttir").write_text('#loc = loc("kernels.py":34:1)\n')
    session = DashboardSession([str(tmp_path)]).load()
    assert session.entries[0].loaded is not None, session.entries[0].failure_reason
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/kernels"):
        page = str(kernels.layout())
    assert "Kernels compiled by Triton" in page and "kernels.py:34" in page


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100/host_metric", "stack samples point to host_metric.py:66"),
        ("h100/voice_stream", "advisor record --deep shows it"),
    ],
)
def test_the_findings_have_the_notes_and_the_line_of_the_report(name: str, says: str) -> None:
    from advisor.advise import finding_text
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import findings
    from advisor.dashboard.server import Access
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of(name))]).load()
    report = session.entries[0].report
    assert report is not None, session.entries[0].failure_reason
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/findings"):
        shown = findings.layout()
    texts = set(_texts(shown))
    assert any(says in text for text in texts)
    conditions = [
        finding_text.gain_conditions(f, report) for f in finding_text.ranked_findings(report)
    ]
    assert any(conditions) and {each for some in conditions for each in some} <= texts


def test_other_programs_are_not_called_faster_nor_their_findings_fixed() -> None:
    from advisor.compare.compare import compare
    from advisor.dashboard.pages import compare as page
    from benchmarks.public_traces import path_of

    c = compare(path_of("h100/host_metric"), path_of("h100/wide_embedding"))
    assert page._heading(c, None).children[0].children == "Not comparable"
    tables = (
        page._comparison_table("Time", page.comparison_text.breakdown_lines(c)),
        page._work_card(c),
        page._step_card(c),
    )
    texts = {*_texts([*tables, page._finding_card(c)])}
    assert not texts & {"better", "worse", "gone"} and "only before 3" in texts


def test_what_was_served_has_its_command_its_gpus_and_no_option_of_the_terminal() -> None:
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import findings, kernels, overview, run
    from advisor.dashboard.server import Access
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of("serving/vllm_decode_full/replay.json.gz"))]).load()
    report = session.entries[0].report
    assert report is not None and report.profile_kernels, session.entries[0].failure_reason
    assert (
        "Profile kernels with hardware counters" in report.verdict
        and "--details" not in report.verdict
    )
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/"):
        for page in (overview, findings, kernels):
            assert report.profile_kernels[0].strip() in {*_texts(page.layout())}, page
        facts = [*_texts(run.layout())]
    gpus = [facts[i + 1] for i, text in enumerate(facts) if text.startswith("GPU ")]
    assert gpus == ["AMD Instinct MI300X · 192 GiB"] * 8


def _texts(part: Any) -> Iterator[str]:
    """All texts of a page's parts."""
    if isinstance(part, str):
        yield part
    for child in part if isinstance(part, list) else [getattr(part, "children", None)]:
        if child is not None:
            yield from _texts(child)


def test_a_generated_kernel_shows_what_is_fused_in_it() -> None:
    from advisor.core.auxiliary_inputs import FusedKernel
    from advisor.core.finding import Location
    from advisor.dashboard.pages import kernels

    b = TraceBuilder()
    with b.step():
        b.run("triton_poi_fused_add_0", "triton_poi_fused_add_0", 300)
    a = b.analysis()
    a.__dict__["fused_kernels"] = {
        "triton_poi_fused_add_0": FusedKernel(
            name="triton_poi_fused_add_0",
            operators=["aten.add"],
            lines=[Location(file="model.py", line=6)],
        )
    }
    view = SimpleNamespace(analysis=a, rank=0, href=lambda *_, **__: "/timeline")
    shown = str(kernels._kernel_detail(cast(Any, view), 0))
    assert "aten.add" in shown and "model.py:6" in shown


def test_what_the_recorder_timed_without_the_gpu_is_in_the_chart_and_counted() -> None:
    from advisor.advise import finding_text
    from advisor.core import labels
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import findings, live, overview, run
    from advisor.dashboard.pages.kernels import kernel_rows
    from advisor.dashboard.server import Access
    from advisor.dashboard.timeline.index_builder import build_index
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of("h100/host_metric"))]).load()
    loaded = session.entries[0].loaded
    assert loaded is not None
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/run"):
        shown = list(_texts(run.layout()))
        first = list(_texts(overview.layout()))
        finding = list(_texts(findings.layout()))
    # the reason stands beside the gains that are in another order
    assert any(text.startswith("Ranked above") for text in first)
    # the line of the program stands before the operator
    line = next(i for i, text in enumerate(first) if text.startswith("Stack samples point to"))
    assert line < first.index("aten::copy_")
    assert "Replay error" not in first and any("comes within" in text for text in first)
    launches, steps = kernel_rows(loaded.main)[0]["count"], loaded.main.step_count
    assert launches * steps == loaded.main.hot_kernels["count"][0]
    recorded = loaded.main.recorded
    assert recorded is not None
    timed = sum(not math.isnan(ns) for ns in recorded.durations)
    assert any(f"{timed} of {len(recorded.steps)} steps are timed" in text for text in shown)
    assert any(text.startswith("Above the axis: step 0, 9.23 s") for text in shown)
    # the slowest are the profiler's, though the GPU timed few of them
    drawn = live.steps_card(recorded).children[1].children[0].children[0].figure
    marks = {mark.name: list(mark.x) for mark in drawn.data[1:]}
    assert marks["while profiled"] == [
        step.n for step, own in zip(recorded.steps, recorded.profiled, strict=True) if own
    ]
    assert not set(marks["while profiled"]) & set(marks["host time alone"])
    # what to do stands before the figures, and limits that change nothing after the checks
    fix = first.index("First fix: ")
    assert fix < first.index("GPU busy") < first.index("Skipped checks")
    limit = next(i for i, text in enumerate(first) if "launched before the recording" in text)
    assert limit > first.index("Skipped checks")
    # the explanation stands before what a range depends on
    summary = labels.clean(loaded.report.findings[0].summary)
    (condition, *_) = finding_text.gain_conditions(loaded.report.findings[0], loaded.report)
    assert finding.index(summary) < finding.index(condition)
    # an outlier's idle time is unknown, not zero
    index = build_index(loaded.main)
    (lane,) = [lane for lane in index.lanes if index.groups[lane.group].label == "Not analysed"]
    spans = [(index.start[i], index.end[i]) for i in range(lane.first_slice, lane.end_slice)]
    aside = loaded.main.steps.table.filter(~pl.col("used"))
    assert spans == list(zip(aside["ts"], aside["end"], strict=True))
    # the timeline's names of idle time are the bar's
    assert "outside operators" in first and "unknown" not in first
    assert "outside operators" in index.names and "unknown" not in index.names


def test_an_alternative_is_not_a_fix_that_comes_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from advisor.advise import finding_text
    from advisor.dashboard.pages import findings

    others = {"also": "a symptom", "or": "another way"}
    monkeypatch.setattr(finding_text, "folded_findings", lambda *_: list(others))
    monkeypatch.setattr(finding_text, "covered_line", lambda _, word: (word, others[word]))
    first, second = findings._covered_findings(Any, Any)  # type: ignore[arg-type]
    assert "Also fixed by this" in str(first) and "another way" not in str(first)
    assert "Also fixed by this" not in str(second) and "another way" in str(second)
