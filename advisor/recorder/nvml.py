"""NVML client: what the driver reports about each GPU to this user.

Devices are matched by UUID, because CUDA and NVML number them differently. A query that a device
does not support, or that this user may not make, runs only once, and its value is ``None``. A
device that is lost during a run is not queried again. ``nvidia-ml-py`` (module ``pynvml``) is
optional."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from advisor.core.run_directory import GpuSample

_T = TypeVar("_T")

MAX_FAILURES = 5
"""Number of consecutive failures, for other reasons, after which a query is given up too."""
KIB = 1024
GPM = {
    "sm_util": "SM_UTIL", "sm_occupancy": "SM_OCCUPANCY", "tensor": "ANY_TENSOR_UTIL",
    "dram": "DRAM_BW_UTIL", "fp64": "FP64_UTIL", "fp32": "FP32_UTIL", "fp16": "FP16_UTIL",
    "integer": "INTEGER_UTIL",
}  # fmt: skip
"""Recorded GPM metrics (Hopper and later), by their name after ``NVML_GPM_METRIC_``, in %."""
GPM_MIN_NS = 200_000_000
"""Minimum interval between two GPM samples, ns: their difference is the metric."""


def open_nvml() -> Nvml | str:
    """Return an open NVML, or the reason why it cannot be opened."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return "no NVIDIA driver"
        return f"the NVIDIA driver cannot be queried ({error})"
    return Nvml(pynvml)


class Nvml:
    """Open NVML library, with the driver's version."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.driver: str | None = self._call("nvmlSystemGetDriverVersion")
        self._open = True

    def devices(self, *, every: bool = False) -> list[NvmlDevice]:
        """Return every GPU, or only the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
        variable = None if every else os.environ.get("CUDA_VISIBLE_DEVICES")
        return [
            NvmlDevice(self.module, handle)
            for handle in select_visible(variable, self._list_handles())
        ]

    def _list_handles(self) -> list[tuple[str, Any]]:
        """Return (UUID, handle) of every GPU in NVML's order, each followed by its MIG slices."""
        nv = self.module
        result = []
        for index in range(self._call("nvmlDeviceGetCount") or 0):
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            result.append((self._uuid(handle), handle))
            mode = self._call("nvmlDeviceGetMigMode", handle)
            if not mode or mode[0] != nv.NVML_DEVICE_MIG_ENABLE:
                continue
            for number in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
                part = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
                if part is not None:
                    result.append((self._uuid(part), part))
        return result

    def _uuid(self, handle: Any) -> str:
        return str(self._call("nvmlDeviceGetUUID", handle) or "")

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            value = getattr(self.module, name)(*arguments)
        except (self.module.NVMLError, AttributeError):
            return None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def close(self) -> None:
        """Shut NVML down, which counts its users."""
        if self._open:
            self._open = False
            self._call("nvmlShutdown")


def select_visible(variable: str | None, present: Sequence[tuple[str, _T]]) -> list[_T]:
    """Return the devices among ``present`` that ``CUDA_VISIBLE_DEVICES`` names.

    As in CUDA, entries are numbers, UUIDs or their beginnings, and the first entry that names no
    device ends the list. Numbers follow NVML's order, which is CUDA's order with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or among equal GPUs."""
    gpus = [handle for uuid, handle in present if not uuid.startswith("MIG-")]
    if variable is None:
        return gpus
    result: list[_T] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdecimal():
            match = [gpus[int(entry)]] if int(entry) < len(gpus) else []
        elif entry.startswith(("GPU-", "MIG-")):
            wanted = entry.lower()
            match = [handle for uuid, handle in present if uuid.lower().startswith(wanted)]
        else:
            match = []
        if len(match) != 1:
            break
        result.append(match[0])
    return result


def to_text(value: Any) -> str | None:
    """Return a string of NVML, which is bytes in older bindings, as text. Keep ``None``."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


class NvmlDevice:
    """GPU or MIG slice, with the queries that it supports."""

    def __init__(self, module: Any, handle: Any) -> None:
        self.nv = module
        self.handle = handle
        self.lost = False
        """True once the driver has lost the GPU, which is then not queried again."""
        self._given_up: set[str] = set()
        self._failures: dict[str, int] = {}
        mig = self._ask("nvmlDeviceIsMigDeviceHandle", handle)
        board = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else None
        self.board = handle if board is None else board
        """Handle of the whole GPU, which has the clocks, power and temperature."""
        self.instance: int | None = self._ask("nvmlDeviceGetGpuInstanceId", handle) if mig else None
        self.uuid = to_text(self._ask("nvmlDeviceGetUUID", handle))
        self.name = to_text(self._ask("nvmlDeviceGetName", handle))
        self._events = self._watch_errors()
        self._gpm = _Gpm.open(self)
        self._pcie: tuple[int, int, int] | None = None
        self._static = self._read_constants()

    def sample(self, *, slow: bool, own: Iterable[int] = ()) -> GpuSample | None:
        """Return the GPU's state, or ``None`` if the device is lost without an XID error. ``slow``:
        include the costly queries. ``own``: processes not to count as others."""
        gpu = GpuSample(uuid=self.uuid, **self._static)
        self._read_fast(gpu)
        if slow and not self.lost:
            self._read_slow(gpu, set(own))
        gpu.xid = self._read_errors()
        return gpu if gpu.xid or not self.lost else None

    def close(self) -> None:
        """Free the GPM samples and the event set."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None
        if self._events is not None:
            events, self._events = self._events, None
            self._ask("nvmlEventSetFree", events)

    # -- queries --------------------------------------------------------------------------------

    def _read_constants(self) -> dict[str, Any]:
        nv, board = self.nv, self.board
        threshold = getattr(nv, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
        clock, temperature = "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetTemperatureThreshold"
        return {
            "sm_clock_max": self._ask(clock, board, nv.NVML_CLOCK_SM),
            "memory_clock_max": self._ask(clock, board, nv.NVML_CLOCK_MEM),
            "power_limit_default": self._ask("nvmlDeviceGetPowerManagementDefaultLimit", board),
            "temperature_slowdown": self._ask(temperature, board, threshold),
            "pcie_gen_max": self._ask("nvmlDeviceGetMaxPcieLinkGeneration", board),
            "pcie_width_max": self._ask("nvmlDeviceGetMaxPcieLinkWidth", board),
        }

    def _read_fast(self, gpu: GpuSample) -> None:
        nv, handle, board = self.nv, self.handle, self.board
        used = self._ask("nvmlDeviceGetUtilizationRates", handle)
        if used is not None:
            gpu.utilisation, gpu.memory_utilisation = int(used.gpu), int(used.memory)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is not None:
            gpu.memory_used, gpu.memory_total = int(memory.used), int(memory.total)
        gpu.sm_clock = self._ask("nvmlDeviceGetClockInfo", board, nv.NVML_CLOCK_SM)
        gpu.memory_clock = self._ask("nvmlDeviceGetClockInfo", board, nv.NVML_CLOCK_MEM)
        gpu.throttle = self._ask_first(
            ("nvmlDeviceGetCurrentClocksEventReasons", board),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", board),
        )
        gpu.power = self._ask("nvmlDeviceGetPowerUsage", board)
        gpu.energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", board)
        gpu.temperature = self._ask_first(
            ("nvmlDeviceGetTemperatureV", board, nv.NVML_TEMPERATURE_GPU),
            ("nvmlDeviceGetTemperature", board, nv.NVML_TEMPERATURE_GPU),
        )
        gpu.gpm = self._gpm.sample() if self._gpm is not None else None

    def _read_slow(self, gpu: GpuSample, own: set[int]) -> None:
        nv, board = self.nv, self.board
        gpu.power_limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", board)
        gpu.pcie_gen = self._ask("nvmlDeviceGetCurrPcieLinkGeneration", board)
        gpu.pcie_width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", board)
        gpu.pcie_tx, gpu.pcie_rx = self._pcie_rates()
        gpu.nvlink_tx = self._read_field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 0xFFFFFFFF)
        gpu.nvlink_rx = self._read_field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 0xFFFFFFFF)
        kinds = nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        gpu.ecc_corrected, gpu.ecc_uncorrected = (
            self._ask("nvmlDeviceGetTotalEccErrors", board, kind, nv.NVML_VOLATILE_ECC)
            for kind in kinds
        )
        rows = self._ask("nvmlDeviceGetRemappedRows", board)
        if rows is not None:
            gpu.remapped_rows = int(rows[0]) + int(rows[1])
            gpu.remap_pending = bool(rows[2]) or bool(rows[3])
        gpu.processes, gpu.processes_bytes = self._other_processes(own)

    def _other_processes(self, own: set[int]) -> tuple[int | None, int | None]:
        """Return the number of other processes and their memory, bytes. Both are ``None`` if the
        list has no process of ``own``: its process ids are then from outside this container."""
        running = self._ask("nvmlDeviceGetComputeRunningProcesses", self.handle)
        if running is None or (own and not own & {int(p.pid) for p in running}):
            return None, None
        others = [process for process in running if int(process.pid) not in own]
        sizes = [process.usedGpuMemory for process in others]
        has_sizes = all(size is not None and 0 <= size < 1 << 50 for size in sizes)
        return len(others), sum(map(int, sizes)) if has_sizes else None

    def _pcie_rates(self) -> tuple[int | None, int | None]:
        """Return bytes per second to and from the host, from counters. Without counters, the driver
        measures them over 20 ms, during which the call blocks."""
        tx = self._read_field("NVML_FI_DEV_PCIE_COUNT_TX_BYTES")
        rx = self._read_field("NVML_FI_DEV_PCIE_COUNT_RX_BYTES")
        if tx is not None and rx is not None:
            now, before = time.perf_counter_ns(), self._pcie
            self._pcie = (now, tx, rx)
            if before is None or now <= before[0] or tx < before[1] or rx < before[2]:
                return None, None
            seconds = (now - before[0]) / 1e9
            return round((tx - before[1]) / seconds), round((rx - before[2]) / seconds)
        nv = self.nv
        rates = []
        for counter in (nv.NVML_PCIE_UTIL_TX_BYTES, nv.NVML_PCIE_UTIL_RX_BYTES):
            value = self._ask("nvmlDeviceGetPcieThroughput", self.board, counter)
            rates.append(None if value is None else int(value) * KIB)
        return rates[0], rates[1]

    def _read_field(self, name: str, scope: int = 0) -> int | None:
        """Return a field's integer value, or ``None`` if the device does not have it."""
        number = getattr(self.nv, name, None)
        if number is None or name in self._given_up:
            return None
        values = self._ask("nvmlDeviceGetFieldValues", self.board, [(number, scope)])
        if values is None:
            return None
        if values[0].nvmlReturn != self.nv.NVML_SUCCESS:
            self._given_up.add(name)
            return None
        kinds = {
            self.nv.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            self.nv.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            self.nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        }
        kind = kinds.get(values[0].valueType)
        return None if kind is None else int(getattr(values[0].value, kind))

    def _watch_errors(self) -> Any:
        """Return an event set that collects XID errors, or ``None`` if not supported."""
        events = self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        kind = getattr(self.nv, "nvmlEventTypeXidCriticalError", 8)
        try:
            self.nv.nvmlDeviceRegisterEvents(self.board, kind, events)
        except self.nv.NVMLError:
            self._ask("nvmlEventSetFree", events)
            return None
        return events

    def _read_errors(self) -> list[int]:
        """Return the XID errors since the last call, at most 100."""
        if self._events is None:
            return []
        result: list[int] = []
        wait = getattr(self.nv, "nvmlEventSetWait_v2", None) or self.nv.nvmlEventSetWait
        try:
            while len(result) < 100:
                result.append(int(wait(self._events, 0).eventData))
        except self.nv.NVMLError as error:
            if error.value != self.nv.NVML_ERROR_TIMEOUT:
                self._on_failure("nvmlEventSetWait_v2", error)
                events, self._events = self._events, None
                self._ask("nvmlEventSetFree", events)
        return result

    # -- asking ---------------------------------------------------------------------------------

    def _ask_first(self, *queries: tuple[Any, ...]) -> Any:
        """Return the first answer to a query under its newer and older names, or ``None``."""
        for name, *arguments in queries:
            value = self._ask(name, *arguments)
            if value is not None:
                return value
        return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return a query's answer, or ``None`` if the device or the driver has none."""
        key = name if len(arguments) < 2 else f"{name}{arguments[1:]}"
        if self.lost or key in self._given_up:
            return None
        query: Callable[..., Any] | None = getattr(self.nv, name, None)
        if query is None:
            self._given_up.add(key)
            return None
        try:
            value = query(*arguments)
        except self.nv.NVMLError as error:
            self._on_failure(key, error)
            return None
        self._failures.pop(key, None)
        return value

    def _on_failure(self, key: str, error: Any) -> None:
        nv = self.nv
        code = getattr(error, "value", None)
        if code in (nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_UNINITIALIZED):
            self.lost = True
            return
        permanent = {
            nv.NVML_ERROR_NOT_SUPPORTED,
            nv.NVML_ERROR_NO_PERMISSION,
            nv.NVML_ERROR_FUNCTION_NOT_FOUND,
            nv.NVML_ERROR_INVALID_ARGUMENT,
        }
        self._failures[key] = self._failures.get(key, 0) + 1
        if code in permanent or self._failures[key] >= MAX_FAILURES:
            self._failures.pop(key, None)
            self._given_up.add(key)


class _Gpm:
    """GPM metrics of a device, which are differences between two samples (Hopper and later)."""

    def __init__(self, device: NvmlDevice, samples: list[Any]) -> None:
        self.device = device
        self.samples = samples
        nv = device.nv
        self.names = {
            name: getattr(nv, f"NVML_GPM_METRIC_{metric}")
            for name, metric in GPM.items()
            if hasattr(nv, f"NVML_GPM_METRIC_{metric}")
        }
        self.request = nv.c_nvmlGpmMetricsGet_t()
        self.at = 0

    @classmethod
    def open(cls, device: NvmlDevice) -> _Gpm | None:
        """Open a device's GPM. Return ``None`` if it has none, or this user may not read it."""
        support = device._ask("nvmlGpmQueryDeviceSupport", device.board)
        if support is None or not support.isSupportedDevice:
            return None
        samples = [device._ask("nvmlGpmSampleAlloc") for _ in range(2)]
        if any(sample is None for sample in samples):
            return None
        result = cls(device, samples)
        result._take_sample()
        return result

    def sample(self) -> dict[str, float] | None:
        """Return the metrics since the last sample, or ``None`` if it is too recent or refused."""
        now = time.perf_counter_ns()
        if self.at and now - self.at < GPM_MIN_NS:
            return None
        is_first = not self.at
        if not self._take_sample() or is_first:
            return None
        nv, request = self.device.nv, self.request
        request.version = nv.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self.names)
        request.sample1, request.sample2 = self.samples
        for position, number in enumerate(self.names.values()):
            request.metrics[position].metricId = number
        answer = self.device._ask("nvmlGpmMetricsGet", request)
        if answer is None:
            return None
        result = {}
        for position, name in enumerate(self.names):
            metric = answer.metrics[position]
            if metric.nvmlReturn == nv.NVML_SUCCESS and math.isfinite(metric.value):
                result[name] = round(float(metric.value), 2)
        return result or None

    def _take_sample(self) -> bool:
        """Take a new second sample, and make the previous one the first. Return whether it
        worked."""
        self.samples.reverse()
        newest = self.samples[1]
        if self.device.instance is None:
            taken = self.device._ask("nvmlGpmSampleGet", self.device.board, newest)
        else:
            taken = self.device._ask(
                "nvmlGpmMigSampleGet", self.device.board, self.device.instance, newest
            )
        if taken is None:
            self.at = 0
            return False
        self.at = time.perf_counter_ns()
        return True

    def close(self) -> None:
        """Free the two samples."""
        for sample in self.samples:
            self.device._ask("nvmlGpmSampleFree", sample)
        self.samples = []
