"""Table of a model's modules with weights, and of the lines that call them; written once a model.

A profiler without Python stacks names operators and the shapes of their inputs, and no line. The
shape of a layer's weights tells which layer an operator is of, and the code of the module around it
has the line that calls it: where its ``forward`` reads the attribute. Nothing is run for this, and
no tensor is read."""

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
"""Forwards of a model before its table is written: layers may be made in the first."""
MAX_MODELS = 8
MAX_MODULES, MAX_ENTRIES = 20_000, 1_000
"""Most modules looked at in a model, and most entries of its table."""
MAX_DIMENSIONS = 8
READS = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute."""


class ModuleLines:
    """Writer of a ``modules`` event for each model, of which ``on_forward`` sees outermost
    forwards. Its ``modules`` are lists: name with ``*`` for numbers, class, how many there are,
    shapes of weights, and the frame that calls it."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._calls: dict[int, int] = {}

    def on_forward(self, module: Any) -> None:
        """Count an outermost forward that begins; describe the module at its third."""
        key = id(module)
        calls = self._calls.get(key, 0)
        if calls >= CALLS_BEFORE or (not calls and len(self._calls) >= MAX_MODELS):
            return
        import torch

        if is_intercepted(torch):
            return  # sizes are tensors while a program is traced
        self._calls[key] = calls + 1
        if calls + 1 < CALLS_BEFORE:
            return
        with suppress(Exception):  # a class of the program's may do anything when it is looked at
            if table := describe_modules(module):
                self._write_event("modules", {"model": type(module).__name__, "modules": table})


def describe_modules(model: Any) -> list[list[Any]]:
    """Return the table of a model's modules with weights of their own."""
    entries: dict[tuple[Any, ...], list[Any]] = {}
    around = {"": model}
    places: dict[tuple[type, str], str] = {}
    for name, module in islice(model.named_modules(), MAX_MODULES):
        around[name] = module
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
        own = [part for part in name.split(".") if part != "_orig_mod"]  # of torch.compile
        short = re.sub(r"\d+", "*", ".".join(own))
        key = short, type(module), str(shapes)
        if key in entries:
            entries[key][2] += 1
        elif len(entries) < MAX_ENTRIES:
            largest = max(weights, key=lambda each: len(weights[each]))
            place = _place(f"{name}.{largest}".lstrip("."), around, places)
            entries[key] = [short, type(module).__name__, 1, shapes, place]
    return list(entries.values())


def _place(name: str, around: dict[str, Any], places: dict[tuple[type, str], str]) -> str:
    """Return the frame whose line reads a weight, the module that has it, or the container that
    this is in, as an attribute of the nearest module with code of its own; empty if none is
    known."""
    while name:
        outer, _, attribute = name.rpartition(".")
        owner = type(around[outer])
        if not owner.__module__.startswith("torch."):
            key = owner, attribute
            if key not in places:
                places[key] = next(_lines(owner, attribute), "")
            if places[key]:
                return places[key]
        name = outer
    return ""


def _lines(owner: type, attribute: str) -> Iterator[str]:
    """Yield frames of a class's methods, ``forward`` first, that read the attribute."""
    methods = [code for each in owner.__mro__[:-1] for code in _methods(each)]
    methods = [code for code in methods if attribute in code.co_names]
    for code in sorted(methods, key=lambda code: code.co_name != "forward"):
        for instruction in dis.get_instructions(code):
            if instruction.opname in READS and instruction.argval == attribute:
                line = instruction.positions.lineno if instruction.positions else None
                yield frame_text(code, line or code.co_firstlineno)
                break


def _methods(owner: type) -> Iterator[CodeType]:
    if owner.__module__.startswith("torch."):
        return
    for name, function in vars(owner).items():
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and name != "__init__":
            yield function.__code__
