"""Call stacks from the profiler and sampled by the recorder: ancestors of complete columns, and
lines of the user's own code.

Samples are taken where the interpreter changes threads. Pure Python of less than 5 ms is rarely
sampled; the call after it is sampled instead. So shares of samples only name lines, and times come
from the recorded phases."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.core.intervals import Bools
from advisor.core.labels import FRAME
from advisor.core.run_directory import RankRecord
from advisor.core.trace import JAX
from advisor.measure.host.names import map_names, name_matches

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.measure import Analysis


Rows = NDArray[Any]
"""Rows of ``trace.cpu``, int32 or int64, with -1 for none."""
_MERGE_LEVELS, _MIN_ROWS_TO_MERGE = 8, 1_000

# The profiler cuts the entries of ``sys.path`` off the front of a file's name, so a frame of an
# installed package starts with the package's name. Only that distinguishes it from the user's code.
TORCH = frozenset({"torch", "advisor", "numpy", "triton"})
"""Packages of PyTorch, and packages that count as PyTorch in a stack."""
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
"""Packages of libraries that users install."""
JAX_FILES = frozenset(
    """ad.py api.py api_util.py array.py array_creation.py array_methods.py batching.py
    compilation_cache.py compiler.py core.py custom_derivatives.py dispatch.py dtypes.py lax.py
    lax_numpy.py linear_util.py loops.py mesh.py mlir.py named_sharding.py partial_eval.py pjit.py
    pmap.py prng.py profiler.py pxla.py reductions.py shard_map.py sharding.py sharding_impls.py
    slicing.py source_info_util.py stages.py traceback_util.py tree_util.py ufuncs.py util.py
    xla_bridge.py xla_metadata_lib.py""".split()
)
"""Files of JAX that are in most stacks. Its profiler writes names without folders, so a user's file
with one of these names counts as JAX's."""

# -- ancestors ---------------------------------------------------------------------------------


def parent_rows(trace: Trace) -> Rows:
    """Return the row of the event around each row, aligned with ``trace.cpu``, or -1."""
    return trace.cpu["parent"].fill_null(-1).to_numpy().astype(np.int32, copy=False)


def innermost_ancestor(parent: Rows, mask: Bools) -> Rows:
    """Find the innermost row of ``mask`` among each row and its ancestors, or -1.

    Every row points at itself if it is in ``mask``, else at its parent. Each round doubles the
    length of all pointers, so log2(depth) rounds over complete columns are enough."""
    count = len(parent)
    rows = np.arange(count, dtype=np.int32)
    jump = np.append(np.where(mask, rows, np.where(parent < 0, count, parent)), count)
    jump = jump.astype(np.int32, copy=False)
    while True:
        next_jump = jump[jump]
        if np.array_equal(next_jump, jump):
            break
        jump = next_jump
    result = jump[:-1]
    return np.where(result == count, np.int32(-1), result)


def outermost_ancestor(parent: Rows, mask: Bools) -> Rows:
    """Find the outermost row of ``mask`` among each row and its ancestors, or -1."""
    nearest = innermost_ancestor(parent, mask)
    ancestor = np.where(parent < 0, np.int32(-1), nearest[np.maximum(parent, 0)])
    return innermost_ancestor(parent, mask & (ancestor < 0))


def is_operator(trace: Trace) -> Bools:
    """Return which rows of ``trace.cpu`` are operators."""
    result: Bools = (trace.cpu["kind"] == "op").to_numpy()
    return result


def outermost_operator(trace: Trace) -> Rows:
    """Return the outermost operator around each row, aligned with ``trace.cpu``, or -1."""
    return outermost_ancestor(parent_rows(trace), is_operator(trace))


def outermost_rows(trace: Trace) -> NDArray[np.int64]:
    """Return operators that are not inside others: rows of ``trace.cpu``, by thread and time."""
    outermost = outermost_operator(trace)
    return np.flatnonzero(outermost == np.arange(len(outermost)))


def climb_stack(parent: Rows, mask: Bools, rows: Rows, *, top: bool = False) -> Rows:
    """Find :func:`innermost_ancestor` (with ``top``, :func:`outermost_ancestor`) of only a few
    rows, or -1. It takes as many rounds as their stacks are deep."""
    result = np.full(len(rows), -1, dtype=parent.dtype)
    index = np.flatnonzero(rows >= 0)
    row = rows[index]
    levels = 0
    while len(index):
        is_found = mask[row]
        result[index[is_found]] = row[is_found]
        if not top:
            index, row = index[~is_found], row[~is_found]
        row = parent[row]
        index, row = index[row >= 0], row[row >= 0]
        levels += 1
        if levels % _MERGE_LEVELS == 0 and len(row) > _MIN_ROWS_TO_MERGE:
            # Paths up through Python frames merge early: continue once for each distinct row.
            distinct, inverse = np.unique(row, return_inverse=True)
            if 2 * len(distinct) < len(row):
                ancestors = climb_stack(parent, mask, distinct, top=top)[inverse]
                result[index] = np.where(ancestors >= 0, ancestors, result[index])
                break
    return result


def rows_around(parent: Rows, rows: Rows) -> Rows:
    """Return the row around each of the given rows, or -1."""
    if not len(parent):
        return np.full(len(rows), -1, dtype=parent.dtype)
    return np.where(rows >= 0, parent[np.maximum(rows, 0)], parent.dtype.type(-1))


def ancestor_chains(parent: Rows, rows: Rows) -> NDArray[np.int64]:
    """Return the given rows and their ancestors, innermost first: a line per row, padded by -1."""
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
        """The frame as the location of a finding."""
        return Location(file=self.file, line=self.line, function=self.function)


_GENERATED_FILE = re.compile(r"^<(?!ipython-input)|torchinductor|torch_compile_debug|eval_with_key")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/(]+)")
_INSTALLED_FOLDER = re.compile(r"^.*(?:site|dist)-packages/")
_STDLIB_FILE = re.compile(r"(?:^|/)lib(?:64)?/python\d[\d.]*t?/|(?:^|/)Lib/(?!site-packages)")


def parse_frame(name: str) -> Frame | None:
    """Parse a frame's file, line and function; ``None`` for a built-in or another event."""
    result = FRAME.match(name)
    if result is None:
        return None
    return Frame(result[1], int(result[2]), result[3])


class CodeOwner(IntEnum):
    """Whose code a row of ``trace.cpu`` is."""

    PYTORCH = 0
    """PyTorch, the standard library, generated code, a built-in, or no Python frame."""
    LIBRARY = 1
    """An installed library."""
    USER = 2
    """The user's own code."""


@lru_cache(maxsize=1 << 16)
def code_owner(name: str) -> CodeOwner:
    """Return whose code a frame is; PYTORCH for a name that is not a frame."""
    frame = parse_frame(name)
    if frame is None or _GENERATED_FILE.search(frame.file):
        return CodeOwner.PYTORCH
    path = frame.file.replace("\\", "/")
    installed = _INSTALLED.search(path)
    if installed:
        is_torch = installed[1].removesuffix(".py") in TORCH
        return CodeOwner.PYTORCH if is_torch else CodeOwner.LIBRARY
    if _STDLIB_FILE.search(path):
        return CodeOwner.PYTORCH
    if path.startswith("/") or path[1:3] == ":/":
        return CodeOwner.USER
    top = path.split("/", 1)[0].removesuffix(".py")
    if top in TORCH or top in sys.stdlib_module_names:
        return CodeOwner.PYTORCH
    return CodeOwner.LIBRARY if top in LIBRARIES else CodeOwner.USER


def _jax_code_owner(name: str) -> CodeOwner:
    frame = parse_frame(name)
    is_jax = frame is not None and frame.file in JAX_FILES
    return CodeOwner.PYTORCH if is_jax else code_owner(name)


def code_owners(trace: Trace) -> NDArray[np.int8]:
    """Return :func:`code_owner` of Python frames, aligned with ``trace.cpu``, and
    ``CodeOwner.PYTORCH`` elsewhere."""
    cpu = trace.cpu
    owners = np.full(cpu.height, CodeOwner.PYTORCH, dtype=np.int8)
    python = np.flatnonzero((cpu["kind"] == "python").to_numpy())
    if len(python):
        owner_of = _jax_code_owner if trace.meta.framework == JAX else code_owner
        owners[python] = map_names(cpu["name"].gather(python), owner_of, pl.Int8).to_numpy()
    return owners


def user_frames(trace: Trace) -> Rows:
    """Compute ``Analysis.user_frame``.

    It is the innermost frame of the user's own code, or if only installed libraries are around a
    row (as in a trace of an inference engine) their innermost one, never PyTorch's or Python's."""
    owner = code_owners(trace)
    if not owner.any():
        return np.full(trace.cpu.height, -1, dtype=np.int32)
    parent = parent_rows(trace)
    frames = innermost_ancestor(parent, owner == CodeOwner.USER)
    if (owner == CodeOwner.LIBRARY).any():
        frames = np.where(
            frames >= 0, frames, innermost_ancestor(parent, owner == CodeOwner.LIBRARY)
        )
    return frames


def nullable_rows(rows: Rows) -> pl.Series:
    """Return rows of a table as a column, with null instead of -1."""
    column = pl.Series(rows, dtype=pl.Int32)
    return column.set(column < 0, None)


def frame_of(a: Analysis, rows: pl.Series) -> pl.Series:
    """Return the user frame of each host row of a column, or null without a row or stacks."""
    index = rows.fill_null(-1).to_numpy()
    if not a.trace.cpu.height:
        return pl.Series([None], dtype=pl.Int32).new_from_index(0, len(index))
    return nullable_rows(np.where(index >= 0, a.user_frame[np.maximum(index, 0)], -1))


def user_line(a: Analysis, row: int | None) -> tuple[str | None, int | None, str | None]:
    """Compute ``Analysis.location``. An operator of the backward pass, which runs on a thread
    without Python frames, is located at the line that called its forward operator."""
    if row is None or row < 0:
        return None, None, None
    frame = int(a.user_frame[row])
    if frame < 0:
        frame = int(a.forward_frame[row])
    if frame < 0:
        return None, None, None
    parsed_frame = parse_frame(str(a.trace.cpu["name"][frame]))
    return (
        (None, None, None)
        if parsed_frame is None
        else (parsed_frame.file, parsed_frame.line, parsed_frame.function)
    )


# -- the backward pass -------------------------------------------------------------------------

NODE_PREFIX = "autograd::engine::evaluate_function: "
"""Prefix of the names of events in which the autograd engine runs a node."""
ENGINE_NODE = r"^autograd::engine::evaluate_function"
"""Pattern of the names of events in which the autograd engine runs a node."""
BACKWARD = rf"{ENGINE_NODE}|Backward\d*$"
"""Pattern of the names of events of the backward pass: the engine's or a node's own."""


def forward_ops(trace: Trace) -> Rows:
    """Find the forward operator that created the autograd node of each row inside the backward
    pass, aligned with ``trace.cpu``; -1 elsewhere and where it is unknown.

    Both carry the same autograd sequence number. Forward operators that created no node carry the
    number of the next one that does, so the *last* forward operator with a number is its owner.
    Numbers count per thread; a number that two forward threads used is left out."""
    cpu = trace.cpu
    owners = np.full(cpu.height, -1, dtype=np.int32)
    sequence = cpu["sequence"].fill_null(-1).to_numpy()
    numbered = sequence >= 0
    if not numbered.any():
        return owners
    parent = parent_rows(trace)
    is_backward = name_matches(cpu["name"], BACKWARD).to_numpy() & numbered
    node = innermost_ancestor(parent, is_backward)
    thread = cpu["thread"].to_numpy()
    forward = np.flatnonzero(numbered & (node < 0) & (cpu["kind"] == "op").to_numpy())
    in_backward = np.flatnonzero(node >= 0)
    if not len(forward) or not len(in_backward):
        return owners
    keys = sequence[forward]
    order = np.lexsort((cpu["ts"].to_numpy()[forward], keys))
    forward, keys = forward[order], keys[order]
    is_last = np.append(keys[1:] != keys[:-1], True)
    is_first = np.append(True, keys[1:] != keys[:-1])
    starts = np.flatnonzero(is_first)
    lowest = np.minimum.reduceat(thread[forward], starts)
    highest = np.maximum.reduceat(thread[forward], starts)
    owner = np.where(lowest == highest, forward[is_last], -1)
    numbers = sequence[node[in_backward]]
    position = np.minimum(np.searchsorted(keys[is_last], numbers), len(owner) - 1)
    forward_rows = np.where(keys[is_last][position] == numbers, owner[position], -1)
    owners[in_backward] = forward_rows
    return owners


def forward_frames(a: Analysis) -> Rows:
    """Find the user frame of the forward operator of each row of the backward pass, aligned with
    ``trace.cpu``, or -1. See :func:`forward_ops`."""
    if not (a.user_frame >= 0).any():
        return np.full(a.trace.cpu.height, -1, dtype=np.int32)
    owner = a.forward_op
    return np.where(owner >= 0, a.user_frame[np.maximum(owner, 0)], np.int32(-1))


NESTED = r"\): <(?:listcomp|setcomp|dictcomp|genexpr|lambda)>$"
"""Pattern of a comprehension's or lambda's frame, which is part of the function around it."""
MIN_SAMPLES = 8
"""Minimum number of samples of a part for naming its lines."""
_MIN_CALL_SHARE = 0.15
"""Minimum share of the samples at which a call can be assigned to a line."""
MAX_SHARE_DIFFERENCE = 0.1
"""Maximum difference of a call's share of a profiled window and its line's share of samples."""
MIN_COVERED_SHARE = 0.5
"""Minimum share of a part's samples with the line that is named for it."""
MIN_OF_LOOP = 0.8
"""Minimum share of one line of the loop itself, the outermost function of all samples."""
_MAX_FRAMES = 200_000
"""Maximum number of frames in all stacks of a rank together: the recorder writes fewer."""
_PART_PATTERNS = {
    "data": re.compile(r"^torch/utils/data/"),
    "forward": re.compile(r"^torch/nn/modules/module\.py\("),
    "backward": re.compile(r"^torch/(?:_tensor|autograd/__init__)\.py\(\d+\): (?:\w+\.)?backward$"),
    "optimizer": re.compile(r"^torch/(?:optim/|amp/grad_scaler)"),
    "communication": re.compile(r"^torch/distributed/distributed_c10d\.py\("),
}
LOOP, COMMUNICATION = "loop", "communication"
"""Names of parts: code outside the other parts, and collectives that the loop itself calls."""
_CLASS_PREFIX = re.compile(r": (?:\w+\.)+(?=\w+$)")
_PROFILER_FRAME = re.compile(r"^torch/profiler/")
_CALLS_HOOKS = re.compile(
    r"^torch/(?:nn/modules/module\.py\(\d+\): (?:Module\.)?_call_impl(?:\.(?:<locals>\.)?inner)?"
    r"|utils/hooks\.py\(\d+\): .*|autograd/graph\.py\(\d+\): _engine_run_backward)$"
)
_CALLS_CALLBACKS = re.compile(
    r"^(?:lightning/pytorch|pytorch_lightning)/trainer/call\.py\(\d+\): _call_callback_hooks$"
    r"|^transformers/trainer_callback\.py\(\d+\): (?:CallbackHandler\.)?call_event$"
)
STEP_EVENT = re.compile(r"^(?:\w+\.)*on_(?:train_batch_\w+|before_\w+|after_backward|\w*step\w*)$")
"""Methods of a callback that a framework's loop calls in each step."""


_AFFIXES = re.compile(r"^_+|^_?(?:fft|linalg|special)_(?=[a-z])|(?:_impl)?[\d_]*$")
"""Prefixes and suffixes that :func:`normalize_operator_name` removes from the names of operators
and functions."""


_C_FUNCTION = re.compile(r"^<built-in function (.+)>$")


class SampledStack(NamedTuple):
    """A sampled stack: its number of samples, and its frames (``file(line): function``), outermost
    first."""

    samples: int
    frames: tuple[str, ...]
    called: str = ""
    """Function without Python code that the innermost frame calls: ``numpy.array``, or ``.read``
    for a method of an object. Empty if there is none, or not recorded."""

    @property
    def part(self) -> str:
        """Part of the step: ``data``, ``forward``, ``backward``, ``optimizer``, ``communication``
        or ``loop``, by the outermost frame that belongs to one."""
        for frame in self.frames:
            for part, pattern in _PART_PATTERNS.items():
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
    """Library function below it with most of its samples, or ``None`` if the line has them."""


def read_stacks(record: RankRecord, since: int | None = None) -> list[SampledStack]:
    """Read the stacks of a rank, without stacks in which a profiler started or stopped. With
    ``since``, read only intervals that certainly begin after it (ns). Damaged lines are left
    out."""
    result: list[SampledStack] = []
    frames_left = _MAX_FRAMES
    previous: int | None = None
    for event in (stacks_event for stacks_event in record.events if stacks_event.kind == "stacks"):
        names, stacks = event.data.get("frames"), event.data.get("stacks")
        start, previous = previous, event.t
        if since is not None and (start is None or start < since):
            continue
        if not isinstance(names, list) or not isinstance(stacks, list):
            continue
        for line in stacks:
            stack = _parse_stack(line, names)
            if stack is None or any(_PROFILER_FRAME.search(frame) for frame in stack.frames):
                continue
            frames_left -= len(stack.frames)
            if frames_left < 0:
                return result
            result.append(stack)
    return result


def read_membership_tests(record: RankRecord) -> dict[tuple[str, str], list[Frame]]:
    """Return the tests ``x in items`` in and below functions with many samples, by the function's
    file and name: places where a list may be searched. Damaged entries are left out."""
    result: dict[tuple[str, str], list[Frame]] = {}
    for event in record.events_of("stacks"):
        names, pairs = event.get("frames"), event.get("tests")
        if not isinstance(names, list) or not isinstance(pairs, list):
            continue
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                continue
            texts = [names[i] for i in pair if type(i) is int and 0 <= i < len(names)]
            frames = [parse_frame(text) for text in texts if isinstance(text, str)]
            if len(frames) == 2 and frames[0] is not None and frames[1] is not None:
                tests = result.setdefault((frames[0].file, frames[0].function), [])
                tests += [frames[1]] * (frames[1] not in tests)
    return result


def _parse_stack(line: Any, names: list[Any]) -> SampledStack | None:
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
    called = _C_FUNCTION.match(frames[-1]) if len(frames) > 1 else None
    return SampledStack(count, frames[:-1], called[1]) if called else SampledStack(count, frames)


def share_in(stacks: Sequence[SampledStack], pattern: str) -> tuple[float, list[SampledStack]]:
    """Return the share of all samples in a frame of this name, as PyTorch's profiler writes frames
    (without the class), and the stacks with the frame."""
    frame_pattern = re.compile(pattern)
    matching = [
        stack
        for stack in stacks
        if any(frame_pattern.search(_CLASS_PREFIX.sub(": ", frame)) for frame in stack.frames)
    ]
    total = sum(stack.samples for stack in stacks)
    return sum(stack.samples for stack in matching) / max(total, 1), matching


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


def _count_lines(stacks: Sequence[SampledStack]) -> _Lines:
    lines: Counter[Frame] = Counter()
    below: dict[Frame, Counter[tuple[str, str]]] = {}
    for count, frames, _ in stacks:
        name = next((name for name in reversed(frames) if code_owner(name) == CodeOwner.USER), None)
        frame = None if name is None else parse_frame(name)
        if frame is not None:
            lines[frame] += count
            inner = parse_frame(
                next(name for name in reversed(frames) if code_owner(name) >= CodeOwner.LIBRARY)
            )
            if inner is not None and inner != frame:
                below.setdefault(frame, Counter())[inner.function, inner.file] += count
    return _Lines(lines, below)


_MAX_FUNCTIONS = 30


def shares_of_functions(stacks: Sequence[SampledStack]) -> dict[str, float]:
    """Return the share of the samples in or below each function of the user's code, the largest
    first, by the frame of its line with most samples. Empty with too few samples."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES:
        return {}
    lines: dict[tuple[str, str], Counter[str]] = {}
    for count, frames, _ in stacks:
        for function, (level, _) in _user_functions(frames).items():
            lines.setdefault(function, Counter())[frames[level]] += count
    shares = {each.most_common(1)[0][0]: each.total() / total for each in lines.values()}
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:_MAX_FUNCTIONS])


def line_of_share(stacks: Sequence[SampledStack], share: float) -> HottestLine | None:
    """Find the one line of the user's code that takes ``share`` of the time, for a call that
    occupies the thread for a known share of the step. The line's share of all samples differs by at
    most ``MAX_SHARE_DIFFERENCE`` or a quarter. ``None`` with too few samples, no such line, or
    several."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES or share < _MIN_CALL_SHARE:
        return None
    lines = _count_lines(stacks)
    max_difference = max(MAX_SHARE_DIFFERENCE, share / 4)
    matching = [
        frame
        for frame, count in lines.samples.items()
        if abs(count / total - share) <= max_difference
    ]
    return (
        lines.hottest(matching[0], lines.samples[matching[0]] / total)
        if len(matching) == 1
        else None
    )


def line_of_function(stacks: Sequence[SampledStack], function: str) -> HottestLine | None:
    """Find the line of the user's code with most samples that end in a function of PyTorch or a
    library, named as by :func:`normalize_operator_name`, or in its call of a C function
    (``torch.cat``, ``.sum``). ``None`` with too few samples, or if several lines share them."""
    matching = [stack for stack in stacks if function in _end_names(stack)]
    count = sum(stack.samples for stack in matching)
    lines = _count_lines(matching)
    if count < MIN_SAMPLES or not lines.samples:
        return None
    line, samples = lines.samples.most_common(1)[0]
    if samples < MIN_OF_LOOP * count:
        return None
    return lines.hottest(line, samples / sum(stack.samples for stack in stacks))


def _end_names(stack: SampledStack) -> Iterator[str]:
    """Yield the names of the innermost function, if not the user's, and of the C function it
    calls."""
    leaf = parse_frame(stack.frames[-1])
    if leaf is not None and code_owner(stack.frames[-1]) < CodeOwner.USER:
        yield normalize_operator_name(leaf.function)
    if stack.called.startswith(("torch.", ".")):
        yield normalize_operator_name(stack.called)


def normalize_operator_name(name: str) -> str:
    """Return the common name of an operator and the Python function that calls it: ``unique`` for
    ``aten::_unique2`` and ``_unique_impl``, ``rfft`` for ``aten::fft_rfft`` and
    ``torch.fft.rfft``."""
    short = name.rpartition("::")[2].rpartition(".")[2]
    return _AFFIXES.sub("", short)


def describe_function(function: tuple[str, str] | None) -> str | None:
    """Format a library's function with its file: ``gcn_norm (torch_geometric/gcn_conv.py)``."""
    if function is None:
        return None
    return f"{function[0]} ({_INSTALLED_FOLDER.sub('', function[1].replace(chr(92), '/'))})"


def innermost_library(a: Analysis, rows: Rows, weight: NDArray[np.int64]) -> str | None:
    """Return the library function around host rows with most of the ``weight``: the innermost frame
    that is not PyTorch's or Python's. ``None`` if it is the user's, or the trace has no Python
    stacks."""
    owner = code_owners(a.trace)
    if not owner.any() or not len(rows):
        return None
    frames = innermost_ancestor(parent_rows(a.trace), owner >= CodeOwner.LIBRARY)[rows]
    weights: Counter[tuple[str, str]] = Counter()
    for row, row_weight in zip(frames, weight, strict=True):
        frame = parse_frame(str(a.trace.cpu["name"][int(row)])) if row >= 0 else None
        if frame is not None and owner[row] == CodeOwner.LIBRARY:
            weights[frame.function, frame.file] += int(row_weight)
    top = weights.most_common(1)
    return describe_function(top[0][0] if top and top[0][1] > weight.sum() / 2 else None)


def stacks_in_hooks(stacks: Sequence[SampledStack]) -> list[SampledStack]:
    """Return the stacks in a hook, which PyTorch calls when a module's ``forward`` ends, or from
    the engine of the backward pass, and in the user's callbacks of each step. A decorator of
    ``forward``, which calls it, is not a hook."""
    calls = [list(_find_hook_calls(stack)) for stack in stacks]
    decorators = {
        (frame.file, frame.function)
        for stack_calls in calls
        for frame, inner in stack_calls
        if _is_forward(inner)
    }
    return [
        stack
        for stack, stack_calls in zip(stacks, calls, strict=True)
        if any((frame.file, frame.function) not in decorators for frame, _ in stack_calls)
    ]


def _find_hook_calls(stack: SampledStack) -> Iterator[tuple[Frame, list[Frame]]]:
    """Yield functions that PyTorch calls like hooks, each with the frames in it up to the next call
    of a module."""
    frames = [parse_frame(name) for name in stack.frames]
    for index, (caller, name) in enumerate(pairwise(stack.frames), 1):
        function = frames[index]
        if function is None or name.startswith("torch/") or _is_forward([function]):
            continue
        if _CALLS_CALLBACKS.search(caller):
            if code_owner(name) == CodeOwner.USER and STEP_EVENT.search(function.function):
                yield function, []
        elif _CALLS_HOOKS.search(caller):
            inner = takewhile(
                lambda position: not _CALLS_HOOKS.search(stack.frames[position]),
                range(index, len(frames)),
            )
            yield function, [frame for position in inner if (frame := frames[position]) is not None]


def hottest_in_modules(stacks: Sequence[SampledStack]) -> HottestLine | None:
    """Find the line of the user's modules that takes most of the forward pass. ``None`` if not
    sampled, or if it is the call of the model."""
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


def _user_functions(frames: Sequence[str]) -> dict[tuple[str, str], tuple[int, Frame]]:
    """Return the functions of the user's code in a stack, by file and name, each with the level and
    the frame of its innermost call."""
    result = {}
    for level, name in enumerate(frames):
        frame = parse_frame(name)
        if frame is not None and code_owner(name) == CodeOwner.USER:
            result[frame.file, frame.function] = level, frame
    return result


def hottest_line(stacks: Sequence[SampledStack]) -> HottestLine | None:
    """Find the innermost function of the user's code with half of the samples in or below it, else
    the function with the most samples, and its line with the most samples. ``None`` if there are
    too few samples, no user code, or several lines of the loop itself."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES:
        return None
    covered: Counter[tuple[str, str]] = Counter()
    depth: dict[tuple[str, str], int] = {}
    lines: dict[tuple[str, str], Counter[Frame]] = {}
    leaves: dict[tuple[str, str], Counter[str]] = {}
    for count, frames, _ in stacks:
        for function, (level, frame) in _user_functions(frames).items():
            covered[function] += count
            depth[function] = max(depth.get(function, 0), level)
            lines.setdefault(function, Counter())[frame] += count
            leaf = frames[-1] if level < len(frames) - 1 else ""
            leaves.setdefault(function, Counter())[leaf] += count
    wide = [function for function, count in covered.items() if count >= MIN_COVERED_SHARE * total]
    if not wide:
        wide = [function for function, _ in covered.most_common(1)]
    if not wide:
        return None
    function = max(wide, key=depth.__getitem__)
    line, line_samples = lines[function].most_common(1)[0]
    if not depth[function] and line_samples < MIN_OF_LOOP * total:
        return None
    leaf, count = leaves[function].most_common(1)[0]
    library_frame = parse_frame(leaf) if 2 * count >= covered[function] else None
    return HottestLine(
        Location(file=line.file, line=line.line, function=line.function),
        covered[function] / total,
        None
        if library_frame is None
        else f"{library_frame.function} ({library_frame.file}:{library_frame.line})",
    )
