"""Debug settings are on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from advisor.core.finding import Evidence, Finding, Outcome, Rule
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.testing import TraceBuilder

_FLAGS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "anomaly_mode": (
        (True,),
        "anomaly detection keeps the stack of every operation and checks every gradient for NaN",
        "torch.autograd.set_detect_anomaly(False)",
    ),
    "sync_debug_mode": (
        (1, 2),
        "every synchronizing call is checked",
        'torch.cuda.set_sync_debug_mode("default")',
    ),
}
_VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("1",),
        "every tensor is a cudaMalloc and a cudaFree, which wait for the GPU",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked across all ranks first"),
    "NCCL_DEBUG": (("TRACE",), "NCCL logs every call"),
    "TORCH_SHOW_DISPATCH_TRACE": (("1",), "every operator call is printed"),
    "TORCH_USE_CUDA_DSA": (("1",), "device-side assertions are collected"),
    "PYTHONDEVMODE": (("1",), "Python's development mode checks every allocation"),
    "PYTHONTRACEMALLOC": ((), "Python records the stack of every allocation"),
    "PYTHONMALLOC": (("debug", "malloc_debug", "pymalloc_debug"), "Python checks allocations"),
    "PYTHONASYNCIODEBUG": (("1",), "asyncio's debug mode is on"),
    "PYTORCH_JIT": (("0",), "scripted modules run uncompiled"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile does nothing"),
}
"""Variable: the values that turn it on (none: any but 0 and empty), and what it costs."""


class DebugSwitches(Rule):
    """A debug setting is on during training and slows it. ``CUDA_LAUNCH_BLOCKING=1`` removes all
    overlap of host and GPU, anomaly detection doubles the host's work in the backward pass,
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` adds a collective to every collective, and so on.

    Read from the process's flags when its first step began, and from its environment. A setting
    that is on for part of the program only may be missed, or reported where it is off again.
    """

    id = "debug-switches"
    title = "Debug settings are on"
    category = "host"
    knobs = ("debug-switches-off",)
    reads_record = True
    found_in = ("recorded/anomaly.slow",)
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/leak.cured",
        "recorded/threads.cured",
    )
    validated_on = (
        "a CPU recording with anomaly detection (median step 23 ms, 10 ms without); silent without"
    )
    references = (
        "https://pytorch.org/docs/stable/autograd.html#anomaly-detection",
        "https://pytorch.org/docs/stable/cuda_environment_variables.html",
    )

    fix = "Turn off the debug settings that this run does not need."
    verify = "Record again: the median step is shorter."
    falsified_by = "the same median step without the setting"
    confidence = 0.9

    code = "torch.autograd.set_detect_anomaly(False)"

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare flags and variables with the list."""
        recorded = record(a)
        settings_on: list[tuple[str, str, str]] = []
        for name, (values, why, cure) in _FLAGS.items():
            value = recorded.flag(name)
            if type(value) in {bool, int} and value in values:
                settings_on.append((f"{name} = {value}", why, cure))
        for name, (settings, why) in _VARIABLES.items():
            setting = recorded.record.rank.env.get(name, "").strip()
            on = (
                setting.upper() in {s.upper() for s in settings}
                if settings
                else (setting not in {"", "0"})
            )
            if on:
                settings_on.append((f"{name}={setting}", why, f"unset {name}"))
        if not settings_on:
            return
        names = ", ".join(name for name, _, _ in settings_on)
        yield Finding(
            title=f"Debug settings are on: {names}",
            summary="; ".join(f"{name}: {why}" for name, why, _ in settings_on) + ".",
            evidence=[Evidence("setting", name) for name, _, _ in settings_on],
            code="\n".join(cure for _, _, cure in settings_on),
            impact=measure_it("record a run without it to see what it costs"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Anomaly mode; blocking launches."""
        return {
            "anomaly mode": _run({"anomaly_mode": True}),
            "blocking launches": _run({}, CUDA_LAUNCH_BLOCKING="1"),
            "several": _run({"sync_debug_mode": 1}, NCCL_DEBUG="TRACE", PYTHONTRACEMALLOC="25"),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """All off; the quieter settings of the same variables."""
        return {
            "all off": (_run({"anomaly_mode": False, "sync_debug_mode": 0}), "not settings_on"),
            "harmless values": (
                _run(
                    {},
                    CUDA_LAUNCH_BLOCKING="0",
                    NCCL_DEBUG="WARN",
                    TORCH_DISTRIBUTED_DEBUG="INFO",
                    PYTHONTRACEMALLOC="0",
                    PYTORCH_JIT="1",
                ),
                "not settings_on",
            ),
        }


def _run(flags: dict[str, Any], **env: str) -> TraceBuilder:
    b = TraceBuilder()
    b.record_of_run(flags=flags, env=env).steps(10, 10)
    return b
