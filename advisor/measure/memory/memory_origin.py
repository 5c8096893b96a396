"""What an allocation was for, and whose line asked for it, by its stack alone."""

from __future__ import annotations

import re
from typing import NamedTuple

from advisor.core.snapshot import SnapshotFrame, Stack
from advisor.measure.host.stacks import frame_rank

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
_MOVE = {
    "_apply", "to", "cuda", "half", "bfloat16", "float", "double", "convert", "to_empty",
    "_load_from_state_dict", "load_state_dict", "load",
}  # fmt: skip
_PARAMETER = re.compile(
    r"(?:^|/)torch/nn/(?:parameter|init)\.py$|/_?(?:flat_param|fsdp_param(?:_group)?)\.py$"
)
_BUILT = {"__init__", "reset_parameters", "_reset_parameters", "_init_weights", "init_weights"}
_LOADED = re.compile(r"(?:^|/)transformers/(?:modeling_utils|core_model_loading)\.py$")
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
_LOSS = re.compile(r"cross_entropy|log_softmax|nll_loss|CrossEntropy|lm_loss|loss_function")
_LOSS_FILE = re.compile(r"(?:^|/)torch/nn/modules/loss\.py$|/loss/loss_utils\.py$")


_OPERATOR = re.compile(r"[a-z]\w*::\w+")


class Origin(NamedTuple):
    """What an allocation was for, as its stack shows."""

    role: str
    """One of ROLES."""
    file: str | None
    """Of the innermost frame of the user's own code (of an installed library's, where there is
    none of theirs); ``None``: no such frame."""
    line: int | None
    function: str | None
    """Of that frame; without one, the outermost operator."""
    state: bool = False
    """``optimizer``: where its state is made."""
    loss: bool = False
    """Inside a loss over classes."""
    backward_begins: bool = False
    """The first gradient of a backward pass, which ``backward()`` makes itself."""
    released: str = ""
    """Role of a block that is freed with this stack, where the stack says so: ``autocast`` (the
    region ends), ``gradient`` (``zero_grad``), ``optimizer``."""
    cast: bool = False
    """A copy in the type of autocast."""
    depth: int = 0
    """Module calls in it."""


def find_origin(stack: Stack | None) -> Origin:
    """What an allocation with this stack (innermost frame first) was for.

    From the innermost frame outwards the first that tells decides: a file and function of PyTorch
    (or a well-known library) that makes parameters, optimizer state, inputs, buffers of
    communication; the autograd engine; a module's call. Inside a recomputation of
    ``torch.utils.checkpoint`` a module's call is a recomputed one.
    """
    if not stack:
        return Origin("nothing", None, None, None)
    own = _own(stack)
    role, state = _role(stack, own)
    return Origin(
        role,
        None if own is None else own.file,
        None if own is None else own.line,
        _outermost_operator(stack) if own is None else own.name,
        state=state,
        loss=any(
            _LOSS_FILE.search(f.file) or (_LOSS.search(f.name) and frame_owner(f) < 2)
            for f in stack
        ),
        backward_begins=any(
            f.name == "_make_grads" and _BACKWARD_FILE.search(_slashes(f.file)) for f in stack
        ),
        released=_released(stack),
        cast=any(_CAST.search(f.name) for f in stack),
        depth=sum(_calls_module(f) for f in stack),
    )


def _outermost_operator(stack: Stack) -> str | None:
    """The outermost operator of a stack without Python frames; ``None``: it has none."""
    return next((f.name for f in reversed(stack) if _OPERATOR.fullmatch(f.name)), None)


def _released(stack: Stack) -> str:
    for frame in stack:
        if frame.name.lstrip("_").startswith("zero_grad"):
            return "gradient"
        if _AUTOCAST_ENDS.search(_slashes(frame.file)):
            return "autocast"
        if _is_optimizer(_slashes(frame.file), frame.name):
            return "optimizer"
    return ""


def _slashes(file: str) -> str:
    return file.replace("\\", "/")


def _calls_module(frame: SnapshotFrame) -> bool:
    """A module's ``forward``: stacks of C++ and Python together may lack ``_call_impl``."""
    return frame.name == "forward" and frame.line > 0 and frame_owner(frame) >= 1


def _role(stack: Stack, own: SnapshotFrame | None) -> tuple[str, bool]:
    result = ""
    for frame in stack:
        file, name = _slashes(frame.file), frame.name
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
        if (kind := _telling(file, name)) is not None:
            return kind, any(_STATE.search(f.name) for f in stack)
        if _is_backward(file, name):
            return "backward", False
        if (
            (MODULE.search(file) and name in CALLS)
            or _FUNCTIONAL.search(file)
            or _calls_module(frame)
            or (_LOSS.search(name) and frame_owner(frame) == 2)
        ):
            result = "forward"
        elif frame is own and name in _BUILT:
            result = "parameter"
    return result or "own", False


def _telling(file: str, name: str) -> str | None:
    """The role of a frame that settles it."""
    if MODULE.search(file):
        return "parameter" if name in _MOVE else None
    if _PARAMETER.search(file) or (_LAYER.search(file) and name in _BUILT):
        return "parameter"
    if _LOADED.search(file):
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


def _own(stack: Stack) -> SnapshotFrame | None:
    """The innermost frame of the user's code, else of an installed library's."""
    library = None
    for frame in stack:
        rank = frame_owner(frame)
        if rank == 2:
            return frame
        if rank == 1 and library is None:
            library = frame
    return library


def frame_owner(frame: SnapshotFrame) -> int:
    """Whose code it is, as ``stacks.frame_rank``; of C++ code nobody's."""
    if _CPP.search(frame.file) or frame.line <= 0:
        return 0
    return frame_rank(f"{frame.file}({min(frame.line, 999_999_999)}): {frame.name}")
