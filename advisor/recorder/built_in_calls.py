"""Name of the C function that a frame is calling, because C functions have no frame.

The frame's current instruction is a call, and the instructions that load its function begin at the
same source position. This runs no code of the program, and reads no attribute of its objects."""

import dis
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

MAX_CODE = 1 << 14
"""Maximum size of code to examine, bytes of instructions: a few milliseconds."""
_CALL_OPS = ("CALL", "PRECALL", "CALL_KW", "CALL_FUNCTION_EX")
_VARIABLE_OPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
"""Instructions that load a variable. Some versions have faster variants with longer names."""
_ATTRIBUTE_OPS = ("LOAD_ATTR", "LOAD_METHOD")
_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and_", "|": "or_", "^": "xor", "<": "lt", ">": "gt", "==": "eq",
    "!": "ne", "UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert", "BINARY_SUBSCR": "getitem",
    "BINARY_SLICE": "getitem", "[]": "getitem", "STORE_SUBSCR": "setitem",
    "STORE_SLICE": "setitem", "CONTAINS_OP": "contains",
}  # fmt: skip
"""Symbols and instructions with the functions of ``operator`` that do the same; ``<=`` counts as
``<``."""
_NEUTRAL_OPS = ("PUSH_NULL", "KW_NAMES", "EXTENDED_ARG", "CACHE", "NOP")
"""Instructions that do not change a value."""


def called_function(frame: FrameType) -> str:
    """Return what a frame is calling: ``numpy.array`` for a function of a module, ``.read`` for a
    method of an object, or an empty text if it calls nothing or something without a name."""
    parts = _find_call_names(frame.f_code, frame.f_lasti)
    if not parts:
        return ""
    root, *attributes = parts
    if not root:
        return f".{attributes[-1]}" if attributes else ""
    value = frame.f_globals.get(root, frame.f_builtins.get(root))
    if value is None and attributes:  # imported in the function
        value = sys.modules.get(root)
    if type(value) is ModuleType:
        return ".".join((str(vars(value).get("__name__", root)), *attributes))
    if attributes:
        return f".{attributes[-1]}"
    if type(value) in (BuiltinFunctionType, FunctionType, type):
        module = value.__module__
        return f"{module}.{root}" if type(module) is str else root
    return ""


def operator_function(frame: FrameType) -> str:
    """Return the function of the ``operator`` module that does the same as the frame's current
    instruction, such as ``operator.pow`` for ``a ** b``. Empty for another instruction."""
    instructions = _instructions_to(frame.f_code, frame.f_lasti)
    name = _operator_name(instructions[-1]) if instructions else ""
    return f"operator.{name}" if name else ""


def _operator_name(instruction: dis.Instruction) -> str:
    """Return the function of the ``operator`` module for an instruction, or an empty text."""
    kind = instruction.opname
    symbol = instruction.argrepr if kind in ("BINARY_OP", "COMPARE_OP") else kind
    return _OPERATORS.get(symbol.removeprefix("bool(").rstrip("=)") or "==", "")


def used_names(code: CodeType) -> list[tuple[str, int]]:
    """Return the names of attributes and globals that a function's code reads, and of functions of
    the ``operator`` module for symbols (``add`` for ``a + b``), each with its line. Comprehensions
    and lambdas are part of it. Sizes (``a.shape[1]``) are no use of ``getitem``."""
    if len(code.co_code) > MAX_CODE:
        return []
    inner = [part for part in code.co_consts if type(part) is CodeType]
    found = dict.fromkeys(name for part in inner for name in used_names(part))
    before: list[Any] = ["", ""]
    for instruction in dis.get_instructions(code):
        kind, position = instruction.opname, instruction.positions
        if kind in _NEUTRAL_OPS or position is None or position.lineno is None:
            continue
        name = "" if before[0] == "shape" else _operator_name(instruction)
        if kind.startswith((*_ATTRIBUTE_OPS, "LOAD_GLOBAL")):
            name = str(instruction.argval)
        before = [before[1], instruction.argval]
        if name:
            found[name, position.lineno] = None
    return list(found)


def _instructions_to(code: CodeType, offset: int) -> list[dis.Instruction]:
    """Return the instructions up to the one at ``offset``, empty if none is there."""
    if len(code.co_code) > MAX_CODE or offset < 0:
        return []
    instructions: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            break
        instructions.append(instruction)
    return instructions if instructions and instructions[-1].offset == offset else []


def _find_call_names(code: CodeType, offset: int) -> list[str]:
    """Return the names that a call consists of, such as ``["np", "array"]``. The first one is empty
    for an expression."""
    instructions = _instructions_to(code, offset)
    if not instructions or instructions[-1].opname not in _CALL_OPS:
        return []
    call = instructions.pop()
    start = _start_position(call)
    if start is None:
        return []
    names: list[str] = []
    for earlier in instructions:
        is_call_part = earlier.positions == call.positions  # part of the same call
        if _start_position(earlier) != start or is_call_part or earlier.opname in _NEUTRAL_OPS:
            continue
        if earlier.opname.startswith(_ATTRIBUTE_OPS) and isinstance(earlier.argval, str):
            names = [*(names or [""]), earlier.argval]
        elif earlier.opname.startswith(_VARIABLE_OPS) and isinstance(earlier.argval, str):
            names = [earlier.argval]
        else:
            names = [""]
    return names


def _start_position(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Return the line and column where an instruction's expression begins in the source."""
    position = instruction.positions
    if position is None or position.lineno is None or position.col_offset is None:
        return None
    return position.lineno, position.col_offset
