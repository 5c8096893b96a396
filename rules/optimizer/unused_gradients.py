"""Gradients of parameters that no optimizer holds."""

from __future__ import annotations

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.citations import CHOSEN, XPROF
from advisor.rules.common import of_step, remove_at, scale_edit, time_in
from advisor.testing import Examples, TraceBuilder

CONVOLUTION = "^aten::convolution_backward$"


class UnusedGradients(Rule):
    """The backward pass computes gradients of parameters that no optimizer holds. Examples are the
    base of a model with adapters (LoRA) and a backbone under a new head. So is a network that only
    judges, as for a perceptual loss. Each lacks ``requires_grad_(False)``.

    The recorder looks at the models' gradients before two early optimizer steps. It counts those
    that are new each time and belong to no optimizer that has stepped so far. One that steps later
    corrects that. Parameters that the program updates itself do not count. Where no optimizer holds
    any parameter of the models, as with copies in another precision, nothing is reported.

    The gain is the time of what computes and accumulates these gradients, known by their shapes.
    After the last gradient that is used, the rest of the backward pass goes too. A convolution
    computes its weight's gradient with its input's: about half of its time goes.
    """

    id = "unused-gradients"
    title = "Gradients are computed that no optimizer uses"
    reads_record = True
    found_in = ("recorded/unfrozen.slow",)
    silent_in = ("recorded/unfrozen.cured", "recorded/second_forward.cured")
    validation_note = (
        "CPU recordings, torch 2.13: low-rank adapters, with and without a frozen base"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.requires_grad_",
    )

    min_share = Threshold(0.05, "of the step in work on these gradients", XPROF)
    of_convolution = Threshold(
        0.5, "of a convolution's backward time is the weight's gradient", CHOSEN
    )

    fix = (
        "Freeze what is not trained with requires_grad_(False), before the optimizer is made. Or "
        "give these parameters to an optimizer, if they should be trained."
    )
    code = (
        "model.requires_grad_(False)                # all of it, then what is trained\n"
        "for name, parameter in model.named_parameters():\n"
        '    if "lora_" in name:\n'
        "        parameter.requires_grad_(True)\n"
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        "optimizer = torch.optim.AdamW(trained, lr=1e-3)"
    )
    verify = "Record again: the backward pass is shorter; the loss of a fixed seed is the same."
    falsified_by = "code that reads these gradients, or an optimizer that is none of PyTorch's"
    assumptions = ("nothing but an optimizer uses these gradients",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        """Sum up the work on gradients that the recorder found unused."""
        recorded = a.recorded_gradients
        if recorded is None or not a.span_ns:
            return
        work = a.unused_gradient_work
        ns, times = time_in(a, work.spans)
        if ns < self.min_share * a.span_ns and not work.convolutions:
            return
        yield Finding(
            summary=(
                f"{recorded.unused:,} of {recorded.total:,} parameters with gradients are in no "
                f"optimizer ({t.format_bytes(recorded.bytes)}): those of "
                f"{', '.join(recorded.modules[:3])}. Their gradients take {of_step(a, ns)}."
            ),
            evidence=[
                Evidence("parameters with a gradient", recorded.total, "count"),
                Evidence("of them, in no optimizer", recorded.unused, "count"),
                Evidence("size of their gradients", recorded.bytes, "bytes"),
                *times,
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
            ],
            edits=[*remove_at("unused_gradient"), *self._convolutions(a, work.convolutions)],
        )

    def _convolutions(self, a: Analysis, share: float) -> list[Edit]:
        """Scale convolutions that compute an unused gradient with one that is used."""
        if not share:
            return []
        if a.trains_on_host:
            select = Select(on="host", kind=("op",), name=CONVOLUTION)
        else:
            select = Select(on="gpu", under=CONVOLUTION)
        part = share * self.of_convolution
        return [scale_edit(select, 1 - part, 1 - 1.3 * part, 1 - 0.7 * part)]

    @staticmethod
    def examples() -> Examples:
        return {
            "a base that is not frozen": _training(),
            "on a GPU": _training(gpu="A100"),
            "all are trained": (_training(unused=False), "recorded is None"),
            "little work": (_training(us=4), "min_share"),
        }


def _training(*, unused: bool = True, gpu: str | None = None, us: float = 600) -> TraceBuilder:
    """Four layers [256, 512], of which an optimizer holds the last one's adapter [8, 512]."""
    b = TraceBuilder(gpu=gpu)
    node = "autograd::engine::evaluate_function: "

    def product(left: list[int], right: list[int], time: float) -> None:
        with b.op("aten::mm", [left, right]):
            if gpu:
                b.launch("ampere_sgemm_128x64_nn", time)
            else:
                b.host(time)

    for _ in b.steps():
        product([1024, 256], [256, 512], 4000)
        with b.range("advisor::backward"):
            for layer in range(4):
                shapes = [[8, 512]] if layer == 3 else []
                with b.op(f"{node}AddmmBackward0", sequence=layer):
                    product([1024, 512], [512, 256], 600)
                    product([256, 1024], [1024, 512], us)
                for shape in [[256, 512], *shapes]:
                    accumulate = "torch::autograd::AccumulateGrad"
                    with b.op(f"{node}{accumulate}"), b.op(accumulate, [shape]):
                        pass
    run = b.record_of_run()
    run.steps(60, 10, forward=4, backward=5)
    if unused:
        order = [2, -1, -1, -1, -1]
        data = {"unused": 4, "total": 5, "bytes": 4 << 19, "modules": ["layers.*"]}
        run.event("gradients", **data, shapes=[[256, 512], [8, 512]], order=order)
    return b
