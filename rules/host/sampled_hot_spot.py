"""Lines of the user's code that leave the GPU idle, found by stacks sampled outside windows."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Finding, Location, Outcomes
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.gaps import HOST_CAUSES
from advisor.measure.host.sampled_code import COMPUTING, MIN_LINE_SHARE, SampledCode, code_outside
from advisor.measure.host.stacks import MIN_SAMPLES, SampledStack, outermost_operator, parse_frame
from advisor.measure.steps.periodic import find_periodic_work
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, REAL_HOST, XPROF
from advisor.rules.support.common import (
    find_loader,
    impact_per_step,
    of_step,
    row_numbers,
    run_steps_of,
    steps_seen,
    sum_column,
)
from advisor.rules.support.library_functions import find_library_use
from advisor.testing import Examples, TraceBuilder

IMAGES = re.compile(r"torchvision/|PIL/|cv2/|albumentations/")
"""Files of libraries that prepare images."""
IMAGE_CODE = (
    "# once; std too\n"
    "mean = torch.tensor(MEAN, device=device).view(3, 1, 1)\n"
    "raw = torch.empty((batch_size, height, width, 3), dtype=torch.uint8,\n"
    "                  pin_memory=True)\n"
    "# for each batch: images of shape [height, width, 3], as uint8\n"
    "np.stack(images, out=raw[: len(images)].numpy())\n"
    "x = raw[: len(images)].to(device).permute(0, 3, 1, 2)\n"
    "x = x.float().div_(255).sub_(mean).div_(std)"
)
WHOLE_PROGRAM = ("main", "<module>")
"""Functions that contain a whole program: reports then name the line."""


class SampledHotSpot(Rule):
    """The host computes for much of each step, and the GPU idles meanwhile. Examples are images
    prepared in the loop, metrics counted with NumPy, and weights averaged on the CPU.

    Without Python stacks in the profiled window, python-hot-spot cannot name the code. But the
    recorder samples stacks outside its windows. The rule names the innermost line or function of
    your code with most samples. Calls of the model, the backward pass, the optimizer and the loader
    do not count. Transforms of torchvision count as your code, although some are modules.

    The gain is at most that share of the mean step. It is also at most the GPU idle time in the
    window while the host launches nothing. Gaps of 100 µs or more count: other rules check Python
    around launches. Work that recurs every few steps is reported by periodic-work."""

    id = "sampled-hot-spot"
    subject = HOST_CODE
    title = "Code on the CPU leaves the GPU idle"
    reads_record = True
    is_python_time = True
    found_in = ("traces/h100/photo_tagger",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "two recordings of an H100 with other programs on it. Images normalized one by one in a "
        "service: 75% of the step predicted, 74% measured. Weights averaged on the CPU: 16% "
        "predicted, 36% measured on a dedicated machine"
    )
    references = ("https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",)

    min_share = Threshold(0.10, "of the step, of idle time and of the samples", XPROF)
    min_gap_us = Threshold(100.0, "µs per gap: Python around one launch takes 10 to 80", REAL_HOST)
    min_samples = Threshold(MIN_SAMPLES, "samples in the line", CHOSEN)
    min_gain_share = Threshold(0.5, "of the time is gained at least; some has to stay", CHOSEN)

    fix = (
        "Do the work of {line} on the GPU, on the whole batch, with torch operators (instead "
        "of NumPy or PIL, if it uses them). Or do it {elsewhere}, while the GPU works on the "
        "previous batch."
    )
    code = (
        "# instead of np.random.choice(n, count)\n"
        "torch.randint(n, (count,), device=device)\n"
        "# instead of np.random.permutation(n)[:count]\n"
        "torch.randperm(n, device=device)[:count]\n"
        "# instead of np.clip, np.sort and np.unique\n"
        "x.clamp(a, b), x.sort(), x.unique()\n"
        "# instead of np.add.at(total, index, values)\n"
        "total.index_add_(0, index, values)"
    )
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "images": {
            "fix": "Copy the images as uint8, and convert and normalise them on the GPU, a whole "
            "batch at once: {line} does this on the CPU. Or do it {elsewhere}, while the GPU works "
            "on the previous batch.",
            "code": IMAGE_CODE,
            "references": ("https://docs.pytorch.org/vision/stable/transforms.html",),
        }
    }
    verify = "Record again: the step is shorter by this time, and the GPU is busy for more of it."
    falsified_by = "the same step time if the result comes from a cache"
    assumptions = ("the work can run on the GPU, or in parallel with it",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        mean = run_steps.mean
        if a.device_id is None or a.trains_on_host or not a.span_ns or not mean:
            return
        if (a.trace.cpu["kind"] == "python").any() or find_periodic_work(run_steps) is not None:
            return
        gaps = self._find_gaps(a)
        idle = int(gaps["dur"].sum())
        if idle < self.min_share * a.span_ns:
            return
        code = code_outside(run_steps.stacks, COMPUTING, self.min_share)
        if code is None or code.waits:
            return
        gain = min(code.share, idle / a.span_ns) * mean
        operator_text = self._describe_operators(a, gaps)
        place = code.location
        line = place.function if place.line is None else f"line {place.line}"
        stacks = _stacks_at(run_steps.stacks, place)
        use = find_library_use(stacks)
        called = code.library_function or ("" if use is None else use.time.function)
        library_text = f", in {called}" if called else ""
        is_image_code = IMAGES.search(called)
        cure = None if is_image_code or use is None else use.cure
        elsewhere = "in another thread or process"
        if find_loader(a) is not None:
            elsewhere = "in workers of the DataLoader"
        texts: dict[str, Any] = {}
        if is_image_code:
            texts = self.case("images", line=line, elsewhere=elsewhere)
        else:
            fix = self.fix.format(line=line, elsewhere=elsewhere)
            texts["fix"] = fix if cure is None else f"{cure.fix} {fix}"
            texts["code"] = self.code if cure is None else cure.code
        in_line = sum(stack.samples for stack in stacks) >= MIN_LINE_SHARE * code.samples
        yield Finding(
            title=f"{_name_code(code, in_line)} leaves the GPU idle",
            summary=(
                f"{code.share:.0%} of the sampled stacks are in {code.place}{library_text}: "
                f"{t.format_duration(code.share * mean)} of the mean step. The GPU idles for "
                f"{of_step(a, idle)} in the profiled window while the host launches nothing"
                f"{operator_text}."
            ),
            evidence=[
                Evidence("time in this code", code.share * mean, "ns", per="step"),
                self.compare("share of the sampled stacks", code.share, "min_share"),
                self.compare("samples in this line", code.samples, "min_samples", "count"),
                self.compare(
                    "GPU idle while the host computes", idle / a.span_ns, "min_share", per=a.per
                ),
                Evidence("mean step", mean, "ns"),
                steps_seen(run_steps),
            ],
            where=[code.location],
            impact=impact_per_step(
                a,
                0.9 * gain,
                low=self.min_gain_share * gain,
                high=gain,
                method="share of the sampled stacks, of the mean step",
            ),
            **texts,
        )

    def _describe_operators(self, a: Analysis, gaps: pl.DataFrame) -> str:
        """Return a text on operators on the CPU that take much of the idle time. Empty if none
        does."""
        idle = gaps.filter(pl.col("cause") == "dispatch")
        names = a.trace.cpu["name"].gather(idle["host"]).cast(pl.String)
        table = pl.DataFrame({"name": names, "ns": idle["dur"]}).group_by("name").agg(pl.sum("ns"))
        longest = table.sort("ns", "name").tail(3).reverse()
        if sum_column(longest["ns"]) < self.min_share * a.span_ns:
            return ""
        operator_times = [
            f"{name} {t.format_duration(ns / a.step_count)}" for name, ns in longest.iter_rows()
        ]
        return f", part of it in operators on the CPU ({', '.join(operator_times)})"

    def _find_gaps(self, a: Analysis) -> pl.DataFrame:
        """Return idle time of the GPU, rows of ``Analysis.gaps``, while the host is not in an
        operator that launches work."""
        outermost = outermost_operator(a.trace)
        is_launching = np.zeros(a.trace.cpu.height + 1, dtype=bool)
        ops = row_numbers(a.trace.gpu["op"])
        is_launching[outermost[ops[ops >= 0]]] = True
        is_launching[-1] = False  # no operator
        gaps = a.gaps.filter(pl.col("cause").is_in(HOST_CAUSES))
        host = row_numbers(gaps["host"])
        outer_op = np.where(host >= 0, outermost[np.maximum(host, 0)], -1)
        gaps = gaps.filter(pl.Series(~is_launching[outer_op]))
        return gaps.filter(pl.col("dur").sum().over("gap") >= self.min_gap_us * 1e3)

    @staticmethod
    def examples() -> Examples:
        stacks = _build_service()
        with stacks.step(), stacks.python("serve.py(9): main"):
            stacks.host(300)
        return {
            "images prepared one by one": _build_service(),
            "operators on the CPU": _build_service(operator="aten::sub"),
            "stacks in the window": (stacks, "(a.trace.cpu['kind'] == 'python').any()"),
            "the GPU works meanwhile": (
                _build_service(kernel=7000),
                "idle < self.min_share * a.span_ns",
            ),
            "around each launch": (_build_service(pieces=60), "min_gap_us"),
            "inside the model": (_build_service(place="module"), "code is None"),
            "waiting for the GPU": (_build_service(place="wait"), "code.waits"),
            "not sampled": (_build_service(samples=0), "code is None"),
            "every few steps": (
                _build_service(every=8),
                "find_periodic_work(run_steps) is not None",
            ),
            "the CPU computes": (_build_service(gpu=None), "a.device_id is None"),
        }


def _stacks_at(stacks: Sequence[SampledStack], place: Location) -> list[SampledStack]:
    matching = []
    for stack in stacks:
        frames = [frame for name in stack.frames if (frame := parse_frame(name)) is not None]
        if (place.file, place.line, place.function) in [
            (f.file, f.line, f.function) for f in frames
        ]:
            matching.append(stack)
    return matching


def _name_code(code: SampledCode, in_line: bool) -> str:
    place = code.location
    if not place.line or not (in_line or place.function in WHOLE_PROGRAM):
        return f"The function {place.function}"
    return f"Line {place.line} of {Path(place.file or '').name}"


def _build_service(
    *,
    operator: str = "",
    kernel: float = 1000,
    pieces: int = 1,
    place: str = "",
    samples: int = 40,
    every: int = 0,
    gpu: str | None = "A100",
) -> TraceBuilder:
    """Build steps of 6 ms of host work in ``pieces``, each before a launch."""
    b = TraceBuilder(gpu=gpu)
    for _ in b.steps():
        for _ in range(pieces):
            if operator:
                b.on_host(operator, 6000 / pieces)
            else:
                b.host(6000 / pieces)
            if gpu:
                b.product(kernel / pieces)
            else:
                b.on_host("aten::mm", kernel)
        if gpu and kernel < 6000:
            b.sync()
    run = b.record_of_run()
    for n in range(80):
        extra = 20.0 if every and n % every == 0 else 0.0
        phases: dict[str, Any] = {"between steps": 1 + extra}
        run.step(7 + extra, forward=5, **phases)
    module = "torch/nn/modules/module.py(1779): Module._wrapped_call_impl"
    inner = {
        "module": [module, "model.py(3): Net.forward"],
        "wait": ["serve.py(12): prepare", "torch/cuda/__init__.py(1162): synchronize"],
        "": ["serve.py(12): prepare", module, "torchvision/transforms/transforms.py(9): forward"],
    }[place]
    if samples:
        frames = ["serve.py(9): main", *inner, module, "model.py(3): Net.forward"]
        sampled, model = [*range(1 + len(inner))], [0, len(frames) - 2, len(frames) - 1]
        run.event("stacks", frames=frames, stacks=[[samples, sampled], [10, model]])
    return b
