"""Libraries that prepare an operator again for each new input shape."""

from typing import Any

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Citation, Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.new_shapes import REPEATED_NS
from advisor.rules.support.citations import SILENT_INPUTS, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import amount_per_step, costliest_places, of_step, scale_edit
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

SEARCH, UNKNOWN, ATTENTION, OTHER = (
    "algorithms are timed",
    "it is not recorded whether algorithms are timed",
    "cuDNN's attention",
    "another operator",
)
_TITLES = {
    SEARCH: "cuDNN times its algorithms again for each new input shape",
    UNKNOWN: "Convolutions are prepared again for each new input shape",
    ATTENTION: "cuDNN attention plans again for each new input shape",
    OTHER: "{operator} is prepared again for each new input shape",
}
_CONVOLUTION, _ATTENTION = "convolution", "_cudnn_attention"
_PAD = "Pad each dimension that varies to a few sizes, so that shapes repeat."
_PAD_CODE = (
    "# a few sizes, each of which is prepared once\n"
    "for dim, unit in {0: 8, -1: 128}.items():   # each dimension that varies\n"
    "    more = list(x.shape)\n"
    "    more[dim] = -x.shape[dim] % unit\n"
    "    x = torch.cat([x, x.new_zeros(more)], dim)"
)
_ENDING_NOTE = (
    " In the run's last steps the shapes repeat: they lose only {left:.0%} of this. The gain "
    "applies to runs with ever new shapes, and to the start of others."
)
_OFF_CODE = f"torch.backends.cudnn.benchmark = False\n\n# or keep it, with{_PAD_CODE[1:]}"


class NewInputShapes(Rule):
    """A library prepares an operator for each input shape: it builds a plan, compiles or loads a
    kernel, or times algorithms. It keeps the result, so that the next call with that shape takes
    microseconds. If most steps have new shapes, the host prepares all the time, and the GPU idles.

    Three causes are common. With ``cudnn.benchmark``, cuDNN times up to 10 algorithms for each new
    shape of a convolution. The attention of cuDNN makes a plan for each length, so a decoder whose
    cache grows pays for each token. Products load another kernel for another size.

    The figure is the host time of the first calls with given shapes and types. It counts only the
    operator's self time, from 1 ms on. Calls with repeated shapes must be 10 times as fast: an
    operator that is always slow has another cause. Without such calls, the rule knows convolutions,
    cuDNN attention, recurrent layers and products by name. It must happen in at least 3 steps and
    in more than half of them. The first steps of a run with fixed shapes are start-up.

    The gain falls as shapes repeat. The low end of its range is the loss in the last quarter of the
    recorded run, or zero without a record.

    The rule needs shapes."""

    id = "new-input-shapes"
    title = "A library prepares operators again for each new input shape"
    found_in = ("traces/h100/asr_beam", "traces/h100/ocr_pages")
    silent_in = (*SILENT_INPUTS, "traces/h100/points_max_split")
    validation_note = (
        "on an H100: a page reader under cudnn.benchmark, 77% of the step predicted, 83% measured "
        "(309 ms, 53 without the search). Beam search: 95 ms per token with new lengths, 13 once "
        "they repeat; 54% of the step predicted while lengths are new"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark",
    )
    sources = (
        Citation(
            "self time from 1 ms on, a factor of 10, 3 steps", "advisor/measure/host/new_shapes.py"
        ),
        Citation(
            "up to 10 algorithms",
            "https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark_limit",
        ),
    )

    min_share = Threshold(0.05, "of the step in such calls", XPROF)
    algorithms_per_shape = Factor(
        10, "algorithms per shape, if the trace does not show them", TRIED_ON_TRACES
    )
    final_steps_share = Factor(
        0.25, "of the run's steps, at its end, show the remaining loss", TRIED_ON_TRACES
    )
    min_final_steps = Threshold(4, "steps to measure it", TRIED_ON_TRACES)
    max_remaining_share = Threshold(
        0.5,
        "of the loss remains in the last steps; below it, the problem ends by itself",
        TRIED_ON_TRACES,
    )

    fix = _PAD + " Run each size once before the loop."
    code = _PAD_CODE
    verify = "Profile again after some steps: no call of the operator takes milliseconds."
    falsified_by = "calls that take as long when their shapes repeat"
    assumptions = ("new shapes keep coming",)
    confidence = 0.85
    cases = {
        SEARCH: {
            "fix": "Set torch.backends.cudnn.benchmark = False: the search pays off only if shapes "
            "repeat. Or keep it and pad inputs to a few sizes, which saves all preparation.",
            "code": _OFF_CODE,
        },
        UNKNOWN: {
            "fix": f"{_PAD} If torch.backends.cudnn.benchmark is on, switch it off: the search "
            "pays off only if shapes repeat.",
            "code": _OFF_CODE,
        },
        ATTENTION: {
            "fix": "Choose the flash or memory-efficient backend of attention, which needs no "
            "preparation per shape. Or pad lengths to a few sizes. In decoding, use a cache of "
            "fixed size.",
            "code": "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            "# EFFICIENT_ATTENTION where there is a mask\n"
            "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n"
            "    output = model(batch)\n\n"
            "# or for the whole program:\n"
            "torch.backends.cuda.enable_cudnn_sdp(False)",
        },
        OTHER: {"fix": fix, "code": code},
    }

    def check(self, a: Analysis) -> Outcomes:
        calls = a.new_shape_calls
        if calls.is_empty():
            return
        ns = int(calls["dur"].sum())
        if ns < self.min_share * a.span_ns:
            return
        groups = [
            self._describe_calls(a, name, advised) for (name,), advised in calls.group_by("name")
        ]
        groups.sort(key=lambda group: -group["ns"])
        main, steps = groups[0], a.steps.used.height
        advised = [group for group in groups if group["cause"] == main["cause"]]
        saved = sum((1 - group["left"]) * group["ns"] for group in advised)
        still_lost = self._measure_remaining_loss(a, saved / max(a.span_ns, 1))
        ending = (
            ""
            if still_lost is None or still_lost > self.max_remaining_share
            else _ENDING_NOTE.format(left=still_lost)
        )
        edits: list[Edit] = []
        for group in groups:
            edits += _build_edits(group, still_lost or 0.0, advised=group["cause"] == main["cause"])
        touched = calls["step"].n_unique()
        usual = main["usual"]
        repeated = f", {t.format_duration(usual)} with one that came before" if usual else ""
        timing = (
            f" It times {main['algorithms']:.0f} algorithms each time."
            if main["algorithms"]
            else ""
        )
        evidence = [
            amount_per_step(a, "host time of calls with new shapes", ns),
            self.compare_share(a, "host time of calls with new shapes", ns),
            amount_per_step(a, "calls with new shapes", calls.height, "count"),
            Evidence("steps with new shapes", touched, "count"),
            Evidence("median call with a new shape", main["median"], "ns"),
            Evidence("median call with a repeated shape", usual, "ns"),
        ]
        if main["algorithms"]:
            evidence.append(Evidence("algorithms timed in a call", main["algorithms"], "count"))
        if still_lost is not None:
            evidence.append(
                Evidence(
                    "share of the loss that remains in the run's last steps", still_lost, "share"
                )
            )
        yield Finding(
            summary=(
                f"Calls with new input shapes take {of_step(a, ns)}. {main['name']} takes "
                f"{t.format_duration(main['median'])} with a new shape{repeated}."
                f"{timing} New shapes come in {touched} of {steps} steps.{ending}"
            ),
            evidence=evidence,
            where=costliest_places(a, calls["host"].to_numpy(), calls["dur"].to_numpy()),
            edits=edits,
            title=_TITLES[main["cause"]].format(operator=main["name"]),
            **self.case(main["cause"]),
        )

    def _describe_calls(self, a: Analysis, name: str, calls: pl.DataFrame) -> dict[str, Any]:
        """Return the time and cause of one operator's calls, and the share that the fix leaves."""
        flag = None if a.run_steps is None else a.run_steps.flag("cudnn.benchmark")
        algorithms, cause = float(np.median(calls["timed_algorithms"].to_numpy())), OTHER
        if _ATTENTION in name:
            cause = ATTENTION
        elif _CONVOLUTION in name:
            cause = SEARCH if algorithms or flag else OTHER if flag is False else UNKNOWN
        ns, usual = int(calls["dur"].sum()), calls["usual"][0]
        repeated = min(1.0, len(calls) * (REPEATED_NS if usual is None else usual) / ns)
        stays = 1 / (algorithms or self.algorithms_per_shape) if cause == SEARCH else 0.0
        return {
            "name": name, "ns": ns, "median": float(np.median(calls["dur"].to_numpy())),
            "usual": usual, "algorithms": algorithms, "cause": cause, "repeated": repeated,
            "left": min(1.0, repeated + stays),
        }  # fmt: skip

    def _measure_remaining_loss(self, a: Analysis, share: float) -> float | None:
        """Return the part of this share of the step that the run's last steps still lose, compared
        with the steps around the window. ``None`` if not recorded."""
        run_steps = a.run_steps
        if run_steps is None:
            return None
        around = run_steps.durations_around(run_steps.kept_by_window(a.trace.meta.window))
        durations = run_steps.timed_durations
        last_durations = durations[
            -int(max(len(durations) * self.final_steps_share, self.min_final_steps)) :
        ]
        if len(around) < self.min_final_steps or len(durations) < 2 * self.min_final_steps:
            return None
        window_step = float(np.median(around))
        lost = share * window_step
        excess = float(np.median(last_durations)) - (window_step - lost)
        return None if lost <= 0 else min(1.0, max(0.0, excess / lost))

    @staticmethod
    def examples() -> Examples:
        """Return a search, growing attention and products, and traps whose shapes repeat."""
        return {
            "algorithms are timed": _build_convolutions(),
            "a switch that the record knows": _build_convolutions(algorithms=0, benchmark=True),
            "not known whether algorithms are timed": _build_convolutions(algorithms=0),
            "attention of growing length": _build_attention(),
            "attention of a run that ends with repeated lengths": _build_attention(late=12),
            "products": _build_attention(name="aten::addmm"),
            "start-up": (_build_attention(grows=False), "calls.is_empty()"),
            "slow with every shape": (_build_attention(repeated=40_000), "calls.is_empty()"),
            "an unknown operator that never repeats": (
                _build_attention(name="mine::parse", others=0),
                "calls.is_empty()",
            ),
            "short plans": (_build_attention(us=700), "calls.is_empty()"),
            "little": (_build_attention(us=2000, other_us=200_000), "min_share"),
        }


def _build_edits(group: dict[str, Any], remaining_loss: float, *, advised: bool) -> list[Edit]:
    """Shorten the calls of an operator to the share that the fix leaves: at best to a repeated
    call, at worst only while shapes are new. Operators that only padding helps get shorter only at
    best."""
    name, left = exact_pattern([group["name"]]), group["left"]
    host = Select(on="host", name=name, at="new_shape")
    if not advised:
        return [scale_edit(host, 1.0, group["repeated"], 1.0)]
    edits = [scale_edit(host, left, group["repeated"], 1 - remaining_loss * (1 - left))]
    if group["algorithms"]:
        part = 1 / group["algorithms"]
        work = Select(on="gpu", under=name, at="new_shape")
        edits.append(scale_edit(work, part, part, 1 - remaining_loss * (1 - part)))
    return edits


def _build_convolutions(*, algorithms: int = 6, benchmark: bool | None = None) -> TraceBuilder:
    """Build steps with pages of a different width each, through two convolutions."""
    b = TraceBuilder()
    for number in b.steps(5):
        width = 320 + 16 * number
        for channels in (64, 128):
            shapes = [[16, channels, 24, width], [128, channels, 3, 3]]
            with b.op("aten::cudnn_convolution", shapes, "c10::Half", host_us=9000):
                for _ in range(algorithms):
                    b.launch("sm90_xmma_fprop_implicit_gemm", 60)
                    b.sync("cudaEventSynchronize")
                b.launch("sm90_xmma_fprop_implicit_gemm", 60)
        b.run("aten::relu", "elementwise_kernel", 200)
        b.sync()
    if benchmark is not None:
        _add_record(b, {"cudnn.benchmark": benchmark}, 40, 40)
    return b


def _build_attention(
    *,
    name: str = "aten::_cudnn_attention_forward",
    us: float = 40_000,
    repeated: float = 60,
    others: int = 3,
    grows: bool = True,
    other_us: float = 2000,
    late: float | None = None,
) -> TraceBuilder:
    """Build decoding steps of four layers, whose length grows by one per step or stays the same."""
    b = TraceBuilder()
    for number in b.steps(5):
        length = 14 + number * grows
        for layer in range(1 + others):
            is_new = layer == 0 and (grows or number == 0)
            shapes = [[80, 16, 1, 64], [80, 16, length, 64]]
            b.run(name, "flash_fprop", 20, shapes, "c10::Half", host_us=us if is_new else repeated)
        b.run("aten::mm", "nvjet_gemm", other_us)
        b.sync()
    if late is not None:
        _add_record(b, {}, 45, late)
    return b


def _add_record(b: TraceBuilder, flags: dict[str, object], ms: float, late: float) -> None:
    run = b.record_of_run(flags=flags)
    run.steps(12, ms)
    run.steps(5, ms, window=0)
    run.steps(30, ms)
    run.steps(30, late)
