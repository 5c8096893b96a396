"""Python that leaves the GPU idle: single functions, or all code before a step's first launch."""

import re
from typing import Any

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Location, Outcomes, Select, SkippedCheck
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.text import count_noun, format_duration
from advisor.measure import Analysis
from advisor.measure.host.gaps import HOST_CAUSES
from advisor.measure.host.host_time import python_gaps, python_hot_spots
from advisor.measure.host.library_time import stacks_of_rows
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.sampled_code import COMPUTING, code_outside
from advisor.measure.host.stacks import CodeOwner, code_owner
from advisor.measure.steps.named_intervals import step_starts
from advisor.rules.support.citations import (
    REAL_HOST,
    SILENT_TRACES,
    TENSORBOARD,
    XPROF,
    public_traces,
)
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    int_column,
    of_step,
    per_step,
    row_numbers,
    scale_edit,
    stacks_option,
)
from advisor.rules.support.launch_gaps import package_of
from advisor.rules.support.library_functions import LibraryUse, find_library_use
from advisor.testing import Examples, TraceBuilder

_MAX_NAMES = 20
MAX_SPOTS = 3
"""Maximum number of functions in a finding. Each must take its part of the minimum share."""
_WORKER_PREFETCH_CODE = (
    "# raw: a list of what your loop prepares now, one item per batch;\n"
    "# prepare: a function of one item, which does that in a worker process\n"
    "loader = torch.utils.data.DataLoader(\n"
    "    raw, batch_size=None, collate_fn=prepare, num_workers={workers})\n"
    "for inputs in loader:\n"
)
_INPUT_NAMES = re.compile(
    r"preprocess|image_process|feature_extract|tokeni[sz]|augment|collate|imread|imdecode|featuri[sz]e"
    r"|load_(?:image|video|audio|sample|batch|data)|read_(?:image|video|audio|sample|batch|frame|csv)"
    r"|decode_(?:image|jpe?g|png|video|audio|frame)|(?:make|get|build|next|prepare)_batch|getitem"
    r"|spectrogram|^PIL/|^cv2/|^av/|librosa|soundfile|albumentations|^pandas/|^datasets/"
    r"|torchaudio/|torchvision/(?:io|transforms|datasets)|torch/utils/data/",
    re.IGNORECASE,
)
"""Names of functions and files that prepare inputs: decoding, preprocessing, tokenizing."""
_ENGINES = r"^(?:vllm|sglang|tensorrt_llm|lmdeploy|xfuser|nemo|verl)/"
"""Files of inference and training engines, which users seldom change."""
AHEAD, OWN, LIBRARY = "input is prepared", "the program's own", "of a library"


def _format_name(spot: dict[str, Any]) -> str:
    return str(spot["function"] or spot["name"])


def _format_place(spot: dict[str, Any]) -> str:
    """Return ``tokenise (text.py:12)``, or only the name of a built-in."""
    if spot["function"] is None:
        return str(spot["name"])
    return f"{spot['function']} ({spot['file']}:{spot['line']})"


def _distinct_names(spots: list[dict[str, Any]]) -> list[str]:
    """Return the names of the functions, with their places if two names are equal."""
    names = [_format_name(spot) for spot in spots]
    return names if len(set(names)) == len(names) else [_format_place(spot) for spot in spots]


def _build_location(a: Analysis, spot: dict[str, Any]) -> Location:
    """Return the function's location and longest call; for a library, with the user's line that
    calls it."""
    frame = int(spot["frame"])
    file, line, function = a.location(frame)
    is_function_line = (file, line, function) == (spot["file"], spot["line"], spot["function"])
    caller = (
        "" if is_function_line or file is None else f"called from {file.rsplit('/', 1)[-1]}:{line}"
    )
    return Location(
        file=spot["file"],
        line=spot["line"],
        function=spot["function"] or spot["name"],
        op=caller or None,
        ts_ns=int(a.trace.cpu["ts"][frame]),
        dur_ns=int(a.trace.cpu["dur"][frame]),
        count=spot["count"],
    )


def _format_calls(a: Analysis, spot: dict[str, Any]) -> str:
    """Return all calls per step, hidden or not, as ``8 of load, 54.6 ms``."""
    count = max(1, round(spot["count"] / a.step_count))
    return f"{count:,} of {_format_name(spot)}, {format_duration(spot['total_ns'] / a.step_count)}"


def _classify(a: Analysis, spot: dict[str, Any]) -> str:
    """Return the kind of a function: it prepares inputs outside the model, is the program's own, or
    is a library's."""
    parent = a.trace.cpu["parent"]
    row: int | None = int(spot["frame"])
    in_model = False
    while row is not None and not in_model:  # one stack
        name = str(a.trace.cpu["name"][row])
        in_model = name.startswith((MODULE, "torch/nn/modules/module.py("))
        row = parent[row]
    file = str(spot["file"] or "")
    if not in_model and (_INPUT_NAMES.search(file) or _INPUT_NAMES.search(_format_name(spot))):
        return AHEAD
    return (
        LIBRARY if code_owner(spot["name"]) < CodeOwner.USER or re.search(_ENGINES, file) else OWN
    )


class PythonHotSpot(Rule):
    """A Python function runs while the GPU has no work and waits for this thread. Making the
    function faster, or moving it off the thread, shortens the step directly.

    The rule needs Python stacks. For each gap it names the function with most of the gap's Python
    time. It is the deepest one, in your code or an installed library, that launches at most 5% of a
    step's device work. So it is the code that keeps the GPU waiting, and not the call around the
    whole step. The three largest count together, if each takes a third of the threshold or more.
    Operators, CUDA calls and the DataLoader are not counted. Only GPU idle time counts: a slow
    function costs nothing while the GPU works through its queue. If a function takes little time
    before each of many launches, launch-bound reports it. So the function has to block the GPU for
    a while in each gap.

    The line is where the function begins, as the profiler records it. Recording stacks lengthens
    Python time, most of all for many small functions."""

    id = "python-hot-spot"
    title = "A Python function leaves the GPU idle"
    is_python_time = True
    found_in = ("traces/b200_eager", "traces/mi300_timesformer_inference")
    silent_in = public_traces(
        "a100_train_6steps v100_train_copy_heavy h100_bert_small_inference pairs/particle_batch128"
    )
    validation_note = (
        "MXFP4 quantisation in Python on b200_eager, 12 of 87 ms. Video inference on an MI300X: "
        "images prepared in Python, a quarter of a second before the first kernel. Silent on "
        "h100_bert_small_inference, whose Python is spread over all launches"
    )
    references = ("https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",)

    min_share = Threshold(0.05, "of the step, for up to three functions", TENSORBOARD, XPROF)
    min_gap_us = Threshold(
        100.0, "µs per gap on average: Python around one launch takes 10 to 80 µs", REAL_HOST
    )
    min_unknown = Threshold(
        0.05, "of the step, unexplained GPU idle time at which the rule asks for stacks", XPROF
    )

    fix = "Compute the result once and keep it, or do it while the GPU works."
    cases = {
        AHEAD: {
            "fix": "Prepare the result of {names} ahead in DataLoader workers, or compute it once "
            "and keep it. With num_workers={workers} they keep up with the shorter step.",
            "code": f"{_WORKER_PREFETCH_CODE}    train_step(inputs)",
            "assumptions": (
                "the step's other work can go on without its result",
                "the work becomes unnecessary, or runs in other processes with {workers} free. A "
                "thread does not help, because of Python's GIL",
            ),
        },
        OWN: {
            "fix": "Compute the result of {names} once and keep it, or vectorize its loops over "
            "tensors or lists. Log and checkpoint every N steps only."
        },
        LIBRARY: {
            "fix": "Make the call around {names} less often, such as once at the start or for "
            "several inputs at once. Or switch off the feature that needs it: this host work is in "
            "{library} itself.",
            "assumptions": ("this call, or the feature that needs it, can be left out",),
        },
    }
    inference = {
        "cases": {
            AHEAD: {
                "code": f"{_WORKER_PREFETCH_CODE}    # of a tensor: model(inputs.to(device))\n"
                "    on_device = dict((name, x.to(device)) for name, x in inputs.items())\n"
                "    outputs = model(**on_device)"
            },
            OWN: {
                "fix": "Compute the result of {names} once and keep it, or vectorize its loops "
                "over tensors or lists."
            },
        }
    }
    verify = "Profile again with stacks: the function's idle time is gone or smaller."
    falsified_by = "the same step time when the function returns a precomputed result"
    assumptions = (
        "the step's other work can go on without its result",
        "the work becomes unnecessary",
    )
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.span_ns:
            return
        if not (a.trace.cpu["kind"] == "python").any():
            yield from self._check_unknown(a)
            return
        spots = python_hot_spots(a).filter(
            pl.col("critical_ns") >= self.min_share / MAX_SPOTS * a.span_ns,
            pl.col("critical_ns") >= self.min_gap_us * 1000 * pl.col("gaps"),
        )
        spots = spots.head(MAX_SPOTS)
        total = int(spots["critical_ns"].sum())
        if spots.is_empty() or total < self.min_share * a.span_ns:
            return
        classified = [spot | {"kind": _classify(a, spot)} for spot in spots.iter_rows(named=True)]
        first = classified[0]
        gaps = python_gaps(a).drop_nulls("frame")
        gaps = gaps.with_columns(name=a.trace.cpu["name"].gather(gaps["frame"]))
        gaps = gaps.filter(pl.col("name").is_in(spots["name"].cast(pl.Categorical).implode()))
        stacks = stacks_of_rows(a, row_numbers(gaps["host"]), int_column(gaps, "dur"))
        use = find_library_use(stacks, timed=True)
        note = "" if use is None or use.cure is None else use.sentence("this time")
        yield Finding(
            title=self._write_title(classified),
            summary=self._write_summary(a, classified) + note,
            evidence=[
                amount_per_step(a, "GPU idle in these functions", total),
                self.compare_share(a, "GPU idle in these functions", total),
                *(
                    Evidence(_format_place(spot), spot["critical_ns"] / a.step_count, "ns")
                    for spot in classified
                ),
                self.compare(
                    "idle time per gap in the first function",
                    first["critical_ns"] / max(1, first["gaps"]),
                    "min_gap_us",
                    "ns",
                    times=1000,
                ),
                Evidence(
                    "all calls of these functions",
                    "; ".join(_format_calls(a, spot) for spot in classified),
                ),
            ],
            where=[_build_location(a, spot) for spot in classified],
            edits=[self._build_edit(a, gaps, spot) for spot in classified],
            **self._advice(a, classified, use),
            confidence_notes=["recording Python stacks lengthens Python time"],
        )

    def _advice(
        self, a: Analysis, spots: list[dict[str, Any]], use: LibraryUse | None
    ) -> dict[str, Any]:
        """Return advice for each kind of function: only input preparation can run ahead. Advice for
        a known library function comes first."""
        fix = []
        kinds = [spot["kind"] for spot in spots]
        for kind in dict.fromkeys(kinds):
            of_kind = [
                spot for spot, spot_kind in zip(spots, kinds, strict=True) if spot_kind == kind
            ]
            names = t.list_names(_distinct_names(of_kind))
            packages = t.list_names(sorted({package_of(spot["name"]) for spot in of_kind}))
            values = {"names": names, "library": packages, "workers": "{workers}"}
            fix.append(self.case(kind, **values)["fix"])
        ahead = [spot["name"] for spot in spots if spot["kind"] == AHEAD]
        library_cure = None if use is None else use.cure
        if library_cure is not None:
            fix.insert(0, library_cure.fix)
        result = {**self.case(AHEAD if ahead else kinds[0]), "fix": " ".join(fix)}
        if library_cure is not None and library_cure.code:
            result["code"] = library_cure.code
        if ahead:
            result["offloaded_ns"] = self._measure_time(a, pl.Series(ahead)) / a.step_count
        return result

    @staticmethod
    def _write_title(spots: list[dict[str, Any]]) -> str:
        """Return a title with all functions of the gain, or with the library if they are its
        internal ones."""
        names = _distinct_names(spots)
        if all(spot["kind"] == LIBRARY for spot in spots) and _format_name(spots[0])[0] == "_":
            return f"Python code of {package_of(spots[0]['name'])} leaves the GPU idle"
        if len(names) == 1:
            return f"The function {names[0]} leaves the GPU idle"
        return f"The functions {t.list_names(names)} leave the GPU idle"

    @staticmethod
    def _write_summary(a: Analysis, spots: list[dict[str, Any]]) -> str:
        """Return how long the GPU idles in the worst function, and in the others."""
        names = _distinct_names(spots)
        first = spots[0]
        calls = count_noun(max(1, round(first["count"] / a.step_count)), "call")
        summary = (
            f"The GPU idles for {of_step(a, first['critical_ns'])} while {names[0]} "
            f"runs ({calls}{per_step(a)})"
        )
        if spots[1:]:
            others = (
                f"{format_duration(spot['critical_ns'] / a.step_count)} in {name}"
                for spot, name in zip(spots[1:], names[1:], strict=True)
            )
            summary += f", and for {' and '.join(others)}"
        return f"{summary}."

    def _check_unknown(self, a: Analysis) -> Outcomes:
        """Report how much idle time Python stacks might explain, where none were recorded."""
        gaps = a.gaps
        host_kind = a.trace.cpu["kind"].gather(gaps["host"])
        unexplained = (gaps["cause"] == "unknown") & (host_kind != "runtime").fill_null(True)
        idle = int(gaps["dur"].filter(unexplained).sum())
        sampled = () if a.run_steps is None else a.run_steps.stacks
        sampled_code = code_outside(sampled, COMPUTING, self.min_unknown)
        if sampled_code is None and idle >= self.min_unknown * a.span_ns:
            yield SkippedCheck(
                what=(
                    f"which Python code leaves the GPU idle for {of_step(a, idle)} while no "
                    "operator runs"
                ),
                why="no Python stacks were recorded",
                missing="no stacks",
                record="with_stack=True",
            )

    @staticmethod
    def _measure_time(a: Analysis, names: pl.Series) -> int:
        """Return the time, ns, in these functions, hidden or not."""
        cpu = a.trace.cpu
        frames = cpu.filter(cpu["name"].is_in(names.cast(pl.Categorical).implode()))
        ts = int_column(frames, "ts")
        return intersect(union(ts, ts + int_column(frames, "dur")), a.spans).total

    @staticmethod
    def _build_edit(a: Analysis, gaps: pl.DataFrame, spot: dict[str, Any]) -> Edit:
        """Return the edit for gap pieces that this function causes, selected by the names that run
        under its frame. For a library's function the range ends at no gain."""
        frame = spot["name"]
        names = a.trace.cpu["name"].gather(gaps["host"])
        in_function = gaps["name"] == frame
        longest = (
            pl.DataFrame(
                {"name": names.filter(in_function), "dur": gaps["dur"].filter(in_function)}
            )
            .group_by("name")
            .agg(pl.col("dur").sum())
            .sort("dur", descending=True)["name"]
            .head(_MAX_NAMES)
            .cast(pl.String)
        )
        pattern = "|".join(re.escape(name) for name in np.sort(longest.to_numpy()))
        select = Select(
            on="gap", cause=("python",), name=f"^(?:{pattern})$", under=f"^{re.escape(frame)}$"
        )
        if spot["kind"] == LIBRARY:
            return scale_edit(select, 0.0, 0.0, 1.0)
        return Edit(op="remove", select=select)

    @staticmethod
    def examples() -> Examples:
        b, hidden, quick, bare, three, small = (TraceBuilder() for _ in range(6))
        for trace, names in ((three, ("reset", "set_context", "find_hook")), (small, ("reset",))):
            for _ in trace.steps():
                with trace.python("pipeline.py(30): run"):
                    for line, name in enumerate(names):
                        with trace.python(f"hooks.py({10 * line + 5}): {name}"):
                            trace.host(300)
                        trace.product(9000 / len(names), wait=True)
        for _ in range(4):
            with b.step(), b.python("train.py(30): train_step"):
                with b.python("text.py(12): tokenise"):
                    b.host(3000)
                with b.python("model.py(5): forward"), b.op("aten::mm"):
                    b.launch("ampere_sgemm_128x64_nn", 4000)
                b.sync()
        for _ in hidden.steps():
            with hidden.python("train.py(30): train_step"):
                hidden.product(8000)
                with hidden.python("text.py(12): tokenise"):
                    hidden.host(3000)
        for _ in quick.steps():
            with quick.python("train.py(30): train_step"):
                for _ in range(40):
                    with quick.python("model.py(5): forward"):
                        quick.host(30)
                        quick.run("aten::add", "elementwise_kernel", 20)
        for _ in bare.steps():
            bare.host(3000)
            bare.product(4000, wait=True)
        return {
            "tokenizing on the training thread": b,
            "three functions, little time each": three,
            "one function, little time": (small, "min_share"),
            "behind a full queue": (hidden, "spots.is_empty()"),
            "many quick calls": (quick, "min_gap_us"),
            "no stacks": (bare, "not (a.trace.cpu['kind'] == 'python').any()"),
        }


class CpuBeforeFirstKernel(Rule):
    """Each step begins with host work before it launches any GPU work, and the GPU idles until
    then. This work prepares, collates, augments or tokenizes a batch, or logs.

    The rule counts GPU idle time between the start of a step and the first GPU work launched in it.
    During that time the launching thread is in operators, in Python or in unrecorded code. A wait
    for the DataLoader, for a copy or for the GPU is not counted. When the host is ahead, the GPU
    still works on the previous step, and the same host work costs nothing.

    It must happen in most steps and last a while, because any step takes a few hundred microseconds
    to reach its first launch."""

    id = "cpu-before-first-kernel"
    title = "Host work delays the first launch of each step"
    is_python_time = True
    silent_in = SILENT_TRACES
    references = ("https://pytorch.org/docs/stable/data.html#working-with-collate-fn",)

    min_share = Threshold(
        0.05, "of the step, as for the similar wait for a loader", TENSORBOARD, XPROF
    )
    min_ms = Threshold(
        0.5, "ms per step; any step needs about 0.1 to 0.3 ms to reach its first launch", REAL_HOST
    )

    code = (
        "def collate(samples):            # runs in a worker, one step ahead\n"
        "    return prepare(torch.utils.data.default_collate(samples))\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., collate_fn=collate, num_workers={workers},\n"
        "                    persistent_workers=True, pin_memory=True)"
    )
    verify = "Profile again: the first launch follows right after the start of the step."
    falsified_by = "the same step time when the loop reuses one prepared batch"
    assumptions = (
        "the work does not depend on the result of the previous step",
        "{workers} free for the workers",
    )

    fix = (
        "Prepare the batch before the step begins: in the Dataset or collate_fn of a DataLoader "
        "with workers, or on the GPU (augmentation, normalization, masks, positions). Log and "
        "update metrics after the launches of the next step."
    )
    confidence = 0.75
    cases = {
        "without stacks": {
            "fix": f"{fix} Record with {{stacks}} to see which lines do it.",
            "confidence": 0.65,
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        lead_spans = step_starts(a)
        if not len(lead_spans):
            return
        gaps = a.gaps.filter(pl.col("cause").is_in(HOST_CAUSES))
        ts, dur = int_column(gaps, "ts"), int_column(gaps, "dur")
        idle = intersect(union(ts, ts + dur), lead_spans)
        used = a.steps.used
        by_step = covered_length(used["ts"].to_numpy(), used["end"].to_numpy(), idle)
        share = idle.total / a.span_ns
        if share < self.min_share or np.median(by_step) < self.min_ms * 1e6:
            return
        if a.step_count < 2:
            yield SkippedCheck(
                what=f"whether {t.format_duration(idle.total)} of host work before the first "
                "launch recurs",
                why="the trace has a single step",
                record="schedule(wait=1, warmup=2, active=5) and profiler.step() in the loop",
            )
            return
        lead_ns = covered_length(ts, ts + dur, lead_spans)
        by_cause = {
            cause: int(lead_ns[(gaps["cause"] == cause).to_numpy()].sum()) / a.step_count
            for cause in HOST_CAUSES
        }
        has_stacks = bool((a.trace.cpu["kind"] == "python").any())
        in_python = t.format_duration(by_cause["python"] + by_cause["unknown"])
        yield Finding(
            summary=(
                f"The GPU idles for {of_step(a, idle.total)} before the first launch, "
                f"{t.format_duration(by_cause['dispatch'])} of it in operators and {in_python} in "
                + ("Python." if has_stacks else "Python or other code outside operators.")
            ),
            evidence=[
                amount_per_step(a, "GPU idle before the first launch", idle.total),
                self.compare(
                    "GPU idle before the first launch, share", share, "min_share", per=a.per
                ),
                self.compare(
                    "GPU idle before the first launch, median of the steps",
                    float(np.median(by_step)),
                    "min_ms",
                    "ns",
                    times=1e6,
                ),
                Evidence(
                    "idle time before the first launch in operators", by_cause["dispatch"], "ns"
                ),
                Evidence(
                    "idle time before the first launch in Python",
                    by_cause["python"] if has_stacks else None,
                    "ns",
                ),
                Evidence(
                    "idle time before the first launch, unexplained", by_cause["unknown"], "ns"
                ),
            ],
            where=costliest_places(
                a, row_numbers(gaps["host"]), lead_ns, ts=ts, dur=dur, gap=int_column(gaps, "gap")
            ),
            edits=[Edit(op="remove", select=Select(on="gap", cause=HOST_CAUSES, at="step_start"))],
            offloaded_ns=idle.total / a.step_count,
            confidence_notes=[]
            if has_stacks
            else ["without stacks, what runs outside operators is unknown"],
            **({} if has_stacks else self.case("without stacks", stacks=stacks_option(a))),
        )

    @staticmethod
    def examples() -> Examples:
        python, operators, ahead, loader, once, ordinary = (TraceBuilder() for _ in range(6))
        for _ in python.steps():
            with python.python("train.py(12): make_batch"):
                python.host(3000)
            python.product(500, 10, wait=True)
        for _ in operators.steps():
            operators.on_host("aten::stack", 1500)
            operators.on_host("aten::normal_", 1500)
            operators.product(500, 10, wait=True)
        for _ in ahead.steps():
            ahead.host(3000)
            ahead.product(6000)
        for _ in loader.steps():
            loader.loader_wait(3000)
            loader.product(500, 10, wait=True)
        for number in once.steps():
            once.host(2200 if number == 0 else 100)
            once.product(500, 10, wait=True)
        for _ in ordinary.steps():
            ordinary.host(400)
            ordinary.product(500, 10, wait=True)
        return {
            "Python before the first launch": python,
            "operators on the CPU": operators,
            "the host is ahead": (ahead, "share < self.min_share"),
            "waiting for the loader": (loader, "share < self.min_share"),
            "one slow step": (once, "min_ms"),
            "an ordinary start": (ordinary, "min_ms"),
        }
