"""Hints about the body of the training loop: waits for the device, and graphs kept alive."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.lint.hint import Hint, place
from advisor.lint.source import (
    Loop,
    Script,
    is_constant,
    is_method,
    keyword,
    names_in,
)

EVERY = 50
"""Steps between two logs, in what is suggested."""
_CALLS = {
    "torch.cuda.empty_cache": (
        "empty-cache-in-loop",
        "the allocator gives its memory back and has to ask for it again, which stops the device",
        "empty-cache-in-loop",
    ),
    "torch.cuda.synchronize": (
        "synchronize-in-loop",
        "the host waits for the device, and the device then waits for the host",
        "explicit-synchronize",
    ),
    "gc.collect": (
        "collect-in-loop",
        "a full collection looks at every object of the process",
        "gc-pauses",
    ),
}


def check(source: Script) -> Iterator[Hint]:
    """What is done in every step."""
    seen: set[ast.stmt] = set()
    for call in source.calls:
        loop = source.in_training_loop(call)
        if loop is None:
            continue
        yield from _forbidden(source, call)
        statement = source.statement(call)
        what = _reads_device(source, call, loop)
        if what and statement is not None and statement not in seen:
            seen.add(statement)
            yield _sync(source, call, statement, what)
        yield from _backward(source, call)
        yield from _append(source, call, loop)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield from _sum(source, node)


def _forbidden(source: Script, call: ast.Call) -> Iterator[Hint]:
    known = _CALLS.get(source.dotted(call.func))
    if known is None:
        return
    identifier, why, rule = known
    yield Hint(
        id=identifier,
        title=f"{source.of(call)[:60]} in every step",
        why=why,
        fix="Take it out of the loop.",
        confirmed_by=rule,
        **place(call),
    )


# -- reading values of the device ---------------------------------------------------------------


def _reads_device(source: Script, call: ast.Call, loop: Loop) -> str:
    """How a call waits for a value of the device; empty: it does not, as far as can be told."""
    if is_method(call, "item", "tolist", "numpy", "cpu") and not call.args:
        assert isinstance(call.func, ast.Attribute)
        return f".{call.func.attr}()"
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    tensors = _losses(loop)
    if name in {"float", "int", "bool"} and len(call.args) == 1:
        return f"{name}()" if _is_tensor(call.args[0], tensors) else ""
    if name == "print" and any(
        _is_tensor(part, tensors) for value in call.args for part in _shown(value)
    ):
        return "print()"
    return ""


def _shown(value: ast.expr) -> list[ast.expr]:
    """What an argument of print shows: itself, or the parts of an f-string."""
    if isinstance(value, ast.JoinedStr):
        return [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
    return [value]


def _is_tensor(node: ast.expr, tensors: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in tensors


def _losses(loop: Loop) -> set[str]:
    """Names on which ``.backward()`` is called in the loop: tensors for sure."""
    found = set()
    for node in ast.walk(loop):
        if is_method(node, "backward") and isinstance(node.func, ast.Attribute):
            found |= names_in(node.func.value) if isinstance(node.func.value, ast.Name) else set()
            # scaler.scale(loss).backward()
            if isinstance(node.func.value, ast.Call):
                found |= {a.id for a in node.func.value.args if isinstance(a, ast.Name)}
    return found


def _sync(source: Script, call: ast.Call, statement: ast.stmt, what: str) -> Hint:
    fix = f"Do it every {EVERY} steps, or keep the value on the device until the epoch's end."
    code = f"if step % {EVERY} == 0:   # where the loop counts its steps\n    ..."
    if what == ".item()" and not isinstance(statement, ast.Expr):
        assert isinstance(call.func, ast.Attribute)
        fix = "Sum on the device with .detach(), and read the sum once after the loop."
        code = f"{source.of(call.func.value)}.detach()"
    return Hint(
        id="sync-in-loop",
        title=f"{what} in every step: {source.of(statement).splitlines()[0][:60]}",
        why=(
            "the host waits until the device has computed the value, and cannot launch ahead; "
            "a value that is on the CPU already costs nothing"
        ),
        fix=fix,
        code=code,
        confirmed_by="implicit-sync",
        **place(call),
    )


# -- graphs kept alive --------------------------------------------------------------------------


def _sum(source: Script, node: ast.AugAssign) -> Iterator[Hint]:
    loop = source.in_training_loop(node)
    if loop is None or not isinstance(node.target, ast.Name | ast.Attribute):
        return
    tensors = _losses(loop)
    value = node.value
    if isinstance(node.target, ast.Name) and node.target.id in tensors:
        return  # several losses summed up for one backward
    plain = value if isinstance(value, ast.Name) else None
    if isinstance(value, ast.BinOp):
        sides = [s for s in (value.left, value.right) if isinstance(s, ast.Name)]
        plain = next((s for s in sides if s.id in tensors), None)
    if plain is None or plain.id not in tensors:
        return
    yield _kept(source, plain, f"{source.of(node)[:60]} keeps the graph of every step alive")


def _append(source: Script, call: ast.Call, loop: Loop) -> Iterator[Hint]:
    if is_method(call, "append") and len(call.args) == 1:
        value = call.args[0]
        if isinstance(value, ast.Name) and value.id in _losses(loop):
            title = f"{source.of(call)[:60]} keeps the graph of every step alive"
            yield _kept(source, value, title)


def _kept(source: Script, value: ast.Name, title: str) -> Hint:
    return Hint(
        id="loss-keeps-graph",
        title=title,
        why=("the loss holds on to the graph that made it, so that memory grows from step to step"),
        fix="Detach it first; .item() would do as well, but waits for the device.",
        code=f"{value.id}.detach()",
        confirmed_by="memory-leak",
        **place(value),
    )


def _backward(source: Script, call: ast.Call) -> Iterator[Hint]:
    """``backward(retain_graph=True)`` and ``zero_grad(set_to_none=False)``."""
    for method, name, value, why, rule in (
        (
            "backward",
            "retain_graph",
            True,
            "the buffers of the graph stay until the next step; needed only to go backward twice",
            "memory-near-capacity",
        ),
        (
            "zero_grad",
            "set_to_none",
            False,
            "gradients are filled with zeros and added to, instead of being written",
            "",
        ),
    ):
        given = keyword(call, name)
        if is_method(call, method) and is_constant(given, value):
            assert given is not None
            yield Hint(
                id=f"{method.replace('_', '-')}-{name.replace('_', '-')}",
                title=f"{method}({name}={value})",
                why=why,
                fix=f"Leave {name} at its default.",
                code=f"{method}()",
                confirmed_by=rule,
                **place(call),
            )
