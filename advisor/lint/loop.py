"""Hints about the training loop: waits for the GPU, graphs kept alive, and debug settings."""

import ast
import re
from collections.abc import Iterator

from advisor.core.cgroup import count_cores
from advisor.lint.script import (
    Hint,
    Loop,
    Script,
    find_keyword,
    hint_position,
    is_constant,
    is_method,
    names_in,
)

LOG_INTERVAL = 50
"""Number of steps between two logs, in suggested code."""
_COSTLY_CALLS = {
    "torch.cuda.empty_cache": (
        "empty-cache-in-loop",
        "the allocator returns its memory and has to ask for it again, which stalls the GPU",
        "empty-cache-in-loop",
    ),
    "torch.cuda.synchronize": (
        "synchronize-in-loop",
        "the host waits for the GPU, and the GPU then waits for the host",
        "explicit-synchronize",
    ),
    "gc.collect": (
        "collect-in-loop",
        "a full collection looks at every object of the process",
        "gc-pauses",
    ),
}


def check_loop(source: Script) -> Iterator[Hint]:
    """Check the calls in a training loop's body that run in every step."""
    reported: set[ast.stmt] = set()
    for call in source.calls:
        loop = source.in_training_loop(call)
        if loop is None:
            continue
        yield from _check_costly_call(source, call)
        statement = source.statement(call)
        sync = _describe_sync(call, loop)
        is_waiting = sync and _GPU_WORDS.search(source.text)
        if is_waiting and statement is not None and statement not in reported:
            reported.add(statement)
            yield _sync_hint(source, call, statement, sync)
        yield from _check_defaults(call)
        yield from _check_append(source, call, loop)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield from _check_sum(source, node)


def _check_costly_call(source: Script, call: ast.Call) -> Iterator[Hint]:
    entry = _COSTLY_CALLS.get(source.qualified_name(call.func))
    if entry is None:
        return
    hint_id, why, rule = entry
    yield Hint(
        id=hint_id,
        title=f"{source.text_of(call)[:60]} in every step",
        why=why,
        fix="Move it out of the loop.",
        confirmed_by=rule,
        **hint_position(call),
    )


# -- reads of GPU values ------------------------------------------------------------------------


_GPU_WORDS = re.compile(r"(?i)\b(?:cuda|hip|rocm|xpu|mps|device\w*|\w*accelerat\w+|fabric)\b")
"""Pattern of the words in programs that use a GPU."""


def _describe_sync(call: ast.Call, loop: Loop) -> str:
    """Return how a call waits for a GPU value. Empty if the source does not show that it waits."""
    if is_method(call, "item", "tolist", "numpy", "cpu") and not call.args:
        assert isinstance(call.func, ast.Attribute)
        return f".{call.func.attr}()"
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    tensors = _loss_names(loop)
    if name in {"float", "int", "bool"} and len(call.args) == 1:
        return f"{name}()" if _is_tensor(call.args[0], tensors) else ""
    if name == "print" and any(
        _is_tensor(part, tensors) for value in call.args for part in _printed_values(value)
    ):
        return "print()"
    return ""


def _printed_values(value: ast.expr) -> list[ast.expr]:
    """Return the values that an argument of print shows: itself, or an f-string's parts."""
    if isinstance(value, ast.JoinedStr):
        return [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
    return [value]


def _is_tensor(node: ast.expr, tensors: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in tensors


def _loss_names(loop: Loop) -> set[str]:
    """Return the names with a ``.backward()`` call in the loop, which must be tensors."""
    names = set()
    for node in ast.walk(loop):
        if is_method(node, "backward") and isinstance(node.func, ast.Attribute):
            names |= names_in(node.func.value) if isinstance(node.func.value, ast.Name) else set()
            # scaler.scale(loss).backward()
            if isinstance(node.func.value, ast.Call):
                names |= {a.id for a in node.func.value.args if isinstance(a, ast.Name)}
    return names


def _sync_hint(source: Script, call: ast.Call, statement: ast.stmt, sync: str) -> Hint:
    fix = f"Read it every {LOG_INTERVAL} steps, or keep it on the GPU until the epoch ends."
    code = f"if step % {LOG_INTERVAL} == 0:   # with a step counter\n    ..."
    if sync == ".item()" and not isinstance(statement, ast.Expr):
        assert isinstance(call.func, ast.Attribute)
        fix = "Sum on the GPU with .detach(), and read the sum once after the loop."
        code = f"{source.text_of(call.func.value)}.detach()"
    return Hint(
        id="sync-in-loop",
        title=f"{sync} in every step: {source.text_of(statement).splitlines()[0][:60]}",
        why=(
            "the host waits until the GPU has computed the value, and cannot launch ahead; a value "
            "on the CPU costs nothing"
        ),
        fix=fix,
        code=code,
        confirmed_by="implicit-sync",
        **hint_position(call),
    )


# -- graphs kept alive --------------------------------------------------------------------------


def _check_sum(source: Script, node: ast.AugAssign) -> Iterator[Hint]:
    loop = source.in_training_loop(node)
    if loop is None or not isinstance(node.target, ast.Name | ast.Attribute):
        return
    tensors = _loss_names(loop)
    value = node.value
    if isinstance(node.target, ast.Name) and node.target.id in tensors:
        return  # several losses are summed up for one backward pass
    added = value if isinstance(value, ast.Name) else None
    if isinstance(value, ast.BinOp):
        operands = [
            operand for operand in (value.left, value.right) if isinstance(operand, ast.Name)
        ]
        added = next((operand for operand in operands if operand.id in tensors), None)
    if added is None or added.id not in tensors:
        return
    yield _kept_graph_hint(
        added, f"{source.text_of(node)[:60]} keeps the graph of every step alive"
    )


def _check_append(source: Script, call: ast.Call, loop: Loop) -> Iterator[Hint]:
    if is_method(call, "append") and len(call.args) == 1:
        value = call.args[0]
        if isinstance(value, ast.Name) and value.id in _loss_names(loop):
            title = f"{source.text_of(call)[:60]} keeps the graph of every step alive"
            yield _kept_graph_hint(value, title)


def _kept_graph_hint(value: ast.Name, title: str) -> Hint:
    return Hint(
        id="loss-keeps-graph",
        title=title,
        why="the loss refers to the graph that made it, so memory grows from step to step",
        fix="Detach it first. .item() works as well, but waits for the GPU.",
        code=f"{value.id}.detach()",
        confirmed_by="memory-leak",
        **hint_position(value),
    )


def _check_defaults(call: ast.Call) -> Iterator[Hint]:
    """Check for ``backward(retain_graph=True)`` and ``zero_grad(set_to_none=False)``."""
    for method, name, value, why, rule in (
        (
            "backward",
            "retain_graph",
            True,
            "the graph's buffers stay until the next step; only a second backward pass needs them",
            "memory-near-capacity",
        ),
        (
            "zero_grad",
            "set_to_none",
            False,
            "gradients are zeroed and added to instead of being written",
            "",
        ),
    ):
        argument = find_keyword(call, name)
        if is_method(call, method) and is_constant(argument, value):
            assert argument is not None
            yield Hint(
                id=f"{method.replace('_', '-')}-{name.replace('_', '-')}",
                title=f"{method}({name}={value})",
                why=why,
                fix=f"Leave {name} at its default.",
                code=f"{method}()",
                confirmed_by=rule,
                **hint_position(call),
            )


# -- settings -----------------------------------------------------------------------------------


_VARYING_BATCHES = re.compile(
    r"(?:^|\.)(?:pad_sequence|pack_sequence|DataCollator\w*(?:Padding|Seq2Seq|TokenClassification)"
    r"|\w*[Bb]ucket\w*(?:Sampler|Iterator|_by_\w+)|as_nested_tensor|nested_tensor)$"
)
"""Pattern of the functions that make batches of varying length."""
_RANDOM_NUMBERS = {"randint", "randrange", "choice", "integers"}
_SIZED_TENSORS = {"rand", "randn", "randint", "zeros", "ones", "empty", "full", "pad"}
_THREAD_SETTERS = {"torch.set_num_threads", "torch.set_num_interop_threads"}


def _environment_settings(
    source: Script, *names: str
) -> Iterator[tuple[ast.Call | ast.Assign, ast.expr]]:
    """Yield the nodes that set one of these environment variables, and the values."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
            sets_variable = source.qualified_name(target.value) == "os.environ"
            if sets_variable and is_constant(target.slice, *names):
                yield node, node.value
        elif isinstance(node, ast.Call) and len(node.args) == 2:
            sets_variable = source.qualified_name(node.func) in {
                "os.environ.setdefault",
                "os.putenv",
            }
            if sets_variable and is_constant(node.args[0], *names):
                yield node, node.args[1]


def _check_threads(source: Script) -> Iterator[Hint]:
    """Check for a literal number of threads above this machine's number of cores."""
    setters: list[tuple[ast.Call | ast.Assign, ast.expr | None]] = [
        (call, call.args[0])
        for call in source.calls
        if source.qualified_name(call.func) in _THREAD_SETTERS and call.args
    ]
    for node, value in [
        *setters,
        *_environment_settings(source, "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    ]:
        text = str(value.value) if isinstance(value, ast.Constant) else ""
        if not text.isdecimal() or int(text) <= count_cores():
            continue
        yield Hint(
            id="too-many-threads",
            title=f"{source.text_of(node)[:60]}: this machine has {count_cores()} cores",
            why="more threads than cores wait for each other in every operator",
            fix="Leave the number to PyTorch, which takes the cores that the process may use.",
            code="torch.set_num_threads(len(os.sched_getaffinity(0)))",
            confirmed_by="thread-oversubscription",
            **hint_position(node),
        )


def _lengths_vary(source: Script) -> bool:
    """Return whether the file makes batches as long as their longest sample or of random length."""
    for call in source.calls:
        padding = find_keyword(call, "padding")
        if is_constant(padding, "max_length") or find_keyword(call, "pad_to_multiple_of"):
            continue
        if _VARYING_BATCHES.search(source.qualified_name(call.func)) or is_constant(
            padding, True, "longest"
        ):
            return True
        name = source.qualified_name(call.func).rpartition(".")[2]
        sizes = [part for arg in call.args for part in getattr(arg, "elts", [arg])]
        if name in _SIZED_TENSORS and any(_varies(source, size) for size in sizes):
            return True
    return any(
        _varies(source, bound)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Slice)
        for bound in (node.lower, node.upper)
    )


def _varies(source: Script, size: ast.expr | None, depth: int = 3) -> bool:
    """Return whether a length is a maximum or random, or a name or sum of such lengths."""
    if size is None or not depth:
        return False
    for node in ast.walk(size):
        if isinstance(node, ast.Call):
            name = source.qualified_name(node.func).rpartition(".")[2]
            if (
                name in _RANDOM_NUMBERS
                or is_method(node, "max")
                or (name == "max" and _takes_lengths(node))
            ):
                return True
        elif isinstance(node, ast.Name) and any(
            _varies(source, value, depth - 1) for value in source.assignments_to(node)
        ):
            return True
    return False


def _takes_lengths(call: ast.Call) -> bool:
    """Return whether ``max`` takes lengths: ``max(len(x) for x in batch)``, ``max(lengths)``."""
    names = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    return any(
        name in {"len", "shape", "size"} or "len" in name.lower()
        for name in names | names_in(call) - {"max"}
    )


def check_settings(source: Script) -> Iterator[Hint]:
    """Check for anomaly detection, blocking launches, more threads than cores, and torch.compile,
    either in the loop or for one shape where lengths vary."""
    yield from _check_threads(source)
    for call in source.calls:
        name = source.qualified_name(call.func)
        if name == "torch.autograd.detect_anomaly" or (
            name == "torch.autograd.set_detect_anomaly"
            and any(is_constant(arg, True) for arg in call.args)
        ):
            yield Hint(
                id="anomaly-mode",
                title="Anomaly detection is on",
                why="it keeps the stack of every operation and checks every gradient for NaN",
                fix="Turn it on only while you look for an error.",
                confirmed_by="debug-switches",
                **hint_position(call),
            )
        elif is_constant(find_keyword(call, "dynamic"), False) and (
            name == "torch.compile" or is_method(call, "compile")
        ):
            if _lengths_vary(source):
                yield Hint(
                    id="compile-static-shapes",
                    title=f"{source.text_of(call)[:60]}, and lengths vary",
                    why="each new shape compiles again, until torch gives up and runs uncompiled",
                    fix="Leave dynamic at its default, or pad to a few lengths.",
                    code="torch.compile(..., dynamic=None)   # or pad to a multiple of 64",
                    confirmed_by="recompilation",
                    **hint_position(call),
                )
        elif name == "torch.compile" and source.in_training_loop(call) is not None:
            yield Hint(
                id="compile-in-loop",
                title="torch.compile in the training loop",
                why="each step compiles a new function, which looks up its graph again",
                fix="Compile once, before the loop.",
                confirmed_by="recompilation",
                **hint_position(call),
            )
    for node, value in _environment_settings(source, "CUDA_LAUNCH_BLOCKING"):
        if is_constant(value, "1"):
            yield Hint(
                id="launch-blocking",
                title="CUDA_LAUNCH_BLOCKING=1",
                why="the host waits for every kernel, so nothing overlaps",
                fix="Set it only while you look for an error.",
                confirmed_by="debug-switches",
                **hint_position(node),
            )
