"""The page of costs: as the report has them, projections with a table of prices, and what is said
where there is neither."""

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


def step(path: Path, gpu: str = "A100", **changes: Any) -> Path:
    """Matrix products on a GPU whose rates are known."""
    b = TraceBuilder(gpu, **changes)
    for _ in range(5):
        with b.step():
            for _ in range(4):
                with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    b.launch("ampere_bf16_s16816gemm_bf16_128x128", 700)
            b.sync()
    return b.write(path)


@pytest.fixture
def told(served: Any, tab: Any) -> Callable[..., str]:
    """The page's text, for a trace and prices."""

    def read(path: Path, prices: Prices) -> str:
        session = DashboardSession([str(path)], Options(prices=prices)).load()
        with served(session) as shown:
            t = tab(shown)
            t.open("/gpus")
            t.page.locator(".ag-row, .empty").first.wait_for(state="attached")
            for folded in t.page.locator("summary").all():
                folded.click()
            text: str = t.text("body")
            assert t.wrong == []
        return text

    return read


def test_the_cheapest_gpu_is_that_of_the_projection_and_costs_are_the_reports(
    told: Any, tmp_path: Path
) -> None:
    path = step(tmp_path / "t.json")
    (tmp_path / "prices.toml").write_text(
        '[prices]\ncurrency = "EUR"\n"H100 SXM" = 9.0\n"A100 SXM 80GB" = 1.5\n"T4" = 0.4\n'
    )
    prices = read_prices(tmp_path / "prices.toml")
    body = told(path, prices)
    session = DashboardSession([str(path)], Options(prices=prices)).load()
    loaded = session.entries[0].loaded
    assert loaded is not None
    found = choose_gpus(Projector(loaded.main), offered_gpus(prices))
    best = describe_cheapest(found)
    assert best.startswith("cheapest: ") and best[1:] in body
    for choice in found:
        assert choice.projection.gpu in body
    for line in describe_cost(loaded.report):
        assert line in body
    assert "€" in body and "not measured: advisor record samples it" in body


def test_what_has_no_price_is_called_that(told: Any, tmp_path: Path) -> None:
    body = told(step(tmp_path / "t.json"), NO_PRICES)
    assert "unknown: pass --price" in body and "per million steps" not in body
    assert "H100 SXM" in body, "times are told all the same"


def test_a_table_without_this_gpu_prices_the_others(told: Any, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("[prices]\nT4 = 0.4\n")
    body = told(step(tmp_path / "t.json"), read_prices(tmp_path / "prices.toml"))
    assert "do not list this GPU" in body and "Cheapest: NVIDIA T4" in body


def test_one_price_is_that_of_this_gpu_alone(told: Any, tmp_path: Path) -> None:
    body = told(step(tmp_path / "t.json"), parse_price("2.50/h"))
    assert "2.50" in body
    assert "--price covers this GPU only" in body and "per million steps" not in body


def test_a_step_that_cannot_be_projected_says_why(told: Any, tmp_path: Path) -> None:
    b = TraceBuilder(None)
    for _ in range(5):
        with b.step():
            b.host(500)
    body = told(b.write(tmp_path / "cpu.json"), NO_PRICES)
    assert "cannot be projected" in body and "nothing to project" in body
