"""``advisor monitor`` shows GPUs and host, and says why a GPU is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from advisor.cli import monitor
from advisor.core.run_directory import GpuSample, HostSample, Sample
from advisor.render.documents.monitor import build, prometheus, throttle_reasons
from advisor.render.formats.terminal import Terminal
from tests.recorder import fake_nvml as fake

Run = Callable[..., Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    healthy_gpu = fake.healthy_gpu(
        "GPU-aaaa-1111", processes=[SimpleNamespace(pid=1, usedGpuMemory=5)]
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake.FakeNvml(healthy_gpu))
    monkeypatch.setattr(monitor, "FIRST_DELAY_NS", 1_000_000)
    return healthy_gpu


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake.FakeNvml(init_error=12))
    monkeypatch.setattr(monitor, "FIRST_DELAY_NS", 1_000_000)


def test_monitor_without_a_driver_shows_the_host(advisor: Run, no_driver: None) -> None:
    result = advisor("monitor", "--once")
    assert result.code == 0 and result.err == ""
    assert "no NVIDIA driver" in result.out and "Host" in result.out and "CPU" in result.out


def test_piped_monitor_prints_one_table(advisor: Run, gpu: Any) -> None:
    result = advisor("monitor")
    assert result.code == 0
    text = " ".join(result.out.split())
    for part in ("97%", "30 GiB of 80 GiB", "1700 of 1980 MHz", "690 W", "software power cap"):
        assert part in text
    assert "\x1b" not in result.out


def test_every_gpu_is_shown_whatever_cuda_may_see(
    advisor: Run, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "97%" in advisor("monitor", "--once").out


def test_json_lines_have_null_for_unreported_values(advisor: Run, gpu: Any) -> None:
    result = advisor("monitor", "--once", "--json")
    (line,) = result.out.splitlines()
    document = json.loads(line)
    assert (
        document["gpus"][0]["uuid"] == "GPU-aaaa-1111" and document["gpus"][0]["power"] == 690_000
    )
    assert document["gpus"][0]["energy"] is None and document["gpus"][0]["processes"] == 1
    assert document["without_gpu"] is None and document["host"] is not None


def test_prometheus_gets_a_whole_file(advisor: Run, gpu: Any, tmp_path: Path) -> None:
    file = tmp_path / "advisor.prom"
    file.write_text("old")
    result = advisor("monitor", "--once", "--prometheus", file)
    assert result.code == 0
    lines = file.read_text().splitlines()
    label = '{gpu="GPU-aaaa-1111",index="0",name="NVIDIA Test"}'
    assert f"advisor_gpu_power_watts{label} 690" in lines
    assert f"advisor_gpu_utilisation_ratio{label} 0.97" in lines
    assert not any(line.startswith("advisor_gpu_energy") for line in lines)
    assert [p.name for p in tmp_path.iterdir()] == ["advisor.prom"]


def test_unwritable_file_is_one_line_error(advisor: Run, gpu: Any, tmp_path: Path) -> None:
    result = advisor("monitor", "--once", "--prometheus", tmp_path / "none" / "x.prom")
    assert result.code == 2 and result.err.count("\n") == 1


def test_monitor_runs_until_interrupted(
    advisor: Run, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(monitor.time, "sleep", sleep)
    result = advisor("monitor", "--json")
    assert result.code == 0 and len(result.out.splitlines()) == 3


def test_costly_fields_are_kept_until_the_next_query() -> None:
    first = Sample(
        t=1, gpus=[GpuSample(uuid="a", power=1, ecc_uncorrected=3)], host=HostSample(swap_used=7)
    )
    then = Sample(t=2, gpus=[GpuSample(uuid="a", power=2)], host=HostSample(cpu=5.0))
    filled = monitor._fill_slow_fields(then, first)
    assert (filled.gpus[0].power, filled.gpus[0].ecc_uncorrected) == (2, 3)
    assert filled.host is not None and (filled.host.cpu, filled.host.swap_used) == (5.0, 7)


def test_an_idle_gpu_is_held_down_by_nothing() -> None:
    assert throttle_reasons(GpuSample(throttle=0x1)) == []
    assert throttle_reasons(GpuSample(throttle=0x1 | 0x40)) == ["hardware thermal"]


def test_hostile_names_reach_neither_terminal_nor_prometheus() -> None:
    sample = Sample(t=1, gpus=[GpuSample(uuid='a"\n} 1\x1b[2J', power=1000)], host=HostSample())
    names = {sample.gpus[0].uuid: '\x1b]0;x\x07"\n'}
    page = Terminal().draw(build(sample, names=names, without_gpu="\x1b[2J"))
    assert "\x1b" not in page
    for line in prometheus(sample, names).splitlines():
        assert line.startswith(("#", "advisor_")) and "\x1b" not in line


def test_a_sample_without_anything_is_an_empty_page() -> None:
    assert Terminal().draw(build(Sample(t=1), names={}, without_gpu=None)) == ""
    assert prometheus(Sample(t=1), {}) == "\n"
