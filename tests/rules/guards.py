"""Find the condition of a rule that ended its search: run the rule's own source with its ``if``s
recorded."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from advisor.core.finding import Finding
from advisor.core.rule import Rule

NO_GAIN = "no gain"
"""The rule fires, and the engine estimates no gain."""


class _GuardRecorder(ast.NodeTransformer):
    """Every condition of an ``if``, part by part, goes through ``_guard(text, value)``."""

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if not _guards_only_checks(node):
            node.test = self._record(node.test)
        return node

    def _record(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self._record(value) for value in test.values]
            return test
        named = next((x for x in ast.walk(test) if isinstance(x, ast.NamedExpr)), None)
        if named is not None:  # a name bound in a call's argument would be the same: leave it
            return test
        text = ast.Constant(ast.unparse(test))
        return ast.Call(ast.Name("_guard", ast.Load()), [text, test], [])


def _guards_only_checks(node: ast.If) -> bool:
    """Return whether an ``if`` only decides on a ``PassedCheck`` or ``SkippedCheck``: it guards no
    finding."""
    inside = [part for line in node.body for part in ast.walk(line)]
    yields = [part.value for part in inside if isinstance(part, ast.Yield)]
    leaves = any(isinstance(part, ast.Return | ast.Continue | ast.Break) for part in inside)
    return bool(yields and not leaves and not node.orelse) and all(
        isinstance(item, ast.Call) and ast.unparse(item.func) in {"PassedCheck", "SkippedCheck"}
        for item in yields
    )


_notes: list[str] = []


def _record_guard(text: str, value: object) -> object:
    _notes.append(text)
    return value


@cache
def _instrument(module: str) -> dict[str, Any]:
    source = inspect.getsource(sys.modules[module])
    tree = ast.fix_missing_locations(_GuardRecorder().visit(ast.parse(source)))
    names = {"__name__": module, "_guard": _record_guard}
    exec(compile(tree, module, "exec"), names)
    return names


@cache
def _instrumented_rule(cls: type[Rule]) -> type[Rule]:
    """The rule with its conditions noted, those of a family's check in another file too."""
    instrumented: type[Rule] = _instrument(cls.__module__)[cls.__name__]
    bases = [base for base in cls.__mro__ if base.__module__.startswith("advisor.rules.")]
    inherited: dict[str, Any] = {}
    for base in reversed(bases):
        if base.__module__ != cls.__module__:
            noted = _instrument(base.__module__)[base.__name__]
            inherited |= {
                name: value for name, value in vars(noted).items() if inspect.isfunction(value)
            }
    missing = {name: value for name, value in inherited.items() if not _defines(instrumented, name)}
    return type(cls.__name__, (instrumented,), {**missing, "__module__": cls.__module__})


def _defines(cls: type[Rule], name: str) -> bool:
    """The class, or one of its own file above it, has a method of that name."""
    return any(name in vars(base) for base in cls.__mro__ if base.__module__ == cls.__module__)


def guard_of(rule: Rule, subject: Any) -> str:
    """Return the last condition a rule evaluated before it ended without a finding, or
    :data:`NO_GAIN` if it found something. ``subject`` is the argument of ``check``."""
    twin = _instrumented_rule(type(rule))()
    _notes.clear()
    outcomes = list((twin.check_run if rule.across_ranks else twin.check)(subject))
    if any(isinstance(outcome, Finding) for outcome in outcomes):
        return NO_GAIN
    return _notes[-1] if _notes else ""


def fires_without_threshold(rule: Rule, name: str, subject: Any) -> bool:
    """Whether a rule fires once a threshold lets everything through: any amount at all is enough,
    or none is too much."""
    for anything in (1e-12, 1e15):
        setattr(rule, name, anything)
        try:
            outcomes = list((rule.check_run if rule.across_ranks else rule.check)(subject))
        except (TypeError, ValueError, OverflowError):  # a count that is no whole number
            continue
        finally:
            delattr(rule, name)
        if any(isinstance(outcome, Finding) for outcome in outcomes):
            return True
    return False
