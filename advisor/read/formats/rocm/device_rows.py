"""Rows for ``build_trace`` from any file of ROCm's profilers."""

import re
from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.trace import Device, Trace, TraceMeta
from advisor.read.build import build_trace
from advisor.read.nvtx import framework_of
from advisor.read.sqlite import stack_frames

DIRECTIONS = {
    "HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD",
    "HOST_TO_HOST": "HtoH", "HOSTTODEVICE": "HtoD", "DEVICETOHOST": "DtoH",
    "DEVICETODEVICE": "DtoD", "HOSTTOHOST": "HtoH",
}  # fmt: skip
"""Direction by a word in a copy's name: ``MEMORY_COPY_HOST_TO_DEVICE``, ``CopyHostToDevice``."""
FILL = r"(?i)fill_?buffer|memset"
"""Pattern of the kernels with which HIP sets memory, and of RPD's name for them."""


def copy_direction(names: pl.Series) -> pl.Series:
    """Return the direction of each copy by its name, or ``other`` if unknown."""
    directions = {
        name: next(
            (direction for word, direction in DIRECTIONS.items() if word in name.upper()), "other"
        )
        for name in names.drop_nulls().unique().to_list()
    }
    return names.replace_strict(directions, default="other", return_dtype=pl.String)


def trace_of(
    meta: TraceMeta,
    host: list[pl.DataFrame],
    device: list[pl.DataFrame],
    inputs: pl.DataFrame | None,
    programs: list[str],
    counters: pl.DataFrame | None = None,
) -> Trace:
    """Return the trace of these rows and empty the lists. Raises AdvisorError if there are none."""
    rows = {"host": stack_frames(host), "device": stack_frames(device)}
    if not any(part.height for part in rows.values()):
        raise AdvisorError(
            f"{meta.path}: a profile of ROCm without GPU work, calls and ranges; record with "
            "rocprofv3 --sys-trace"
        )
    names = [part["name"].unique().cast(pl.String) for part in rows.values() if part.height]
    meta = replace(meta, vendor="amd", framework=framework_of(pl.concat(names), programs))
    return build_trace(  # it frees the rows as soon as it has read them
        meta, host=rows.pop("host"), device=rows.pop("device"), counters=counters, inputs=inputs
    )


def build_device(number: int, facts: Mapping[str, object]) -> Device:
    """Return a device from an agent's recorded facts. Missing facts are ``None``."""

    def text(*keys: str) -> str | None:
        for key in keys:
            value = facts.get(key)
            if isinstance(value, str) and value.strip():
                return value.strip()[:200]
        return None

    def positive_integer(key: str) -> int | None:
        value = facts.get(key)
        return value if isinstance(value, int) and 0 < value < 1 << 53 else None

    name = text("product_name", "model_name", "name")
    if name is not None and re.fullmatch(r"gfx\w+", name) is None and "AMD" not in name.upper():
        name = f"AMD {name}"
    waves, simds = positive_integer("max_waves_per_cu"), positive_integer("max_waves_per_simd")
    lanes, simds_per_cu = positive_integer("wave_front_size"), positive_integer("simd_per_cu")
    if waves is None and simds and simds_per_cu:
        waves = simds * simds_per_cu
    return Device(
        id=number,
        name=name,
        sms=positive_integer("cu_count"),
        warp_size=lanes,
        max_threads_per_sm=waves * lanes if waves and lanes else None,
    )
