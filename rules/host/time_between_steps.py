"""Time of a run between its training steps."""

import re
from collections import Counter
from collections.abc import Sequence

from advisor.core import text as t
from advisor.core.finding import Finding, Location, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.sampled_code import model_call
from advisor.measure.host.stacks import SampledStack, parse_frame
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import impact_over_run, run_steps_of, steps_seen
from advisor.testing import Examples, TraceBuilder


class TimeBetweenSteps(Rule):
    """Much of the run is spent between the training steps: evaluation, checkpoints, rollouts,
    generation of samples. The recorder measures this time apart from the steps.

    Evaluation is intended, but how often it runs and on how much data is a choice. It needs no
    gradients and allows larger batches than training. What comes before the first step (imports,
    making the model) does not count."""

    id = "time-between-steps"
    title = "Long pauses between training steps take much of the run"
    verdict_role = "time between steps"
    reads_record = True
    found_in = ("recorded/waiting_loop.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording that evaluates every twenty steps on much data"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    )

    min_share = Threshold(0.30, "of the time in and between steps", CHOSEN)
    min_steps = Threshold(20, "steps; fewer do not show how often it happens", CHOSEN)
    saved_share = Factor(0.5, "of that time, by evaluating half as often", CHOSEN)
    min_collecting_share = Threshold(
        0.2, "of the time between steps, in appending outputs: then this is the cause", CHOSEN
    )
    best_saved_ratio = Factor(
        1.5, "times that time: the outputs are also made in 32 bits and moved", CHOSEN
    )
    min_simulated_share = Threshold(
        0.7, "of the rollouts outside the policy: then the simulation is the cause", CHOSEN
    )
    min_paused_share = Threshold(
        0.5, "of the steps follow a pause; evaluation is less frequent", CHOSEN
    )

    fix = (
        "Evaluate less often, or on a fixed part of the data, if the pauses are evaluation. "
        "Run it under torch.inference_mode() with a larger batch and DataLoader workers, and save "
        "checkpoints from another thread."
    )
    code = (
        "model.eval()\n"
        "with torch.inference_mode():\n"
        "    for batch in validation:            # a larger batch_size than in training\n"
        "        metric.update(model(batch))\n"
        "model.train()"
    )
    verify = "Record again: less time between the steps."
    falsified_by = "time between the steps that the training itself needs, as rollouts do"
    assumptions = ("evaluating half as often is enough",)
    confidence = 0.6
    alternatives = "between steps"
    cases = {
        "before each step": {
            "fix": "If these are rollouts, step several environments at once, in their own "
            "processes. Infer for all in one batch, and take several steps with each rollout.",
            "code": "envs = gymnasium.vector.AsyncVectorEnv([make_env] * 8)   # one process each",
            "assumptions": ("rollouts can run in parallel",),
        },
        "rollouts": {
            "fix": "Call the policy once for all environments, not once for each: it accepts a "
            "batch dimension. Step the environments in separate processes, and take several "
            "training steps with each rollout.",
            "code": "with torch.inference_mode():\n"
            "    actions = policy(torch.as_tensor(observations))   # of all environments\n"
            "observations, rewards, *_ = envs.step(actions.cpu().numpy())",
            "assumptions": ("the policy is called for single environments, or they wait for it",),
        },
        "simulation": {
            "fix": "Speed up the simulation, which takes most of the rollouts, not the policy: "
            "compute what it returns once for each action, for all environments together. Or step "
            "environments in separate processes.",
            "code": "envs = gymnasium.vector.AsyncVectorEnv([make_env] * 8)   # one process each",
            "assumptions": ("the simulation can be shortened, or run in parallel",),
        },
        "collected": {
            "title": "Evaluation collects the logits of all batches",
            "fix": "Reduce the logits after each batch of an evaluation, before the Trainer "
            "appends them to those of all others. Where no metric needs them, set "
            "prediction_loss_only=True.",
            "code": "def reduce_logits(logits, labels):\n"
            "    return logits.argmax(dim=-1)      # what compute_metrics needs\n"
            "trainer = Trainer(..., preprocess_logits_for_metrics=reduce_logits)",
            "assumptions": ("the metrics do not need whole logits",),
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        start, end = run_steps.span
        outside = run_steps.outside_steps_ns
        steps = int(run_steps.used.sum())
        if steps < self.min_steps or run_steps.inference or end <= start:
            return
        run_ns = run_steps.after_first_ns
        if outside < self.min_share * run_ns:
            return
        pauses = sum(step.evaluation > 0 for step in run_steps.steps if step.n)
        before_most_steps = pauses >= self.min_paused_share * steps
        share, collecting = stacks.share_in(run_steps.stacks, _COLLECTS)
        if (
            share * run_ns > self.min_collecting_share * outside
            and sum(stack.samples for stack in collecting) >= stacks.MIN_SAMPLES
        ):
            yield self._report_collecting(a, share, outside)
            return
        place, simulated_share = _find_rollout(run_steps.stacks)
        case = "before each step" if before_most_steps else ""
        if place is not None:
            is_simulation = simulated_share >= self.min_simulated_share
            case = "simulation" if is_simulation else "rollouts"
        purpose = "for rollouts" if place is not None else "perhaps for evaluation or checkpoints"
        yield Finding(
            summary=(
                f"{t.count_noun(pauses, 'long pause')} between training steps take "
                f"{t.format_duration(outside)}, {outside / run_ns:.0%} of the time after the first "
                f"step, {'before most steps' if before_most_steps else purpose}."
            ),
            where=[] if place is None else [place],
            evidence=[
                Evidence("time between steps", outside, "ns"),
                self.compare("time between steps, share of the run", outside / run_ns, "min_share"),
                Evidence("pauses between steps", pauses, "count"),
                steps_seen(run_steps),
            ],
            impact=impact_over_run(
                self.saved_share * outside, high=outside, method="half of the time between steps"
            ),
            **(self.case(case) if case else {}),
        )

    def _report_collecting(self, a: Analysis, share: float, outside: float) -> Finding:
        """Build the finding on an evaluation that appends each batch's logits to a growing tensor.
        ``share``: of the sampled stacks. ``outside``: time between steps, ns."""
        run_steps = run_steps_of(a)
        spent = min(share * run_steps.after_first_ns, outside)
        return Finding(
            summary=(
                f"Between the training steps, {t.format_duration(spent)} of the run "
                f"({share:.0%} of the sampled stacks) append each batch's outputs to those of all "
                "batches before it."
            ),
            evidence=[
                Evidence("time in appending outputs", spent, "ns"),
                Evidence("time between steps", outside, "ns"),
                self.compare("appending, share of it", spent / outside, "min_collecting_share"),
                steps_seen(run_steps),
            ],
            impact=impact_over_run(
                spent,
                low=self.saved_share * spent,
                high=min(self.best_saved_ratio * spent, outside),
                method="share of the sampled stacks, of the run",
                total=run_steps.after_first_ns,
            ),
            confidence=0.8,
            **self.case("collected"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "evaluation every ten steps": _build_run(every=10, ms=400),
            "rollouts every ten steps": _build_run(every=10, ms=400, rollouts=True),
            "a simulation in rollouts": _build_run(every=10, ms=400, rollouts=True, simulated=True),
            "a rollout before each step": _build_run(every=1, ms=12),
            "an evaluation that collects logits": _build_run(every=10, ms=400, collects=True),
            "a short evaluation": (_build_run(every=20, ms=40), "min_share"),
            "a few steps": (_build_run(every=3, ms=400, steps=12), "min_steps"),
        }


_COLLECTS = (
    r"^transformers/trainer_pt_utils\.py\(\d+\): (?:EvalLoopContainer\.add|nested_concat"
    r"|nested_numpify|torch_pad_and_concatenate)$"
)
"""Frames of Transformers that append a batch's outputs to those of the evaluation."""

_ROLLOUT = re.compile(
    r"(?i)(?:gym(?:nasium)?|pettingzoo|envpool|stable_baselines3|torchrl)/"
    r"|: (?:\w+\.)*_?(?:(?:collect_|do_|run_)?rollouts?|act|(?:select|choose|sample)_actions?"
    r"|collect_(?:experience|trajector(?:y|ies)|samples)|self_play)$"
)
"""Frames of code that runs a policy in environments: their libraries and usual function names."""


def _find_rollout(samples: Sequence[SampledStack]) -> tuple[Location | None, float]:
    """Return the user's line with most sampled stacks of rollouts, outside modules, or ``None`` if
    there are too few; and the share of the rollouts in functions of the user that call no module:
    the simulation."""
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    infers: set[str] = set()
    for stack in samples:
        call = model_call(stack.frames)
        user_frames = [
            frame
            for frame in stack.frames[:call]
            if stacks.code_owner(frame) == stacks.CodeOwner.USER
        ]
        if user_frames and any(map(_ROLLOUT.search, stack.frames)):
            lines[user_frames[-1]] += stack.samples
            parsed_frame = parse_frame(user_frames[-1])
            name = "" if parsed_frame is None else parsed_frame.function
            functions[name] += stack.samples
            if call is not None or any(map(_ROLLOUT.search, user_frames[-1:])):
                infers.add(name)
    frame = parse_frame(max(lines, key=lines.__getitem__)) if lines else None
    if frame is None or lines.total() < stacks.MIN_SAMPLES:
        return None, 0.0
    simulated = sum(count for name, count in functions.items() if name not in infers)
    return frame.location, simulated / lines.total()


def _build_run(
    *,
    every: int,
    ms: float,
    steps: int = 80,
    rollouts: bool = False,
    simulated: bool = False,
    collects: bool = False,
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    if rollouts:
        r.event(
            "stacks",
            frames=[
                *("train.py(90): main", "train.py(40): rollout", "train.py(31): act"),
                "train.py(12): Simulator.scan",
            ],
            stacks=[[20, [0, 1, 2]], [80 * simulated, [0, 1, 3]]],
        )
    if collects:
        add = "transformers/trainer_pt_utils.py(376): EvalLoopContainer.add"
        frames = ["train.py(90): main", "transformers/trainer.py(2863): Trainer.evaluate", add]
        r.event("stacks", frames=frames, stacks=[[40, [0, 1]], [40, [0, 1, 2]]])
    for n in range(steps):
        r.step(10, forward=3, backward=6, evaluation=ms if n and n % every == 0 else 0)
    return b
