"""Name of the function in C that a frame is calling: such a function has no frame of its own.

The frame's current instruction is a call, and the instructions that load what it calls begin at the
same place of the source. Nothing of the program is run, and no attribute of its objects is read."""

import dis
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

MAX_CODE = 1 << 14
"""Largest code that is looked at, bytes of instructions: a few milliseconds."""
_CALLS = ("CALL", "PRECALL", "CALL_KW", "CALL_FUNCTION_EX")
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
"""Instructions that load a variable; some versions have longer names for faster variants."""
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and_", "|": "or_", "^": "xor", "<": "lt", ">": "gt", "==": "eq",
    "!": "ne", "UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert", "BINARY_SUBSCR": "getitem",
    "BINARY_SLICE": "getitem", "[]": "getitem", "STORE_SUBSCR": "setitem",
    "STORE_SLICE": "setitem", "CONTAINS_OP": "contains",
}  # fmt: skip
"""Symbols and instructions with the functions of ``operator`` that do the same; ``<=`` counts as
``<``."""
_STACK = ("PUSH_NULL", "KW_NAMES", "EXTENDED_ARG", "CACHE", "NOP")
"""Instructions that change no value."""


def called_function(frame: FrameType) -> str:
    """Return what a frame is calling: ``numpy.array`` for a function of a module, ``.read`` for a
    method of an object; empty: no call, or one of something without a name."""
    parts = _names_of_call(frame.f_code, frame.f_lasti)
    if not parts:
        return ""
    root, *attributes = parts
    if not root:
        return f".{attributes[-1]}" if attributes else ""
    known = frame.f_globals.get(root, frame.f_builtins.get(root))
    if known is None and attributes:  # imported in the function
        known = sys.modules.get(root)
    if type(known) is ModuleType:
        return ".".join((str(vars(known).get("__name__", root)), *attributes))
    if attributes:
        return f".{attributes[-1]}"
    if type(known) in (BuiltinFunctionType, FunctionType, type):
        module = known.__module__
        return f"{module}.{root}" if type(module) is str else root
    return ""


def operator_function(frame: FrameType) -> str:
    """Return the function of the ``operator`` module that the frame's current instruction runs, as
    ``operator.pow`` for ``a ** b``; empty: another instruction."""
    code, offset = frame.f_code, frame.f_lasti
    if len(code.co_code) > MAX_CODE or offset < 0:
        return ""
    for instruction in dis.get_instructions(code):
        if instruction.offset == offset:
            kind = instruction.opname
            symbol = instruction.argrepr if kind in ("BINARY_OP", "COMPARE_OP") else kind
            name = _OPERATORS.get(symbol.removeprefix("bool(").rstrip("=)") or "==")
            return f"operator.{name}" if name else ""
    return ""


def _names_of_call(code: CodeType, offset: int) -> list[str]:
    """Return the names that a call is written with, ``["np", "array"]``; an empty first one stands
    for an expression."""
    if len(code.co_code) > MAX_CODE or offset < 0:
        return []
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= offset:
            break
        before.append(instruction)
    else:
        return []
    if instruction.offset != offset or instruction.opname not in _CALLS:
        return []
    start = _start(instruction)
    if start is None:
        return []
    names: list[str] = []
    for each in before:
        whole = each.positions == instruction.positions  # a part of the same call
        if _start(each) != start or whole or each.opname in _STACK:
            continue
        if each.opname.startswith(_ATTRIBUTES) and isinstance(each.argval, str):
            names = [*(names or [""]), each.argval]
        elif each.opname.startswith(_NAMES) and isinstance(each.argval, str):
            names = [each.argval]
        else:
            names = [""]
    return names


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Return where an instruction's expression begins in the source: line and column."""
    place = instruction.positions
    if place is None or place.lineno is None or place.col_offset is None:
        return None
    return place.lineno, place.col_offset
