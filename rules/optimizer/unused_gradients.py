"""Gradients are computed that no optimizer uses."""

import re
from collections.abc import Sequence

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, XPROF
from advisor.rules.support.common import measure_time_in, of_step, remove_at, scale_edit
from advisor.testing import Examples, TraceBuilder

CONVOLUTION = "^aten::convolution_backward$"
_DETACH_FIX = (
    "Stop this backward pass where the other network begins: detach its output, or compute it "
    "under no_grad(). It is computed again for its own loss."
)
_DETACH_CODE = (
    "fake = generator(noise)\n"
    "loss = criterion(discriminator(fake.detach()), zeros)  # stops at the generator\n"
    "loss.backward()\n"
    "discriminator_optimizer.step()"
)
_REFERENCE_NAMES = re.compile(
    r"(?:\w+_)?(?:teacher|target|ema|ref|reference|reward)(?:_(?:model|net|network))?"
)
"""Names of networks whose outputs are constants of the loss, so nothing learns through them."""
_NO_GRAD_FIX = (
    "Call {name} under torch.no_grad(), if no gradient has to go through it. Freeze it with "
    "requires_grad_(False): nothing trains it."
)
_NO_GRAD_CODE = (
    "{name}.requires_grad_(False)\n"
    "with torch.no_grad():    # keeps nothing for the backward pass\n"
    "    targets = {name}(x)"
)
_FREEZE_FIX = (
    "Freeze the other network while this loss is computed: requires_grad_(False) on its "
    "parameters. Gradients still pass through it to the trained part."
)
_FREEZE_CODE = (
    "critic.requires_grad_(False)                 # no gradients of its weights\n"
    "loss = -critic(state, actor(state)).mean()\n"
    "loss.backward()\n"
    "actor_optimizer.step()\n"
    "critic.requires_grad_(True)"
)


_MAX_NAMED = 3
"""Maximum number of modules that a summary names."""


class UnusedGradients(Rule):
    """The backward pass computes gradients of parameters that no optimizer holds. Examples are the
    base of a model with adapters (LoRA) and a backbone under a new head. Another is a network that
    only judges, as for a perceptual loss. Each lacks ``requires_grad_(False)``. Or an optimizer
    holds them, and ``zero_grad`` drops the gradients before it steps. A discriminator's loss goes
    backward through the generator, or an actor's through its critics' weights.

    The recorder looks at the models' gradients before two early optimizer steps. It counts
    gradients that are new each time and belong to no optimizer that has stepped so far. An
    optimizer that steps later corrects the count. Parameters that the program updates itself do not
    count. Where no optimizer holds any parameter of the models, as with copies in another
    precision, nothing is reported. Where several optimizers step in turn, it looks at gradients for
    two rounds. It counts gradients that are new before the step of one optimizer, and gone before
    the next step of the one that holds the parameter. Gradients zeroed in place may add up, and do
    not count.

    The gain is the time of operators that compute and accumulate these gradients, known by their
    shapes. After the last gradient that is used, the rest of the backward pass goes too. A
    convolution computes its weight's gradient with its input's: about half of its time goes."""

    id = "unused-gradients"
    title = "Gradients are computed that no optimizer uses"
    training_only = True
    reads_record = True
    found_in = ("recorded/unfrozen.slow", "traces/h100/lora_instruct")
    silent_in = ("recorded/second_forward.cured",)
    validation_note = (
        "CPU recordings, torch 2.13: low-rank adapters, with and without a frozen base"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.requires_grad_",
    )

    min_share = Threshold(0.05, "of the step in work on these gradients", XPROF)
    weight_gradient_share = Factor(
        0.5, "of a convolution's backward time is the weight's gradient", CHOSEN
    )

    fix = (
        "Freeze these parameters with requires_grad_(False), or add them to the optimizer if they "
        "should train. Freeze once the optimizer is made."
    )
    code = (
        "# after the optimizer is made; of several, use all groups\n"
        "groups = optimizer.param_groups\n"
        'trained = {id(p) for group in groups for p in group["params"]}\n'
        "for parameter in model.parameters():\n"
        "    if id(parameter) not in trained:\n"
        "        parameter.requires_grad_(False)"
    )
    verify = "Record again: the backward pass is shorter; the loss of a fixed seed is the same."
    falsified_by = "code that reads these gradients, or an optimizer that is not one of PyTorch's"
    assumptions = ("nothing but an optimizer uses these gradients",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        recorded, dropped = a.recorded_gradients, a.dropped_gradients
        if (recorded is None and not dropped) or not a.span_ns:
            return
        work = a.unused_gradient_work
        ns, times = measure_time_in(a, work.spans)
        if ns < self.min_share * a.span_ns and not work.convolutions:
            return
        report = recorded or max(dropped, key=lambda passes: passes.bytes)
        count = f"{report.unused:,} of {report.total:,} parameters with gradients"
        size, names = t.format_bytes(report.bytes), ", ".join(report.modules[:_MAX_NAMED])
        prefix = "those of" if len(report.modules) <= _MAX_NAMED else "among them those of"
        if report.models:
            prefix, names = "all of the class", " and ".join(report.models)
        summary = f"{count} are in no optimizer ({size}), {prefix} {names}."
        fix, code, kind_text = self.fix, self.code, "in no optimizer"
        if reference := _find_reference(report.modules) or ("teacher" if report.models else ""):
            subject = "this whole model" if report.models else reference
            fix, code = _NO_GRAD_FIX.format(name=subject), _NO_GRAD_CODE.format(name=reference)
        if recorded is None:
            kind_text = "dropped before their optimizer steps"
            summary = (
                "The backward pass before one optimizer's step computes gradients of another's "
                f"parameters, which are zeroed before that one steps: {count} ({size}), {prefix} "
                f"{names}."
            )
            detaches = work.rest.total > 0.5 * work.spans.total
            fix, code = (_DETACH_FIX, _DETACH_CODE) if detaches else (_FREEZE_FIX, _FREEZE_CODE)
        yield Finding(
            summary=f"{summary} They take {of_step(a, ns)}.",
            evidence=[
                Evidence("parameters with a gradient", report.total, "count"),
                Evidence(f"of them, {kind_text}", report.unused, "count"),
                Evidence("size of the unused gradients", report.bytes, "bytes"),
                *times,
                self.compare_share(a, "work on the unused gradients", ns),
            ],
            fix=fix,
            code=code,
            edits=[*remove_at("unused_gradient"), *self._scale_convolutions(a, work.convolutions)],
        )

    def _scale_convolutions(self, a: Analysis, share: float) -> list[Edit]:
        """Scale convolutions that compute an unused gradient with one that is used."""
        if not share:
            return []
        if a.trains_on_host:
            select = Select(on="host", kind=("op",), name=CONVOLUTION)
        else:
            select = Select(on="gpu", under=CONVOLUTION)
        part = share * self.weight_gradient_share
        return [scale_edit(select, 1 - part, 1 - 1.3 * part, 1 - 0.7 * part)]

    @staticmethod
    def examples() -> Examples:
        return {
            "a base that is not frozen": _build_training(),
            "on a GPU": _build_training(gpu="A100"),
            "a whole model": _build_training(models=["Net"]),
            "dropped before their optimizer steps": _build_training(dropped=True),
            "all are trained": (_build_training(unused=False), "not dropped"),
            "little work": (_build_training(us=4), "min_share"),
        }


def _find_reference(modules: Sequence[str]) -> str:
    """Return the name of the teacher, target or reference network that holds all these modules, or
    ``""`` if there is none."""
    roots = {name.partition(".")[0] for name in modules}
    root = roots.pop() if len(roots) == 1 else ""
    return root if _REFERENCE_NAMES.fullmatch(root) else ""


def _build_training(
    *,
    unused: bool = True,
    dropped: bool = False,
    gpu: str | None = None,
    us: float = 600,
    models: Sequence[str] = (),
) -> TraceBuilder:
    """Build four layers [256, 512]. An optimizer holds the last one's adapter [8, 512]. With
    ``dropped`` another optimizer holds the layers, and drops these gradients."""
    b = TraceBuilder(gpu=gpu)

    for _ in b.steps():
        b.compute("aten::mm", 4000, [[1024, 256], [256, 512]])
        with b.range("advisor::backward"):
            for layer in range(4):
                shapes = [[8, 512]] if layer == 3 else []
                with b.op(f"{NODE_PREFIX}AddmmBackward0", sequence=layer):
                    b.compute("aten::mm", 600, [[1024, 512], [512, 256]])
                    b.compute("aten::mm", us, [[256, 1024], [1024, 512]])
                for shape in [[256, 512], *shapes]:
                    accumulate = "torch::autograd::AccumulateGrad"
                    with b.op(f"{NODE_PREFIX}{accumulate}"):
                        b.on_host(accumulate, 2, [shape])
        if dropped:
            with b.range("Optimizer.step#Adam.step"):
                b.host(10)
    run = b.record_of_run()
    run.steps(60, 10, forward=4, backward=5)
    if unused:
        order = [2, -1, -1, -1, -1]
        data = {"unused": 4, "total": 5, "bytes": 4 << 19, "modules": ["layers.*"]}
        data |= {"models": list(models), "shapes": [[256, 512], [8, 512]], "order": order}
        if dropped:
            run.event("dropped_gradients", passes=[data])
        else:
            run.event("gradients", **data)
    return b
