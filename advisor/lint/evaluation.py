"""Hints about validation: gradients that nobody needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from advisor.lint.hint import Hint, place
from advisor.lint.source import Function, Script, is_method, names_in

_EVAL = re.compile(
    r"(?:^|_)(?:eval\w*|valid\w*|val|test|infer\w*|predict\w*)(?:$|_)", re.IGNORECASE
)
_OFF = {
    "torch.no_grad",
    "torch.inference_mode",
    "no_grad",
    "inference_mode",
    "torch.set_grad_enabled",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
}


def check(source: Script) -> Iterator[Hint]:
    """Loops over validation data outside ``no_grad``."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.For | ast.AsyncFor) or not _is_evaluation(source, node):
            continue
        if _without_grad(source, node) or any(
            isinstance(inner, ast.With | ast.AsyncWith) and _turns_off(source, inner)
            for inner in ast.walk(node)
        ):
            continue
        function = next((n for n in source.around(node) if isinstance(n, Function)), None)
        own = function is not None and _EVAL.search(function.name)
        if own and function is not None:
            code = f"@torch.inference_mode()\ndef {function.name}(...):"
        else:
            code = f"with torch.inference_mode():\n    {source.of(node).splitlines()[0]}"
        yield Hint(
            id="eval-with-grad",
            title="Validation without torch.inference_mode()",
            why="every forward pass keeps its activations for a backward pass that never comes",
            fix="Put it under torch.inference_mode(), or torch.no_grad().",
            code=code,
            confirmed_by="eval-without-no-grad",
            **place(node),
        )


def _is_evaluation(source: Script, loop: ast.For | ast.AsyncFor) -> bool:
    """A loop over a loader, in a function or over a name that says validation, that calls a model
    and never goes backward."""
    over = " ".join(
        names_in(loop.iter)
        | {node.attr for node in ast.walk(loop.iter) if isinstance(node, ast.Attribute)}
    )
    if not re.search(r"loader|dataset|batches|_dl\b|iterator", over, re.IGNORECASE):
        return False
    named = any(_EVAL.search(word) for word in over.split())
    for outer in source.around(loop):
        if isinstance(outer, Function):
            named = named or bool(_EVAL.search(outer.name))
            break
    if not named:
        return False
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    if any(is_method(call, "backward", "step") for call in calls):
        return False
    return any(_calls_model(call.func) for call in calls)


def _calls_model(func: ast.expr) -> bool:
    """``model(x)``, ``net(x)``, ``self.model(x)``: what people call their models."""
    if isinstance(func, ast.Name):
        return bool(re.search(r"model|net|encoder|decoder|backbone", func.id, re.IGNORECASE))
    return (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "self"
        and bool(re.search(r"model|net$", func.attr, re.IGNORECASE))
    )


def _without_grad(source: Script, node: ast.AST) -> bool:
    for outer in source.around(node):
        if isinstance(outer, ast.With | ast.AsyncWith) and _turns_off(source, outer):
            return True
        if isinstance(outer, Function):
            for decorator in outer.decorator_list:
                func = decorator.func if isinstance(decorator, ast.Call) else decorator
                if source.dotted(func) in _OFF:
                    return True
    return any(
        source.dotted(call.func) in {"torch.set_grad_enabled", "torch._C._set_grad_enabled"}
        for call in source.calls
    )


def _turns_off(source: Script, node: ast.With | ast.AsyncWith) -> bool:
    for item in node.items:
        expr = item.context_expr
        func = expr.func if isinstance(expr, ast.Call) else expr
        if source.dotted(func) in _OFF:
            return True
    return False
