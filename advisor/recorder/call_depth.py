"""Test of a thread's call depth: a profiler may start and stop at the outermost level only.

torch keeps the state of a profiler with the thread's state, and saves and restores that state
around many calls back into Python: a backward's hooks, compiled and traced functions, captures. A
profiler that starts inside one of them is lost when the call ends. Stopping one there restores
another profiler or none, and the process crashes later. So the test does not list bad places, but
checks the conditions of a good one:

- torch reports that it is in no backward, trace, capture, transform or other profiler.
- Between the caller and the bottom of the stack, torch has no frames except the known ones around
  the caller (an optimizer's ``step`` around its hooks) and the ones that only start programs. A
  call by the user's loop itself has no frame of torch below it.

The test runs once or twice per window, so it may take some ten µs."""

import sys
from types import FrameType
from typing import Any

WRAPPER_MODULES = (
    "torch.optim.optimizer",
    "torch.optim.lr_scheduler",
    "torch.amp.grad_scaler",
    "torch.nn.modules.module",  # an outermost call, whose forward has ended
    "torch.fx.graph_module",  # around the call of an exported or a traced module
)
"""Modules of torch whose functions directly surround the hooks at the end of a step."""
LAUNCHER_MODULES = (
    "torch.multiprocessing",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.elastic",
    "torch.utils._contextlib",  # decorators: no_grad, enable_grad, set_grad_enabled
)
"""Modules of torch that only start the program."""
CALLED_BACK = frozenset(("__torch_function__", "__torch_dispatch__", "__del__"))
"""Functions of the program that torch or the interpreter calls from C, without a frame."""
PACKAGE = __name__.rpartition(".")[0]


def is_outermost(torch: Any, *, profiled: bool = False) -> bool:
    """Return whether the calling thread is at its outermost level. ``profiled``: whether our
    profiler records this thread."""
    return is_undisturbed(torch, profiled=profiled) and _has_only_allowed_frames(sys._getframe(1))


def is_undisturbed(torch: Any, *, profiled: bool = False) -> bool:
    """Return whether torch is in no call that saves the thread's state, and no profiler but ours
    (``profiled``) is active."""
    lowlevel = torch._C
    if torch.autograd._profiler_enabled() is not profiled or in_backward(torch):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_scripting():
        return False
    if lowlevel._get_tracing_state() is not None or _is_capturing(torch):
        return False
    return not (_is_in_compiled_call(torch) or _is_in_transform(torch))


def in_backward(torch: Any) -> bool:
    """Return whether the calling thread runs a backward or one of its hooks."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _is_capturing(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing())


def _is_in_compiled_call(torch: Any) -> bool:
    """Return whether a function compiled by dynamo is running."""
    dynamo = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    get_callback = getattr(dynamo, "get_eval_frame_callback", None)
    return get_callback is not None and get_callback() not in (None, False)


def _is_in_transform(torch: Any) -> bool:
    """Return whether vmap, grad or another transform is running."""
    functorch = getattr(torch._C, "_functorch", None)
    peek = getattr(functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def _has_only_allowed_frames(frame: FrameType | None) -> bool:
    only_ours = True
    """True while all frames so far are ours or may surround our hooks."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not isinstance(name, str):
            name = ""
        if name == "torch" or name.startswith("torch."):
            allowed = _is_in(name, LAUNCHER_MODULES) or (
                only_ours and _is_in(name, WRAPPER_MODULES)
            )
            if not allowed:
                return False
        elif name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            only_ours = False
            if frame.f_code.co_name in CALLED_BACK:
                return False
        frame = frame.f_back
    return True


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
