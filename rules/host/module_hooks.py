"""Hooks on modules or gradients that take much of the step."""

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.stacks import STEP_EVENT, hottest_line, stacks_in_hooks
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import impact_per_step, run_steps_of, steps_seen
from advisor.testing import Examples, TraceBuilder


class ModuleHooks(Rule):
    """Hooks that watch activations or gradients (``register_forward_hook``,
    ``register_full_backward_hook``, ``Tensor.register_hook``, ``wandb.watch``) run in every step
    and at every layer. What they compute and read is part of the forward or the backward pass.

    Sampled Python stacks show them: PyTorch calls such a function at the end of a module's
    ``forward``, or from the engine of the backward pass. Callbacks that Lightning or Transformers
    call in each step are found too. The estimate is its share of the samples
    times the mean step. If a GPU trains, that time may be hidden behind the device's work, and
    other rules check what waits."""

    id = "module-hooks"
    title = "Hooks on modules or gradients take much of the step"
    reads_record = True
    found_in = ("recorded/hooks.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
    )

    min_share = Threshold(0.05, "of the sampled stacks", XPROF)
    min_samples = Threshold(8, "samples in hooks", TRIED_ON_TRACES)
    min_gain_share = Threshold(0.5, "of the time is gained at least; some may have to stay", CHOSEN)

    fix = (
        "Compute in the hook only every N steps, or register it for one step and remove it. Keep "
        "results as tensors and read them together, not with .item() at each layer."
    )
    code = (
        "calls = collections.Counter()\n"
        "def hook(module, inputs, output):\n"
        "    calls[module] += 1\n"
        "    if calls[module] % 100:\n"
        "        return\n"
        "    ...   # what the hook computes now"
    )
    cases = {
        "callback": {
            "title": "A callback takes much of each step",
            "fix": "Compute in the callback only every N steps, as often as its values are kept. "
            "Keep results as tensors and read them together, not with .item() one by one.",
            "code": "def on_before_optimizer_step(self, trainer, module, optimizer):\n"
            "    # In Transformers, the count is state.global_step.\n"
            "    if trainer.global_step % 50:\n"
            "        return\n"
            "    ...   # what the callback computes now",
            "assumptions": ("the callback only observes: training does not need it",),
        }
    }
    inference = {
        "cases": {
            "callback": {
                "code": "if step % 50:\n    return      # nobody keeps the values of this step",
                "assumptions": ("the callback only observes: nothing else needs it",),
            }
        }
    }
    verify = "Record again: fewer sampled stacks are in the hook, and the step is shorter."
    falsified_by = "the same step time without the hooks"
    assumptions = ("the hooks only observe: the model's results do not need them",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        mean, stacks = run_steps.mean, run_steps.stacks
        if not a.trains_on_host or not mean:
            return
        hooks = stacks_in_hooks(stacks)
        samples = sum(stack.samples for stack in hooks)
        share = samples / max(1, sum(stack.samples for stack in stacks))
        if not hooks or share < self.min_share or samples < self.min_samples:
            return
        line, spent = hottest_line(hooks), share * mean
        function = "" if line is None else line.location.function or ""
        is_callback = STEP_EVENT.search(function) is not None
        yield Finding(
            summary=(
                f"{share:.0%} of the sampled Python stacks are in "
                f"{function if is_callback else 'hooks'}: {t.format_duration(spent)} of each step "
                "on average."
            ),
            evidence=[
                Evidence("time in hooks", spent, "ns", per="step"),
                self.compare("share of the sampled stacks", share, "min_share"),
                self.compare("samples in hooks", samples, "min_samples", "count"),
                steps_seen(run_steps),
            ],
            where=[] if line is None else [line.location],
            impact=impact_per_step(
                a,
                0.9 * spent,
                low=self.min_gain_share * spent,
                high=spent,
                method="share of the sampled stacks, of the mean step",
            ),
            **(self.case("callback") if is_callback else {}),
        )

    @staticmethod
    def examples() -> Examples:
        engine = ["torch/_tensor.py(623): Tensor.backward", f"{_GRAPH}: _engine_run_backward"]
        return {
            "a hook after forward": _build_run(
                [_CALL, f"{_MODULE}: Module._call_impl.inner", _HOOK]
            ),
            "a hook of a gradient": _build_run([*engine, _HOOK]),
            "a callback of Lightning": _build_run([_LIGHTNING, _CALLBACK]),
            "a callback after an epoch": (
                _build_run([_LIGHTNING, "train.py(9): Watch.on_train_epoch_end"]),
                "not hooks",
            ),
            "a model's own function": (
                _build_run([_CALL, "model.py(9): Net.forward", "model.py(20): attend"]),
                "not hooks",
            ),
            "forward under another name": (
                _build_run([_CALL, "peft/lora.py(9): lora_forward"]),
                "not hooks",
            ),
            "a decorated forward": (
                _build_run(
                    [_CALL, "models/utils.py(9): returns_tuple.wrapper", "model.py(9): Net.forward"]
                ),
                "not hooks",
            ),
            "a few samples": (_build_run([_CALL, _HOOK], samples=4), "min_samples"),
        }


_MODULE = "torch/nn/modules/module.py(1845)"
_GRAPH = "torch/autograd/graph.py(979)"
_CALL = f"{_MODULE}: Module._call_impl"
_HOOK = "train.py(7): watch.hook"
_LIGHTNING = "lightning/pytorch/trainer/call.py(228): _call_callback_hooks"
_CALLBACK = "train.py(9): Watch.on_before_optimizer_step"


def _build_run(frames: list[str], samples: int = 30) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    run.steps(60, 10, forward=6, backward=4)
    other_samples = 40 if samples > 8 else 20
    names = [
        "train.py(30): main",
        _CALL,
        "torch/nn/modules/linear.py(134): Linear.forward",
        *frames,
    ]
    hook_frames = [0, *range(3, len(names))]
    run.event("stacks", frames=names, stacks=[[other_samples, [0, 1, 2]], [samples, hook_frames]])
    return b
