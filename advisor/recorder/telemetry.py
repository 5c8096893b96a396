"""The sampler: a quiet thread that writes what GPU and host do, a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from advisor.core.run_directory import Gpu, Sample
from advisor.recorder.background import Background
from advisor.recorder.host_sampler import HostSampler
from advisor.recorder.nvml import Nvml, NvmlDevice, open_nvml

MAX_HZ = 20.0
"""Faster sampling was seen to slow the training thread (100 Hz: a third), and to hold the driver's
lock."""


class Sampler(Background):
    """Calls ``write`` with a ``run_directory.Sample`` ``hz`` times a second, from a daemon
    thread, until ``stop``.

    Cheap queries are made for every sample, costly ones (processes, ECC, PCIe, children, disk)
    every ``slow_every_s``.
    """

    name = "telemetry"
    stop_seconds = 2.0

    def __init__(
        self,
        write: Callable[[Sample], None],
        *,
        hz: float = 2.0,
        slow_every_s: float = 7.0,
    ) -> None:
        super().__init__()
        self.write = write
        self.interval = 1 / min(max(hz, 1e-3), MAX_HZ)
        self.slow_every_s = slow_every_s
        self.without_gpu: str | None = None
        """Why there are no GPU samples; ``None``: there are, or it has not begun."""

    def work(self) -> None:
        """Sample until the end."""
        with SampleSource() as source:
            self.without_gpu = source.without_gpu
            self._loop(source)

    def _loop(self, source: SampleSource) -> None:
        begun = time.monotonic()
        slow_at = begun
        ticks = 0
        while True:
            now = time.monotonic()
            slow = now >= slow_at
            if slow:
                slow_at = now + self.slow_every_s
            self.write(source.sample(slow=slow))
            # late ticks are dropped, not made up for
            ticks = max(ticks + 1, int((time.monotonic() - begun) / self.interval) + 1)
            if self.over.wait(max(0.0, begun + ticks * self.interval - time.monotonic())):
                return


class SampleSource:
    """Where samples come from: the GPUs through NVML, and the host. A context manager. By default
    the GPUs that this process sees, where it and its children do not count as others; ``every``:
    all of the machine, for somebody who looks on."""

    def __init__(self, *, every: bool = False) -> None:
        self.host = HostSampler()
        self._every = every
        opened = open_nvml()
        self.nvml: Nvml | None = None if isinstance(opened, str) else opened
        self.without_gpu: str | None = opened if isinstance(opened, str) else None
        self.devices: list[NvmlDevice] = []
        if self.nvml is not None:
            self.devices = self.nvml.devices(every=every)
            if not self.devices:
                self.without_gpu = "no GPU is visible to this process"

    def sample(self, *, slow: bool) -> Sample:
        """One sample of GPUs and host."""
        now = time.perf_counter_ns()
        host = self.host.sample(slow=slow)
        gpus: list[Gpu] = []
        for device in list(self.devices):
            gpu = device.sample(slow=slow, own=() if self._every else self.host.pids)
            if gpu is not None:
                gpus.append(gpu)
            if device.lost:
                self.devices.remove(device)
                self.without_gpu = f"the driver has lost GPU {device.uuid or 'of unknown UUID'}"
        return Sample(t=now, gpus=gpus, host=host)

    def close(self) -> None:
        """Give back what the driver lent."""
        for device in self.devices:
            device.close()
        if self.nvml is not None:
            self.nvml.close()

    def __enter__(self) -> SampleSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
