"""Page of costs and GPUs: costs of the report, projections with prices, and missing prices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import Options
from advisor.advise.report_text import describe_cost
from advisor.core.prices import NO_PRICES, Prices, parse_price, read_prices
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.replay.project.project import Projector, choose_gpus, describe_cheapest, offered_gpus
from advisor.testing import TraceBuilder


def write_trace(path: Path, gpu: str = "A100", **changes: Any) -> Path:
    """Write a trace of matrix products on a GPU with known rates."""
    b = TraceBuilder(gpu, **changes)
    for _ in range(5):
        with b.step():
            for _ in range(4):
                with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    b.launch("ampere_bf16_s16816gemm_bf16_128x128", 700)
            b.sync()
    return b.write(path)


@pytest.fixture
def page_text(serve_session: Any, open_tab: Any) -> Callable[..., str]:
    """Return a function that reads the page's text for a trace and prices."""

    def read(path: Path, prices: Prices) -> str:
        session = DashboardSession([str(path)], Options(prices=prices)).load()
        with serve_session(session) as dashboard:
            tab = open_tab(dashboard)
            tab.open("/gpus")
            tab.page.locator(".ag-row, .empty").first.wait_for(state="attached")
            for summary in tab.page.locator("summary").all():
                summary.click()
            text: str = tab.text("body")
            assert tab.problems == []
        return text

    return read


def test_costs_and_the_cheapest_gpu_match_the_report_and_the_projection(
    page_text: Any, tmp_path: Path
) -> None:
    path = write_trace(tmp_path / "t.json")
    (tmp_path / "prices.toml").write_text(
        '[prices]\ncurrency = "EUR"\n"H100 SXM" = 9.0\n"A100 SXM 80GB" = 1.5\n"T4" = 0.4\n'
    )
    prices = read_prices(tmp_path / "prices.toml")
    body = page_text(path, prices)
    session = DashboardSession([str(path)], Options(prices=prices)).load()
    loaded = session.entries[0].loaded
    assert loaded is not None
    choices = choose_gpus(Projector(loaded.main), offered_gpus(prices))
    best = describe_cheapest(choices)
    assert best.startswith("cheapest: ") and best[1:] in body
    for choice in choices:
        assert choice.projection.gpu in body
    for line in describe_cost(loaded.report):
        assert line in body
    assert "€" in body and "not measured: advisor record samples it" in body


def test_a_missing_price_is_reported(page_text: Any, tmp_path: Path) -> None:
    body = page_text(write_trace(tmp_path / "t.json"), NO_PRICES)
    assert "unknown: pass --price" in body and "per million steps" not in body
    assert "H100 SXM" in body, "times are still shown"


def test_a_price_table_without_this_gpu_gives_costs_of_the_others(
    page_text: Any, tmp_path: Path
) -> None:
    (tmp_path / "prices.toml").write_text("[prices]\nT4 = 0.4\n")
    body = page_text(write_trace(tmp_path / "t.json"), read_prices(tmp_path / "prices.toml"))
    assert "do not list this GPU" in body and "Cheapest: NVIDIA T4" in body


def test_a_single_price_applies_to_this_gpu_only(page_text: Any, tmp_path: Path) -> None:
    body = page_text(write_trace(tmp_path / "t.json"), parse_price("2.50/h"))
    assert "2.50" in body
    assert "--price covers this GPU only" in body and "per million steps" not in body


def test_a_step_that_cannot_be_projected_has_a_reason(page_text: Any, tmp_path: Path) -> None:
    b = TraceBuilder(None)
    for _ in range(5):
        with b.step():
            b.host(500)
    body = page_text(b.write(tmp_path / "cpu.json"), NO_PRICES)
    assert "cannot be projected" in body and "nothing to project" in body
