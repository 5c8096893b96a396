"""All pages in a browser, on different recordings: no errors, and the figures of ``advisor analyze
--format json``."""

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
from advisor.core import text as t
from advisor.core.report_steps import EQUAL_STEP_SHARE
from advisor.core.text import host_label, split_verdict
from advisor.dashboard.app import PAGES
from advisor.dashboard.pages.distributed import _split_small as split_small
from advisor.render.formats.html import MAX_TITLE
from advisor.testing import TraceBuilder

SCALES = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
AMOUNT = re.compile(r"([\d,]+(?:\.\d+)?) (ns|µs|ms|s)\b")


def parse_duration(text: str) -> tuple[float, float]:
    """Return the first duration in a text and its maximum rounding error, ns."""
    match = AMOUNT.search(text)
    assert match is not None, text
    digits, scale = match[1].replace(",", ""), SCALES[match[2]]
    decimals = len(digits.partition(".")[2])
    return float(digits) * scale, 0.5001 * scale / 10**decimals


def shows_duration(text: str, ns: float) -> bool:
    """Return whether the duration in a text equals a measured one, up to rounding."""
    shown_ns, error = parse_duration(text)
    return abs(shown_ns - ns) <= error


def analyze_as_json(path: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the report that ``advisor analyze --format json`` prints."""
    capsys.readouterr()
    assert cli.run(["analyze", str(path), "--format", "json", "--no-progress"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture(scope="module")
def recording(
    shared_trace: Callable[[str], str],
    two_ranks: Callable[[], Path],
    truncated_trace: Callable[[], Path],
    cpu_run: Callable[[], Path],
    recorded_run: Callable[[], Path],
) -> Callable[[str], str]:
    """Return a function that makes a recording by name, once."""
    paths: dict[str, str] = {}
    sources = {
        "two ranks": two_ranks,
        "truncated": truncated_trace,
        "profiled on a CPU": cpu_run,
        "recorded on a CPU": recorded_run,
    }

    def get(name: str) -> str:
        if name not in paths:
            paths[name] = str(sources[name]()) if name in sources else shared_trace(name)
        return paths[name]

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
def test_every_page_opens_and_shows_the_figures_of_analyze(
    name: str, recording: Any, dashboard_of: Any, open_tab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """All checks of a recording share one visit, because reading and loading it take longest."""
    path = recording(name)
    report = analyze_as_json(path, capsys)
    tab = open_tab(dashboard_of(path))
    checks = {
        "overview": [_check_overview],
        "findings": [_check_findings],
        "kernels": [_check_families],
    }
    if name in ("h100_bert_small_inference", "two ranks", "recorded on a CPU"):
        checks["findings"] += [_check_has_findings]
    if name == "two ranks":
        checks["distributed"] = [_check_ranks]
    if name == "recorded on a CPU":
        checks["run"] = [_check_recorded_run]
    if name == "truncated":
        checks["overview"] += [_check_truncation_notice]
    if name == "no_gpu_rank":
        checks["overview"] += [_check_main_thread]
        checks["kernels"] += [_check_no_device_work]
    visited = []
    for module in tab.visit_pages():
        body = tab.text("body")
        assert "This page failed" not in body, (module, body)
        # values that no formatter handled
        assert not re.search(r"\b(None|nan|NaN|undefined|\[object)\b", body), (module, body)
        for check in checks.pop(module, []):
            check(tab, report)
        assert tab.problems == [], module
        visited.append(module)
    assert visited == [page.module for page in PAGES] and not checks
    assert tab.problems == []


def test_pages_open_by_their_address(recording: Any, dashboard_of: Any, open_tab: Any) -> None:
    """All other tests open these pages by the menu."""
    tab = open_tab(dashboard_of(recording("two ranks")))
    paths = {page.module: page.path for page in PAGES}
    for module in ("memory", "distributed", "run", "compare"):
        tab.open(paths[module])
        assert tab.page.locator(f".page-{module} main h1").count() == 1, module
        assert "This page failed" not in tab.text("body"), module
        tab.wait_until_idle()
        assert tab.problems == [], module


def _step_ns(report: dict[str, Any]) -> float:
    """Return the step time that a report uses: the run's own if there is one."""
    step = report["step"]
    if step is None:
        return float(report["scope"]["step_ns"])
    varies = abs(step["mean_ns"] / step["ns"] - 1) >= 0.1
    return float(step["mean_ns"] if varies else step["ns"])


def _busy_share(report: dict[str, Any]) -> Any:
    """Return the busy share of the run's own step if the profiled step differs from it."""
    step = report["step"]
    if step is None or step["busy_share"] is None:
        return report["busy_share"]
    differs = abs(step["window_ns"] / _step_ns(report) - 1) >= 0.2
    return step["busy_share"] if differs else report["busy_share"]


def _mfu(report: dict[str, Any]) -> float | None:
    """Return the MFU of the step that the report uses."""
    step, mfu = report["step"], report["mfu"]
    if mfu is None or step is None or step["window_ns"] is None or step["busy_share"] is None:
        return mfu
    differs = abs(step["window_ns"] / _step_ns(report) - 1) >= EQUAL_STEP_SHARE
    return mfu * step["window_ns"] / _step_ns(report) if differs else mfu


def _check_overview(tab: Any, report: dict[str, Any]) -> None:
    verdict = tab.page.locator(".page-overview .page-head :is(h1, .lead)").all_inner_texts()
    assert " ".join(verdict) == " ".join(filter(None, split_verdict(report["verdict"], MAX_TITLE)))
    tiles = _read_tiles(tab)
    unit = "Recording" if report["scope"]["step_source"] == "whole trace" else "Step"
    assert shows_duration(tiles[unit], _step_ns(report))
    assert not any(name.startswith(("Profiled", "Median")) for name in tiles)
    if report["time"]:
        _check_share(tiles["GPU busy"], _busy_share(report))
        _check_share(tiles["MFU"], _mfu(report))
    else:  # without GPU work, no tile of the GPU is shown
        assert (_busy_share(report), _mfu(report)) == (None, None)
        assert not {"GPU busy", "MFU"} & set(tiles)
    if report["communication_ns"] is None:
        assert "Communication" not in tiles
    else:
        assert shows_duration(tiles["Communication"], report["communication_ns"])
    _check_step_bar(tab, report)
    _check_fix_sequence(tab, report)
    _check_fixes(tab, report)


def _read_tiles(tab: Any) -> dict[str, str]:
    return dict(
        zip(
            tab.page.locator(".tile dt").all_inner_texts(),
            tab.page.locator(".tile dd").all_inner_texts(),
            strict=True,
        )
    )


def _check_share(text: str, share: float | None) -> None:
    first = text.split("\n", maxsplit=1)[0]
    if share is None:
        assert first == "not measured"
    elif 0 < share < 0.005:
        assert first == "<1%"
    else:
        assert abs(float(first.removesuffix("%")) / 100 - share) <= 0.005001


def _check_step_bar(tab: Any, report: dict[str, Any]) -> None:
    """Check the durations in the legend of the step's bar: work, and idle time by cause."""
    tables = [
        [row.split("\t") for row in table.inner_text().split("\n") if "\t" in row]
        for table in tab.page.locator(".legend table").all()
    ]
    if report["time"]:
        work = [part for part in report["time"] if part["name"] != "idle" and part["ns"] > 0]
        idle = sum(part["ns"] for part in report["time"] if part["name"] == "idle")
    else:
        work, idle = report["host"], 0.0
        tables = [[row for table in tables for row in table]]
        if tables[0][-1][0] == "smaller parts":
            ns, error = parse_duration(tables[0].pop()[1])
            listed_count = len(tables[0])
            assert len(work) - listed_count > 1  # several small parts are summed
            assert abs(ns - sum(part["ns"] for part in work[listed_count:])) <= error
            work = work[:listed_count]
    assert len(tables[0]) == len(work)
    for row, part in zip(tables[0], work, strict=True):
        assert shows_duration(row[1], part["ns"]), (row, part)
    if idle:
        durations = [parse_duration(row[1]) for row in tables[1]]
        assert abs(sum(ns for ns, _ in durations) - idle) <= sum(error for _, error in durations)


def _check_fixes(tab: Any, report: dict[str, Any]) -> None:
    """Check that each line of the overview has the start of its finding's fix."""
    texts = tab.page.locator(".lines .fix").all_inner_texts()
    listed = [f for f in report["findings"] if f["folded_under"] is None][:5] + report["risks"]
    assert len(texts) == len(listed)
    for text, finding in zip(texts, listed, strict=True):
        assert 10 < len(text) <= 203
        assert finding["fix"].startswith(text.removesuffix(" …").rstrip())


def _check_fix_sequence(tab: Any, report: dict[str, Any]) -> None:
    """Check that each fix shortens the step by the finding's marginal gain."""
    ranked = [f for f in report["findings"] if f["folded_under"] is None]
    texts = tab.page.locator(".fix-row .after-figures").all_inner_texts()
    if not ranked:
        assert texts == []
        return
    remaining_ns = _step_ns(report)
    assert shows_duration(texts[0], remaining_ns)
    for text, finding in zip(texts[1:], ranked, strict=True):
        remaining_ns -= finding["marginal_gain_ns"]
        assert shows_duration(text, max(remaining_ns, 0.0)) or remaining_ns < 50_000, (
            text,
            remaining_ns,
        )


def _check_findings(tab: Any, report: dict[str, Any]) -> None:
    findings = _shown_findings(report)
    cards = tab.page.locator("article.finding").all()
    assert len(cards) == len(findings)
    for card, finding in zip(cards, findings, strict=True):
        text = card.inner_text()
        assert card.locator("h2").inner_text() == finding["title"]
        assert finding["fix"] in text and finding["summary"] in text
        if finding["code"]:
            assert finding["code"].strip() == card.locator("pre").inner_text().strip()
        gain = finding["impact"]["gain_ns"]
        if gain is not None:
            assert shows_duration(card.locator(".saving strong").inner_text(), gain)
        for fact in finding["evidence"]:
            assert fact["label"] in text


def _check_has_findings(tab: Any, report: dict[str, Any]) -> None:
    assert _shown_findings(report)


def _shown_findings(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in report["findings"] if f["folded_under"] is None] + report["risks"]


def _check_families(tab: Any, report: dict[str, Any]) -> None:
    if not report["families"]:
        assert "not measured" in tab.text(".empty")
        # a grid draws the cells of its header shortly after itself
        tab.page.locator("#op-grid .ag-header-cell").first.wait_for()
        columns = tab.page.locator("#op-grid .ag-header-cell").all_inner_texts()
        assert not any("Device" in column for column in columns), columns
        return
    rows = tab.page.locator("table.data").first.locator("tbody tr").all_inner_texts()
    cells_by_family = {row.split("\t")[0].strip(): row.split("\t") for row in rows}
    assert set(cells_by_family) == {family["name"] for family in report["families"]}
    for family in report["families"]:
        cells = cells_by_family[family["name"]]
        assert shows_duration(cells[2], family["ns"])
        _check_share(cells[3], family["share"])


def _check_ranks(tab: Any, report: dict[str, Any]) -> None:
    lines = report["ranks"]["lines"]
    rows = tab.page.locator("table.data").first.locator("tbody tr").all_inner_texts()
    assert len(rows) == len(lines) == 2
    for row, line in zip(rows, lines, strict=True):
        cells = row.split("\t")
        assert cells[0].strip() == f"rank {line['rank']}"
        assert shows_duration(cells[1], line["step_ns"])
        assert shows_duration(cells[3], line["communication_ns"])
        assert shows_duration(cells[6], line["caused_wait_ns"]) or line["caused_wait_ns"] == 0


def _check_recorded_run(tab: Any, report: dict[str, Any]) -> None:
    recorded = report["recorded"]
    tiles = _read_tiles(tab)
    assert tiles["Steps"].split("\n")[0] == str(recorded["steps"]) == "64"
    assert shows_duration(tiles["Step"], _step_ns(report))
    assert tiles["Throughput"].split("\n")[0] == f"{recorded['samples_per_second']:,.0f}/s"
    rows = [
        row.split("\t")
        for row in tab.page.locator("div.legend").first.inner_text().split("\n")
        if "\t" in row
    ]
    phase_times = {row[0]: row[1] for row in rows}
    assert {phase["name"] for phase in recorded["phases"]} >= {"data", "forward", "backward"}
    for phase in recorded["phases"]:
        assert shows_duration(phase_times[host_label(phase["name"])], phase["ns"]), (
            phase,
            phase_times,
        )


def _check_truncation_notice(tab: Any, report: dict[str, Any]) -> None:
    assert "truncated" in tab.text(".banner")


def _check_main_thread(tab: Any, report: dict[str, Any]) -> None:
    assert "main thread" in tab.text("main")


def _check_no_device_work(tab: Any, report: dict[str, Any]) -> None:
    assert "not measured" in tab.text(".empty")


# -- hostile names -------------------------------------------------------------------------------

HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "{{constructor.constructor('window.pwned=1')()}}",
    "\x1b[31mred\u202e reversed",
)


def test_names_with_markup_are_shown_as_text(
    dashboard_of: Any, open_tab: Any, tmp_path: Path
) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.range(HOSTILE[1]):
            for name in HOSTILE:
                with b.op(name, [[512, 512], [512, 512]], "float"):
                    b.launch(name, 900)
            b.sync()
    tab = open_tab(dashboard_of(b.write(tmp_path / "<b>hostile.json")))
    page = tab.page
    for module in tab.visit_pages():
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("b", has_text=re.compile(r"^hostile\.json$")).count() == 0
        assert page.evaluate("window.pwned") is None, module
    tab.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    cells = page.locator("#kernel-grid [data-full]").evaluate_all(
        "cells => cells.map(cell => cell.dataset.full)"
    )
    labels = page.locator("#kernel-grid [col-id=name]").all_inner_texts()
    assert any(text.startswith("<img") for text in labels)
    assert HOSTILE[0] in cells
    assert any("\\x1b[31mred\\u202e reversed" in cell for cell in cells)
    page.locator("#kernel-grid .ag-row").first.click()
    page.locator(".detail").wait_for()
    assert page.evaluate("window.pwned") is None
    assert tab.problems == []


def test_small_collectives_are_summed_without_loss() -> None:
    rows = pl.DataFrame(
        {
            "kind": [f"kind {i}" for i in range(13)],
            "dur": [900, 60, 40, *[5] * 10],
            "exposed": [0, 60, 0, *[0] * 10],
        }
    )
    large, small = split_small(rows, (pl.col("dur"), pl.col("exposed")))
    assert large["kind"].to_list() == ["kind 0", "kind 1", "kind 2"]
    assert small["dur"].sum() == 50
    # a single small row is listed instead of "1 other"
    large, small = split_small(rows.head(4), (pl.col("dur"), pl.col("exposed")))
    assert (large.height, small.height) == (4, 0)
    many = pl.DataFrame({"kind": range(100), "dur": [10] * 100})
    large, small = split_small(many, (pl.col("dur"),))
    assert large.height == 40
    assert large["dur"].sum() + small["dur"].sum() == 1000


def test_the_memory_page_of_a_snapshot_agrees_with_its_report(tmp_path: Path) -> None:
    """Bytes by category at the peak, and the blocks of the segments, add up to the report's."""
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
    (peak,), (memory,) = loaded.main.peak_memories, loaded.report.memory
    figure = memory_cards._timeline_figure(peak, peak.timeline(50))
    peak_row = int(peak.timeline(50)["event"].index_of(peak.event) or 0)
    assert figure.layout.yaxis.title.text == "MiB"  # less than one GiB
    stacked = {line.name: line.y[peak_row] * MIB for line in figure.data if line.stackgroup}
    assert {name: size for name, size in stacked.items() if size} == {
        category.category: category.bytes for category in memory.categories
    }
    bars = memory_cards._segment_figure(peak).data
    assert sum(sum(bar.x) for bar in bars) * MIB == pytest.approx(
        sum(p.reserved for p in memory.pools)
    )
    assert all("<script>" not in tooltip for bar in bars for (tooltip,) in bar.customdata)
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/memory"):
        assert "Left behind by each step" in str(page.layout())
        modules = [item.module for item in PAGES if has_content(item, page_view.view())]
        assert modules == ["overview", "findings", "memory"]
    with app.server.test_request_context("/"):
        overview_text = str(overview.layout())
        assert "What held the memory at the peak" in overview_text and "Step" not in overview_text
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of("memory/h100_fragments.pickle.gz"))]).load()
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/"):
        texts = list(_texts(overview.layout()))
    # the first fix is below the verdict, and the memory it frees is beside the finding
    assert texts.index("First fix: ") < texts.index("What held the memory at the peak")
    assert any(text.startswith("frees ") and text.endswith("GiB") for text in texts)


def test_hardware_counters_and_compiled_kernels_are_shown_as_tables(
    tmp_path: Path,
) -> None:
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import kernels, overview
    from advisor.dashboard.server import Access
    from benchmarks.public_traces import path_of

    report_path = path_of("ncu/sparse_matmul_a10g.ncu-rep.gz")
    session = DashboardSession([str(report_path)]).load()
    with create_app(session, Access.for_host("127.0.0.1", "t" * 20)).server.test_request_context(
        "/"
    ):
        overview_text = str(overview.layout())
    assert (
        "Kernels with hardware counters" in overview_text and "smem_blocking<32>" in overview_text
    )
    assert "10.8 ms" in overview_text and "GPU busy" not in overview_text

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
def test_the_findings_page_has_the_notes_and_lines_of_the_report(name: str, says: str) -> None:
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
        layout = findings.layout()
    texts = set(_texts(layout))
    assert any(says in text for text in texts)
    conditions = [
        finding_text.gain_conditions(f, report) for f in finding_text.ranked_findings(report)
    ]
    assert any(conditions) and {each for group in conditions for each in group} <= texts


def test_a_run_on_the_cpu_has_its_own_figures_and_nothing_of_a_gpu() -> None:
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import memory, overview, run
    from advisor.dashboard.server import Access

    path = Path(__file__).parents[1] / "data" / "recorded" / "workers.slow"
    session = DashboardSession([str(path)]).load()
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/"):
        texts = [*_texts([overview.layout(), run.layout(), memory.layout()])]
    assert {"70.3 ms", "Loading data", "51.7 ms", "583 ms", "114/s"} <= {*texts}
    assert "74% of the step" in texts and "of 111 timed steps" in texts
    assert "host time" in texts and "Host memory over the run" in texts
    assert not [text for text in texts if "device" in text or "asynchronously" in text]


def test_different_programs_are_not_compared_as_faster_or_fixed() -> None:
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
    assert not texts & {"better", "worse", "gone"} and "only before 2" in texts


def test_a_served_model_has_its_counter_command_and_gpus() -> None:
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


def _figures(part: Any) -> Iterator[Any]:
    """Yield the figures of all charts of a page's components."""
    if hasattr(part, "figure"):
        yield part.figure
    for child in part if isinstance(part, list) else [getattr(part, "children", None)]:
        if child is not None:
            yield from _figures(child)


def _texts(part: Any) -> Iterator[str]:
    """Yield all texts of a page's components."""
    if isinstance(part, str):
        yield part
    for child in part if isinstance(part, list) else [getattr(part, "children", None)]:
        if child is not None:
            yield from _texts(child)


def test_a_generated_kernel_shows_its_fused_operators() -> None:
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
    text = str(kernels._kernel_detail(cast(Any, view), 0))
    assert "aten.add" in text and "model.py:6" in text


def test_steps_without_gpu_time_are_drawn_and_counted() -> None:
    from advisor.advise import finding_text
    from advisor.core import labels
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.pages import findings, kernels, live, overview, run
    from advisor.dashboard.pages.kernels import kernel_rows
    from advisor.dashboard.server import Access
    from advisor.dashboard.timeline.index_builder import build_index
    from benchmarks.public_traces import path_of

    session = DashboardSession([str(path_of("h100/host_metric"))]).load()
    loaded = session.entries[0].loaded
    assert loaded is not None
    app = create_app(session, Access.for_host("127.0.0.1", "t" * 20))
    with app.server.test_request_context("/run"):
        run_texts = list(_texts(run.layout()))
        overview_texts = list(_texts(overview.layout()))
        finding_texts = list(_texts(findings.layout()))
        (icicle,) = (
            figure.data[0]
            for figure in _figures(kernels.layout())
            if figure.data[0].type == "icicle"
        )
    # times of the tree are per step, as in the tables of its page
    family_ns = sum(family.ns for family in loaded.report.families)
    assert icicle.customdata[0][1] == t.format_duration(family_ns)
    # the profiler's overhead is one figure
    (overhead,) = (text for text in overview_texts if "the profiler adds" in text)
    assert "the profiler adds 28%" in overhead and "+28%" in run_texts
    # the reason for a different order is beside the gains
    assert any(text.startswith("Ranked above") for text in overview_texts)
    # the line of the program is before the operator
    line = next(
        i for i, text in enumerate(overview_texts) if text.startswith("Stack samples point to")
    )
    assert line < overview_texts.index("aten::copy_")
    assert "Replay error" not in overview_texts and any(
        "comes within" in text for text in overview_texts
    )
    launches, steps = kernel_rows(loaded.main)[0]["count"], loaded.main.step_count
    assert launches * steps == loaded.main.hot_kernels["count"][0]
    run_steps = loaded.main.run_steps
    assert run_steps is not None
    timed_count = sum(not math.isnan(ns) for ns in run_steps.durations)
    assert any(
        f"{timed_count} of {len(run_steps.steps)} steps are timed" in text for text in run_texts
    )
    assert any(text.startswith("Above the axis: step 0, 9.23 s") for text in run_texts)
    # the slowest steps are the profiled ones, although few of them have GPU times
    (figure,) = _figures(live.steps_card(run_steps))
    # they do not compress the others
    assert figure.layout.yaxis.range[1] < 4 * run_steps.mean / 1e6
    marks = {mark.name: list(mark.x) for mark in figure.data[1:]}
    assert marks["while profiled"] == [
        step.n
        for step, is_profiled in zip(run_steps.steps, run_steps.profiled, strict=True)
        if is_profiled
    ]
    assert not set(marks["while profiled"]) & set(marks["host time only"])
    # the first fix is before the figures, and limits that do not affect it are after the checks
    fix = overview_texts.index("First fix: ")
    assert fix < overview_texts.index("GPU busy") < overview_texts.index("Skipped checks")
    limit = next(
        i for i, text in enumerate(overview_texts) if "launched before the recording" in text
    )
    assert limit > overview_texts.index("Skipped checks")
    # the summary is before the conditions of the range
    summary = labels.clean(loaded.report.findings[0].summary)
    (condition, *_) = finding_text.gain_conditions(loaded.report.findings[0], loaded.report)
    assert finding_texts.index(summary) < finding_texts.index(condition)
    # an outlier's idle time is unknown, not zero
    index = build_index(loaded.main)
    (lane,) = [lane for lane in index.lanes if index.groups[lane.group].label == "Not analysed"]
    spans = [(index.start[i], index.end[i]) for i in range(lane.first_slice, lane.end_slice)]
    unused_steps = loaded.main.steps.table.filter(~pl.col("used"))
    assert spans == list(zip(unused_steps["ts"], unused_steps["end"], strict=True))
    # the timeline and the bar have the same names of idle time
    assert "outside operators" in overview_texts and "unknown" not in overview_texts
    assert "outside operators" in index.names and "unknown" not in index.names


def test_alternatives_are_listed_apart_from_covered_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from advisor.advise import finding_text
    from advisor.dashboard.pages import findings

    others = {"also": "a symptom", "or": "another way"}
    monkeypatch.setattr(finding_text, "folded_findings", lambda *_: list(others))
    monkeypatch.setattr(finding_text, "covered_line", lambda _, word: (word, others[word]))
    covered, alternatives = findings._covered_findings(Any, Any)  # type: ignore[arg-type]
    assert "Also fixed by this" in str(covered) and "another way" not in str(covered)
    assert "Also fixed by this" not in str(alternatives) and "another way" in str(alternatives)
