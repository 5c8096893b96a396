"""Parameters that get gradients and that no optimizer holds, as a base model that was not frozen.

Looked for once, at two early optimizer steps, by a hook that is removed afterwards. Parameters,
gradients and optimizers are held weakly; no value of a tensor is read.
"""

from __future__ import annotations

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
MAX_MODULES = 16
MAX_PARAMETERS = 4096
"""Most parameters of which an event is written."""
MAX_NAMES = 5


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
    updated: bool = False
    """True if the parameter changed between the looks: an optimizer, or the program itself."""


class UnusedGradients:
    """Finder of such parameters. ``write_event(kind, data)`` writes a ``gradients`` event; the
    last one of a run counts."""

    def __init__(
        self, hook_state: list[int], write_event: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._hook_state = hook_state
        self._write_event = write_event
        self._modules: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}
        self._steps = 0
        self._seen: list[_Gradient] = []
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
        self._seen = []
        self.remove()

    def _on_step(self, optimizer: Any) -> None:
        known = self._optimizers.get(id(optimizer))
        new = known is None or known() is not optimizer
        if new:
            self._optimizers[id(optimizer)] = ref(optimizer)
        self._steps += 1
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
            self._stop()
            return
        shapes = list(dict.fromkeys(one.shape for one, _ in rows))
        number = {shape: n + 1 for n, shape in enumerate(shapes)}
        sizes: Counter[str] = Counter()
        for one in unused:
            sizes[re.sub(r"\b\d+\b", "*", one.name.rpartition(".")[0])] += one.size
        self._write_event(
            "gradients",
            {
                "unused": len(unused),
                "total": len(rows),
                "bytes": sum(one.size for one in unused),
                "modules": [name for name, _ in sizes.most_common(MAX_NAMES)],
                "shapes": [list(shape) for shape in shapes],
                # in the order of the models: the number of the shape, negative if unused
                "order": [number[one.shape] * (1 if is_used else -1) for one, is_used in rows],
            },
        )


def _is_new(before: _Gradient, after: _Gradient) -> bool:
    """Return whether a gradient was computed since the first look."""
    gradient = before.gradient()
    same = gradient is not None and gradient is after.gradient()
    return not same or before.gradient_version != after.gradient_version


hide_from_warnings(globals())
