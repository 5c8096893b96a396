"""Call stacks, of the profiler and sampled by the recorder: ancestors over whole columns, and the
line of the user's own code.

A sample falls where the interpreter changes threads. Stretches of pure Python of less than 5 ms are
rarely hit, and the call after them is instead. So shares of samples name lines; time is that of the
recorded phases."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.core.intervals import Bools
from advisor.core.run_directory import RankRecord
from advisor.core.trace import JAX
from advisor.measure.host.names import map_names, name_matches

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.measure import Analysis


Rows = NDArray[Any]
"""Rows of ``trace.cpu``, int32 or int64; -1: none."""
_MERGE_LEVELS, _MANY = 8, 1_000

# The profiler cuts the entries of ``sys.path`` off the front of a file's name, so that a frame of
# an installed package starts with the package's own name: only that tells it from the user's code.
TORCH = frozenset({"torch", "advisor", "numpy", "triton"})
"""Packages of PyTorch, and what stands for it in a stack."""
LIBRARIES = frozenset(
    """accelerate aiobotocore aiohttp albumentations apex audioread bitsandbytes blosc blosc2 boto3
    botocore bs4 cloudpickle composer cupy cv2 dask datasets decord deepspeed diffusers dill duckdb
    einops evaluate fairscale fastai fastparquet flash_attn flashinfer flax fsspec gcsfs grpc h5py
    httpcore httpx huggingface_hub hydra ignite ijson imageio jax jieba joblib keras kornia librosa
    lightly lightning lightning_fabric lightning_utilities llvmlite lmdb loguru lxml lz4 matplotlib
    megatron mlflow mmcv mmengine monai msgpack netCDF4 nibabel nltk numba numcodecs omegaconf onnx
    onnxruntime open_clip optree optuna orjson packaging pandas peft PIL polars psutil psycopg
    psycopg2 pyarrow pydantic pydicom pydub pymongo pytest pytorch_lightning pyvips rasterio ray
    requests resampy rich s3fs safetensors scipy sentence_transformers sentencepiece SimpleITK
    skimage sklearn smart_open soundfile soxr spacy sqlalchemy sympy tensorboard tensorboardX
    tensordict tensorflow tifffile tiktoken timm tokenizers torch_geometric torch_scatter
    torch_sparse torchao torchaudio torchcodec torchdata torcheval torchmetrics torchrec torchtext
    torchvision tqdm transformer_engine transformers trl ultralytics urllib3 wandb webdataset xarray
    xformers yaml zarr zstandard""".split()
)
"""Packages of libraries that a user installed."""
JAX_FILES = frozenset(
    """ad.py api.py api_util.py array.py array_creation.py array_methods.py batching.py
    compilation_cache.py compiler.py core.py custom_derivatives.py dispatch.py dtypes.py lax.py
    lax_numpy.py linear_util.py loops.py mesh.py mlir.py named_sharding.py partial_eval.py pjit.py
    pmap.py prng.py profiler.py pxla.py reductions.py shard_map.py sharding.py sharding_impls.py
    slicing.py source_info_util.py stages.py traceback_util.py tree_util.py ufuncs.py util.py
    xla_bridge.py xla_metadata_lib.py""".split()
)
"""Files of JAX that are in most stacks. Its profiler writes names without folders, so a file of the
user's that is called like one of them is taken for JAX's."""

# -- ancestors ---------------------------------------------------------------------------------


def parent_rows(trace: Trace) -> Rows:
    """Return the row of the event around each row, aligned with ``trace.cpu``; -1: none."""
    return trace.cpu["parent"].fill_null(-1).to_numpy().astype(np.int32, copy=False)


def innermost_ancestor(parent: Rows, mask: Bools) -> Rows:
    """Find the innermost wanted row among each row and its ancestors, -1: none.

    Every row points at itself when it is wanted, else at its parent; following all pointers twice
    as far in each round settles in log2(depth) rounds over whole columns."""
    count = len(parent)
    own = np.arange(count, dtype=np.int32)
    jump = np.append(np.where(mask, own, np.where(parent < 0, count, parent)), count)
    jump = jump.astype(np.int32, copy=False)
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            break
        jump = further
    result = jump[:-1]
    return np.where(result == count, np.int32(-1), result)


def outermost_ancestor(parent: Rows, mask: Bools) -> Rows:
    """Find the outermost wanted row among each row and its ancestors, -1: none."""
    near = innermost_ancestor(parent, mask)
    above = np.where(parent < 0, np.int32(-1), near[np.maximum(parent, 0)])
    return innermost_ancestor(parent, mask & (above < 0))


def is_operator(trace: Trace) -> Bools:
    """Return which rows of ``trace.cpu`` are operators."""
    result: Bools = (trace.cpu["kind"] == "op").to_numpy()
    return result


def outermost_operator(trace: Trace) -> Rows:
    """Return the outermost operator around each row, aligned with ``trace.cpu``; -1: none."""
    return outermost_ancestor(parent_rows(trace), is_operator(trace))


def outermost_rows(trace: Trace) -> NDArray[np.int64]:
    """Return operators that lie in no other one: rows of ``trace.cpu``, by thread and time."""
    outermost = outermost_operator(trace)
    return np.flatnonzero(outermost == np.arange(len(outermost)))


def climb_stack(parent: Rows, mask: Bools, rows: Rows, *, top: bool = False) -> Rows:
    """Find :func:`innermost_ancestor` (with ``top``: :func:`outermost_ancestor`) of a few rows only
    (-1: none): as many rounds as their stacks are deep."""
    result = np.full(len(rows), -1, dtype=parent.dtype)
    index = np.flatnonzero(rows >= 0)
    row = rows[index]
    levels = 0
    while len(index):
        hit = mask[row]
        result[index[hit]] = row[hit]
        if not top:
            index, row = index[~hit], row[~hit]
        row = parent[row]
        index, row = index[row >= 0], row[row >= 0]
        levels += 1
        if levels % _MERGE_LEVELS == 0 and len(row) > _MANY:
            # Ways up through Python frames meet early: go on once for each distinct row.
            distinct, back = np.unique(row, return_inverse=True)
            if 2 * len(distinct) < len(row):
                above = climb_stack(parent, mask, distinct, top=top)[back]
                result[index] = np.where(above >= 0, above, result[index])
                break
    return result


def rows_around(parent: Rows, rows: Rows) -> Rows:
    """Return the row around each of these (-1: none)."""
    if not len(parent):
        return np.full(len(rows), -1, dtype=parent.dtype)
    return np.where(rows >= 0, parent[np.maximum(rows, 0)], parent.dtype.type(-1))


def ancestor_chains(parent: Rows, rows: Rows) -> NDArray[np.int64]:
    """Return these rows and those around them, innermost first: a line per row, padded with -1."""
    levels = [rows.astype(np.int64)]
    while (levels[-1] >= 0).any():
        levels.append(rows_around(parent, levels[-1]).astype(np.int64))
    return np.stack(levels, axis=1)


# -- frames ------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A Python frame as the profiler writes it: ``train.py(12): forward``."""

    file: str
    line: int
    function: str

    @property
    def location(self) -> Location:
        """The frame as a place of a finding."""
        return Location(file=self.file, line=self.line, function=self.function)


_FRAME = re.compile(r"^(.+?)\((\d{1,9})\): (.*)$", re.DOTALL)
_GENERATED = re.compile(r"^<(?!ipython-input)|torchinductor|torch_compile_debug|eval_with_key")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/(]+)")
_INSTALLED_FOLDER = re.compile(r"^.*(?:site|dist)-packages/")
_STDLIB = re.compile(r"(?:^|/)lib(?:64)?/python\d[\d.]*t?/|(?:^|/)Lib/(?!site-packages)")


def parse_frame(name: str) -> Frame | None:
    """Parse a frame's file, line and function; ``None``: a built-in, a module range, no frame."""
    result = _FRAME.match(name)
    if result is None:
        return None
    return Frame(result[1], int(result[2]), result[3])


@lru_cache(maxsize=1 << 16)
def frame_rank(name: str) -> int:
    """Return whose code a frame is: 2 the user's own, 1 a library the user installed, 0 PyTorch,
    the standard library, generated code, a built-in, or no frame at all."""
    frame = parse_frame(name)
    if frame is None or _GENERATED.search(frame.file):
        return 0
    path = frame.file.replace("\\", "/")
    installed = _INSTALLED.search(path)
    if installed:
        return 0 if installed[1].removesuffix(".py") in TORCH else 1
    if _STDLIB.search(path):
        return 0
    if path.startswith("/") or path[1:3] == ":/":
        return 2
    top = path.split("/", 1)[0].removesuffix(".py")
    if top in TORCH or top in sys.stdlib_module_names:
        return 0
    return 1 if top in LIBRARIES else 2


def _jax_rank(name: str) -> int:
    frame = parse_frame(name)
    return 0 if frame is not None and frame.file in JAX_FILES else frame_rank(name)


def frame_ranks(trace: Trace) -> NDArray[np.int8]:
    """Return :func:`frame_rank` of Python frames, aligned with ``trace.cpu``; 0 elsewhere."""
    cpu = trace.cpu
    rank = np.zeros(cpu.height, dtype=np.int8)
    python = np.flatnonzero((cpu["kind"] == "python").to_numpy())
    if len(python):
        ranked = _jax_rank if trace.meta.framework == JAX else frame_rank
        rank[python] = map_names(cpu["name"].gather(python), ranked, pl.Int8).to_numpy()
    return rank


def user_frames(trace: Trace) -> Rows:
    """Compute ``Analysis.user_frame``.

    The innermost frame of the user's own code; where only installed libraries are around a row (a
    trace of an inference engine, say), the innermost of theirs: never PyTorch's or Python's."""
    rank = frame_ranks(trace)
    if not rank.any():
        return np.full(trace.cpu.height, -1, dtype=np.int32)
    parent = parent_rows(trace)
    own = innermost_ancestor(parent, rank == 2)
    if (rank == 1).any():
        own = np.where(own >= 0, own, innermost_ancestor(parent, rank == 1))
    return own


def nullable_rows(rows: Rows) -> pl.Series:
    """Return rows of a table as a column: null in place of -1."""
    column = pl.Series(rows, dtype=pl.Int32)
    return column.set(column < 0, None)


def frame_of(a: Analysis, rows: pl.Series) -> pl.Series:
    """Return the user frame of each host row of a column; null: no row, or no stacks."""
    index = rows.fill_null(-1).to_numpy()
    if not a.trace.cpu.height:
        return pl.Series([None], dtype=pl.Int32).new_from_index(0, len(index))
    return nullable_rows(np.where(index >= 0, a.user_frame[np.maximum(index, 0)], -1))


def locate_row(a: Analysis, row: int | None) -> tuple[str | None, int | None, str | None]:
    """Compute ``Analysis.location``. An operator of the backward pass, which runs on a thread
    without Python frames, is located at the line that called its forward operator."""
    if row is None or row < 0:
        return None, None, None
    frame = int(a.user_frame[row])
    if frame < 0:
        frame = int(a.forward_frame[row])
    if frame < 0:
        return None, None, None
    parsed = parse_frame(str(a.trace.cpu["name"][frame]))
    return (None, None, None) if parsed is None else (parsed.file, parsed.line, parsed.function)


# -- the backward pass -------------------------------------------------------------------------

NODE_PREFIX = "autograd::engine::evaluate_function: "
"""Beginning of the names of events in which the autograd engine runs a node."""
ENGINE_NODE = r"^autograd::engine::evaluate_function"
"""Names of events in which the autograd engine runs a node."""
BACKWARD = rf"{ENGINE_NODE}|Backward\d*$"
"""Names of events of the backward pass: the engine's, or a node's own."""


def forward_ops(trace: Trace) -> Rows:
    """Find the forward operator that created the autograd node of each row inside the backward
    pass, aligned with ``trace.cpu``; -1 elsewhere and where it is unknown.

    Both carry the same autograd sequence number. Forward operators that created no node carry the
    number of the next one that does, so the *last* forward operator with a number is its owner.
    Numbers count per thread; one that two forward threads used is left out."""
    cpu = trace.cpu
    none = np.full(cpu.height, -1, dtype=np.int32)
    sequence = cpu["sequence"].fill_null(-1).to_numpy()
    numbered = sequence >= 0
    if not numbered.any():
        return none
    parent = parent_rows(trace)
    backward = name_matches(cpu["name"], BACKWARD).to_numpy() & numbered
    around = innermost_ancestor(parent, backward)
    thread = cpu["thread"].to_numpy()
    forward = np.flatnonzero(numbered & (around < 0) & (cpu["kind"] == "op").to_numpy())
    inside = np.flatnonzero(around >= 0)
    if not len(forward) or not len(inside):
        return none
    keys = sequence[forward]
    order = np.lexsort((cpu["ts"].to_numpy()[forward], keys))
    forward, keys = forward[order], keys[order]
    last = np.append(keys[1:] != keys[:-1], True)
    first = np.append(True, keys[1:] != keys[:-1])
    starts = np.flatnonzero(first)
    lowest = np.minimum.reduceat(thread[forward], starts)
    highest = np.maximum.reduceat(thread[forward], starts)
    owner = np.where(lowest == highest, forward[last], -1)
    wanted = sequence[around[inside]]
    place = np.minimum(np.searchsorted(keys[last], wanted), len(owner) - 1)
    result = np.where(keys[last][place] == wanted, owner[place], -1)
    none[inside] = result
    return none


def forward_frames(a: Analysis) -> Rows:
    """Find the user frame of the forward operator behind each row of the backward pass, aligned
    with ``trace.cpu``; -1: none. See :func:`forward_ops`."""
    if not (a.user_frame >= 0).any():
        return np.full(a.trace.cpu.height, -1, dtype=np.int32)
    owner = a.forward_op
    return np.where(owner >= 0, a.user_frame[np.maximum(owner, 0)], np.int32(-1))


NESTED = r"\): <(?:listcomp|setcomp|dictcomp|genexpr|lambda)>$"
"""Pattern of a comprehension's or lambda's frame: a part of the function around it."""
MIN_SAMPLES = 8
"""Samples of a part from which its lines are named."""
MIN_SHARE = 0.15
"""Share of the samples from which a call can be assigned to a line."""
NEAR_SHARE = 0.1
"""Difference allowed between a call's share of a profiled window and its line's of the samples."""
MIN_COVERED = 0.5
"""Share of a part's samples that must hold the line named for it."""
MIN_OF_LOOP = 0.8
"""Share for one line of the outermost function, which is in all samples: the loop itself."""
MAX_FRAMES = 200_000
"""Frames of all stacks of a rank together, at most: the recorder writes less."""
_PARTS = {
    "data": re.compile(r"^torch/utils/data/"),
    "forward": re.compile(r"^torch/nn/modules/module\.py\("),
    "backward": re.compile(r"^torch/(?:_tensor|autograd/__init__)\.py\(\d+\): (?:\w+\.)?backward$"),
    "optimizer": re.compile(r"^torch/(?:optim/|amp/grad_scaler)"),
    "communication": re.compile(r"^torch/distributed/distributed_c10d\.py\("),
}
LOOP, COMMUNICATION = "loop", "communication"
"""Part of code outside the other parts; part of collectives that the loop itself calls."""
_CLASS = re.compile(r": (?:\w+\.)+(?=\w+$)")
_PROFILER = re.compile(r"^torch/profiler/")
_CALLS_HOOKS = re.compile(
    r"^torch/(?:nn/modules/module\.py\(\d+\): (?:Module\.)?_call_impl(?:\.(?:<locals>\.)?inner)?"
    r"|utils/hooks\.py\(\d+\): .*|autograd/graph\.py\(\d+\): _engine_run_backward)$"
)


_AFFIXES = re.compile(r"^_+|(?:_impl)?[\d_]*$")
"""Affixes of the names of operators and functions that :func:`normalize_operator_name` leaves
out."""


_CALLED = re.compile(r"^<built-in function (.+)>$")


class SampledStack(NamedTuple):
    """A sampled stack: its number of samples, and its frames (``file(line): function``), the
    outermost first."""

    samples: int
    frames: tuple[str, ...]
    called: str = ""
    """Function without Python code that the innermost frame calls: ``numpy.array``, or ``.read``
    for a method of an object; empty: none, or not recorded."""

    @property
    def part(self) -> str:
        """Part of the step: ``data``, ``forward``, ``backward``, ``optimizer``, ``communication``
        or ``loop``, by the outermost frame that is of one."""
        for frame in self.frames:
            for part, pattern in _PARTS.items():
                if pattern.search(frame):
                    return part
        return LOOP


_MODULE_CALL = re.compile(r"(?:^|/)torch/nn/modules/module\.py\(")


class HottestLine(NamedTuple):
    """A line of the user's code with the share of a part's samples in or below it."""

    location: Location
    share: float
    """Share of the part's samples."""
    library_function: str | None
    """Library function below it with most of its samples; ``None``: they are in the line itself."""


def read_stacks(record: RankRecord, since: int | None = None) -> list[SampledStack]:
    """Read the stacks of a rank, without those in which a profiler started or stopped; ``since``:
    of the stretches that surely begin after this moment (ns). Damaged lines are left out."""
    result: list[SampledStack] = []
    room = MAX_FRAMES
    before: int | None = None
    for event in (each for each in record.events if each.kind == "stacks"):
        names, stacks = event.data.get("frames"), event.data.get("stacks")
        begin, before = before, event.t
        if since is not None and (begin is None or begin < since):
            continue
        if not isinstance(names, list) or not isinstance(stacks, list):
            continue
        for line in stacks:
            stack = _stack(line, names)
            if stack is None or any(_PROFILER.search(frame) for frame in stack.frames):
                continue
            room -= len(stack.frames)
            if room < 0:
                return result
            result.append(stack)
    return result


def _stack(line: Any, names: list[Any]) -> SampledStack | None:
    if not isinstance(line, list) or len(line) != 2:
        return None
    count, index = line
    if type(count) is not int or not 0 < count < 1 << 31 or not isinstance(index, list):
        return None
    if not index or not all(type(i) is int and 0 <= i < len(names) for i in index):
        return None
    frames = tuple(names[i] for i in index)
    if not all(isinstance(frame, str) for frame in frames):
        return None
    called = _CALLED.match(frames[-1]) if len(frames) > 1 else None
    return SampledStack(count, frames[:-1], called[1]) if called else SampledStack(count, frames)


def share_in(stacks: Sequence[SampledStack], pattern: str) -> tuple[float, list[SampledStack]]:
    """Return the share of all samples in a frame of this name, as PyTorch's profiler writes frames
    (without the class), and those samples."""
    named = re.compile(pattern)
    own = [
        stack
        for stack in stacks
        if any(named.search(_CLASS.sub(": ", frame)) for frame in stack.frames)
    ]
    total = sum(stack.samples for stack in stacks)
    return sum(stack.samples for stack in own) / max(total, 1), own


class _Lines(NamedTuple):
    """The user's innermost lines in stacks."""

    samples: Counter[Frame]
    below: dict[Frame, Counter[tuple[str, str]]]
    """Innermost library functions below each line, with their files."""

    def hottest(self, line: Frame, share: float) -> HottestLine:
        """Describe a line, and the library function with most of its samples."""
        top = self.below.get(line, Counter()).most_common(1)
        library = top[0][0] if top and top[0][1] > self.samples[line] / 2 else None
        place = Location(file=line.file, line=line.line, function=line.function)
        return HottestLine(place, share, describe_function(library))


def _lines_of(stacks: Sequence[SampledStack]) -> _Lines:
    lines: Counter[Frame] = Counter()
    below: dict[Frame, Counter[tuple[str, str]]] = {}
    for count, frames, _ in stacks:
        name = next((name for name in reversed(frames) if frame_rank(name) == 2), None)
        frame = None if name is None else parse_frame(name)
        if frame is not None:
            lines[frame] += count
            inner = parse_frame(next(name for name in reversed(frames) if frame_rank(name)))
            if inner is not None and inner != frame:
                below.setdefault(frame, Counter())[inner.function, inner.file] += count
    return _Lines(lines, below)


def line_of_share(stacks: Sequence[SampledStack], share: float) -> HottestLine | None:
    """Find the one line of the user's code that takes ``share`` of the time, for a call that keeps
    the thread for a known share of the step. The line's share of all samples is within
    ``NEAR_SHARE`` or a quarter of it. ``None``: too few samples, no such line, or several."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES or share < MIN_SHARE:
        return None
    lines = _lines_of(stacks)
    near = max(NEAR_SHARE, share / 4)
    found = [frame for frame, count in lines.samples.items() if abs(count / total - share) <= near]
    return lines.hottest(found[0], lines.samples[found[0]] / total) if len(found) == 1 else None


def line_of_function(stacks: Sequence[SampledStack], function: str) -> HottestLine | None:
    """Find the line of the user's code with most samples that end in a function of PyTorch or a
    library, named as :func:`normalize_operator_name` does, or in its call of one in C
    (``torch.cat``, ``.sum``). ``None``: too few such samples, or several lines share them."""
    own = [stack for stack in stacks if function in _ends_in(stack)]
    count = sum(stack.samples for stack in own)
    lines = _lines_of(own)
    if count < MIN_SAMPLES or not lines.samples:
        return None
    line, samples = lines.samples.most_common(1)[0]
    if samples < MIN_OF_LOOP * count:
        return None
    return lines.hottest(line, samples / sum(stack.samples for stack in stacks))


def _ends_in(stack: SampledStack) -> Iterator[str]:
    """Yield names of the innermost function, if it is not the user's, and of what it calls in C."""
    leaf = parse_frame(stack.frames[-1])
    if leaf is not None and frame_rank(stack.frames[-1]) < 2:
        yield normalize_operator_name(leaf.function)
    if stack.called.startswith(("torch.", ".")):
        yield normalize_operator_name(stack.called)


def normalize_operator_name(name: str) -> str:
    """Return what an operator and the Python function that calls it share: ``unique`` of
    ``aten::_unique2`` and of ``_unique_impl``."""
    short = name.rpartition("::")[2].rpartition(".")[2]
    return _AFFIXES.sub("", short)


def describe_function(function: tuple[str, str] | None) -> str | None:
    """Write a library's function with its file: ``gcn_norm (torch_geometric/gcn_conv.py)``."""
    if function is None:
        return None
    return f"{function[0]} ({_INSTALLED_FOLDER.sub('', function[1].replace(chr(92), '/'))})"


def innermost_library(a: Analysis, rows: Rows, weight: NDArray[np.int64]) -> str | None:
    """Return the library function in which host rows with most of the ``weight`` are: the innermost
    frame around them that is not PyTorch's or Python's. ``None``: it is the user's, or the trace
    has no Python stacks."""
    rank = frame_ranks(a.trace)
    if not rank.any() or not len(rows):
        return None
    inner = innermost_ancestor(parent_rows(a.trace), rank > 0)[rows]
    weights: Counter[tuple[str, str]] = Counter()
    for row, share in zip(inner, weight, strict=True):
        frame = parse_frame(str(a.trace.cpu["name"][int(row)])) if row >= 0 else None
        if frame is not None and rank[row] == 1:
            weights[frame.function, frame.file] += int(share)
    top = weights.most_common(1)
    return describe_function(top[0][0] if top and top[0][1] > weight.sum() / 2 else None)


def stacks_in_hooks(stacks: Sequence[SampledStack]) -> list[SampledStack]:
    """Return the stacks in a hook, which PyTorch calls where a module's ``forward`` ends, or from
    the engine of the backward pass. A decorator of ``forward``, which calls it, is no hook."""
    called = [list(_called_like_hooks(stack)) for stack in stacks]
    decorators = {
        (frame.file, frame.function) for of in called for frame, inner in of if _is_forward(inner)
    }
    return [
        stack
        for stack, of in zip(stacks, called, strict=True)
        if any((frame.file, frame.function) not in decorators for frame, _ in of)
    ]


def _called_like_hooks(stack: SampledStack) -> Iterator[tuple[Frame, list[Frame]]]:
    """Yield functions that PyTorch calls as it does hooks, each with the frames in it up to the
    next call of a module."""
    frames = [parse_frame(name) for name in stack.frames]
    for place, (caller, name) in enumerate(pairwise(stack.frames), 1):
        called = frames[place]
        if called is None or name.startswith("torch/") or _is_forward([called]):
            continue
        if _CALLS_HOOKS.search(caller):
            inner = takewhile(
                lambda at: not _CALLS_HOOKS.search(stack.frames[at]), range(place, len(frames))
            )
            yield called, [frame for at in inner if (frame := frames[at]) is not None]


def hottest_in_modules(stacks: Sequence[SampledStack]) -> HottestLine | None:
    """Find the line of the user's modules behind the forward pass; ``None``: not sampled, or it is
    the call of the model."""
    forward = [stack for stack in stacks if stack.part == "forward"]
    line = hottest_line(forward)
    for _, frames, _ in forward if line is not None else ():
        in_module = False
        for name in frames:
            in_module = in_module or _MODULE_CALL.search(name) is not None
            frame = parse_frame(name)
            place = None if frame is None else (frame.file, frame.line, frame.function)
            if line is not None and in_module and place == (
                line.location.file, line.location.line, line.location.function
            ):  # fmt: skip
                return line
    return None


def _is_forward(frames: Sequence[Frame]) -> bool:
    return any("forward" in frame.function.lower() for frame in frames)


def hottest_line(stacks: Sequence[SampledStack]) -> HottestLine | None:
    """Find the innermost function of the user's code that half of the samples are in or below, and
    its line of most samples; where there is no such function, that of most. ``None``: too few
    samples, no such code, or several lines of the loop itself."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES:
        return None
    covered: Counter[tuple[str, str]] = Counter()
    depth: dict[tuple[str, str], int] = {}
    lines: dict[tuple[str, str], Counter[Frame]] = {}
    leaves: dict[tuple[str, str], Counter[str]] = {}
    for count, frames, _ in stacks:
        own = {}
        for place, name in enumerate(frames):
            frame = parse_frame(name)
            if frame is not None and frame_rank(name) == 2:
                own[frame.file, frame.function] = place, frame
        for function, (place, frame) in own.items():
            covered[function] += count
            depth[function] = max(depth.get(function, 0), place)
            lines.setdefault(function, Counter())[frame] += count
            leaf = frames[-1] if place < len(frames) - 1 else ""
            leaves.setdefault(function, Counter())[leaf] += count
    wide = [function for function, count in covered.items() if count >= MIN_COVERED * total]
    if not wide:
        wide = [function for function, _ in covered.most_common(1)]
    if not wide:
        return None
    function = max(wide, key=depth.__getitem__)
    line, most = lines[function].most_common(1)[0]
    if not depth[function] and most < MIN_OF_LOOP * total:
        return None
    leaf, count = leaves[function].most_common(1)[0]
    inside = parse_frame(leaf) if 2 * count >= covered[function] else None
    return HottestLine(
        Location(file=line.file, line=line.line, function=line.function),
        covered[function] / total,
        None if inside is None else f"{inside.function} ({inside.file}:{inside.line})",
    )
