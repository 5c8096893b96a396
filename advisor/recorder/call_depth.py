"""Test of a thread's call depth: a profiler may start and stop at the outermost level only.

torch keeps what a profiler has begun with the thread's state, and saves and restores that state
around much of what calls back into Python: a backward's hooks, compiled and traced functions,
captures. A profiler that starts inside of one of them is lost when it ends, and stopping one there
leaves another behind, or none: the process crashes later. So the answer is not a list of places
that are bad, but what must hold where it is good:

- torch says of itself that it is in no backward, trace, capture, transform or other profiler;
- between the caller and the bottom of the stack there is no frame of torch, but those that the
  caller is known to be in (an optimizer's ``step`` around its hooks) and those that only start
  programs. What is called by the user's loop itself has no frame of torch below it.

Asked once or twice a window, so it may take some ten µs."""

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
"""Modules of torch whose functions surround the hooks at the end of a step, without a gap …"""
LAUNCHER_MODULES = (
    "torch.multiprocessing",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.elastic",
    "torch.utils._contextlib",  # decorators: no_grad, enable_grad, set_grad_enabled
)
"""… and those that only start the program."""
CALLED_BACK = frozenset(("__torch_function__", "__torch_dispatch__", "__del__"))
"""Functions of the program that torch or the interpreter calls from C, without a frame."""
OURS = __name__.rpartition(".")[0]


def is_outermost(torch: Any, *, profiled: bool = False) -> bool:
    """Return whether the calling thread is at its outermost level; ``profiled``: a profiler of ours
    records this thread."""
    return is_undisturbed(torch, profiled=profiled) and _nothing_around(sys._getframe(1))


def is_undisturbed(torch: Any, *, profiled: bool = False) -> bool:
    """Return whether torch is in nothing that saves the thread's state, with no profiler active but
    ours (``profiled``)."""
    lowlevel = torch._C
    if torch.autograd._profiler_enabled() is not profiled or in_backward(torch):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_scripting():
        return False
    if lowlevel._get_tracing_state() is not None or _capturing(torch):
        return False
    return not (_compiled_call(torch) or _transformed(torch))


def in_backward(torch: Any) -> bool:
    """Return whether the calling thread runs a backward, or a hook of one."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _capturing(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing())


def _compiled_call(torch: Any) -> bool:
    """Return whether a function compiled by dynamo is running."""
    dynamo = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    asked = getattr(dynamo, "get_eval_frame_callback", None)
    return asked is not None and asked() not in (None, False)


def _transformed(torch: Any) -> bool:
    """Return whether vmap, grad or another transform is running."""
    functorch = getattr(torch._C, "_functorch", None)
    asked = getattr(functorch, "peek_interpreter_stack", None)
    return asked is not None and asked() is not None


def _nothing_around(frame: FrameType | None) -> bool:
    top = True
    """True while all frames so far are ours or allowed around our hooks."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not isinstance(name, str):
            name = ""
        if name == "torch" or name.startswith("torch."):
            allowed = _in(name, LAUNCHER_MODULES) or (top and _in(name, WRAPPER_MODULES))
            if not allowed:
                return False
        elif name != OURS and not name.startswith(f"{OURS}."):
            top = False
            if frame.f_code.co_name in CALLED_BACK:
                return False
        frame = frame.f_back
    return True


def _in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
