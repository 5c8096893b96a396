"""Hints about how the model runs: validation with gradients, and training on several GPUs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from advisor.lint.source import Function, Hint, Script, is_method, is_occasional, names_in, position

_EVAL = re.compile(
    r"(?:^|_)(?:eval\w*|valid\w*|val|test|infer\w*|predict\w*)(?:$|_)", re.IGNORECASE
)
_NO_GRAD = {
    "torch.no_grad",
    "torch.inference_mode",
    "no_grad",
    "inference_mode",
    "torch.set_grad_enabled",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
}
_DDP = {"torch.nn.parallel.DistributedDataParallel", "DistributedDataParallel", "DDP"}
_DP = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "DataParallel"}


def check_evaluation(source: Script) -> Iterator[Hint]:
    """Loops over validation data outside ``no_grad``."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.For | ast.AsyncFor) or not _is_evaluation(source, node):
            continue
        if _without_grad(source, node) or any(
            isinstance(inner, ast.With | ast.AsyncWith) and _disables_grad(source, inner)
            for inner in ast.walk(node)
        ):
            continue
        function = next((n for n in source.ancestors(node) if isinstance(n, Function)), None)
        if function is not None and _EVAL.search(function.name):
            code = f"@torch.inference_mode()\ndef {function.name}(...):"
        else:
            code = f"with torch.inference_mode():\n    {source.text_of(node).splitlines()[0]}"
        yield Hint(
            id="eval-with-grad",
            title="Validation without torch.inference_mode()",
            why="every forward pass keeps its activations for a backward pass that does not follow",
            fix="Run it under torch.inference_mode() or torch.no_grad().",
            code=code,
            confirmed_by="eval-without-no-grad",
            **position(node),
        )


def _is_evaluation(source: Script, loop: ast.For | ast.AsyncFor) -> bool:
    """A loop over a loader, in a function or over a name that means validation, that calls a model
    and runs no backward pass."""
    over = " ".join(
        names_in(loop.iter)
        | {node.attr for node in ast.walk(loop.iter) if isinstance(node, ast.Attribute)}
    )
    if not re.search(r"loader|dataset|batches|_dl\b|iterator", over, re.IGNORECASE):
        return False
    named = any(_EVAL.search(word) for word in over.split())
    for outer in source.ancestors(loop):
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
    """``model(x)``, ``net(x)``, ``self.model(x)``: common names of models."""
    if isinstance(func, ast.Name):
        return bool(re.search(r"model|net|encoder|decoder|backbone", func.id, re.IGNORECASE))
    return (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "self"
        and bool(re.search(r"model|net$", func.attr, re.IGNORECASE))
    )


def _without_grad(source: Script, node: ast.AST) -> bool:
    for outer in source.ancestors(node):
        if isinstance(outer, ast.With | ast.AsyncWith) and _disables_grad(source, outer):
            return True
        if isinstance(outer, Function):
            for decorator in outer.decorator_list:
                func = decorator.func if isinstance(decorator, ast.Call) else decorator
                if source.qualified_name(func) in _NO_GRAD:
                    return True
    return any(
        source.qualified_name(call.func) in {"torch.set_grad_enabled", "torch._C._set_grad_enabled"}
        for call in source.calls
    )


def _disables_grad(source: Script, node: ast.With | ast.AsyncWith) -> bool:
    for item in node.items:
        expr = item.context_expr
        func = expr.func if isinstance(expr, ast.Call) else expr
        if source.qualified_name(func) in _NO_GRAD:
            return True
    return False


def check_parallel(source: Script) -> Iterator[Hint]:
    """``DataParallel``, and accumulation that reduces gradients after every micro-batch."""
    for call in source.calls:
        if source.qualified_name(call.func) in _DP:
            yield _data_parallel(source, call)
    if not any(is_method(call, "no_sync", "accumulate") for call in source.calls):
        yield from _accumulation(source)


def _data_parallel(source: Script, call: ast.Call) -> Hint:
    model = source.text_of(call.args[0]) if len(call.args) == 1 else "model"
    return Hint(
        id="data-parallel",
        title="torch.nn.DataParallel",
        why=(
            "one process drives all GPUs: every step it copies the model to each, gathers all "
            "outputs on the first, and runs Python on one core"
        ),
        fix=(
            "Use DistributedDataParallel with one process per GPU, started by torchrun: "
            "init_process_group(), local_rank from the environment, a DistributedSampler."
        ),
        code=f"DistributedDataParallel({model}, device_ids=[local_rank])",
        confirmed_by="data-parallel",
        **position(call),
    )


def _accumulation(source: Script) -> Iterator[Hint]:
    model = _wrapped_model(source)
    if model is None:
        return
    for loop in source.training_loops:
        condition = _step_condition(loop)
        backward = [
            n for n in ast.walk(loop) if is_method(n, "backward") and source.loop_around(n) is loop
        ]
        if condition is None or not backward:
            continue
        statement = source.statement(backward[0])
        if statement is None or statement not in loop.body:
            continue
        yield Hint(
            id="accumulation-without-no-sync",
            title="Gradients are reduced across ranks after every micro-batch",
            why="only the last micro-batch before optimizer.step() has to reduce them",
            fix="Run forward and backward of the other micro-batches under model.no_sync().",
            code=(
                f"with contextlib.nullcontext() if {source.text_of(condition)} else "
                f"{model}.no_sync():\n    ...   # forward and backward, both"
            ),
            confirmed_by="missing-no-sync",
            **position(backward[0]),
        )


def _wrapped_model(source: Script) -> str | None:
    """Name of the variable that holds a DistributedDataParallel."""
    for call in source.calls:
        if source.qualified_name(call.func) in _DDP:
            statement = source.statement(call)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                return statement.targets[0].id
    return None


def _step_condition(loop: ast.AST) -> ast.expr | None:
    """The condition, with a remainder, under which the optimizer steps."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and is_occasional(node.test):
            for inner in node.body:
                for call in ast.walk(inner):
                    if is_method(call, "step") and not (call.args or call.keywords):
                        return node.test
    return None
