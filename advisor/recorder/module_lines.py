"""Table of a model's modules with weights and the lines that call them, written once per model.

A profiler without Python stacks records operators and the shapes of their inputs, but no lines. The
shape of the weights shows which layer an operator belongs to. The line that calls the layer is
where the ``forward`` of the module around it reads the attribute. Finding it runs no code of the
program and reads no tensor."""

import dis
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from advisor.recorder.stack_samples import frame_text
from advisor.recorder.watchers import is_intercepted

CALLS_BEFORE = 3
"""Number of forwards of a model before its table is written: the first may create layers."""
_MAX_MODELS = 8
_MAX_MODULES, MAX_MODULE_KINDS = 20_000, 1_000
"""Maximum number of modules examined in a model, and of entries in its table."""
MAX_DIMENSIONS = 8
READ_INSTRUCTIONS = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute."""


class ModuleLines:
    """Writer of a ``modules`` event for each model whose outermost forwards ``on_forward`` sees.
    Each entry of its ``modules`` is a list: name with ``*`` for numbers, class, number of such
    modules, shapes of weights, and the frame that calls them."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._call_counts: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        """Paths of the described models' modules by id, such as ``Net.blocks.0.conv``."""

    def on_forward(self, module: Any) -> None:
        """Count an outermost forward that begins, and describe the module at its third one."""
        key = id(module)
        calls = self._call_counts.get(key, 0)
        if calls >= CALLS_BEFORE or (not calls and len(self._call_counts) >= _MAX_MODELS):
            return
        import torch

        if is_intercepted(torch):
            return  # sizes are tensors while a program is traced
        self._call_counts[key] = calls + 1
        if calls + 1 < CALLS_BEFORE:
            return
        with suppress(Exception):  # examining a class of the program may do anything
            if table := describe_modules(module, self.paths):
                self._write_event("modules", {"model": type(module).__name__, "modules": table})


def describe_modules(model: Any, paths: dict[int, str] | None = None) -> list[list[Any]]:
    """Return the table of a model's modules that have weights of their own. Add the paths of all
    modules to ``paths``."""
    entries: dict[tuple[Any, ...], list[Any]] = {}
    modules_by_name = {"": model}
    frames: dict[tuple[type, str], str] = {}
    for name, module in islice(model.named_modules(), _MAX_MODULES):
        modules_by_name[name] = module
        if paths is not None:
            paths.setdefault(id(module), f"{type(model).__name__}.{name}".rstrip("."))
        weights = {
            attribute: list(weight.shape)
            for attribute, weight in vars(module).get("_parameters", {}).items()
            if weight is not None
            and len(weight.shape) <= MAX_DIMENSIONS
            and all(type(size) is int for size in weight.shape)
        }
        if not weights:
            continue
        shapes = list(weights.values())
        parts = [part for part in name.split(".") if part != "_orig_mod"]  # added by torch.compile
        short = re.sub(r"\d+", "*", ".".join(parts))
        key = short, type(module), str(shapes)
        if key in entries:
            entries[key][2] += 1
        elif len(entries) < MAX_MODULE_KINDS:
            largest = max(weights, key=lambda attribute: len(weights[attribute]))
            frame = _find_frame(f"{name}.{largest}".lstrip("."), modules_by_name, frames)
            entries[key] = [short, type(module).__name__, 1, shapes, frame]
    return list(entries.values())


def _find_frame(name: str, modules: dict[str, Any], frames: dict[tuple[type, str], str]) -> str:
    """Return the frame whose line reads a weight, its module, or a container of the module, as an
    attribute of the nearest module that is not from torch. Empty if there is none."""
    while name:
        outer, _, attribute = name.rpartition(".")
        owner = type(modules[outer])
        if not owner.__module__.startswith("torch."):
            key = owner, attribute
            if key not in frames:
                frames[key] = next(_reading_frames(owner, attribute), "")
            if frames[key]:
                return frames[key]
        name = outer
    return ""


def _reading_frames(owner: type, attribute: str) -> Iterator[str]:
    """Yield frames of a class's methods, ``forward`` first, that read the attribute."""
    methods = [code for base in owner.__mro__[:-1] for code in _method_codes(base)]
    methods = [code for code in methods if attribute in code.co_names]
    for code in sorted(methods, key=lambda code: code.co_name != "forward"):
        for instruction in dis.get_instructions(code):
            if instruction.opname in READ_INSTRUCTIONS and instruction.argval == attribute:
                line = instruction.positions.lineno if instruction.positions else None
                yield frame_text(code, line or code.co_firstlineno)
                break


def _method_codes(owner: type) -> Iterator[CodeType]:
    if owner.__module__.startswith("torch."):
        return
    for name, function in vars(owner).items():
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and name != "__init__":
            yield function.__code__
