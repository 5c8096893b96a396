"""Energy and money: by hand, not measured where nothing was, and the same wherever they are
shown."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import advisor
from advisor import cli
from advisor.advise import report_text
from advisor.advise.engine import Options
from advisor.compare import compare
from advisor.core.errors import AdvisorError
from advisor.core.prices import Prices, format_money, parse_price, read_prices
from advisor.core.run_directory import (
    GpuSample,
    Manifest,
    RankInfo,
    RankRecord,
    RecordedDevice,
    Sample,
    StepRow,
)
from advisor.dashboard.pages import overview
from advisor.measure.device.energy import step_energy
from advisor.measure.steps.run_steps import RunSteps
from advisor.testing import TraceBuilder
from tests.run_directories import write_run

MS = 1_000_000
GiveSample = Callable[[float], GpuSample]


def record(
    watts: Callable[[float], float] = lambda s: 300.0,
    *,
    ms: float = 100.0,
    steps: int = 60,
    every_ms: float = 250.0,
    counter: bool = True,
    power: bool = True,
    uuid: str = "GPU-1",
    rank: int = 0,
) -> RankRecord:
    """Equal steps, and samples of a GPU whose power is a function of the second."""
    step_rows = [StepRow(n=n, t=int(n * ms * MS), dur=int(ms * MS)) for n in range(steps)]
    samples, spent, last = [], 5_000_000.0, 0.0
    for number in range(int(steps * ms / every_ms) + 2):
        now = number * every_ms / 1e3
        fine = 200  # the counter is the power's integral, here by the midpoint rule
        spent += (
            sum(
                watts(last + (now - last) * (i + 0.5) / fine) * (now - last) / fine
                for i in range(fine)
            )
            * 1e3
        )
        last = now
        gpu = GpuSample(
            uuid=uuid,
            energy=round(spent) if counter else None,
            power=round(watts(now) * 1e3) if power else None,
        )
        samples.append(Sample(t=round(now * 1e9), gpus=[gpu]))
    return RankRecord(
        rank=RankInfo(rank=rank, devices=[RecordedDevice(uuid=uuid)]),
        steps=step_rows,
        samples=samples,
    )


@pytest.mark.parametrize(("counter", "method"), [(True, "counter"), (False, "power")])
def test_a_step_takes_its_power_times_its_time(counter: bool, method: str) -> None:
    energy = step_energy(RunSteps(record(counter=counter)))
    assert energy is not None and energy.method == method
    assert energy.joules == pytest.approx(300 * 0.1, rel=0.01)
    assert energy.watts == pytest.approx(300, rel=0.01)
    assert energy.steps >= 40


def test_energy_is_power_integrated_over_counted_steps() -> None:
    def watts(s: float) -> float:
        return 200 + 100 * s  # up to 800 W after 6 s

    for counter in (True, False):
        energy = step_energy(RunSteps(record(watts, counter=counter)))
        assert energy is not None
        # the first ten steps are warm-up: the mean from 1 s to the last sample, near 6 s
        assert energy.joules == pytest.approx(0.1 * (200 + 100 * (1 + 6) / 2), rel=0.03)


def test_profiled_steps_are_left_out_of_a_steps_energy() -> None:
    def watts(s: float) -> float:
        return 1000.0 if 3 <= s < 4 else 300.0

    rank_record = record(watts, every_ms=50)
    for step in rank_record.steps[30:40]:
        step.window = 0
    energy = step_energy(RunSteps(rank_record))
    assert energy is not None
    assert energy.joules == pytest.approx(30, rel=0.03)


@pytest.mark.parametrize(
    "rank_record",
    [
        record(counter=False, power=False),
        record(uuid="MIG-1"),  # the driver tells the whole board's
        record(every_ms=3000.0),  # three samples
        record(lambda s: 0.0),
        record(every_ms=20_000.0, steps=2000),  # nothing is known between samples
    ],
    ids=["not sampled", "slice", "too few", "no counter that moves", "too far apart"],
)
def test_unmeasured_energy_is_none(rank_record: RankRecord) -> None:
    assert step_energy(RunSteps(rank_record)) is None


def test_a_counter_that_falls_is_not_believed() -> None:
    rank_record = record()
    rank_record.samples[14].gpus[0].energy = 10
    energy = step_energy(RunSteps(rank_record))
    assert energy is not None and energy.method == "power"


def analyze_records(folder: Path, *records: RankRecord, **options: Any) -> advisor.Report:
    """The report of a run of these ranks."""
    world = Manifest(run_id="r", world_size=len(records))
    path = write_run(folder, dict(enumerate(records)), world)
    return advisor.analyze(path, dataclasses.replace(Options(config={}), **options))


def test_ranks_are_summed_and_a_shared_gpu_counts_once(tmp_path: Path) -> None:
    two_gpus = analyze_records(tmp_path / "a", record(), record(uuid="GPU-2", rank=1)).energy
    assert two_gpus is not None and two_gpus.joules == pytest.approx(60, rel=0.02)
    assert [one.rank for one in two_gpus.ranks] == [0, 1]
    shared = analyze_records(tmp_path / "b", record(), record(rank=1)).energy
    assert shared is not None and shared.joules == pytest.approx(30, rel=0.02)
    part = analyze_records(
        tmp_path / "c", record(), record(rank=1, counter=False, power=False)
    ).energy
    assert part is not None and part.joules is None and len(part.ranks) == 1


def test_a_step_costs_its_time_at_the_price_of_all_gpus(tmp_path: Path) -> None:
    paid = Options(prices=parse_price("3.60/h"))
    report = analyze_records(tmp_path / "a", record(), record(rank=1), prices=paid.prices)
    cost = report.cost
    assert cost is not None
    assert (cost.gpus, cost.currency, cost.per_hour) == (2, "USD", 3.6)
    assert cost.step == pytest.approx(2 * 0.001 * 0.1)  # 3.60 an hour is 0.1 cents a second
    assert cost.run == pytest.approx(2 * 0.001 * 6.0)
    assert report_text.describe_cost(report)[0] == "$0.200 for 1,000 steps"
    assert "at 2 × $3.60 per hour" in report_text.describe_cost(report)
    # the two ranks share a GPU
    assert report_text.describe_energy(report) == ["30 J per step", "300 W", "the driver's counter"]
    for line in ("energy   30 J per step", "cost     $0.200 for 1,000 steps"):
        assert line in str(report)
    here: Any = SimpleNamespace(href=lambda path, **query: path)
    view = str(overview._heading(here, report))
    assert "30 J per step" in view and "$0.200 for 1,000 steps" in view
    unmeasured = analyze_records(tmp_path / "c", record(counter=False, power=False))
    assert {"energy", "cost"}.isdisjoint(
        label for label, _ in report_text.describe_scope(unmeasured)
    )
    other = analyze_records(tmp_path / "b", record(), paid_gpus=8, prices=paid.prices).cost
    assert other is not None and other.step == pytest.approx(8 * 0.001 * 0.1)


@pytest.fixture
def slow_trace(tmp_path: Path) -> Path:
    """Steps of 11 ms, of which 10 wait for a loader without workers."""
    b = TraceBuilder("H100")
    for number in range(6):
        with b.step():
            b.loader_wait(10_000 + number, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("gemm", 900)
            b.sync()
    return b.write(tmp_path / "slow.json")


def test_savings_of_fixes_are_their_gain_at_the_price_and_add_up(slow_trace: Path) -> None:
    report = advisor.analyze(slow_trace, Options(prices=parse_price("3.60"), config={}))
    cost = report.cost
    assert cost is not None and cost.step_after is not None and cost.run is None
    for fix in cost.fixes:
        finding = next(f for f in report.findings if f.priority == fix.priority)
        assert fix.step == pytest.approx((finding.marginal_gain_ns or 0) * 1e-9 * 0.001)
    assert cost.step - cost.step_after == pytest.approx(sum(fix.step for fix in cost.fixes))
    assert cost.step_after < 0.25 * cost.step
    restored = type(report).from_json(report.to_json())
    assert restored.cost == cost
    assert (
        advisor.analyze(slow_trace, Options(config={}, prices=Prices({}, "USD", ""))).cost is None
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_price_is_shown_in_every_format_if_known(
    slow_trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in ("terminal", "markdown", "html"):
        code, text, _ = run(
            capsys, "analyze", slow_trace, "--price", "2.50 EUR/h", "--format", form
        )
        assert code == 0 and "€0.0075" in text.replace(" ", ""), form
        assert "€" not in run(capsys, "analyze", slow_trace, "--format", form)[1]
    Path("pyproject.toml").write_text('[tool.advisor.prices]\nh100 = 2.5\ncurrency = "CHF"\n')
    cost = json.loads(run(capsys, "analyze", slow_trace, "--format", "json")[1])["cost"]
    assert (cost["currency"], cost["per_hour"]) == ("CHF", 2.5)
    assert cost["source"] == "pyproject.toml: [tool.advisor.prices]: h100"
    _, text, _ = run(
        capsys, "compare", slow_trace, slow_trace, "--format", "json", "--price", "3.60"
    )
    amounts = {a["name"]: a for a in json.loads(text)["amounts"]}
    assert amounts["cost of 1,000 steps"]["unit"] == "USD"
    assert amounts["cost of 1,000 steps"]["before"] == pytest.approx(0.011, rel=0.02)
    _, text, _ = run(capsys, "gate", slow_trace, slow_trace, "--format", "json", "--price", "3.60")
    (figure,) = [f for f in json.loads(text)["amounts"] if f["unit"] == "USD"]
    assert figure["before"] == figure["after"] == pytest.approx(0.011, rel=0.02)
    for words in (("--price", "cheap"), ("--price", "1", "--prices", "x.toml")):
        code, out, err = run(capsys, "analyze", slow_trace, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_energy_is_compared_and_gated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_run(tmp_path / name, {0: record(lambda s, w=watts: w)})
        for name, watts in (("a", 300.0), ("b", 200.0))
    ]
    result = {a.name: a for a in compare(*runs).amounts}["energy per step"]
    assert result.unit == "J"
    assert (result.before, result.after) == (pytest.approx(30, 0.02), pytest.approx(20, 0.02))
    _, text, _ = run(capsys, "gate", *runs)
    assert re.search(r"energy per step +30[.\d]* J +20[.\d]* J", text)


def test_price_table_name_matches_gpu_by_words(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(
        '[prices]\ncurrency = "eur"\nA100 = 1.0\n"A100 80GB" = 1.5\n"MI300X" = 2\nH100 = 0\n'
    )
    prices = read_prices(file)
    for name, hour in (
        ("NVIDIA A100-SXM4-40GB", 1.0),
        ("NVIDIA A100-SXM4-80GB", 1.5),
        ("AMD Instinct MI300X", 2.0),
        ("NVIDIA H100 80GB HBM3", 0.0),
    ):
        price = prices.price_of(name)
        assert price is not None and (price.per_hour, price.currency) == (hour, "EUR"), name
    for name in ("NVIDIA A1000", "NVIDIA RTX A10", None):
        assert prices.price_of(name) is None
    with pytest.raises(AdvisorError, match="both fit"):
        Prices({"A100": 1.0, "80GB": 2.0}, "USD", "t").price_of("NVIDIA A100 80GB")


@pytest.mark.parametrize(
    "text",
    ["A100 = true", 'A100 = "2"', "A100 = -1", "A100 = inf", "A100 = nan", '"" = 1', '"-" = 1',
     "currency = 1", 'currency = "dollars"', "[A100]\nx = 1", "A100 =", "a." * 2000 + "b = 1"],
)  # fmt: skip
def test_a_bad_table_of_prices_is_one_line_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(AdvisorError) as caught:
        read_prices(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hour", "currency"),
    [("2.50/h", 2.5, "USD"), ("$2.50", 2.5, "USD"), ("€ 3 / hr", 3, "EUR"), ("4 chf/h", 4, "CHF")],
)
def test_prices_are_read_as_people_write_them(text: str, hour: float, currency: str) -> None:
    price = parse_price(text).price_of(None)
    assert price is not None and price[:2] == (hour, currency)


@pytest.mark.parametrize("text", ["", "-1", "1e9", "2,50", "$2 EUR", "nan", "9" * 9, "2/day"])
def test_an_invalid_price_is_refused(text: str) -> None:
    with pytest.raises(AdvisorError, match="--price"):
        parse_price(text)


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(12.4, "$12.40"), (0.00012345, "$0.000123"), (0.0, "$0.00"), (1234.5, "$1,234.50")],
)
def test_small_amounts_keep_three_digits(amount: float, expected: str) -> None:
    assert format_money(amount, "USD") == expected
    assert format_money(amount, "CHF") == f"{expected[1:]} CHF"
    assert math.isfinite(amount)
