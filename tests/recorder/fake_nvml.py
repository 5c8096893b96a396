"""A pynvml that answers from a script: GPUs, MIG slices, and what goes wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """An error like pynvml's: carries the return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeGpu:
    """A simulated device: its answers, and which queries fail with which code."""

    def __init__(self, uuid: str, **answers: Any) -> None:
        self.uuid = uuid
        self.answers = answers
        self.errors: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.xid: list[int] = []
        self.mig: list[FakeGpu] = []
        self.parent: FakeGpu | None = None
        self.gpm_taken = 0


class FakeNvml:
    """Stands in for the module ``pynvml``."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_UNKNOWN = 999
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_SM_OCCUPANCY = 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None) -> None:
        self.gpus = list(gpus)
        self.init_error = init_error
        self.users = 0
        self.freed: list[str] = []

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.10"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> tuple[int, int]:
        if not gpu.mig:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.mig):
            raise NVMLError(6)
        return gpu.mig[index]

    def nvmlDeviceIsMigDeviceHandle(self, gpu: FakeGpu) -> bool:
        return gpu.parent is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:
        assert gpu.parent is not None
        return gpu.parent

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        return 3

    # -- measurements -----------------------------------------------------------------------

    def _query(self, gpu: FakeGpu, name: str) -> Any:
        gpu.calls[name] = gpu.calls.get(name, 0) + 1
        if name in gpu.errors:
            raise NVMLError(gpu.errors[name])
        if name not in gpu.answers:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu.answers[name]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "NVIDIA Test"

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._query(gpu, "utilisation")

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return self._query(gpu, "memory")

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return int(self._query(gpu, f"clock{kind}"))

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return int(self._query(gpu, f"clock_max{kind}"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return int(self._query(gpu, "throttle"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return int(self._query(gpu, "throttle_old"))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return int(self._query(gpu, "power"))

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return int(self._query(gpu, "temperature"))

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        return int(self._query(gpu, f"ecc{kind}"))

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        rows: tuple[int, int, int, int] = self._query(gpu, "rows")
        return rows

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return list(self._query(gpu, "processes"))

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        return int(self._query(gpu, f"pcie{counter}"))

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[tuple[int, int]]) -> list[Any]:
        number, _ = fields[0]
        values = gpu.answers.get("fields", {})
        if number not in values:
            return [SimpleNamespace(nvmlReturn=3, valueType=0, value=None)]
        value = SimpleNamespace(ullVal=values[number], uiVal=None, ulVal=None)
        return [SimpleNamespace(nvmlReturn=0, valueType=3, value=value)]

    # -- events and GPM ---------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> list[FakeGpu]:
        return []

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: list[FakeGpu]) -> None:
        if "events" in gpu.errors:
            raise NVMLError(gpu.errors["events"])
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[FakeGpu], timeout: int) -> Any:
        assert timeout == 0
        if not events[0].xid:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=events[0].xid.pop(0))

    def nvmlEventSetFree(self, events: list[FakeGpu]) -> None:
        self.freed.append("events")

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(isSupportedDevice=int("gpm" in gpu.answers))

    def nvmlGpmSampleAlloc(self) -> dict[str, int]:
        return {}

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: dict[str, int]) -> dict[str, int]:
        gpu.gpm_taken += 1
        sample["number"] = gpu.gpm_taken
        return sample

    def nvmlGpmMigSampleGet(
        self, gpu: FakeGpu, instance: int, sample: dict[str, int]
    ) -> dict[str, int]:
        assert instance == 3
        return self.nvmlGpmSampleGet(gpu, sample)

    def nvmlGpmSampleFree(self, sample: dict[str, int]) -> None:
        self.freed.append("gpm")

    class c_nvmlGpmMetricsGet_t:
        def __init__(self) -> None:
            self.version = self.numMetrics = 0
            self.sample1: Any = None
            self.sample2: Any = None
            self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(64)]

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        assert request.sample2["number"] == request.sample1["number"] + 1
        for metric in request.metrics[: request.numMetrics]:
            known = metric.metricId in (2, 5)
            metric.nvmlReturn = 0 if known else self.NVML_ERROR_NOT_SUPPORTED
            metric.value = {2: 87.654, 5: 41.0}.get(metric.metricId, float("nan"))
        return request


def healthy_gpu(uuid: str = "GPU-aaaa-1111", **more: Any) -> FakeGpu:
    """A healthy data-centre GPU."""
    answers: dict[str, Any] = {
        "utilisation": SimpleNamespace(gpu=97, memory=40),
        "memory": SimpleNamespace(used=30 << 30, total=80 << 30, free=50 << 30),
        "clock1": 1700,
        "clock2": 2600,
        "clock_max1": 1980,
        "clock_max2": 2619,
        "throttle": 0x4,
        "power": 690_000,
        "temperature": 61,
        "ecc0": 1,
        "ecc1": 0,
        "rows": (1, 0, 0, 0),
        "processes": [],
        "pcie0": 1000,
        "pcie1": 2000,
    }
    return FakeGpu(uuid, **{**answers, **more})
