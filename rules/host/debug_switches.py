"""Debug settings that are on while a model trains."""

from typing import Any, Literal, NamedTuple

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select, impact_without_gain
from advisor.core.rule import Evidence, Rule
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import NODE_PREFIX, rows_around
from advisor.rules.support.common import amount_per_step, of_step
from advisor.testing import Examples, TraceBuilder

Slows = Literal["always", "gpu", "ranks", "perhaps"]
"""Programs that a setting certainly slows: all, those on a GPU, or those of several ranks.
``perhaps``: it depends on something that is not recorded."""


class Setting(NamedTuple):
    name: str
    """Name of the setting, with its value."""
    why: str
    """Reason why the setting costs time."""
    cure: str
    slows: Slows


ANOMALY = "anomaly_mode"
_KEEPS_STACKS = "anomaly detection keeps the stack of every operation and checks every gradient"
_NO_ANOMALY = "torch.autograd.set_detect_anomaly(False)"
_FLAGS: dict[str, tuple[tuple[Any, ...], str, str, Slows]] = {
    ANOMALY: ((True,), f"{_KEEPS_STACKS} for NaN", _NO_ANOMALY, "always"),
    "sync_debug_mode": (
        (1, 2),
        "every synchronizing call is checked",
        'torch.cuda.set_sync_debug_mode("default")',
        "perhaps",
    ),
}
_VARIABLES: dict[str, tuple[tuple[str, ...], str, Slows]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel", "gpu"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("1",),
        "every tensor is a cudaMalloc and a cudaFree, which wait for the GPU",
        "gpu",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        "every collective is checked across all ranks first",
        "ranks",
    ),
    "NCCL_DEBUG": (("TRACE",), "NCCL logs every call", "ranks"),
    "TORCH_SHOW_DISPATCH_TRACE": (("1",), "every operator call is printed", "perhaps"),
    "TORCH_USE_CUDA_DSA": (("1",), "device-side assertions are collected", "perhaps"),
    "PYTHONDEVMODE": (("1",), "Python's development mode checks every allocation", "always"),
    "PYTHONTRACEMALLOC": ((), "Python records the stack of every allocation", "always"),
    "PYTHONMALLOC": (
        ("debug", "malloc_debug", "pymalloc_debug"),
        "Python checks allocations",
        "always",
    ),
    "PYTHONASYNCIODEBUG": (("1",), "asyncio's debug mode is on", "perhaps"),
    "PYTORCH_JIT": (("0",), "scripted modules run uncompiled", "perhaps"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile does nothing", "perhaps"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile does nothing", "perhaps"),
}
"""Variable -> values that turn it on (if none: all but 0 and empty), why it costs time, and which
programs it slows."""


class AnomalyDetection(Rule):
    """Anomaly detection is on in a trace. After each node of the backward pass PyTorch checks its
    gradients for NaN: ``aten::isnan``, ``aten::_is_any_true`` and a read of the answer, directly
    inside ``autograd::engine::evaluate_function``. Each operator of the forward pass keeps its
    Python stack. On a GPU each check waits for the device.

    The gain is the time of these checks and, where Python stacks were recorded, of formatting the
    kept ones. Without stacks, the formatting is part of the forward operators' time, and the gain
    is a lower bound. A recorded run also shows the flag: see ``debug-switches``."""

    id = "anomaly-detection"
    title = "Anomaly detection is on"
    training_only = True
    knobs = ("debug-switches-off",)
    validation_note = (
        "CPU recordings, torch 2.13, with the mode on and off: steps of 58 ms instead of 21"
    )
    references = ("https://pytorch.org/docs/stable/autograd.html#anomaly-detection",)

    fix = (
        "Turn anomaly detection off, and on again only to search for a NaN. Watch the loss or the "
        "norm of all gradients instead, every N steps."
    )
    verify = "Record again: no aten::isnan after the nodes of the backward pass."
    falsified_by = "the same step time without it"
    confidence = 0.95
    code = _NO_ANOMALY

    def check(self, a: Analysis) -> Outcomes:
        cost = AnomalyCost(a)
        if a.run_steps is not None or not cost.checks:
            return
        yield Finding(
            summary=cost.summary, evidence=cost.evidence, edits=cost.edits, **cost.certainty
        )

    @staticmethod
    def examples() -> Examples:
        by_hand = TraceBuilder(gpu=None)
        for _ in by_hand.steps():
            by_hand.on_host("aten::isnan", 400)
            with by_hand.op(f"{NODE_PREFIX}MmBackward0"):
                by_hand.on_host("aten::mm", 2000)
        return {
            "without stacks": _build_checked_steps(),
            "with stacks": _build_checked_steps(stacks=True),
            "the program's own check": (by_hand, "not cost.checks"),
            "a recorded run": (
                _build_run({ANOMALY: True}, _build_checked_steps()),
                "a.run_steps is not None",
            ),
        }


_CHECKS = r"^aten::(?:isnan|_is_any_true|item)$"
_FORMATTING = r"(?:^|/)traceback\.py\(\d+\): format_stack$"


class AnomalyCost:
    """Cost of anomaly detection in the analysed steps, as far as the trace shows it."""

    def __init__(self, a: Analysis) -> None:
        names = a.trace.cpu["name"]
        check_rows = name_matches(names, r"^aten::isnan$").to_numpy().nonzero()[0]
        node = rows_around(a.trace.cpu["parent"].fill_null(-1).to_numpy(), check_rows)
        is_node = name_matches(names, f"^{NODE_PREFIX}").to_numpy()
        self.checks = int((is_node[node] & (node >= 0)).sum()) if len(check_rows) else 0
        """Number of gradient checks in the whole trace."""
        self.runs_backward = bool(is_node.any())
        self._a = a
        is_formatting = name_matches(names, _FORMATTING).to_numpy()
        self.stacks = float(a.trace.cpu["dur"].filter(pl.Series(is_formatting)).sum())
        """Time of formatting stacks in the whole trace, ns; 0 if Python stacks were not
        recorded."""

    @property
    def edits(self) -> list[Edit]:
        """Edits that remove checks and formatting. The range allows for the overhead of recording
        Python stacks."""
        checks = Select(on="host", kind=("op",), name=_CHECKS, under=f"^{NODE_PREFIX}")
        result = [Edit(op="remove", select=checks)]
        if self._a.device_id is not None:
            kernels = Select(on="gpu", under=r"^aten::(?:isnan|_is_any_true)$")
            result.append(Edit(op="remove", select=kernels))
        if self.stacks:
            select = Select(on="host", kind=("python",), name=_FORMATTING)
            result.append(
                Edit(op="scale", select=select, factor=0.0, best_factor=0.0, worst_factor=0.5)
            )
        return result

    @property
    def certainty(self) -> dict[str, Any]:
        """Fields of a finding. The gain is a lower bound if formatting was not recorded."""
        if self.stacks:
            return {"confidence_notes": ["recording Python stacks lengthens Python time"]}
        return {"costs_more_than_recorded": True}

    @property
    def evidence(self) -> list[Evidence]:
        """Gradient checks and time of formatting stacks, per step."""
        shown = [amount_per_step(self._a, "checks of gradients for NaN", self.checks, "count")]
        if self.stacks:
            shown.append(amount_per_step(self._a, "time that formats stacks", self.stacks))
        return shown

    @property
    def summary(self) -> str:
        """Sentences on what anomaly detection does and how long it takes."""
        effect = f"{_KEEPS_STACKS} for NaN"
        if not self.stacks:
            return f"{effect}. Without Python stacks in the recording only the checks are measured."
        return f"{effect}. Formatting stacks takes {of_step(self._a, self.stacks)}."


class DebugSwitches(Rule):
    """A debug setting is on during training and slows it. For example, ``CUDA_LAUNCH_BLOCKING=1``
    removes all overlap of host and GPU. Anomaly detection doubles the host's work in the backward
    pass. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` adds a collective to every collective.

    The rule reads the process's flags at its first step, and its environment. A setting that is on
    for only part of the program may be missed, or reported although it is off again. If anomaly
    detection is on in the profiled steps, they show its cost; the cost of other settings is not
    recorded. Settings for GPUs and for several ranks count only in such programs."""

    id = "debug-switches"
    title = "Debug settings are on"
    host_check = "debug settings"
    knobs = ("debug-switches-off",)
    reads_record = True
    found_in = ("recorded/anomaly.slow",)
    silent_in = ("recorded/gc_pauses.cured", "recorded/leak.cured", "recorded/threads.cured")
    validation_note = (
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

    code = _NO_ANOMALY

    def check(self, a: Analysis) -> Outcomes:
        cost = AnomalyCost(a)
        settings = [s for s in _settings_on(a, cost) if _affects(s, a)]
        if not settings:
            return
        names = ", ".join(setting.name for setting in settings)
        certain = any(setting.slows != "perhaps" for setting in settings)
        fields: dict[str, Any] = {
            "impact": impact_without_gain("record a run without it to see what it costs"),
            "costs_more_than_recorded": certain,
        }
        if cost.checks:
            fields = {"edits": cost.edits, **cost.certainty}
            if any(s.slows != "perhaps" and not s.name.startswith(ANOMALY) for s in settings):
                fields["costs_more_than_recorded"] = True
        yield Finding(
            title=f"Debug settings are on: {names}",
            summary=t.upper_first("; ".join(s.why for s in settings)) + ".",
            evidence=[
                *(Evidence("setting", setting.name) for setting in settings),
                *(cost.evidence if cost.checks else ()),
            ],
            code="\n".join(setting.cure for setting in settings),
            **fields,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "anomaly mode": _build_run({ANOMALY: True}),
            "anomaly mode in the trace": _build_run({}, _build_checked_steps()),
            "blocking launches": _build_run({}, _build_gpu_steps(), CUDA_LAUNCH_BLOCKING="1"),
            "several": _build_run({"sync_debug_mode": 1}, PYTORCH_JIT="0", PYTHONTRACEMALLOC="25"),
            "all off": (_build_run({ANOMALY: False, "sync_debug_mode": 0}), "not settings"),
            "no GPU, one process": (
                _build_run({}, CUDA_LAUNCH_BLOCKING="1", NCCL_DEBUG="TRACE"),
                "not settings",
            ),
            "harmless values": (
                _build_run(
                    {},
                    CUDA_LAUNCH_BLOCKING="0",
                    NCCL_DEBUG="WARN",
                    TORCH_DISTRIBUTED_DEBUG="INFO",
                    PYTHONTRACEMALLOC="0",
                    PYTORCH_JIT="1",
                ),
                "not settings",
            ),
        }


def _settings_on(a: Analysis, cost: AnomalyCost) -> list[Setting]:
    """Return the settings of flags, environment and trace that are on."""
    result: list[Setting] = []
    if a.run_steps is None:
        return result
    for name, (values, why, cure, slows) in _FLAGS.items():
        value = a.run_steps.flag(name)
        on = type(value) in {bool, int} and value in values
        if name == ANOMALY and cost.checks:
            on, value = True, True
        elif name == ANOMALY and cost.runs_backward:
            slows = "perhaps"  # it is off again: the profiled steps do not check
        if on:
            result.append(Setting(f"{name} = {value}", why, cure, slows))
    for name, (settings, why, slows) in _VARIABLES.items():
        setting = a.run_steps.rank_record.rank.env.get(name, "").strip()
        on = (
            setting.upper() in {s.upper() for s in settings}
            if settings
            else (setting not in {"", "0"})
        )
        if on:
            result.append(Setting(f"{name}={setting}", why, f"unset {name}", slows))
    return result


def _affects(setting: Setting, a: Analysis) -> bool:
    if setting.slows == "gpu":
        return not a.trains_on_host
    if setting.slows == "ranks" and a.run_steps is not None:
        return a.run_steps.rank_record.rank.env.get("WORLD_SIZE", "").strip() not in {"", "0", "1"}
    return True


def _build_checked_steps(*, stacks: bool = False) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        with b.op("aten::mm", sequence=1):
            if stacks:
                with b.python("torch/fx/traceback.py(497): format_stack"):
                    b.host(700)
            b.host(700)
        with b.op(f"{NODE_PREFIX}MmBackward0", sequence=1):
            b.on_host("MmBackward0", 1400)
            b.on_host("aten::isnan", 300)
            b.on_host("aten::_is_any_true", 200)
            b.on_host("aten::item", 20)
    return b


def _build_gpu_steps() -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        b.product(300, wait=True)
    return b


def _build_run(flags: dict[str, Any], b: TraceBuilder | None = None, **env: str) -> TraceBuilder:
    b = b or TraceBuilder()
    b.record_of_run(flags=flags, env=env).steps(10, 10)
    return b
