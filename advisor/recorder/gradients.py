"""Gradients that are computed in vain: no optimizer holds the parameter, as with a base model that
was not frozen, or the gradient is dropped before its optimizer steps, as where a GAN's
discriminator loss goes backward through the generator.

Looked for once, at a few early optimizer steps, by a hook that is removed afterwards. Parameters,
gradients and optimizers are held weakly; no value of a tensor is read."""

import re
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ref

from advisor.recorder.modules import hide_from_warnings
from advisor.recorder.tape import THREAD

FIRST, SECOND = 3, 8
"""Optimizer steps before which gradients are looked at: both times a new one is in use."""
MAX_ROUNDS = 12
"""Most optimizer steps, from ``SECOND`` on, at which gradients are looked at where several
optimizers step in turn: two rounds of them."""
MAX_MODULES = 16
MAX_PARAMETERS = 4096
"""Most parameters of which an event is written."""
MAX_NAMES = 5
MAX_PASSES = 4


class _Gradient(NamedTuple):
    """A parameter with a gradient, as it was at the first look."""

    name: str
    parameter: Any
    version: int
    gradient: Any
    gradient_version: int
    shape: tuple[int, ...]
    size: int
    """Bytes of the gradient."""
    model: tuple[int, str]
    """Identity and class of the model that holds it."""
    updated: bool = False
    """True if the parameter changed between the looks: an optimizer, or the program itself."""


class _Look(NamedTuple):
    """Gradients before a step of an optimizer, by the identity of the parameter."""

    optimizer: int
    gradients: dict[int, _Gradient]
    made: set[int]
    """New gradients since the look before …"""
    decided: set[int]
    """… whose own optimizer has stepped since …"""
    dropped: set[int]
    """… and did not use them."""


class UnusedGradientFinder:
    """Finder of such parameters. ``write_event(kind, data)`` writes a ``gradients`` event, of which
    the last one of a run counts, and a ``dropped_gradients`` event."""

    def __init__(
        self, hook_state: list[int], write_event: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._hook_state = hook_state
        self._write_event = write_event
        self._modules: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}
        self._steps = 0
        self._seen: list[_Gradient] = []
        self._searching = True
        """True until it is known which parameters no optimizer holds."""
        self._looks: list[_Look] = []
        self._handle: Any = None
        self._done = False

    def install(self) -> None:
        """Register the hook before optimizer steps, unless the search is over."""
        from torch.compiler import is_dynamo_compiling as compiling
        from torch.optim import optimizer as optim

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if compiling() or get_ident() != self._hook_state[THREAD]:
                return
            try:
                self._on_step(optimizer)
            except Exception:  # a module or a tensor of another kind: nothing is known of it
                self._stop()

        if self._handle is None and not self._done:
            self._handle = optim.register_optimizer_step_pre_hook(before)

    def remove(self) -> None:
        """Remove the hook; ``install`` registers it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def add_module(self, module: Any) -> None:
        """Note a model, whose forward ran before the first backward."""
        if len(self._modules) < MAX_MODULES and id(module) not in self._modules:
            self._modules[id(module)] = ref(module)

    def _stop(self) -> None:
        self._done = True
        self._seen, self._looks = [], []
        self.remove()

    def _on_step(self, optimizer: Any) -> None:
        known = self._optimizers.get(id(optimizer))
        new = known is None or known() is not optimizer
        if new:
            self._optimizers[id(optimizer)] = ref(optimizer)
        self._steps += 1
        if self._searching:
            self._search(new)
        optimizers = len(self._optimizers)
        last = SECOND + min(MAX_ROUNDS, 2 * optimizers) - 1 if optimizers > 1 else SECOND
        if optimizers > 1 and SECOND <= self._steps <= last:
            self._look(optimizer)
            if len(self._looks) == last - SECOND + 1:
                self._report_dropped()
        if not self._searching and self._steps >= last:
            self._stop()

    def _search(self, new: bool) -> None:
        """Look for parameters that no optimizer holds. ``new``: this one never stepped before."""
        if self._steps == FIRST:
            self._seen = self._gradients()
        elif self._steps == SECOND:
            now = {id(one.parameter()): one for one in self._gradients()}
            self._seen = [
                one._replace(updated=one.version != after.version)
                for one in self._seen
                if (after := now.get(id(one.parameter()))) is not None and _is_new(one, after)
            ]
            self._report()
        elif self._steps > SECOND and new:  # one that steps less often than the others
            self._report()

    def _gradients(self) -> list[_Gradient]:
        """List parameters with a gradient, in the order of the models."""
        from torch._C import DisableTorchFunction
        from torch.nn import Module

        result: list[_Gradient] = []
        known: set[int] = set()
        with DisableTorchFunction():
            for weak in self._modules.values():
                module = weak()
                if module is None:
                    continue
                for name, parameter in Module.named_parameters(module):
                    if id(parameter) in known or not parameter.requires_grad:
                        continue
                    known.add(id(parameter))
                    gradient = parameter.grad
                    if gradient is None:
                        continue
                    result.append(
                        _Gradient(
                            name,
                            ref(parameter),
                            parameter._version,
                            ref(gradient),
                            gradient._version,
                            tuple(map(int, parameter.shape)),
                            int(gradient.numel() * gradient.element_size()),
                            (id(module), type(module).__name__),
                        )
                    )
        return result

    def _report(self) -> None:
        """Write what no optimizer holds. If there is any, an optimizer that steps later may hold
        it: the search goes on."""
        held: set[int] = set()
        for weak in self._optimizers.values():
            optimizer = weak()
            for group in [] if optimizer is None else optimizer.param_groups:
                held.update(map(id, group["params"]))
        own = [id(one.parameter()) in held for one in self._seen]
        rows = [(one, one.updated or is_held) for one, is_held in zip(self._seen, own, strict=True)]
        unused = [one for one, is_used in rows if not is_used and one.parameter() is not None]
        # an optimizer of copies in another precision holds no parameter of any model
        if not unused or not any(own) or len(rows) > MAX_PARAMETERS:
            if self._steps > SECOND:
                self._write_event("gradients", {"unused": 0})
            self._searching = False
            return
        self._write_event("gradients", _describe(rows))

    def _look(self, optimizer: Any) -> None:
        """Note which gradients are new before this step, and which new ones of its parameters at
        earlier steps of other optimizers are gone by now."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        now = {id(one.parameter()): one for one in self._gradients()}
        before = self._looks[-1].gradients if self._looks else {}
        for look in self._looks:
            if look.optimizer == id(optimizer):
                continue
            for key in look.made & held:
                one, after = look.gradients[key], now.get(key)
                gone = after is None or one.gradient() is not after.gradient()
                if key not in look.decided and gone and (not after or after.version == one.version):
                    look.dropped.add(key)
                look.decided.add(key)
        made = {
            key
            for key, one in now.items()
            if (known := before.get(key)) is None or _is_new(known, one)
        }
        self._looks.append(_Look(id(optimizer), now, made, set(), set()))

    def _report_dropped(self) -> None:
        """Write the passes whose gradients of another optimizer's parameters are dropped."""
        passes: list[dict[str, Any]] = []
        for look in self._looks[1:]:
            rows = [
                (one, key not in look.dropped)
                for key, one in look.gradients.items()
                if key in look.made
            ]
            described = _describe(rows)
            if look.dropped and len(rows) <= MAX_PARAMETERS and described not in passes:
                passes.append(described)
        if passes:
            self._write_event("dropped_gradients", {"passes": passes[:MAX_PASSES]})


def _describe(rows: list[tuple[_Gradient, bool]]) -> dict[str, Any]:
    """Describe parameters with a gradient, in the order of the models, and whether each is used."""
    unused = [one for one, is_used in rows if not is_used]
    learn = {one.model for one, is_used in rows if is_used}
    models = {one.model for one in unused}
    shapes = list(dict.fromkeys(one.shape for one, _ in rows))
    number = {shape: n + 1 for n, shape in enumerate(shapes)}
    sizes: Counter[str] = Counter()
    for one in unused:
        sizes[re.sub(r"\b\d+\b", "*", one.name.rpartition(".")[0])] += one.size
    return {
        "unused": len(unused),
        "total": len(rows),
        "bytes": sum(one.size for one in unused),
        "modules": [name for name, _ in sizes.most_common(MAX_NAMES)],
        # classes of the models, if no other gradient of theirs is used
        "models": [] if models & learn else sorted({name for _, name in models})[:MAX_NAMES],
        "shapes": [list(shape) for shape in shapes],
        # the number of the shape, negative if unused
        "order": [number[one.shape] * (1 if is_used else -1) for one, is_used in rows],
    }


def _is_new(before: _Gradient, after: _Gradient) -> bool:
    """Return whether a gradient was computed since the first look."""
    gradient = before.gradient()
    same = gradient is not None and gradient is after.gradient()
    return not same or before.gradient_version != after.gradient_version


hide_from_warnings(globals())
