"""Purpose and user line of an allocation, from its stack alone. Memory by layer: the bytes that the
calls of each module allocate, keep, and need at most, from the allocator events of a trace
(``profile_memory=True``) or from the stacks of a snapshot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.core.report_memory import ModuleMemory
from advisor.core.snapshot import SnapshotFrame, Stack
from advisor.measure.host.stacks import CodeOwner, code_owner
from advisor.measure.memory.trace_memory import find_running

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.host.layers import LayerTable
    from advisor.measure.memory.peak_memory import PeakMemory


ROLES = (
    "parameter",
    "optimizer",
    "gradient",
    "forward",
    "recomputed",
    "backward",
    "input",
    "communication",
    "workspace",
    "cache",  # keys and values of earlier tokens
    "own",  # the user's own line, outside any module
    "nothing",  # no frame at all
)

_CPP = re.compile(r"\.(?:so(?:\.\d+)*|cpp|cc|cu|h|cuh|hpp|c)$|^\?\?|^$|^/?csrc/")
MODULE = re.compile(r"(?:^|/)torch/nn/modules/module\.py$")
CALLS = {"_call_impl", "_wrapped_call_impl", "_slow_forward"}
_MOVING_FUNCTIONS = {
    "_apply", "to", "cuda", "half", "bfloat16", "float", "double", "convert", "to_empty",
    "_load_from_state_dict", "load_state_dict", "load",
}  # fmt: skip
_PARAMETER = re.compile(
    r"(?:^|/)torch/nn/(?:parameter|init)\.py$|/_?(?:flat_param|fsdp_param(?:_group)?)\.py$"
)
_INIT = {"__init__", "reset_parameters", "_reset_parameters", "_init_weights", "init_weights"}
_LOADING_FILE = re.compile(r"(?:^|/)transformers/(?:modeling_utils|core_model_loading)\.py$")
_LAYER = re.compile(r"(?:^|/)torch/nn/modules/\w+\.py$")
_FUNCTIONAL = re.compile(r"(?:^|/)torch/nn/functional\.py$")
_OPTIMIZER = re.compile(r"(?:^|/)torch/optim/\w+\.py$|optim", re.IGNORECASE)
_OPTIMIZER_NAMES = re.compile(
    r"^(?:step|_?init_group|_?init_state|_?update\w*|_single_tensor_\w+|_multi_tensor_\w+"
    r"|_fused_\w+|optimizer_update|adam\w*|sgd\w*)$"
)
_SCHEDULE = re.compile(r"(?:^|/)torch/optim/(?:lr_scheduler|swa_utils)\.py$")
_WRAPPER = re.compile(r"(?:^|/)torch/optim/optimizer\.py$")
_STATE = re.compile(r"^(?:_?init_group|_?init_state|__setstate__|load_state_dict)$")
_CHECKPOINT = re.compile(r"(?:^|/)torch/utils/checkpoint\.py$")
_RECOMPUTE = {"recompute_fn", "unpack_hook", "backward", "inner_unpack_hook"}
_BACKWARD_FILE = re.compile(
    r"(?:^|/)torch/(?:autograd/(?:__init__|graph|function)|_tensor)\.py$"
    r"|/_functorch/_aot_autograd/runtime_wrappers\.py$"
)
_BACKWARD_NAMES = {"backward", "_engine_run_backward", "_make_grads", "apply"}
_BACKWARD_CPP = re.compile(r"autograd::Engine|Backward\w*::apply|autograd::PyNode|AccumulateGrad")
_ACCUMULATE = re.compile(r"AccumulateGrad")
_WORKSPACE = re.compile(r"[Ww]orkspace|cublas(?:Lt)?\w*Handle|cudnn\w*(?:Handle|Workspace)")
_COMMUNICATION = re.compile(r"(?:^|/)torch/(?:distributed/|nn/parallel/)")
_COMMUNICATION_CPP = re.compile(r"c10d::|ProcessGroup")
_INPUT = re.compile(r"(?:^|/)torch/utils/data/|(?:^|/)nvidia/dali/")
_INPUT_NAMES = re.compile(
    r"^(?:_?prepare_inputs?|_?send_to_device|move_(?:data_)?to_device|move_data_to_device"
    r"|(?:transfer_)?batch_to_device|batch_to|data_to_device|recursive_to|_?to_device|to_cuda"
    r"|_?prefetch\w*|_?preload)$"
)
_CACHE = re.compile(
    r"(?:^|_)(?:kv|key_value|past_key_value)s?_?(?:cache|pool|buffer)|^_?(?:init|alloc\w*|create|setup)"
    r"_(?:\w+_)?caches?(?:_|$)"
)
_CACHE_FILE = re.compile(r"(?:^|/)(?:kv_?cache|cache_utils|cache_engine|static_cache)\w*\.py$")
_WEIGHTS = re.compile(
    r"^_?(?:init|load|build|create|make|alloc\w*|get)_(?:\w+_)?(?:weights?|params?|parameters?"
    r"|checkpoint|state_dict|model)(?:_|$)"
)
_CAST = re.compile(r"autocast::cached_cast")
_AUTOCAST_ENDS = re.compile(r"(?:^|/)torch/(?:amp|cuda/amp)/autocast_mode\.py$")
_OUTPUTS = {
    "softmax": re.compile(r"(?:at::_ops|aten)::_?softmax\b|torch/nn/functional\.py:softmax$"),
    "product": re.compile(
        r"(?:at::_ops|aten)::(?:addmm|addbmm|baddbmm|bmm|mm|matmul|linear|_?convolution|conv[123]d"
        r"|_scaled_dot_product_\w*attention)\b"
        r"|torch/functional\.py:einsum$|torch/nn/modules/(?:linear|conv)\.py:\w*forward$"
    ),
    "same type": re.compile(
        r"(?:at::_ops|aten)::(?:relu|gelu|silu|sigmoid|tanh|dropout|contiguous|clone|reshape"
        r"|mul_Tensor|mul)\b|torch/nn/functional\.py:(?:relu|silu|dropout|leaky_relu)$"
    ),
}
"""Operators by the type of their results under autocast, by a frame's file and name."""
_LOSS = re.compile(r"cross_entropy|log_softmax|nll_loss|CrossEntropy|lm_loss|loss_function")
_LOSS_FILE = re.compile(r"(?:^|/)torch/nn/modules/loss\.py$|/loss/loss_utils\.py$")


_OPERATOR = re.compile(r"[a-z]\w*::\w+")


class AllocationOrigin(NamedTuple):
    """Purpose and line of an allocation, from its stack."""

    role: str
    """Purpose: one of ROLES."""
    file: str | None
    """File of the innermost frame of the user's own code (else of an installed library), or
    ``None`` without one."""
    line: int | None
    function: str | None
    """Function of that frame, or the outermost operator without one."""
    state: bool = False
    """Whether an ``optimizer`` creates its state there."""
    loss: bool = False
    """Whether it is inside a loss over classes."""
    backward_begins: bool = False
    """Whether it is the first gradient of a backward pass, which ``backward()`` makes itself."""
    released: str = ""
    """Role of a block that is freed with this stack, if the stack shows it: ``autocast`` (the
    region ends), ``gradient`` (``zero_grad``), ``optimizer``."""
    cast: bool = False
    """Whether it is a copy in the type of autocast."""
    output: str = ""
    """Operator that makes it: ``softmax``, ``product`` (in 16 bits under autocast), ``same type``
    (as its inputs). Empty for other operators."""
    depth: int = 0
    """Number of module calls in the stack."""


def find_origin(stack: Stack | None) -> AllocationOrigin:
    """Find the purpose of an allocation from its stack (innermost frame first).

    The first known frame from the innermost outwards decides: a file and function of PyTorch (or a
    well-known library) that makes parameters, optimizer state, inputs or communication buffers; the
    autograd engine; a module's call. Inside a recomputation of ``torch.utils.checkpoint``, a
    module's call counts as recomputed."""
    if not stack:
        return AllocationOrigin("nothing", None, None, None)
    user_frame = _find_user_frame(stack)
    role, state = _find_role(stack, user_frame)
    calls = [f"{_use_slashes(f.file)}:{f.name}" for f in stack]
    return AllocationOrigin(
        role,
        None if user_frame is None else user_frame.file,
        None if user_frame is None else user_frame.line,
        next((frame.name for frame in reversed(stack) if _OPERATOR.fullmatch(frame.name)), None)
        if user_frame is None
        else user_frame.name,
        state=state,
        loss=any(
            _LOSS_FILE.search(f.file)
            or (_LOSS.search(f.name) and snapshot_code_owner(f) < CodeOwner.USER)
            for f in stack
        ),
        backward_begins=any(
            f.name == "_make_grads" and _BACKWARD_FILE.search(_use_slashes(f.file)) for f in stack
        ),
        released=_find_released_role(stack),
        cast=any(_CAST.search(f.name) for f in stack),
        output=next((o for o, pattern in _OUTPUTS.items() if any(map(pattern.search, calls))), ""),
        depth=sum(_calls_module(f) for f in stack),
    )


def _find_released_role(stack: Stack) -> str:
    for frame in stack:
        if frame.name.lstrip("_").startswith("zero_grad"):
            return "gradient"
        if _AUTOCAST_ENDS.search(_use_slashes(frame.file)):
            return "autocast"
        if _is_optimizer(_use_slashes(frame.file), frame.name):
            return "optimizer"
    return ""


def _use_slashes(file: str) -> str:
    return file.replace("\\", "/")


def _calls_module(frame: SnapshotFrame) -> bool:
    """Return whether a frame is a module's ``forward``: stacks may lack ``_call_impl``."""
    return (
        frame.name == "forward"
        and frame.line > 0
        and snapshot_code_owner(frame) >= CodeOwner.LIBRARY
    )


def _find_role(stack: Stack, user_frame: SnapshotFrame | None) -> tuple[str, bool]:
    result = ""
    for frame in stack:
        file, name = _use_slashes(frame.file), frame.name
        if (_CPP.search(file) and frame.line == 0) or "::" in name:
            if _WORKSPACE.search(name):
                return "workspace", False
            if _ACCUMULATE.search(name):
                return "gradient", False
            if _COMMUNICATION_CPP.search(name) and not result:
                return "communication", False
            if _BACKWARD_CPP.search(name):
                return ("recomputed", False) if result == "recomputed" else ("backward", False)
            continue
        if _CHECKPOINT.search(file) and name in _RECOMPUTE:
            return "recomputed", False
        if result:
            if _is_backward(file, name):
                return "backward", False
            continue
        if (kind := _decisive_role(file, name)) is not None:
            return kind, any(_STATE.search(other.name) for other in stack)
        if _is_backward(file, name):
            return "backward", False
        if (
            (MODULE.search(file) and name in CALLS)
            or _FUNCTIONAL.search(file)
            or _calls_module(frame)
            or (_LOSS.search(name) and snapshot_code_owner(frame) == CodeOwner.USER)
        ):
            result = "forward"
        elif frame is user_frame and name in _INIT:
            result = "parameter"
    return result or "own", False


def _decisive_role(file: str, name: str) -> str | None:
    """Return the role of a decisive frame, or ``None`` for other frames."""
    if MODULE.search(file):
        return "parameter" if name in _MOVING_FUNCTIONS else None
    if _PARAMETER.search(file) or (_LAYER.search(file) and name in _INIT):
        return "parameter"
    if _LOADING_FILE.search(file):
        return "parameter" if "load" in name or name == "from_pretrained" else None
    if _is_optimizer(file, name):
        return "optimizer"
    if _CACHE.search(name) or _CACHE_FILE.search(file):
        return "cache"
    if _WEIGHTS.search(name):
        return "parameter"
    if _INPUT.search(file) or _INPUT_NAMES.search(name):
        return "input"
    if _COMMUNICATION.search(file) and name != "forward":
        return "communication"
    return None


def _is_optimizer(file: str, name: str) -> bool:
    return bool(
        _OPTIMIZER.search(file)
        and not _SCHEDULE.search(file)
        and not _WRAPPER.search(file)
        and (_OPTIMIZER_NAMES.search(name) or _STATE.search(name))
    )


def _is_backward(file: str, name: str) -> bool:
    return name in _BACKWARD_NAMES and bool(_BACKWARD_FILE.search(file))


def _find_user_frame(stack: Stack) -> SnapshotFrame | None:
    """Return the innermost frame of the user's code, else of an installed library's."""
    library = None
    for frame in stack:
        owner = snapshot_code_owner(frame)
        if owner == CodeOwner.USER:
            return frame
        if owner == CodeOwner.LIBRARY and library is None:
            library = frame
    return library


def snapshot_code_owner(frame: SnapshotFrame) -> CodeOwner:
    """Return whose code a frame of a snapshot is; C++ code is PyTorch's."""
    if _CPP.search(frame.file) or frame.line <= 0:
        return CodeOwner.PYTORCH
    return code_owner(f"{frame.file}({min(frame.line, 999_999_999)}): {frame.name}")


HOST_MEMORY = -1
"""Device number of the host's allocator events."""


class LayerMemory(NamedTuple):
    """Bytes by node of a ``LayerTable``, in the same order, including nested modules."""

    allocated: NDArray[np.int64]
    """Bytes allocated in the calls, summed over the window, without the backward pass."""
    net_allocated: NDArray[np.int64]
    """Allocated minus released bytes of the calls, negative if they release memory of others."""
    peak: NDArray[np.int64] | None
    """Maximum bytes that one call adds to the memory allocated at its start, or ``None`` if the
    ends of calls were not recorded."""


def measure_layer_memory(a: Analysis, layers: LayerTable) -> LayerMemory | None:
    """Sum allocator events of the analysed device (of the host's memory without a device), each in
    the call of its thread. ``None`` if no events were recorded in modules."""
    device = HOST_MEMORY if a.device_id is None else a.device_id
    events = a.trace.memory.filter((pl.col("device") == device) & (pl.col("bytes") != 0))
    if events.is_empty():
        return None
    events = events.with_columns(pl.col("thread").fill_null(-1))
    events = events.sort("thread", "ts", maintain_order=True)
    ts, thread = events["ts"].to_numpy(), events["thread"].to_numpy()
    in_window = covered_length(ts, ts + 1, a.spans) > 0
    node = layers.find(find_running(a, thread, ts)).astype(np.int64)
    is_assigned = in_window & (node >= 0)
    if not is_assigned.any():
        return None
    change = events["bytes"].to_numpy()
    count = layers.nodes.height
    net = _sum_by_node(node[is_assigned], change[is_assigned], count)
    is_allocation = is_assigned & (change > 0)
    allocated = _sum_by_node(node[is_allocation], change[is_allocation], count)
    parent = layers.nodes["parent"].fill_null(-1).to_list()
    for index in reversed(range(count)):  # nodes: parents come first
        if parent[index] >= 0:
            net[parent[index]] += net[index]
            allocated[parent[index]] += allocated[index]
    return LayerMemory(allocated, net, _find_peaks(a, layers, thread, ts, change))


def _sum_by_node(node: NDArray[np.int64], size: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    result = np.zeros(count, dtype=np.int64)
    np.add.at(result, node, size)
    return result


def _find_peaks(
    a: Analysis,
    layers: LayerTable,
    thread: NDArray[np.int32],
    ts: NDArray[np.int64],
    change: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """Find each node's peak over its calls in the window. ``thread``, ``ts`` and ``change``
    describe the events, in order of thread and time."""
    cpu = a.trace.cpu
    rows = np.flatnonzero(layers.scopes >= 0)
    if not len(rows) or layers.source == "FSDP":  # its rows are marks, not calls
        return None
    start, dur, threads = (cpu[name].gather(rows).to_numpy() for name in ("ts", "dur", "thread"))
    is_shown = covered_length(start, start + np.maximum(dur, 1), a.spans) > 0
    result = np.zeros(layers.nodes.height, dtype=np.int64)
    level = np.append(np.cumsum(change), 0)
    for thread_id in np.unique(thread).tolist():  # a handful of threads
        thread_start, thread_end = np.searchsorted(thread, [thread_id, thread_id + 1])
        calls = np.flatnonzero(is_shown & (threads == thread_id))
        first_event = thread_start + np.searchsorted(ts[thread_start:thread_end], start[calls])
        end_event = thread_start + np.searchsorted(
            ts[thread_start:thread_end], start[calls] + dur[calls], side="right"
        )
        has_events = end_event > first_event
        calls, first_event, end_event = (
            calls[has_events],
            first_event[has_events],
            end_event[has_events],
        )
        if not len(calls):
            continue
        edges = np.stack([first_event, end_event], axis=1).ravel()
        maxima = np.maximum.reduceat(level, edges)[::2]
        growth = maxima - np.where(first_event > 0, level[first_event - 1], 0)
        np.maximum.at(result, layers.scopes[rows[calls]], growth)
    return result


# -- a snapshot's modules, by the frames of its allocations
# -----------------------------------------------

_MAX_DEPTH = 64
"""Maximum nesting depth of module calls."""


def held_by_module(peak: PeakMemory) -> list[ModuleMemory]:
    """List module calls, each after its parent, largest first among siblings. Modules called from
    one line (blocks in a loop) count as one. Empty if no stack contains a ``forward``."""
    history, rows = peak.history, peak.allocated_rows
    stack, size = history.block_lifetimes.stack[rows], history.block_lifetimes.size[rows]
    nodes: dict[tuple[int, str, int | None], int] = {}
    parent: list[int] = []
    own_bytes: list[int] = []
    blocks: list[int] = []
    unique, inverse = np.unique(stack, return_inverse=True)
    sums = np.bincount(inverse, size, minlength=len(unique)).astype(np.int64).tolist()
    counts = np.bincount(inverse, minlength=len(unique)).tolist()
    for number, total, count in zip(unique.tolist(), sums, counts, strict=True):
        frames = history.snapshot.stacks[number] if number >= 0 else ()
        chain = [entry for entry in reversed(frames) if entry.name == "forward" and entry.line > 0][
            :_MAX_DEPTH
        ]
        node, outer = -1, None
        for frame in chain:
            key = node, frame.file, None if outer is None else outer.line
            if key not in nodes:
                nodes[key] = len(parent)
                parent.append(node)
                own_bytes.append(0)
                blocks.append(0)
            node, outer = nodes[key], frame
            blocks[node] += count
        if chain:
            own_bytes[node] += total
    total_bytes = own_bytes.copy()
    for node_index in reversed(range(len(parent))):  # a parent has the smaller number
        if parent[node_index] >= 0:
            total_bytes[parent[node_index]] += total_bytes[node_index]
    children: dict[int, list[int]] = {}
    for node_index, parent_node in enumerate(parent):
        children.setdefault(parent_node, []).append(node_index)
    keys = list(nodes)
    result: list[ModuleMemory] = []
    pending: list[tuple[int, int | None]] = [
        (node_index, None) for node_index in _smallest_first(children, -1, total_bytes)
    ]
    while pending:
        node_index, parent_row = pending.pop()
        _, file, line = keys[node_index]
        result.append(
            ModuleMemory(file=file, line=line, parent=parent_row, blocks=blocks[node_index],
                         bytes=total_bytes[node_index], own_bytes=own_bytes[node_index])
        )  # fmt: skip
        pending += [
            (child, len(result) - 1) for child in _smallest_first(children, node_index, total_bytes)
        ]
    return result


def _smallest_first(children: dict[int, list[int]], node: int, size: list[int]) -> list[int]:
    return sorted(children.get(node, []), key=lambda child: size[child])
