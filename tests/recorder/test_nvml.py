"""NVML is asked for what it can tell, and for nothing twice that it cannot."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest

from advisor.recorder import nvml as subject
from advisor.recorder.nvml import Nvml, NvmlDevice, open_nvml, select_visible
from tests.recorder.fake_nvml import FakeGpu, FakeNvml, healthy_gpu


def device(gpu: object) -> NvmlDevice:
    return NvmlDevice(FakeNvml(gpu), gpu)


def test_missing_package_or_driver_and_broken_driver_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() == "nvidia-ml-py is not installed"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=12))
    assert open_nvml() == "no NVIDIA driver"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=999))
    assert "cannot be queried" in str(open_nvml())


def test_an_open_nvml_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml(healthy_gpu())
    monkeypatch.setitem(sys.modules, "pynvml", module)
    nvml = open_nvml()
    assert isinstance(nvml, Nvml) and module.users == 1
    assert nvml.driver == "570.86.10"
    nvml.close()
    nvml.close()
    assert module.users == 0


def test_sample_has_driver_values_and_none_otherwise() -> None:
    gpu = device(healthy_gpu()).sample(slow=True)
    assert gpu is not None
    assert (gpu.utilisation, gpu.memory_used, gpu.memory_total) == (97, 30 << 30, 80 << 30)
    assert (gpu.sm_clock, gpu.sm_clock_max, gpu.throttle, gpu.power) == (1700, 1980, 4, 690_000)
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (1, 0)
    assert (gpu.remapped_rows, gpu.remap_pending) == (1, False)
    assert (gpu.pcie_tx, gpu.pcie_rx) == (1000 * 1024, 2000 * 1024)
    assert gpu.processes == 0 and gpu.processes_bytes == 0
    assert gpu.energy is None and gpu.nvlink_tx is None and gpu.gpm is None


def test_costly_queries_are_left_to_slow_samples() -> None:
    gpu = healthy_gpu()
    sample = device(gpu).sample(slow=False)
    assert sample is not None and sample.processes is None and sample.ecc_uncorrected is None
    assert not {"processes", "ecc0", "pcie0", "rows"} & set(gpu.calls)


@pytest.mark.parametrize("code", [3, 4, 13], ids=["not supported", "no permission", "no function"])
def test_a_query_that_a_device_refuses_is_made_once(code: int) -> None:
    gpu = healthy_gpu()
    gpu.errors["utilisation"] = code
    watched = device(gpu)
    for _ in range(4):
        sample = watched.sample(slow=False)
        assert sample is not None and sample.utilisation is None and sample.power == 690_000
    assert gpu.calls["utilisation"] == 1


def test_temporary_failure_is_retried_a_limited_time() -> None:
    gpu = healthy_gpu()
    gpu.errors["power"] = 999
    watched = device(gpu)
    watched.sample(slow=False)
    del gpu.errors["power"]
    sample = watched.sample(slow=False)
    assert sample is not None and sample.power == 690_000
    gpu.errors["power"] = 999
    for _ in range(3 * subject.MAX_FAILURES):
        watched.sample(slow=False)
    assert gpu.calls["power"] == 2 + subject.MAX_FAILURES


def test_one_refused_clock_does_not_hide_the_other() -> None:
    gpu = healthy_gpu()
    gpu.errors["clock2"] = 3
    watched = device(gpu)
    for _ in range(2):
        sample = watched.sample(slow=False)
        assert sample is not None and sample.sm_clock == 1700 and sample.memory_clock is None


def test_old_driver_gives_throttle_reasons_by_their_old_name() -> None:
    gpu = healthy_gpu(throttle_old=0x40)
    gpu.errors["throttle"] = 13
    sample = device(gpu).sample(slow=False)
    assert sample is not None and sample.throttle == 0x40


def test_device_lost_during_a_run_is_not_queried_again() -> None:
    gpu = healthy_gpu()
    watched = device(gpu)
    assert watched.sample(slow=False) is not None
    gpu.errors["memory"] = 15
    assert watched.sample(slow=False) is None and watched.lost
    calls = dict(gpu.calls)
    assert watched.sample(slow=True) is None
    assert gpu.calls == calls


def test_the_error_that_lost_a_device_is_still_reported() -> None:
    gpu = healthy_gpu()
    watched = device(gpu)
    gpu.errors["utilisation"] = 15
    gpu.xid = [79]
    sample = watched.sample(slow=False)
    assert sample is not None and sample.xid == [79]
    assert watched.sample(slow=False) is None


def test_xid_errors_are_reported_once_each() -> None:
    gpu = healthy_gpu()
    watched = device(gpu)
    gpu.xid = [31, 43]
    first, second = watched.sample(slow=False), watched.sample(slow=False)
    assert first is not None and second is not None
    assert first.xid == [31, 43] and second.xid == []


def test_without_permission_for_events_the_set_is_given_back() -> None:
    gpu = healthy_gpu()
    gpu.errors["events"] = 4
    module = FakeNvml(gpu)
    sample = NvmlDevice(module, gpu).sample(slow=False)
    assert sample is not None and sample.xid == [] and module.freed == ["events"]


def test_gpm_is_the_difference_of_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "GPM_MIN_NS", 1_000_000)
    watched = device(healthy_gpu(gpm=True))
    time.sleep(0.002)
    sample = watched.sample(slow=False)
    assert sample is not None and sample.gpm == {"sm_util": 87.65, "tensor": 41.0}
    monkeypatch.setattr(subject, "GPM_MIN_NS", 10_000_000_000)
    close = watched.sample(slow=False)
    assert close is not None and close.gpm is None


def test_a_mig_slice_has_its_own_memory_and_the_boards_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = healthy_gpu("GPU-board", gpm=True)
    part = FakeGpu("MIG-part", memory=SimpleNamespace(used=1 << 30, total=10 << 30), processes=[])
    part.parent, board.mig = board, [part]
    module = FakeNvml(board)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-part")
    (only,) = Nvml(module).devices()
    sample = only.sample(slow=True)
    assert sample is not None and sample.uuid == "MIG-part"
    assert sample.memory_total == 10 << 30 and sample.sm_clock == 1700
    assert sample.utilisation is None


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["a1", "a2", "b1"]),
        ("", []),
        ("-1", []),
        ("2,0", ["b1", "a1"]),
        ("1,9,0", ["a2"]),
        ("GPU-b", ["b1"]),
        ("GPU-a", []),
        ("GPU-a2, 0", ["a2", "a1"]),
        ("MIG-x", ["x1"]),
        ("none", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    variable: str | None, expected: list[str]
) -> None:
    present = [("GPU-a1", "a1"), ("GPU-a2", "a2"), ("MIG-x1", "x1"), ("GPU-b1", "b1")]
    assert select_visible(variable, present) == expected


def test_visible_devices_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    module = FakeNvml(healthy_gpu("GPU-a"), healthy_gpu("GPU-b"))
    assert [item.uuid for item in Nvml(module).devices()] == ["GPU-b"]


def test_others_are_counted_without_ourselves() -> None:
    me = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 << 30)
    other = SimpleNamespace(pid=1, usedGpuMemory=2 << 30)
    sample = device(healthy_gpu(processes=[me, other])).sample(slow=True, own={os.getpid()})
    assert sample is not None and (sample.processes, sample.processes_bytes) == (1, 2 << 30)


def test_process_numbers_of_another_container_say_nothing() -> None:
    other = SimpleNamespace(pid=1, usedGpuMemory=2 << 30)
    sample = device(healthy_gpu(processes=[other])).sample(slow=True, own={os.getpid()})
    assert sample is not None and sample.processes is None and sample.processes_bytes is None


def test_hidden_memory_of_other_processes_is_unknown() -> None:
    other = SimpleNamespace(pid=1, usedGpuMemory=None)
    sample = device(healthy_gpu(processes=[other])).sample(slow=True)
    assert sample is not None and (sample.processes, sample.processes_bytes) == (1, None)


def test_pcie_bytes_come_from_available_counters() -> None:
    gpu = healthy_gpu(fields={197: 1000, 198: 5000})
    watched = device(gpu)
    first = watched.sample(slow=True)
    assert first is not None and first.pcie_tx is None
    before = time.perf_counter()
    gpu.answers["fields"] = {197: 1000 + 7_000_000, 198: 5000}
    time.sleep(0.02)
    second = watched.sample(slow=True)
    assert second is not None and second.pcie_rx == 0
    assert second.pcie_tx is not None
    assert second.pcie_tx <= 7_000_000 / 0.02
    assert second.pcie_tx > 0.2 * 7_000_000 / (time.perf_counter() - before)
    assert "pcie0" not in gpu.calls
