"""Hints, and the parsed source of a program: its tree, names, loops and text."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeGuard

from msgspec import Struct

from advisor.core.errors import AdvisorError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


class Hint(Struct, kw_only=True):
    """A place in a program that may cost time, and the rule that shows whether it does."""

    id: str
    """Stable identifier of the hint."""
    title: str
    """Description of what the code does, in one line."""
    why: str
    """Reason why it may cost time."""
    fix: str
    """Description of what to write instead."""
    confirmed_by: str
    """Identifier of the rule that confirms the cost on a recording. Empty if there is none."""
    line: int
    column: int = 0
    """Column of the code, counted from 0."""
    end_line: int | None = None
    file: str = ""
    code: str | None = None
    """Code of the fix, a line or two to paste, or ``null`` if ``fix`` is enough."""


def hint_position(node: ast.stmt | ast.expr) -> dict[str, Any]:
    """Return the position of a node, as fields of a hint."""
    return {"line": node.lineno, "column": node.col_offset, "end_line": node.end_lineno}


def parse(text: str, name: str) -> Script:
    """Parse Python source. Raises AdvisorError with the line number if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid string escapes in the user's code
            tree = ast.parse(text)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise AdvisorError(f"{name}: not Python: {error.msg}{where}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise AdvisorError(
            f"{name}: cannot be parsed ({str(error) or 'nested too deeply'})"
        ) from None
    return Script(text, name, tree)


class Script:
    """A parsed Python file, with its text."""

    def __init__(self, text: str, name: str, tree: ast.Module) -> None:
        self.text = text
        self.name = name
        self.tree = tree
        self.lines = [line.rstrip("\r\n") for line in split_lines(text)] or [""]

    # -- the tree -----------------------------------------------------------------------------

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            yield node

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the script."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full names of imported names: ``nn`` → ``torch.nn``."""
        aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    if item.asname:
                        aliases[item.asname] = item.name
                    else:
                        aliases[item.name.split(".")[0]] = item.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for item in node.names:
                    aliases[item.asname or item.name] = f"{node.module}.{item.name}"
        return aliases

    def qualified_name(self, node: ast.AST) -> str:
        """Return ``torch.nn.DataParallel`` for ``nn.DataParallel``. Empty if it is not a name."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self.aliases.get(node.id, node.id))
        return ".".join(reversed(parts))

    @cached_property
    def _assignments(self) -> dict[str, list[ast.expr]]:
        """Values assigned to each plain name or attribute, anywhere in the file."""
        result: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            value = getattr(node, "value", None)
            for target in targets:
                assigned = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                for item in assigned:
                    name = self.qualified_name(item)
                    if name and value is not None:
                        result.setdefault(name, []).append(value)
        return result

    def assignments_to(self, node: ast.expr) -> list[ast.expr]:
        """Return the values that the file assigns to a name or attribute (of a tuple part: all)."""
        return self._assignments.get(self.qualified_name(node), [])

    # -- loops --------------------------------------------------------------------------------

    @cached_property
    def training_loops(self) -> list[Loop]:
        """Innermost loops whose body calls ``.backward()``."""
        loops: dict[Loop, None] = {}
        for call in self.calls:
            if is_method(call, "backward"):
                loop = self.loop_around(call)
                if loop is not None:
                    loops[loop] = None
        return list(loops)

    def loop_around(self, node: ast.AST) -> Loop | None:
        """Return the innermost loop of the same function whose body runs the node, or ``None``."""
        inner = node
        for outer in self.ancestors(node):
            if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
                return None
            if isinstance(outer, ast.For | ast.AsyncFor | ast.While) and not (
                inner in outer.orelse or inner is getattr(outer, "iter", None)
            ):
                return outer
            inner = outer
        return None

    def in_training_loop(self, node: ast.AST) -> Loop | None:
        """Return the training loop around a node at any depth. ``None`` if there is none, or if a
        condition on the step or a nested function keeps the node from running in every step."""
        inner: ast.AST = node
        for outer in self.ancestors(node):
            if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
                return None
            if isinstance(outer, ast.If) and inner is not outer.test and is_occasional(outer.test):
                return None
            if isinstance(outer, ast.ExceptHandler):
                return None
            if outer in self.training_loops and isinstance(
                outer, ast.For | ast.AsyncFor | ast.While
            ):
                return None if inner is getattr(outer, "iter", None) else outer
            inner = outer
        return None

    # -- text ---------------------------------------------------------------------------------

    @cached_property
    def _line_starts(self) -> list[int]:
        offsets = [0]
        for line in split_lines(self.text):
            offsets.append(offsets[-1] + len(line))
        return offsets

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text for a line (from 1) and a column (in UTF-8 bytes)."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return self._line_starts[line - 1] + len(text.encode()[:column].decode("utf-8", "ignore"))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the start and end of a node in the text."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost statement around a node or the node itself, or ``None``."""
        if isinstance(node, ast.stmt):
            return node
        return next((n for n in self.ancestors(node) if isinstance(n, ast.stmt)), None)


def split_lines(text: str) -> list[str]:
    """Split text into lines as Python does, keeping line ends. Form feed and U+2028 end no line."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


def is_method(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
    )


def find_keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument, or ``None`` if it is not given."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Return whether a node is a literal with one of these values (``0`` is not ``False``)."""
    return isinstance(node, ast.Constant) and any(
        type(node.value) is type(value) and node.value == value for value in values
    )


def is_occasional(test: ast.expr) -> bool:
    """Return whether a condition holds in some steps only: it has a remainder or names logging."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if "log" in name.lower() or "debug" in name.lower() or "verbose" in name.lower():
                return True
    return False


def names_in(node: ast.AST) -> set[str]:
    """Return the plain names that an expression reads."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
