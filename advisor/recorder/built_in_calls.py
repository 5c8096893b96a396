"""Name of the C function that a frame is calling, because C functions have no frame.

The frame's current instruction is a call, and the instructions that load its function begin at the
same source position. This runs no code of the program, and reads no attribute of its objects."""

import dis
import functools
import sys
import time
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_MAX_CODE = 1 << 14
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
_SETS = ("set", "frozenset", "<setcomp>")
_TABLES = ("dict", "defaultdict", "Counter", "OrderedDict", "<dictcomp>")
MAX_FUNCTIONS, MAX_OWNED, _MAX_BEFORE = 12, 200, 8
"""Maximum number of functions that are searched for tests, of methods of a file that make its
attributes, and of instructions before a test that load its container."""
_WRAPPERS = (FunctionType, classmethod, staticmethod, functools._lru_cache_wrapper)
"""Types whose ``__wrapped__`` is no code of the program."""
YIELD_SECONDS = 2e-4
"""Sleep between two functions, s, so that the training thread does not wait for the interpreter."""
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
    if len(code.co_code) > _MAX_CODE:
        return []
    inner = [part for part in code.co_consts if type(part) is CodeType]
    names = dict.fromkeys(name for part in inner for name in used_names(part))
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
            names[name, position.lineno] = None
    return list(names)


def membership_tests(code: CodeType, names: dict[str, Any]) -> list[tuple[CodeType, int]]:
    """Return the tests ``x in items`` in a function and in functions of its file that it calls, as
    code and line. ``names`` are the globals of its file. Tests of constants, and of containers that
    the file makes as a set or a dictionary, are left out: they are quick."""
    codes = [code]
    tables, rows = _made_tables(code, names)
    result: list[tuple[CodeType, int]] = []
    for each in codes:
        result += [(each, line) for line in _slow_tests(each, names, tables, rows)]
        parts = [part for part in each.co_consts if type(part) is CodeType]
        called = [find_in_file(names, name) for name, _ in used_names(each)]
        parts += [function.__code__ for function in called if type(function) is FunctionType]
        for part in parts:
            is_here = part.co_filename == code.co_filename and part not in codes
            if is_here and len(codes) < MAX_FUNCTIONS and len(part.co_code) <= _MAX_CODE:
                codes.append(part)
    return list(dict.fromkeys(result))


def find_in_file(names: dict[str, Any], name: str) -> Any:
    """Return a file's function, or the method of that name if one of its classes has it."""
    if name in names:
        return names[name]
    owners = [owner for owner in _classes_of_file(names) if name in _own_attributes(owner)]
    return find_function(owners[0], name) if len(owners) == 1 else None


_own_attributes = type.__dict__["__dict__"].__get__
_bases_in_order = type.__dict__["__mro__"].__get__
"""``vars(kind)`` and ``kind.__mro__`` without code of a metaclass."""


def _classes_of_file(names: dict[str, Any]) -> list[type]:
    """Return the classes that a file with these globals defines."""
    classes = [value for value in list(names.values()) if issubclass(type(value), type)]
    file = names.get("__name__")
    return [kind for kind in classes if _own_attributes(kind).get("__module__") == file]


def find_function(kind: type, name: str) -> FunctionType | None:
    """Return a method of a class, without decorators such as ``torch.no_grad``."""
    for base in _bases_in_order(kind)[:-1]:
        if name in _own_attributes(base):
            function = _own_attributes(base)[name]
            if type(function) in _WRAPPERS:
                function = getattr(function, "__wrapped__", function)
            return function if type(function) is FunctionType else None
    return None


def _made_tables(code: CodeType, names: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names of variables and attributes that a file's methods or a function make as sets
    or dictionaries, and of those whose items are sets."""
    codes = [code]
    for owner in _classes_of_file(names):
        functions = (find_function(owner, name) for name in list(_own_attributes(owner)))
        codes += [each.__code__ for each in functions if each is not None]
    tables: set[str] = set()
    rows: set[str] = set()
    for each in codes[:MAX_OWNED]:
        if len(each.co_code) > _MAX_CODE:
            continue
        time.sleep(YIELD_SECONDS)
        table_line = sets = 0  # the last lines that make a table, and a set
        for instruction in dis.get_instructions(each):
            position = instruction.positions
            line = 0 if position is None else position.lineno or 0
            value = instruction.argval
            name = value.co_name if type(value) is CodeType else _last_name(instruction)
            if name in _SETS or instruction.opname in ("BUILD_SET", "SET_ADD"):
                table_line = sets = line
            elif name in _TABLES or instruction.opname in ("BUILD_MAP", "MAP_ADD"):
                table_line = line
            elif instruction.opname.startswith("STORE_"):
                tables |= {name} if table_line == line else set()
                rows |= {name} if sets == line else set()
    return tables, rows


def _slow_tests(
    code: CodeType, names: dict[str, Any], tables: set[str], rows: set[str]
) -> Iterator[int]:
    """Yield the lines of a code's tests ``x in items`` that may look through all items."""
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NEUTRAL_OPS:
            continue
        if instruction.opname == "CONTAINS_OP" and before and instruction.positions is not None:
            container = before[-1]
            known = tables
            if container.opname.startswith("BINARY_SUBSCR"):
                known = rows
                loads = [i for i in before if i.opname.startswith(_ATTRIBUTE_OPS)]
                container = loads[-1] if loads else container
            name = _last_name(container)
            is_variable = container.opname.startswith((*_VARIABLE_OPS, *_ATTRIBUTE_OPS))
            if container.opname.startswith("LOAD_GLOBAL"):
                is_variable = type(names.get(name)) in (list, tuple)
            if is_variable and name not in known and instruction.positions.lineno is not None:
                yield instruction.positions.lineno
        before = [*before, instruction][-_MAX_BEFORE:]


def _last_name(instruction: dis.Instruction) -> str:
    """Return the name that an instruction uses: the last one, if newer versions join two."""
    value = instruction.argval
    return str(value[-1] if type(value) is tuple and value else value)


def _instructions_to(code: CodeType, offset: int) -> list[dis.Instruction]:
    """Return the instructions up to the one at ``offset``, empty if none is there."""
    if len(code.co_code) > _MAX_CODE or offset < 0:
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
