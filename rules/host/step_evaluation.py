"""Training steps that evaluate the model."""

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import covered_length
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.module_calls import FORWARD_RANGE
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    scale_edit,
    work_launched_in,
)
from advisor.testing import Examples, TraceBuilder


class StepEvaluation(Rule):
    """Each training step evaluates the model that it trains: on validation data, or on a pool of
    samples that it scores. The result seldom changes much from one step to the next.

    The recorder logs the outermost modules that a profiled window calls, with their mode. The rule
    looks for a module that the steps train in training mode, and that most of them also call in
    evaluation mode without gradients. A teacher, a target network or a rollout is not reported: it
    is another module, or stays in one mode. Evaluation between steps is not a part of them."""

    id = "step-evaluation"
    title = "Each step evaluates the model"
    training_only = True
    reads_record = True
    sampled_part = "forward"
    found_in = ("recorded/step_evaluation.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording, torch 2.13, that scores a pool of samples: 79 ms predicted, 108 to 12 ms "
        "measured with a tenth of the evaluations"
    )
    references = ("https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode",)

    min_share = Threshold(0.10, "of the step in evaluation", XPROF)
    remaining_share = Factor(0.1, "of the time remains, with an evaluation every ten steps", CHOSEN)
    worst_remaining_share = Factor(0.5, "of it remains at worst, every second step", CHOSEN)

    fix = (
        "Evaluate every N steps, or on a fixed part of the data. If each step needs a result, "
        "evaluate fewer samples in each."
    )
    code = "if step % 50 == 0:            # not in every step\n    scores = evaluate(model)"
    verify = "Record again: forward is shorter, and most steps run the model once."
    falsified_by = "training that needs this result in each step"
    assumptions = ("most steps can do without its result",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        spans = a.step_evaluations
        if not a.span_ns or not spans.total:
            return
        ns = work_launched_in(a, spans) if a.device_id is not None else spans.total
        if ns < self.min_share * a.span_ns:
            return
        table = outermost_in_steps(a)
        ts = table["ts"].to_numpy()
        table = table.filter(covered_length(ts, ts + 1, spans) > 0)
        select = [Select(on=on, at="evaluation") for on in ("gpu", "host", "gap")]
        yield Finding(
            summary=(
                "Each step runs the model that it trains in evaluation mode too, without "
                f"gradients. This takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "time of the evaluation", ns),
                self.compare_share(a, "time of the evaluation", ns),
            ],
            where=costliest_places(a, table["row"].to_numpy(), table["ns"].to_numpy(), top=1),
            edits=[
                scale_edit(each, self.remaining_share, 0.0, self.worst_remaining_share)
                for each in select
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a pool is scored": _build_run(),
            "on a GPU": _build_run(gpu="A100"),
            "a teacher": (_build_run(module=1), "not spans.total"),
            "a rollout": (_build_run(in_training=1), "not spans.total"),
            "gradients are kept": (_build_run(gradients=1), "not spans.total"),
            "one step of four": (_build_run(every=4), "not spans.total"),
            "a short evaluation": (_build_run(us=100), "min_share"),
        }


def _build_run(
    *,
    gpu: str | None = None,
    module: int = 0,
    in_training: int = 0,
    gradients: int = 0,
    every: int = 1,
    us: float = 3000,
) -> TraceBuilder:
    """Build steps that call a module in training mode, and another or the same one before it."""
    b = TraceBuilder(gpu=gpu)
    b.head["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
    r = b.record_of_run()
    r.steps(60, 10, forward=5, backward=4)
    calls, outermost, origin = [], [], b.now
    for number in b.steps():
        for length, mode in ((us, [module, in_training, gradients]), (1000, [0, 1, 1])):
            if mode[1:] != [1, 1] and number % every:
                continue
            begin = b.now
            with b.range(FORWARD_RANGE):
                if gpu is None:
                    b.on_host("aten::linear", length, sequence=number if mode[2] else None)
                else:
                    b.run("aten::linear", "ampere_sgemm_128x64_nn", length)
            calls.append([0, (begin - origin) * 1e3, (b.now - begin) * 1e3, 0, -1, 0])
            outermost.append(mode)
        b.on_host("autograd::engine::evaluate_function: AddmmBackward0", 2000, sequence=number)
        if gpu is not None:
            b.sync()
    rows = [[round(field) for field in call] for call in calls]
    r.event(
        "calls",
        window=0,
        frames=["train.py(30): main"],
        modules=["Net"],
        calls=rows,
        names=[],
        outermost=outermost,
        anchor_unix_ns=b.trace().meta.start_ns,
    )
    return b
