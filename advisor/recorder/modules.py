"""Hook that times the forwards of outermost modules, by replacing the code of ``Module.__call__``.

The function stays the same object with the same name. It gets other code, which does the same as
the original and also reports a call if no module's call is open. So models have no attributes of
ours (they are copied, pickled, scripted and exported unchanged), torch finds the function that it
expects, and dynamo treats the frame like torch's, with the file name and line of the original.
During an outermost call, the function has its original code, so submodules cost nothing. Only in a
profiled window without Python stacks does it have a third code, which logs the calls of submodules
(``module_calls``)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

from advisor.recorder.module_calls import CallLog
from advisor.recorder.tape import PART_OF_GRADIENTS

MAX_MODULE_DEPTH = 64
"""Maximum number of nested calls with a frame of ours, so that deep recursion keeps its limit."""
_FOLDER = str(Path(__file__).parent)
_NAME = "_wrapped_call_impl"
_GLOBAL_NAMES = (
    *("_advisor_here", "_advisor_inside", "_advisor_thread", "_advisor_forward"),
    *("_advisor_submodule", "_advisor_depth"),
)
_OUTERMOST = """_advisor_here[1] in _advisor_inside
        or (_advisor_thread() != _advisor_here[0] and not _advisor_here[7])"""
_SUBMODULE = f"""_advisor_thread() != _advisor_here[0]
        or _advisor_depth[0] >= {MAX_MODULE_DEPTH}"""
_SOURCE = f"""
def {_NAME}(self, *args, **kwargs):
    if not (
        torch.compiler.is_dynamo_compiling()
        or {{excluded}}
    ):
        return {{call}}(self, args, kwargs)
    if self._compiled_call_impl is not None:
        return self._compiled_call_impl(*args, **kwargs)
    else:
        return self._call_impl(*args, **kwargs)
"""
"""Code of torch's ``_wrapped_call_impl`` since 2.2, after our own test. Dynamo takes the test's
first part as true and so never reaches our call."""


class ModuleCalls:
    """Hook on ``Module.__call__``. ``make(calls)`` returns ``forward(module, args, kwargs)``, which
    makes an outermost call in the watched thread. ``hook_state`` belongs to the tape."""

    def __init__(
        self,
        hook_state: list[int],
        make: Callable[[ModuleCalls], Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]],
    ) -> None:
        """Raises AttributeError if this torch calls modules in another way."""
        from torch.nn import Module

        function: Any = getattr(Module, _NAME)
        if not isinstance(function, FunctionType) or function.__closure__:
            raise AttributeError(f"Module.{_NAME}")
        if not (hasattr(Module, "_compiled_call_impl") and hasattr(Module, "_call_impl")):
            raise AttributeError("Module._call_impl")
        self.function = function
        self.original = function.__code__
        self.code = _compile_at_original(
            self.original, excluded=_OUTERMOST, call="_advisor_forward"
        )
        self.logging_code = _compile_at_original(
            self.original, excluded=_SUBMODULE, call="_advisor_submodule"
        )
        self.log: CallLog | None = None
        """Log of the calls in the open window, or ``None`` where none is kept."""
        self.reported = False
        """True while calls are reported: code that was removed for a while is restored."""
        self._depth = [0]
        self._values = (
            *(hook_state, PART_OF_GRADIENTS, get_ident, make(self), self._call_submodule),
            self._depth,
        )

    def install(self) -> None:
        """Start reporting calls, unless other code has changed the function."""
        function = self.function
        if function.__code__ is self.original:
            function.__globals__.update(zip(_GLOBAL_NAMES, self._values, strict=True))
            self.reported = True
            function.__code__ = self.code

    def remove(self) -> None:
        """Stop reporting calls. A running call in another thread may still be reported."""
        self.reported = False
        if self.function.__code__ in (self.code, self.logging_code):
            self.function.__code__ = self.original

    def _call_submodule(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call of a module inside another one, and log it."""
        log = self.log
        call = module._compiled_call_impl or module._call_impl
        if log is None or not log.begin(module, sys._getframe(1).f_back):
            return call(*args, **kwargs)
        self._depth[0] += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth[0] -= 1
            log.end()


def _compile_at_original(original: CodeType, **parts: str) -> CodeType:
    """Compile our code at the position of the original's last line, where tracebacks point."""
    lines = [line for _, _, line in original.co_lines() if line]
    last_line = max(lines, default=original.co_firstlineno)
    positions = [p for p in original.co_positions() if p[0] == last_line and p[2] is not None]
    start = min((p[2] for p in positions if p[2] is not None), default=0)
    end = max((p[3] for p in positions if p[3] is not None), default=0)
    tree = ast.parse(_SOURCE.format(**parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.lineno, node.end_lineno = original.co_firstlineno, last_line
        elif hasattr(node, "lineno"):
            node.lineno = node.end_lineno = last_line  # type: ignore[attr-defined]
            node.col_offset, node.end_col_offset = start, end  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {}
    exec(compile(tree, original.co_filename, "exec"), namespace)  # our own text, above
    code: CodeType = namespace[_NAME].__code__
    return code.replace(co_qualname=original.co_qualname)


def leave_to_dynamo() -> None:
    """Have dynamo skip our frames, as it skips torch's own. Otherwise it would compile the ones
    inside a compiled call."""
    try:
        from torch._C import _dynamo

        eval_frame: Any = _dynamo.eval_frame
        if hasattr(eval_frame, "set_code_exec_strategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            for code in _find_codes():
                eval_frame.set_code_exec_strategy(code, strategy)
        else:
            for code in _find_codes():
                eval_frame.skip_code(code)
    except (ImportError, AttributeError, TypeError):
        return


def hide_from_warnings(names: dict[str, Any]) -> None:
    """Have ``warnings`` and ``logging`` skip a module's functions when they look for the caller's
    line, as they skip the import system's functions, by file name."""

    def hide(code: CodeType) -> CodeType:
        inner = (hide(c) if isinstance(c, CodeType) else c for c in code.co_consts)
        file = f"{names['__file__']} (importlib._bootstrap)"
        return code.replace(co_filename=file, co_consts=tuple(inner))

    for value in list(names.values()):
        for function in vars(value).values() if isinstance(value, type) else [value]:
            if isinstance(function, FunctionType) and function.__module__ == names["__name__"]:
                function.__code__ = hide(function.__code__)


def _find_codes() -> set[CodeType]:
    """Return the code of all loaded functions of this package, including inner functions."""
    package = __name__.rpartition(".")[0]
    result: set[CodeType] = set()
    pending: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                pending += vars(value).values() if isinstance(value, type) else [value]
    while pending:
        value = pending.pop()
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
        if not isinstance(code, CodeType) or code in result:
            continue
        if code.co_filename.startswith(_FOLDER):
            result.add(code)
            pending += code.co_consts
    return result
