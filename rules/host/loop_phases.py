"""Time of the loop's own code, outside the training phases, from the run's record."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Finding, Impact, Location, Outcomes, impact_without_gain
from advisor.core.intervals import Floats
from advisor.core.rule import Evidence, Threshold
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.names import name_matches
from advisor.measure.host.sampled_code import share_of_python
from advisor.measure.host.stacks import (
    LOOP,
    HottestLine,
    SampledStack,
    parse_frame,
    read_membership_tests,
)
from advisor.measure.steps.run_steps import RunSteps
from advisor.rules.support.citations import CHOSEN, XPROF
from advisor.rules.support.common import (
    LOOP_SHARE,
    Rows,
    find_iterator_start,
    impact_per_step,
    loop_phase_times,
    row_numbers,
    run_steps_of,
    steps_seen,
    time_of_restart,
)
from advisor.rules.support.growing_calls import find_growing_rows
from advisor.rules.support.library_functions import find_library_use
from advisor.rules.support.loop_operators import (
    OF_LOOP,
    PYTORCH,
    TRAINS,
    LoopRule,
    WholeOperators,
    backward_of,
    case_by_name,
    differentiated_operators,
    largest_operators,
    name_operators,
    operator_time,
    operators_beside_training,
    share_by_name,
    whole_operators,
)
from advisor.testing import Examples, TraceBuilder

_RECORD_DEEP = "advisor record --deep"
_SORT_OPS = r"^aten::(?:arg|m)?sort$"
_SORT_TEXTS: Mapping[str, Any] = {
    "assumptions": ("only the largest or smallest values are used",),
    "falsified_by": "a result that needs the order of all values",
    "alternatives": "sort",
}
"""Texts shared by the advice for sorts."""


class _OwnCode(NamedTuple):
    """The loop's own code in a step of the run; times in ns."""

    ns: float
    by_hand: float
    """Time without operators that have no replacement."""
    of_window: float
    """Ratio of the run's step time to the window's."""
    rows: Rows
    replaceable: Rows
    """Rows of operators that have a backward pass and a replacement."""
    line: HottestLine | None
    case: str
    """``the loss``, ``many operators`` or empty."""
    largest: dict[str, float]


def _estimate_gain(a: Analysis, own: float, subject: str, *, loss: bool = False) -> Impact:
    """Return the gain of a fix for code that takes ``own`` ns per step. A loss is still computed,
    but in another way."""
    return impact_per_step(
        a,
        (0.4 if loss else 0.9) * own,
        low=0 if loss else 0.5 * own,
        high=own,
        method=f"recorded host time of {subject}",
        of_median=not run_steps_of(a).varies,
    )


class LoopPhases(LoopRule):
    """Code between training phases lengthens each step if the training computes on the CPU. Without
    stacks, which loop-code needs, this rule takes its time from the recorder's phases: ``between
    steps`` and ``other`` are not loading, forward, backward or optimizer. Evaluation between steps
    and garbage collection are left out. The Python stacks that the recorder samples outside its
    windows name the function. Time that only the earlier half of the steps has is left out too: the
    program or the recorder starts. If they show that one function takes the time, half the
    threshold suffices. Samples in calls of torch.distributed are waits for other ranks. Their share
    is left out too.

    If half of these stacks are in one kind of library function, such as ``json.dumps``, the advice
    is about that. If half run Python itself, the advice is to replace a loop over elements. Where
    its code has tests such as ``item in items``, the advice is to search in a set. Matrix
    products, and losses that are already one function of PyTorch, have no replacement. They have no
    gain, and are named if they take most of this time. If such a loss is over many classes,
    skipping ignored labels may save much: ignored-labels reports that if the recorder saw the
    loss."""

    id = "loop-phases"
    subject = HOST_CODE
    title = "The loop's own code takes much of each step"
    inference: ClassVar[Mapping[str, Any]] = {
        **LoopRule.inference,
        "title": "Code outside the model takes much of the step",
        "cases": {
            **LoopRule.inference["cases"],
            "unknown": {
                "fix": f"Once its lines are known, {t.lower_first(LoopRule.inference['fix'])}",
                "code": f"{_RECORD_DEEP} python PROGRAM.py",
            },
        },
    }
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **LoopRule.cases,
        "the loss": {
            "title": "Operators outside the model, such as the loss, take much of the step",
            "fix": "If a loss is written by hand, use one function of PyTorch, such as "
            "cross_entropy or torch.cdist. The first takes logits and class numbers, in place of "
            "softmax, logarithm and one-hot vectors. Use binary_cross_entropy_with_logits "
            "in place of sigmoid and logarithm. torch.cdist computes distances of all pairs "
            "without a tensor of their differences. Use torch.compile to fuse code without such a "
            "function.",
            "code": "# a loss, with logits and class numbers\n"
            "loss = F.cross_entropy(logits, target)\n"
            "# not -(F.one_hot(target) * logits.softmax(-1).log()).sum(-1).mean()\n\n"
            "# or distances of all pairs\n"
            "distances = torch.cdist(a, b)\n"
            "# not (a[:, :, None] - b[:, None]).square().sum(-1).sqrt()",
            "assumptions": ("one function of PyTorch, or a compiled one, computes the same",),
            "falsified_by": "the same step time with that function",
            "alternatives": "loss",
        },
        "scores": {
            "title": "Scores of many classes, for a loss, take much of the step",
            "fix": "Check how many labels the loss ignores, because the recording does not show "
            "it. If it ignores many, compute scores only where there is a label. Loss and "
            "gradients stay the same.",
            "code": "keep = labels != -100                  # or your ignore_index\n"
            "loss = F.cross_entropy(head(hidden[keep]), labels[keep])",
            "assumptions": ("the loss ignores many labels", "only the loss uses the scores"),
            "falsified_by": "a loss that ignores few labels",
        },
        "products": {
            "title": "{operator} outside the model takes much of the step",
            "fix": "Check whether all of its result is used, and whether it is the same in several "
            "steps. This is already one call of PyTorch: only a smaller input or fewer calls save "
            "time.",
            "assumptions": ("part of its result is not used, or is known from an earlier step",),
            "falsified_by": "a result that is used as a whole, and differs in each step",
        },
        "unknown": {
            "fix": "Once its lines are known, run this code every N steps, compute its result "
            "once, or prepare it in a DataLoader worker. Where it waits (a sleep, a server, a "
            "lock), wait in another thread.",
            "code": f"{_RECORD_DEEP} python PROGRAM.py",
        },
        "Python": {
            "title": "A loop in Python outside the model takes much of the step",
            "fix": "Replace the loop over elements with operators on whole NumPy arrays or "
            "tensors. Libraries have replacements for some loops, such as "
            "torchvision.ops.batched_nms for overlapping boxes. Compute once what is the same for "
            "many steps.",
            "code": "# all pairs in one operator, not a loop in a loop; a, b: NumPy arrays\n"
            "both = np.minimum(a[:, None], b[None, :])\n"
            "keep = (both > limit).any(axis=1)",
            "assumptions": ("the loop works on elements that can be computed together",),
            "falsified_by": "the same step time with operators on whole arrays",
        },
        "a search in a list": {
            "title": "A loop in Python outside the model looks for values in a list",
            "fix": "Keep a set or a dictionary beside the list that {tests} search{end} with "
            "`in`: a list compares each of its items. If this is no list, replace the loop over "
            "elements with operators on whole NumPy arrays or tensors.",
            "code": "seen = set(items)         # once; seen.add(item) with items.append(item)\n"
            "if item in seen:          # not in items",
            "assumptions": ("the searched object is a list, a tuple or a deque",),
            "falsified_by": "the same step time with a set",
        },
        "a sort": {
            "title": "Sorting outside the model takes much of the step",
            "fix": "Select the largest values with torch.topk, if the order of the others is not "
            "used. torch.kthvalue finds a single value by rank. The rank of one value is the "
            "number of larger ones.",
            "code": "values, ids = torch.topk(scores, k)     # not argsort or sort\n"
            "# the smallest: largest=False\n"
            "# the rank of scores[i, wanted[i]], without a sort\n"
            "rank = (scores > scores.gather(1, wanted.unsqueeze(1))).sum(1)",
            **_SORT_TEXTS,
        },
        "a sort before sampling": {
            "title": "Sorting outside the model takes much of the step",
            "fix": "First take the largest values with torch.topk, which does not sort all. Then "
            "normalise, add up and sample only these.",
            "code": "values, ids = torch.topk(logits, k)     # not torch.sort(logits)\n"
            "probs = values.softmax(-1)\n"
            "token = ids.gather(-1, torch.multinomial(probs, 1))",
            **_SORT_TEXTS,
        },
    }
    min_sort_share = Threshold(0.2, "of this time in sorts at which they are named first", CHOSEN)
    max_operator_us = Threshold(100, "µs per operator on average; longer ones do real work", CHOSEN)
    min_operator_share = Threshold(
        1 / 3,
        "of this time in operators; otherwise a loop over tensors is not the cause",
        CHOSEN,
    )
    min_product_share = Threshold(
        0.5, "of the operators' time in products and in losses that are one function", CHOSEN
    )
    min_python_share = Threshold(
        0.5, "of this time's samples in lines that call no operator or library", CHOSEN
    )
    min_classes = Threshold(1000, "classes; scores of fewer seldom take much time", CHOSEN)
    min_loss_share = Threshold(
        1 / 3, "of this time in code with a backward pass, which is then the loss", CHOSEN
    )
    min_share = Threshold(
        LOOP_SHARE, "of the step; four times the threshold for a waiting GPU", XPROF
    )
    min_named_share = Threshold(
        0.10, "of the step in one function that sampled stacks name, as in loop-code", XPROF
    )
    reads_record = True
    found_in = ("recorded/waiting_loop.slow", "recorded/histograms.slow")
    silent_in = ("recorded/anomaly.cured", "recorded/leak.cured")
    validation_note = (
        "CPU recordings that sleep 0.1 s in each step, and that log histograms of weights and "
        "gradients; silent without"
    )

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if not a.trains_on_host or (a.trace.cpu["kind"] == "python").any():
            return
        spent = {name: run_steps.typical(own) for name, own in loop_phase_times(run_steps).items()}
        pauses = run_steps.column("gc") + _time_of_restarts(run_steps)  # reported by other rules
        paused = run_steps.typical(pauses[run_steps.used]) if run_steps.count else 0.0
        step, ns = (
            run_steps.reference or 0.0,
            sum(spent.values()) - paused,
        )
        ns = (
            ns * run_steps.loop_share
            if run_steps.loop_share is not None
            else ns - _wait_time(a, step)
        )
        line = run_steps.hottest_line(LOOP)
        limit = self._find_limit(run_steps, line)
        if not step or ns < limit * step or ns < self.min_ms * 1e6:
            return
        later_ns = sum(
            run_steps.later_half_mean(own) for own in loop_phase_times(run_steps).values()
        )
        if later_ns < self.min_ms * 1e6:
            return  # the program or the recorder starts: later steps do without this code
        rows = operators_beside_training(a)
        differentiated = differentiated_operators(a, rows)
        differentiated_ns = min(ns, operator_time(a, differentiated) * step / max(a.step_ns, 1))
        is_loss = differentiated_ns >= self.min_loss_share * ns
        ns -= 0 if is_loss else differentiated_ns
        limit = self.min_share if is_loss else limit
        if ns < limit * step or ns < self.min_ms * 1e6:
            return
        operators = len(rows) / max(a.step_count, 1)
        many = (
            line is not None
            and line.library_function is None
            and operators >= self.min_tensor_operators
        )
        operator_ns = operator_time(a, rows)
        of_window = step / max(a.step_ns, 1)
        runs_operators = operator_ns * of_window >= self.min_operator_share * ns
        many = many and runs_operators
        many = many and operator_ns <= self.max_operator_us * 1e3 * operators
        fixed = whole_operators(a, rows) if is_loss else None
        fixed_ns = 0.0 if fixed is None else operator_time(a, fixed.rows)
        by_hand = ns - fixed_ns * of_window
        replaceable = by_hand >= self.min_share * step
        if (
            fixed is not None
            and fixed_ns >= self.min_product_share * operator_ns
            and not replaceable
        ):
            yield from self._report_fixed(a, fixed, line, fixed_ns * of_window / step)
            return
        largest = largest_operators(a, rows) if runs_operators else {}
        replaceable_ops = differentiated[
            ~np.isin(differentiated, [] if fixed is None else fixed.rows)
        ]
        case = "the loss" if is_loss else "many operators" if many else ""
        code = _OwnCode(ns, by_hand, of_window, rows, replaceable_ops, line, case, largest)
        gain, place, texts, sentence = self._choose_fix(a, code)
        if texts.get("alternatives") == "sort" and np.isin(rows, find_growing_rows(a)).any():
            return  # growing-inputs reports sorts of more and more values
        if place is not None and not _trains(run_steps, place):
            texts = self._name_function(place, texts, inference=run_steps.inference)
        yield Finding(
            summary=_summarize(code, step, operator_ns, texts, sentence, varies=run_steps.varies),
            evidence=self._list_evidence(
                run_steps, spent, line, ns, step, operators if many else None
            ),
            where=[] if place is None else [place],
            impact=gain,
            **texts,
        )

    def _list_evidence(
        self,
        run_steps: RunSteps,
        spent: dict[str, float],
        line: HottestLine | None,
        ns: float,
        step: float,
        operators: float | None,
    ) -> list[Evidence]:
        """Return evidence that the loop's own code takes ``ns`` of a ``step``. ``spent`` is ns by
        phase; ``operators`` is the number per step, or ``None`` if it does not matter."""
        share = self.compare("the loop's own code, share", ns / step, "min_share", per="step")
        if line is not None and ns < self.min_share * step:
            share = self.compare(
                "share of this function", line.share * ns / step, "min_named_share", per="step"
            )
        evidence = [
            Evidence("the loop's own code", ns, "ns", per="step"),
            *(Evidence(f"phase '{name}'", own, "ns", per="step") for name, own in spent.items()),
            share,
        ]
        if operators is not None:
            evidence.append(
                Evidence("operators in the loop's own code", operators, "count", per="step")
            )
        return [*evidence, steps_seen(run_steps)]

    def _choose_fix(
        self, a: Analysis, code: _OwnCode
    ) -> tuple[Impact, Location | None, dict[str, Any], str]:
        """Return the gain, place and texts of the fix, and a sentence on the library function that
        takes most of the time (empty if none does)."""
        run_steps, line, loss = run_steps_of(a), code.line, code.case == "the loss"
        gain = impact_per_step(a, code.by_hand, of_median=not run_steps.varies)
        place = None if line is None else line.location
        if line is not None:
            own = line.share * code.by_hand
            own += backward_of(a, code.replaceable) * code.of_window if loss else 0
            gain = _estimate_gain(a, own, "this function", loss=loss)
        sorts = sum(own for name, own in code.largest.items() if re.search(_SORT_OPS, name))
        largest_ns = max(code.largest.values(), default=0)
        if sorts and (sorts >= self.min_sort_share * code.ns if code.case else sorts == largest_ns):
            if code.case:  # the other code stays
                gain = _estimate_gain(a, sorts * code.of_window, "the sorts")
            names = a.trace.cpu["name"].gather(code.rows)
            samples = name_matches(names, r"^aten::multinomial$").any()
            return gain, place, self.case("a sort before sampling" if samples else "a sort"), ""
        sampled = [stack for stack in run_steps.stacks if stack.part == LOOP]
        if code.case:
            case = case_by_name(code.case, place, self.cases)
            if line is not None and (share := share_by_name(case, sampled)) > line.share:
                gain = _estimate_gain(a, share * code.by_hand, "functions of this name")
            return gain, place, self.case(case), ""
        use, part, share = find_library_use(sampled), "it", 1.0
        if use is None and line is not None:  # what the function with most of it spends time on
            part = str(line.location.function)
            inside = [stack for stack in sampled if _find_frame(stack, line.location) >= 0]
            use = find_library_use(inside)
            share = sum(stack.samples for stack in inside) / sum(s.samples for s in sampled)
        advice = {} if use is None else use.advice("the step")
        if use is None or not advice:
            is_python = line is not None and not code.largest
            is_python = is_python and share_of_python(sampled) >= self.min_python_share
            is_unknown = place is None and not code.largest
            if is_python and (tests := _find_searches(run_steps, sampled)):
                end = "es" * (len(tests) == 1)
                texts = self.case("a search in a list", tests=" and ".join(tests[:2]), end=end)
                return gain, place, texts, ""
            case = "Python" if is_python else "unknown" if is_unknown else ""
            return gain, place, self.case(case) if case else {}, ""
        function_ns = gain.high_ns
        gain = _estimate_gain(a, use.time.share * share * code.ns, "this library function")
        if share < 1 and function_ns and gain.high_ns:  # at best its preparations go too
            gain = replace(gain, high_ns=max(gain.high_ns, function_ns))
        return gain, use.time.location or place, advice, use.sentence(part).strip()

    def _report_fixed(
        self, a: Analysis, fixed: WholeOperators, line: HottestLine | None, share: float
    ) -> Outcomes:
        """Report products and losses that have no replacement. For a loss over many classes, advise
        on ignored labels."""
        many_classes = fixed.classes >= self.min_classes
        if many_classes and run_steps_of(a).rank_record.events_of("labels"):
            return  # ignored labels were recorded: ignored-labels reports them
        ns, name = operator_time(a, fixed.rows), str(a.trace.cpu["name"][fixed.row])
        place = None if line is None else line.location
        yield Finding(
            summary=(
                f"Products and losses outside the model's call take {share:.0%} of the step, "
                f"without their backward pass. The largest is {fixed.name(a)}"
                + ("." if place is None else f", at {place.function} ({place.file}:{place.line}).")
            ),
            evidence=[
                Evidence("products and losses outside the model", ns, "ns", per="step"),
                self.compare(
                    "products and losses outside the model, share", share, "min_share", per="step"
                ),
                *([Evidence("classes", fixed.classes, "count")] if many_classes else []),
                steps_seen(run_steps_of(a)),
            ],
            where=[place or Location(op=name)],
            impact=impact_without_gain(
                "how many labels the loss ignores was not recorded"
                if many_classes
                else "the recording does not show which part of this work is unnecessary"
            ),
            **self.case("scores" if many_classes else "products", operator=labels.clean(name)),
        )

    def _name_function(
        self, place: Location, texts: dict[str, Any], *, inference: bool
    ) -> dict[str, Any]:
        """Add a title and code with the name of the function, if ``texts`` have no others."""
        name = str(place.function)
        if "title" in texts or not name.replace(".", "").isidentifier():
            return texts
        texts = {"title": f"{name} takes much of the step", **texts}
        if inference or "fix" in texts:
            return texts
        return {"code": self.code.replace("log(metrics)", f"{name}(...)"), **texts}

    def _find_limit(self, run_steps: RunSteps, line: HottestLine | None) -> float:
        """Return the minimum share of the step at which this time is reported. It is lower if the
        sampled stacks show that one function takes it. In a function that also trains, PyTorch's
        code around operators does not count."""
        if line is None:
            return float(self.min_share)
        place, own_samples, total = line.location, 0, 0
        trains = _trains(run_steps, place)
        for stack in (stack for stack in run_steps.stacks if stack.part == LOOP):
            frame_index, total = _find_frame(stack, place), total + stack.samples
            inner_frames = stack.frames[frame_index + 1 :] if frame_index >= 0 and trains else ()
            pytorch = any(re.search(PYTORCH, f) and not re.search(OF_LOOP, f) for f in inner_frames)
            own_samples += stack.samples * (frame_index >= 0 and not pytorch)
        return float(min(self.min_share, self.min_named_share * total / max(own_samples, 1)))

    @staticmethod
    def examples() -> Examples:
        stacks = _build_run(forward=2, backward=2)
        with stacks.step(), stacks.python("train.py(30): main"):
            stacks.host(300)
        starting = TraceBuilder(gpu=None)
        starting.record_of_run().steps(20, 30, forward=1, **{"between steps": 28})
        starting.record_of_run().steps(20, 1.2, forward=1)
        loss, mined, counts, order, drawn = (_build_run(forward=2, backward=2) for _ in range(5))
        for b, is_differentiated, name in (
            (loss, True, "aten::log"),
            (mined, True, "aten::log"),
            (counts, False, "aten::log"),
            (order, False, "aten::sort"),
            (drawn, False, "aten::sort"),
        ):
            for number in b.steps():
                with b.range("advisor::forward"):
                    b.on_host("aten::linear", 2000)
                b.on_host(name, 6000, sequence=number if is_differentiated else None)
                if b is mined:
                    b.on_host("aten::sort", 3000)
                if b is drawn:
                    b.on_host("aten::multinomial", 50)
                node = "autograd::engine::evaluate_function: LogBackward0"
                b.on_host(node, 2000, sequence=number if is_differentiated else None)
        return {
            "a loss by hand": loss,
            "a sort in the loss": mined,
            "metrics by hand": counts,
            "a sort of all values": order,
            "a sort before sampling": drawn,
            "a wait between steps": _build_run(forward=2, backward=2, **{"between steps": 6}),
            "stacks were sampled": _build_run(sampled=20, forward=2, backward=2),
            "a function of a sixth of the step": _build_run(sampled=20, forward=4.3, backward=4),
            "a sixth of the step, not sampled": (_build_run(forward=4.3, backward=4), "min_share"),
            "PyTorch in the loop itself": (
                _build_run(sampled=20, clips=1, forward=4.3, backward=4),
                "min_share",
            ),
            "evaluation": (_build_run(evaluation=20, forward=3.5, backward=6), "min_share"),
            "a small model": (_build_run(0.6, forward=0.2), "min_ms"),
            "pauses in the first steps": (starting, "later_ns < self.min_ms"),
            "stacks": (stacks, "== 'python').any()"),
        }


def _find_searches(run_steps: RunSteps, sampled: list[SampledStack]) -> list[str]:
    """Return the lines that may search a list, in functions with most of these samples or below."""
    counts: Counter[tuple[str, str]] = Counter()
    for stack in sampled:
        frame = parse_frame(stack.frames[-1])
        if frame is not None and not stack.called:
            counts[frame.file, frame.function] += stack.samples
    tests = read_membership_tests(run_steps.rank_record)
    function, count = counts.most_common(1)[0] if counts else (("", ""), 0)
    if 2 * count < sum(stack.samples for stack in sampled):
        return []
    return [f"line {each.line} ({each.function})" for each in tests.get(function, [])]


def _wait_time(a: Analysis, step: float) -> float:
    """Return the waits per step for collectives that the loop itself calls, ns, scaled from the
    window to the run."""
    table = a.collectives
    if a.device_id is not None or table.is_empty() or not a.step_ns:
        return 0.0
    trains = name_matches(a.trace.cpu["name"], TRAINS).to_numpy()
    of_loop = stacks.climb_stack(stacks.parent_rows(a.trace), trains, row_numbers(table["op"])) < 0
    waits = table.filter(pl.Series(of_loop))["exposed"].to_numpy().sum()
    return float(waits) / a.step_count * step / a.step_ns


def _summarize(
    code: _OwnCode,
    step: float,
    operator_ns: float,
    texts: Mapping[str, Any],
    sentence: str,
    *,
    varies: bool,
) -> str:
    """Say how much of a ``step`` the loop's own code takes, and what takes it. ``sentence``: on the
    library function that takes most of it; ``texts``: those of the fix."""
    is_loss = code.case == "the loss"
    leading = _name_leading(code.largest, operator_ns) if is_loss else ""
    parts = [
        "The loop's own code, outside loading, forward, backward and optimizer, takes "
        f"{t.format_duration(code.ns)} of the {'mean' if varies else 'median'} step "
        f"({code.ns / step:.0%}){leading}.",
        "The backward pass goes through much of it." * is_loss,
    ]
    if _RECORD_DEEP not in str(texts.get("code", "")):  # there, the code shows the lines
        parts.append(sentence or _describe_line(code.line))
    parts.append(name_operators(code.largest, operator_ns).strip() * (not is_loss))
    return " ".join(filter(None, parts))


def _name_leading(largest: Mapping[str, float], total: float) -> str:
    """Name the largest operators: ``, led by aten::neg (38% of its operators' time)``. Empty if
    there are none."""
    shares = (f"{labels.clean(name)} ({ns / total:.0%}" for name, ns in largest.items())
    first, *others = [*shares][:2] or [""]
    names = t.list_names([f"{first} of its operators' time)", *(f"{name})" for name in others)])
    return f", led by {names}" if first else ""


def _describe_line(line: HottestLine | None) -> str:
    if line is None:
        return "advisor record --deep shows its lines."
    place, library = (
        line.location,
        f", in {line.library_function}" if line.library_function else "",
    )
    return (
        f"{line.share:.0%} of the sampled stacks are in {place.function} "
        f"({place.file}:{place.line}){library}."
    )


def _trains(run_steps: RunSteps, place: Location) -> bool:
    """Return whether a function also trains, by sampled stacks."""
    return any(
        stack.part in ("forward", "backward", "optimizer") and _find_frame(stack, place) >= 0
        for stack in run_steps.stacks
    )


def _time_of_restarts(run_steps: RunSteps) -> Floats:
    """Return the time of each step in which workers of a loader ended and started, ns."""
    result = np.zeros(len(run_steps.dur))
    for event in (e for e in run_steps.rank_record.events if e.kind == "loader_iter"):
        after = run_steps.ts + run_steps.dur > find_iterator_start(event)
        if after.any():
            result[np.argmax(after)] += time_of_restart(event)
    return result


def _find_frame(stack: SampledStack, place: Location) -> int:
    """Return the index of a function's innermost frame in a stack; -1 if it has none."""
    for index in reversed(range(len(stack.frames))):
        frame = parse_frame(stack.frames[index])
        if frame is not None and (frame.file, frame.function) == (place.file, place.function):
            return index
    return -1


def _build_run(ms: float = 10, sampled: int = 0, clips: int = 0, **phases: float) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    run.steps(60, ms, **phases)
    if sampled:
        below = "torch/nn/utils/clip_grad.py(40): clip" if clips else "train.py(12): log"
        backward = "torch/_tensor.py(623): Tensor.backward"
        frames = ["train.py(50): <module>", "train.py(30): main", below, backward]
        run.event("stacks", frames=frames, stacks=[[sampled, [0, 1, 2]], [sampled, [0, 1, 3]]])
    return b
