"""Detector of gradients that are computed in vain. Either no optimizer has the parameter, as with a
base model that was not frozen, or the gradient is dropped before its optimizer steps, as when a
GAN's discriminator loss goes backward through the generator.

The search runs once, at a few early optimizer steps, in a hook that is then removed. References to
parameters, gradients and optimizers are weak, and no value of a tensor is read."""

import re
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ref

from advisor.recorder.modules import hide_from_warnings
from advisor.recorder.tape import THREAD

FIRST, SECOND = 3, 8
"""Numbers of the optimizer steps before which gradients are examined; both must be new."""
_MAX_ROUNDS = 12
"""Maximum number of optimizer steps, from ``SECOND`` on, at which gradients are examined if several
optimizers take turns. The search ends earlier once each of them has stepped twice."""
_MAX_MODULES = 16
_MAX_PARAMETERS = 4096
"""Maximum number of parameters for which an event is written."""
_MAX_NAMES = 5
_MAX_PASSES = 4


class _Gradient(NamedTuple):
    """Parameter with a gradient, as it was at the first check."""

    name: str
    parameter: Any
    version: int
    gradient: Any
    gradient_version: int
    shape: tuple[int, ...]
    size: int
    """Bytes of the gradient."""
    model: tuple[int, str]
    """Id and class of the model that has the parameter."""
    updated: bool = False
    """True if an optimizer or the program changed the parameter between the checks."""


class _Check(NamedTuple):
    """Gradients before a step of an optimizer, by the id of the parameter."""

    optimizer: int
    gradients: dict[int, _Gradient]
    new: set[int]
    """Parameters with a new gradient since the previous check."""
    decided: set[int]
    """Parameters with a new gradient whose own optimizer has stepped since then."""
    dropped: set[int]
    """Parameters whose optimizer stepped without using the new gradient."""


class UnusedGradientFinder:
    """Finder of unused gradients. ``write_event(kind, data)`` writes ``gradients`` events, of which
    the last one of a run counts, and a ``dropped_gradients`` event."""

    def __init__(
        self, hook_state: list[int], write_event: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._hook_state = hook_state
        self._write_event = write_event
        self._modules: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}
        self._steps = 0
        self._first_gradients: list[_Gradient] = []
        self._searching = True
        """True until it is known which parameters are in no optimizer."""
        self._checks: list[_Check] = []
        self._has_reported = False
        """True once the dropped gradients have been reported, if there are any."""
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
            except Exception:  # an unknown kind of module or tensor
                self._stop()

        if self._handle is None and not self._done:
            self._handle = optim.register_optimizer_step_pre_hook(before)

    def remove(self) -> None:
        """Remove the hook; ``install`` registers it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def add_module(self, module: Any) -> None:
        """Note a model whose forward ran before the first backward."""
        if len(self._modules) < _MAX_MODULES and id(module) not in self._modules:
            self._modules[id(module)] = ref(module)

    def _stop(self) -> None:
        self._done = True
        self._first_gradients, self._checks = [], []
        self.remove()

    def _on_step(self, optimizer: Any) -> None:
        reference = self._optimizers.get(id(optimizer))
        is_new = reference is None or reference() is not optimizer
        if is_new:
            self._optimizers[id(optimizer)] = ref(optimizer)
        self._steps += 1
        if self._searching:
            self._search_unused(is_new)
        if self._steps < SECOND:
            return
        is_over = len(self._optimizers) == 1
        if not is_over and not self._has_reported:
            self._check_dropped(optimizer)
            times = Counter(check.optimizer for check in self._checks)
            has_two_rounds = all(times[key] >= 2 for key in self._optimizers)
            if has_two_rounds or len(self._checks) >= _MAX_ROUNDS:
                self._report_dropped()
                self._has_reported = True
        if not self._searching and (is_over or self._has_reported):
            self._stop()

    def _search_unused(self, is_new: bool) -> None:
        """Search for parameters in no optimizer. ``is_new``: this optimizer has not stepped
        before."""
        if self._steps == FIRST:
            self._first_gradients = self._list_gradients()
        elif self._steps == SECOND:
            gradients = {id(gradient.parameter()): gradient for gradient in self._list_gradients()}
            self._first_gradients = [
                gradient._replace(updated=gradient.version != after.version)
                for gradient in self._first_gradients
                if (after := gradients.get(id(gradient.parameter()))) is not None
                and _is_new(gradient, after)
            ]
            self._report_unused()
        elif self._steps > SECOND and is_new:  # an optimizer that steps less often than the others
            self._report_unused()

    def _list_gradients(self) -> list[_Gradient]:
        """List the parameters with a gradient, in the order of the models."""
        from torch._C import DisableTorchFunction
        from torch.nn import Module

        result: list[_Gradient] = []
        seen: set[int] = set()
        with DisableTorchFunction():
            for reference in self._modules.values():
                module = reference()
                if module is None:
                    continue
                for name, parameter in Module.named_parameters(module):
                    if id(parameter) in seen or not parameter.requires_grad:
                        continue
                    seen.add(id(parameter))
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

    def _report_unused(self) -> None:
        """Write the parameters that are in no optimizer. If there are any, continue the search: an
        optimizer that steps later may have them."""
        optimized: set[int] = set()
        for reference in self._optimizers.values():
            optimizer = reference()
            for group in [] if optimizer is None else optimizer.param_groups:
                optimized.update(map(id, group["params"]))
        is_optimized = [id(gradient.parameter()) in optimized for gradient in self._first_gradients]
        rows = [
            (gradient, gradient.updated or is_held)
            for gradient, is_held in zip(self._first_gradients, is_optimized, strict=True)
        ]
        unused = [
            gradient
            for gradient, is_used in rows
            if not is_used and gradient.parameter() is not None
        ]
        # an optimizer of copies in another precision has no parameter of any model
        if not unused or not any(is_optimized) or len(rows) > _MAX_PARAMETERS:
            if self._steps > SECOND:
                self._write_event("gradients", {"unused": 0})
            self._searching = False
            return
        self._write_event("gradients", _describe(rows))

    def _check_dropped(self, optimizer: Any) -> None:
        """Note which gradients are new before this step. For the optimizer's parameters, also note
        which new gradients from earlier steps of other optimizers are gone by now."""
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {id(gradient.parameter()): gradient for gradient in self._list_gradients()}
        before = self._checks[-1].gradients if self._checks else {}
        for check in self._checks:
            if check.optimizer == id(optimizer):
                continue
            for key in check.new & optimized:
                gradient, after = check.gradients[key], gradients.get(key)
                is_gone = after is None or gradient.gradient() is not after.gradient()
                if (
                    key not in check.decided
                    and is_gone
                    and (not after or after.version == gradient.version)
                ):
                    check.dropped.add(key)
                check.decided.add(key)
        new_parameters = {
            key
            for key, gradient in gradients.items()
            if (earlier := before.get(key)) is None or _is_new(earlier, gradient)
        }
        self._checks.append(_Check(id(optimizer), gradients, new_parameters, set(), set()))

    def _report_dropped(self) -> None:
        """Write the passes that drop gradients of another optimizer's parameters."""
        passes: list[dict[str, Any]] = []
        for check in self._checks[1:]:
            rows = [
                (gradient, key not in check.dropped)
                for key, gradient in check.gradients.items()
                if key in check.new
            ]
            described = _describe(rows)
            if check.dropped and len(rows) <= _MAX_PARAMETERS and described not in passes:
                passes.append(described)
        if passes:
            self._write_event("dropped_gradients", {"passes": passes[:_MAX_PASSES]})


def _describe(rows: list[tuple[_Gradient, bool]]) -> dict[str, Any]:
    """Describe parameters with a gradient, in the order of the models, and whether each is used."""
    unused = [gradient for gradient, is_used in rows if not is_used]
    used_models = {gradient.model for gradient, is_used in rows if is_used}
    unused_models = {gradient.model for gradient in unused}
    shapes = list(dict.fromkeys(gradient.shape for gradient, _ in rows))
    shape_number = {shape: n + 1 for n, shape in enumerate(shapes)}
    sizes: Counter[str] = Counter()
    for gradient in unused:
        sizes[re.sub(r"\b\d+\b", "*", gradient.name.rpartition(".")[0])] += gradient.size
    return {
        "unused": len(unused),
        "total": len(rows),
        "bytes": sum(gradient.size for gradient in unused),
        "modules": [name for name, _ in sizes.most_common(_MAX_NAMES)],
        # classes of the models, if none of their other gradients is used
        "models": []
        if unused_models & used_models
        else sorted({name for _, name in unused_models})[:_MAX_NAMES],
        "shapes": [list(shape) for shape in shapes],
        # the number of the shape, negative if unused
        "order": [
            shape_number[gradient.shape] * (1 if is_used else -1) for gradient, is_used in rows
        ],
    }


def _is_new(before: _Gradient, after: _Gradient) -> bool:
    """Return whether a gradient was computed since the first check."""
    gradient = before.gradient()
    is_same = gradient is not None and gradient is after.gradient()
    return not is_same or before.gradient_version != after.gradient_version


hide_from_warnings(globals())
