"""A module of an inference loop gets inputs that it already computed an output for."""

from advisor.core import text as t
from advisor.core.finding import Finding, Impact, Outcomes, impact_without_gain
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import impact_per_step, run_steps_of, sum_of_events
from advisor.rules.support.repeated_inputs import ModuleRepeats, read_repeats
from advisor.testing import Examples, TraceBuilder


class SameInputAgain(Rule):
    """An inference loop calls a module again with the input of an earlier call. Examples are a text
    encoder in each denoising step, and embeddings of class names for each batch of pictures. The
    output is the same, and can be kept.

    The recorder compares 12 outermost forwards in 60: module, version of its weights, and inputs.
    Inputs and outputs on the CPU are compared by a checksum of values, inputs on a device by their
    memory and its version. A forward with a cache of keys and values is not compared. Where all
    modules get the same inputs again and again, a benchmark runs on one input, and the rule is
    silent.

    The gain is the module's share of the time in forward, for the part of its calls that repeat an
    earlier one. The first call of a sample does not count, as it is not known to repeat. The
    maximum gain is all calls."""

    id = "same-input-again"
    title = "A module computes the same output again"
    reads_record = True
    sampled_part = "forward"
    found_in = ("recorded/text_encoder.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording, torch 2.13: a text encoder in each of 8 denoising steps, 27% of the step "
        "predicted; 25–36% measured in four pairs of runs"
    )
    references = ("https://docs.python.org/3/library/functools.html#functools.lru_cache",)

    min_forwards = Threshold(12, "forwards that were compared: one sample", CHOSEN)
    min_repeated_share = Threshold(0.25, "of the module's forwards repeat an earlier one", CHOSEN)
    min_new_input_share = Threshold(0.25, "of all compared forwards get new inputs", CHOSEN)
    min_share = Threshold(0.05, "of the time in forward", XPROF)
    worst_saved_share = Factor(
        0.7, "of the time is saved, at worst: outputs are kept and copied", CHOSEN
    )

    fix = (
        "Call the module once for each new input, before the loop, and keep its output. Where the "
        "same inputs come back with later requests, keep outputs in a dictionary by input."
    )
    code = (
        "cond = text_encoder(ids)          # once, before the loop\n"
        "for t in timesteps:\n"
        "    x = step(x, t, cond)          # not text_encoder(ids) in each"
    )
    verify = "Record again: the module is called once for each input."
    falsified_by = "inputs that differ in real use: a test that repeats one input"
    assumptions = ("real inputs repeat as in this run",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if not run_steps.inference or not a.span_ns:
            return
        events = run_steps.rank_record.events_of("repeated_inputs")
        forwards, again, total = (sum_of_events(events, key) for key in ("forwards", "again", "ns"))
        if forwards < self.min_forwards or total <= 0:
            return
        if 1 - again / forwards < self.min_new_input_share:
            return
        module = max(read_repeats(events), key=lambda repeats: repeats.again_ns, default=None)
        if module is None:
            return
        if module.again < self.min_repeated_share * module.forwards:
            return
        share = module.again_ns / total
        if share < self.min_share:
            return
        forward_ns = self._forward_time(a)
        taken, time_evidence = f"These calls take {share:.0%} of the time", list[Evidence]()
        if forward_ns is not None:
            repeated_share = module.share_again * module.ns / total
            repeated_ns = repeated_share * forward_ns
            taken = (
                "Without the first of each sample, the repeats take "
                f"{t.format_duration(repeated_ns)} of each step, {repeated_share:.0%} of the time"
            )
            time_evidence = [Evidence("time of repeated calls", repeated_ns, "ns", per="step")]
        yield Finding(
            summary=(
                f"{module.module} got the input of an earlier call in {module.again} of "
                f"{module.forwards} calls that were compared. {taken} in forward."
            ),
            evidence=[
                *time_evidence,
                self.compare("compared forwards", forwards, "min_forwards", "count"),
                self.compare(
                    f"calls of {module.module} with the input of an earlier one",
                    module.again / module.forwards,
                    "min_repeated_share",
                ),
                self.compare(
                    "forwards with new inputs", 1 - again / forwards, "min_new_input_share"
                ),
                self.compare("share of the time in forward", share, "min_share"),
            ],
            where=[] if module.place is None else [module.place],
            impact=self._estimate_impact(a, module, forward_ns, total),
        )

    def _forward_time(self, a: Analysis) -> float | None:
        """Return the time in forward of the run's step, ns, of a program on the CPU."""
        run_steps = run_steps_of(a)
        share = run_steps.share("forward")
        step = run_steps.reference
        return None if a.device_id is not None or share is None or not step else share * step

    def _estimate_impact(
        self, a: Analysis, module: ModuleRepeats, forward_ns: float | None, total: int
    ) -> Impact:
        if forward_ns is None:
            return impact_without_gain("how long it takes on the device is not recorded")
        ns_scale = forward_ns / total
        return impact_per_step(
            a,
            ns_scale * module.share_again * module.ns,
            low=ns_scale * self.worst_saved_share * module.again_ns,
            high=ns_scale * module.ns,
            method="recorded time of forwards that repeat",
            of_median=not run_steps_of(a).varies,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a text encoder in each denoising step": _build_denoising(),
            "on a GPU": _build_denoising(gpu="A100"),
            "without the caller's frames": _build_denoising(frames=[]),
            "each input is new": (_build_denoising(again=0), "module is None"),
            "an input came back by chance": (_build_denoising(again=1), "min_repeated_share"),
            "one input for all modules": (
                _build_denoising(again=6, others=5),
                "min_new_input_share",
            ),
            "small next to the rest": (_build_denoising(ms=0.2), "min_share"),
            "few forwards": (_build_denoising(samples=1, compared=11), "min_forwards"),
            "a training": (_build_denoising(trained=True), "not run_steps.inference"),
        }


FRAMES = ["poster.py(41): Pipeline.velocity", "poster.py(60): main"]


def _build_denoising(
    *,
    gpu: str | None = None,
    again: int = 5,
    others: int = 0,
    ms: float = 4,
    samples: int = 4,
    compared: int = 12,
    frames: list[str] = FRAMES,
    trained: bool = False,
) -> TraceBuilder:
    """Build steps of a text encoder and a network, 8 ms; six forward passes of both per sample."""
    b = TraceBuilder(gpu=gpu)
    for _ in b.steps():
        b.on_host("aten::addmm", 1_000 * (8 + ms))
        if gpu:
            b.product(6_000)
    run = b.record_of_run()
    phases = {"backward": 1.0} if trained else {}
    run.steps(60, 8 + ms + 1, forward=8 + ms, **phases)
    for _ in range(samples):
        encoder_ns = round(ms * 1e6)
        module = {"name": "TextEncoder", "frames": frames, "forwards": 6, "again": again}
        module |= {"ns": 6 * encoder_ns, "again_ns": again * encoder_ns}
        run.event(
            "repeated_inputs",
            forwards=compared,
            again=again + others,
            ns=6 * (encoder_ns + 8_000_000),
            modules=[module] if again else [],
        )
    return b
