"""A sample of GPUs and host as a table for the terminal, and as text for Prometheus."""

from collections.abc import Mapping
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.run_directory import THROTTLE_BITS, GpuSample, HostSample, Sample
from advisor.render.document import Block, Document, FieldList, Grid, Paragraph, Section, TextField

NOT_REPORTED = "–"
"""Text for values that the driver does not report."""


def build(
    sample: Sample, *, names: Mapping[str | None, str | None], without_gpu: str | None
) -> Document:
    """Build the document of one sample. ``names``: names of the GPUs, by UUID. ``without_gpu``:
    reason why there are none."""
    blocks: list[Block] = []
    if sample.gpus:
        head = ["GPU", "used", "memory", "clock", "power", "°C", "processes"]
        rows = [_build_row(number, gpu) for number, gpu in enumerate(sample.gpus)]
        fields = [
            TextField(f"GPU {number}", _describe_gpu(gpu, names.get(gpu.uuid)))
            for number, gpu in enumerate(sample.gpus)
        ]
        table = Grid(head, rows)
        blocks.append(Section("GPUs", [table, FieldList(fields)], f"{len(sample.gpus)}"))
    if without_gpu is not None:
        blocks.append(Paragraph(f"No GPU is shown: {without_gpu}.", "warn", indent=0))
    return Document("", [*blocks, *_describe_host(sample)], name="sample")


def _build_row(number: int, gpu: GpuSample) -> list[str]:
    return [
        str(number),
        _format_percent(gpu.utilisation),
        NOT_REPORTED
        if gpu.memory_used is None
        else f"{t.format_bytes(gpu.memory_used)} of {t.format_bytes(gpu.memory_total)}",
        NOT_REPORTED
        if gpu.sm_clock is None
        else f"{gpu.sm_clock} of {gpu.sm_clock_max or NOT_REPORTED} MHz",
        NOT_REPORTED if gpu.power is None else f"{gpu.power / 1e3:.0f} W",
        NOT_REPORTED if gpu.temperature is None else str(gpu.temperature),
        NOT_REPORTED if gpu.processes is None else str(gpu.processes),
    ]


def _describe_gpu(gpu: GpuSample, name: str | None) -> list[str]:
    parts = [labels.clean(name or "model not recorded")]
    if reasons := throttle_reasons(gpu):
        parts.append(f"limited by: {', '.join(reasons)}")
    if gpu.gpm:
        known = {"sm_util": "SMs active", "tensor": "tensor cores", "dram": "DRAM"}
        parts += [f"{label} {gpu.gpm[key]:.0f}%" for key, label in known.items() if key in gpu.gpm]
    if gpu.power_limit is not None:
        parts.append(f"limit {gpu.power_limit / 1e3:.0f} W")
    if gpu.pcie_gen is not None and gpu.pcie_width is not None:
        best = f" of {gpu.pcie_gen_max} x{gpu.pcie_width_max}" if gpu.pcie_gen_max else ""
        parts.append(f"PCIe {gpu.pcie_gen} x{gpu.pcie_width}{best}")
    if gpu.ecc_uncorrected:
        parts.append(f"{gpu.ecc_uncorrected} uncorrectable memory errors")
    if gpu.remap_pending:
        parts.append("row remapping pending")
    if gpu.xid:
        parts.append(f"XID {', '.join(map(str, gpu.xid[:5]))}")
    return parts


def throttle_reasons(gpu: GpuSample) -> list[str]:
    """Name why the clocks are below their maximum. Idling does not count."""
    value = gpu.throttle or 0
    return [name for name, bit in THROTTLE_BITS.items() if value & bit and name != "idle"]


def _describe_host(sample: Sample) -> list[Block]:
    host = sample.host
    if host is None:
        return []
    free = NOT_REPORTED if host.memory_available is None else t.format_bytes(host.memory_available)
    parts = [f"CPU {_format_percent(host.cpu)}", f"memory available {free}"]
    if host.swap_used is not None:
        parts.append(f"swap {t.format_bytes(host.swap_used)}")
    if host.throttled_periods:
        parts.append(
            f"stopped by the CPU quota {host.throttled_periods:,} times, "
            f"{t.format_duration((host.throttled or 0) * 1e3)} in all"
        )
    return [Section("Host", [FieldList([TextField("host", parts)])])]


def _format_percent(value: float | None) -> str:
    return NOT_REPORTED if value is None else f"{value:.0f}%"


# -- Prometheus ---------------------------------------------------------------------------------

_GPU: Final[dict[str, tuple[str, str, str, float]]] = {
    "utilisation_ratio": ("gauge", "Share of time in which any kernel ran", "utilisation", 0.01),
    "memory_used_bytes": ("gauge", "Device memory in use", "memory_used", 1),
    "memory_total_bytes": ("gauge", "Device memory", "memory_total", 1),
    "sm_clock_hertz": ("gauge", "SM clock", "sm_clock", 1e6),
    "sm_clock_max_hertz": ("gauge", "Highest SM clock", "sm_clock_max", 1e6),
    "throttle_reasons": ("gauge", "Bits of nvmlClocksEventReasons", "throttle", 1),
    "power_watts": ("gauge", "Power draw", "power", 1e-3),
    "power_limit_watts": ("gauge", "Enforced limit", "power_limit", 1e-3),
    "energy_joules_total": ("counter", "Energy since the driver was loaded", "energy", 1e-3),
    "temperature_celsius": ("gauge", "Temperature of the GPU", "temperature", 1),
    "pcie_generation": ("gauge", "PCIe generation in use", "pcie_gen", 1),
    "pcie_width": ("gauge", "PCIe lanes in use", "pcie_width", 1),
    "pcie_transmit_bytes_per_second": ("gauge", "To the host", "pcie_tx", 1),
    "pcie_receive_bytes_per_second": ("gauge", "From the host", "pcie_rx", 1),
    "ecc_uncorrected_total": ("counter", "Uncorrectable memory errors", "ecc_uncorrected", 1),
    "processes": ("gauge", "Processes with a context on it", "processes", 1),
    "sm_active_ratio": ("gauge", "Multiprocessors active (GPM)", "gpm.sm_util", 0.01),
    "tensor_active_ratio": ("gauge", "Tensor cores active (GPM)", "gpm.tensor", 0.01),
    "dram_active_ratio": ("gauge", "DRAM active (GPM)", "gpm.dram", 0.01),
}
"""Metric -> kind, help, field of ``GpuSample``, factor to the metric's unit."""
_HOST: Final = {
    "cpu_ratio": ("gauge", "cpu", 0.01),
    "memory_available_bytes": ("gauge", "memory_available", 1),
    "swap_used_bytes": ("gauge", "swap_used", 1),
    "cpu_throttled_seconds_total": ("counter", "throttled", 1e-6),
}


def _read_metric(source: GpuSample | HostSample, field: str, factor: float) -> str | None:
    """Return a field in the metric's unit, or ``None`` if not measured."""
    group, _, name = field.rpartition(".")
    value = (getattr(source, group) or {}).get(name) if group else getattr(source, name)
    if value is None:
        return None
    scaled = value if factor == 1 else value * factor
    return str(int(scaled)) if scaled == int(scaled) else repr(round(scaled, 9))


def prometheus(sample: Sample, names: Mapping[str | None, str | None]) -> str:
    """Write the sample in Prometheus' text format, for node_exporter's textfile collector, without
    values that were not measured."""
    lines: list[str] = []
    for name, (kind, text, field, factor) in _GPU.items():
        rows = [
            f"advisor_gpu_{name}{{gpu={_quote(gpu.uuid or str(number))},"
            f'index="{number}",name={_quote(names.get(gpu.uuid) or "")}}} {value}'
            for number, gpu in enumerate(sample.gpus)
            if (value := _read_metric(gpu, field, factor)) is not None
        ]
        if rows:
            lines += [f"# HELP advisor_gpu_{name} {text}", f"# TYPE advisor_gpu_{name} {kind}"]
            lines += rows
    for name, (kind, field, factor) in _HOST.items():
        value = None if sample.host is None else _read_metric(sample.host, field, factor)
        if value is not None:
            lines += [f"# TYPE advisor_host_{name} {kind}", f"advisor_host_{name} {value}"]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = labels.clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
