"""Padding in the token ids or feature sequences of a model's call, and ignored labels of a loss's
call, whatever their source.

One forward in ``EVERY`` is examined. Ids on the CPU are read in place. Ids on a GPU are never read,
but their CPU copy is, when ``Tensor.to`` uploads it. NumPy reads them, so that traces contain no
operator of ours and no mode of the program sees the access.

A loss's labels are examined when a stack sample finds the loss in the innermost frame."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from advisor.recorder.loaders import MASKS, MAX_BATCH_DEPTH, MAX_TENSORS, is_mapping
from advisor.recorder.watchers import is_intercepted

EVERY = 5
"""Interval, in outermost forwards, at which their inputs are examined."""
_MAX_SAMPLES = 256
"""Maximum number of forwards, and of losses, examined per run."""
MAX_IDS = 1 << 20
"""Maximum size of a matrix of ids to examine, elements: about 1 ms."""
MIN_LENGTH = 8
"""Minimum length of a sequence to examine."""
MAX_SIGNAL = 1 << 24
"""Maximum size of feature sequences to examine, elements."""
MAX_FEATURES = 4
"""Maximum number of features per position that are read."""
MIN_SIGNAL_LENGTH = 32
"""Minimum length of a sequence of features to examine."""
MIN_WAVEFORM_LENGTH = 1024
"""Minimum length of a sequence of single values: shorter ones may be features of a sample."""
MIN_DENSITY = 0.9
"""Minimum share of positions before the end of a sequence that differ from the padding. Sparse
vectors have fewer."""
MAX_SIGNAL_MISSES = 64
"""Maximum number of inputs to examine for padding of features before any is found."""
MAX_UPLOADS = 8
"""Maximum number of uploads examined per forward."""
MIN_VALUES = 3
"""Minimum of the largest id: masks and segment numbers are smaller."""
_MAX_MODELS = 64
MIN_SORTED_ROWS = 4
"""Minimum number of rows whose order of length is no coincidence."""
IGNORED = -100
"""Label that PyTorch's cross entropy ignores."""


class TokenPadding:
    """Sampler of padding. ``write_event(kind, data)`` gets the share of padding of a forward's ids
    or features (``padding``) and of the labels that its loss ignores (``labels``)."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._forwards = 0
        self._samples = 0
        self._losses = 0
        self._last_labels: Callable[[], Any] = lambda: None
        """Reference to the labels of the last examined loss."""
        self._has_signals = False
        """Whether padding of feature sequences was found."""
        self._signal_misses = 0
        self._uploads: dict[tuple[int, ...], dict[str, Any]] = {}
        self._vocabularies: dict[int, int] = {}
        """Maximum number of ids that a module embeds, by the module's id, or 0 if it embeds
        none."""

    @property
    def is_due(self) -> bool:
        """Whether the next forward is examined."""
        return self._forwards % EVERY == 0 and self._samples < _MAX_SAMPLES

    def on_upload(self, tensor: Any) -> None:
        """Examine a CPU tensor that is being copied to a device, if the next forward is due."""
        if not self.is_due or len(self._uploads) >= MAX_UPLOADS:
            return
        import torch

        if type(tensor) is not torch.Tensor or is_intercepted(torch):
            return
        with torch._C.DisableTorchFunction():
            ids = _read_ids(tensor)
            if ids is not None and (labels := measure_labels(ids)) is not None:
                self._uploads[(-1, *tensor.shape)] = labels
            else:
                padding = self._measure_signal(tensor) if ids is None else measure_ids(ids)
                if padding is not None:
                    self._uploads[tuple(tensor.shape)] = padding

    def on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Examine the inputs of an outermost forward that begins, if it is due."""
        is_due, self._forwards = self.is_due, self._forwards + 1
        if not is_due:
            return
        uploads, self._uploads = self._uploads, {}
        vocabulary = self._vocabulary_size(module)
        import torch

        if is_intercepted(torch):
            return
        with torch._C.DisableTorchFunction():
            named_tensors: list[tuple[str | None, Any]] = []
            collect_tensors((args, kwargs), None, named_tensors, 0)
            labels = None
            if vocabulary:
                found_labels = (_find_labels(tensor, uploads) for _, tensor in named_tensors)
                labels = next(filter(None, found_labels), None)
            padding = self._measure_inputs(named_tensors, vocabulary, uploads)
        self._samples += padding is not None or labels is not None
        if labels is not None:
            self._write_event("labels", labels)
        if padding is not None:
            del padding["largest"]
            self._write_event("padding", padding)

    def on_loss(self, arguments: Mapping[str, Any]) -> None:
        """Examine the labels among a loss's arguments, once per call. Any thread may call this."""
        scores: Any = arguments.get("input")
        labels: Any = arguments.get("target")
        ignored = arguments.get("ignore_index", IGNORED)
        if (
            self._losses >= _MAX_SAMPLES
            or labels is self._last_labels()
            or type(ignored) is not int
        ):
            return
        import torch

        if type(labels) is not torch.Tensor or type(scores) is not torch.Tensor:
            return
        with torch._C.DisableTorchFunction():
            if labels.dtype is not torch.int64 or not _is_on_cpu(labels) or scores.dim() < 2:
                return
            ids = _as_array(labels)
            classes = int(scores.shape[1])
        if ids is None:
            return
        self._losses += 1
        self._last_labels = ref(labels)
        share = float((ids == ignored).mean())
        data = {"ignored": share, "rows": 1, "columns": ids.size, "classes": classes}
        self._write_event("labels", data)

    def _measure_inputs(
        self,
        named_tensors: list[tuple[str | None, Any]],
        vocabulary: int,
        uploads: dict[tuple[int, ...], Any],
    ) -> dict[str, Any] | None:
        """Return the padding of a mask among the inputs, else of the largest matrix of ids, else of
        the largest feature sequences."""
        best: dict[str, Any] | None = None
        if not vocabulary:
            signals = [self._measure_signal(tensor, uploads) for _, tensor in named_tensors]
            return max(filter(None, signals), key=lambda s: s["rows"] * s["columns"], default=None)
        for name, tensor in named_tensors:
            ids = _read_ids(tensor)
            if name in MASKS and ids is not None:
                padding = measure_mask(ids != 0 if MASKS[name] else ids == 0)
                if padding is not None and padding["rows"] != padding["columns"]:
                    return padding  # a square mask may be causal
                continue
            if ids is not None:
                padding = measure_ids(ids)
            else:
                padding = uploads.get(tuple(tensor.shape)) if _may_be_ids(tensor) else None
            if padding is None or not MIN_VALUES <= padding["largest"] < vocabulary:
                continue
            size = padding["rows"] * padding["columns"], padding["largest"]
            if best is None or size > (best["rows"] * best["columns"], best["largest"]):
                best = padding
        return best

    def _measure_signal(
        self, tensor: Any, uploads: Mapping[tuple[int, ...], Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the padding of feature sequences on the CPU, or of their upload."""
        if tensor.dim() not in (2, 3) or not tensor.dtype.is_floating_point:
            return None
        if tensor.device.type != "cpu":
            return None if uploads is None else uploads.get(tuple(tensor.shape))
        if not 0 < tensor.numel() <= MAX_SIGNAL or self._signal_misses >= MAX_SIGNAL_MISSES:
            return None
        values = _as_array(tensor.detach())
        padding = None if values is None else measure_signal(values, varies=not self._has_signals)
        self._has_signals |= padding is not None
        self._signal_misses += not self._has_signals
        return padding

    def _vocabulary_size(self, module: Any) -> int:
        size = self._vocabularies.get(id(module))
        if size is None and len(self._vocabularies) < _MAX_MODELS:
            from torch.nn import Embedding

            sizes = [m.num_embeddings for m in module.modules() if isinstance(m, Embedding)]
            size = self._vocabularies[id(module)] = max(sizes, default=0)
        return size or 0


def _find_labels(tensor: Any, uploads: dict[tuple[int, ...], Any]) -> dict[str, Any] | None:
    """Return the share of ignored labels in an input, or ``None`` if it has no labels."""
    ids = _read_ids(tensor)
    if ids is not None:
        return measure_labels(ids)
    return uploads.get((-1, *tensor.shape)) if _may_be_ids(tensor) else None


def measure_labels(ids: Any) -> dict[str, Any] | None:
    """Return the share of labels that a loss ignores, or ``None`` if these are not labels."""
    if ids.dtype.kind != "i" or int(ids.min()) != IGNORED:
        return None
    rows, columns = ids.shape
    return {"ignored": float((ids == IGNORED).mean()), "rows": rows, "columns": columns}


def _may_be_ids(tensor: Any) -> bool:
    return tensor.dim() == 2 and str(tensor.dtype) in ("torch.int64", "torch.int32")


def _read_ids(tensor: Any) -> Any:
    """Return a matrix of integers or booleans on the CPU as an array, without a copy. Return
    ``None`` for other tensors."""
    if tensor.dim() != 2 or not _is_on_cpu(tensor):
        return None
    if not (_may_be_ids(tensor) or str(tensor.dtype) == "torch.bool"):
        return None
    return _as_array(tensor)


def _is_on_cpu(tensor: Any) -> bool:
    """Return whether a tensor is on the CPU and small enough to examine."""
    return bool(tensor.device.type == "cpu" and 0 < tensor.numel() <= MAX_IDS)


def _as_array(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except Exception:  # a functorch tensor, or NumPy is missing
        return None


def collect_tensors(
    value: Any, name: str | None, named_tensors: list[tuple[str | None, Any]], depth: int
) -> None:
    """Collect tensors and their argument names from the usual containers."""
    from torch import Tensor

    kind = type(value)
    if kind is Tensor:
        named_tensors.append((name, value))
    elif depth > MAX_BATCH_DEPTH or len(named_tensors) >= MAX_TENSORS:
        return
    elif kind is list or kind is tuple:
        for part in value[:MAX_TENSORS]:
            collect_tensors(part, name, named_tensors, depth + 1)
    elif isinstance(value, Mapping) and (kind is dict or is_mapping(value)):
        for key, part in list(value.items())[:MAX_TENSORS]:
            collect_tensors(part, key if isinstance(key, str) else None, named_tensors, depth + 1)


def measure_ids(ids: Any) -> dict[str, Any] | None:
    """Return the padding of a matrix of ids without a mask: an id that ends (or begins) most rows.
    Return ``None`` if these are not ids, or all ids are equal."""
    import numpy as np

    if ids.dtype.kind != "i" or int(ids.min()) < 0:
        return None
    largest = int(ids.max())
    if largest == int(ids.min()):
        return None
    best: dict[str, Any] | None = None
    # sequences may run along either dimension; rows of one token are not sequences
    for rows in (ids, ids.T) if ids.shape[1] > 1 else (ids,):
        for matrix in (rows, rows[:, ::-1]):
            if matrix.shape[1] < MIN_LENGTH:
                continue
            values, counts = np.unique(matrix[:, -1], return_counts=True)
            padding = measure_mask(_mark_until_last_token(matrix != values[counts.argmax()]))
            if padding is not None and (best is None or padding["padding"] > best["padding"]):
                best = padding
        if best is not None and best["padding"] > 0:
            break
    return None if best is None else {**best, "largest": largest}


def measure_signal(values: Any, *, varies: bool = True) -> dict[str, Any] | None:
    """Return the padding of feature sequences, [rows, time, features] or [rows, features, time], or
    of waveforms, [rows, time]: a constant that ends the rows. ``varies``: only if they end at
    different places. Return ``None`` if these are not sequences."""
    import numpy as np

    orders = (values, values.transpose(0, 2, 1)) if values.ndim == 3 else (values[:, :, None],)
    best: dict[str, Any] | None = None
    for matrix in orders:
        _, length, features = matrix.shape
        if length < (MIN_SIGNAL_LENGTH if features > 1 else MIN_WAVEFORM_LENGTH):
            continue
        sampled = matrix[:, :, :: max(1, features // MAX_FEATURES)]
        differs = np.ones(sampled.shape[:2], dtype=np.bool_)
        # rows that end in a constant; one without padding ends in another value by chance
        is_padded = (sampled[:, -2:] == sampled[:, -1:, :1]).all(axis=(1, 2))
        if is_padded.any():
            ends, counts = np.unique(sampled[is_padded, -1, 0], return_counts=True)
            differs = (sampled != ends[counts.argmax()]).any(axis=2)
        is_token = _mark_until_last_token(differs)
        lengths = is_token.sum(axis=1)
        is_dense = differs.sum() >= MIN_DENSITY * lengths.sum()
        if is_dense and (not varies or lengths.min() != lengths.max()):
            padding = measure_mask(is_token)
            if padding is not None and (best is None or padding["padding"] > best["padding"]):
                best = {**padding, "signal": True}
    return best


def _mark_until_last_token(tokens: Any) -> Any:
    """Return which positions of each row have a token at or after them."""
    import numpy as np

    return np.logical_or.accumulate(tokens[:, ::-1], axis=1)[:, ::-1]


def measure_mask(tokens: Any) -> dict[str, Any] | None:
    """Return the share of padding in a matrix that is true for tokens, and the share in positions
    without a token in any row, of which a batch padded to its longest sequence has none. If the
    rows are in the order of their lengths, also return the share of positions that would be gone if
    the batch were split in two. Return ``None`` if rows are too short, or a row has no tokens."""
    rows, columns = tokens.shape
    if columns < MIN_LENGTH or not tokens.any(axis=1).all():
        return None
    padding = {
        "padding": 1 - float(tokens.mean()),
        "beyond": 1 - float(tokens.any(axis=0).mean()),
        "rows": rows,
        "columns": columns,
        "largest": MIN_VALUES,
    }
    lengths = tokens.sum(axis=1)
    changes = lengths[1:] - lengths[:-1]
    if rows >= MIN_SORTED_ROWS and changes.any() and ((changes >= 0).all() or (changes <= 0).all()):
        halves = lengths[: rows // 2], lengths[rows // 2 :]
        left = sum(len(half) * int(half.max()) for half in halves)
        padding["split"] = 1 - left / (rows * columns)
    return padding
