"""Padding in the token ids, and ignored labels, that a model or a loss is called with, wherever
they come from.

One forward in ``EVERY`` is looked at. Ids on the CPU are read where they are; ids on a GPU never
are: their copy on the CPU is, as ``Tensor.to`` uploads it. Reading is by NumPy, so that no operator
of ours is in a trace, and no mode of the program sees it.

Labels that a loss is called with are looked at where a sample of the stack meets the loss."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from advisor.recorder.loaders import MASKS, MAX_DEPTH, MAX_TENSORS, is_mapping
from advisor.recorder.watchers import is_intercepted

EVERY = 5
"""Interval, in outermost forwards, at which their inputs are looked at."""
MAX_SAMPLES = 256
"""Most forwards, and most losses, looked at in a run."""
MAX_IDS = 1 << 20
"""Largest matrix of ids that is looked at, elements: about 1 ms."""
MIN_LENGTH = 8
"""Shortest sequence that is looked at."""
MAX_UPLOADS = 8
"""Most uploads looked at for one forward."""
MIN_VALUES = 3
"""Largest id is at least this: masks and segment numbers are smaller."""
MAX_MODELS = 64
IGNORED = -100
"""Label that PyTorch's cross entropy ignores."""


class TokenPadding:
    """Sampler of padding. ``write_event(kind, data)`` gets the share of padding of a forward's ids
    (``padding``) and of the labels that its loss ignores (``labels``)."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._forwards = 0
        self._samples = 0
        self._losses = 0
        self._labels: Callable[[], Any] = lambda: None
        """Reference to the labels that a loss was last met with."""
        self._uploads: dict[tuple[int, ...], dict[str, Any]] = {}
        self._vocabularies: dict[int, int] = {}
        """Largest number of ids that a module embeds, by its id; 0: it embeds none."""

    @property
    def is_due(self) -> bool:
        """Whether the next forward is looked at."""
        return self._forwards % EVERY == 0 and self._samples < MAX_SAMPLES

    def on_upload(self, tensor: Any) -> None:
        """Look at a tensor of the CPU that is copied to a device, if the next forward is due."""
        if not self.is_due or len(self._uploads) >= MAX_UPLOADS:
            return
        import torch

        if type(tensor) is not torch.Tensor or is_intercepted(torch):
            return
        with torch._C.DisableTorchFunction():
            ids = _readable(tensor)
            if ids is not None and (labels := measure_labels(ids)) is not None:
                self._uploads[(-1, *tensor.shape)] = labels
            elif ids is not None and (found := measure_ids(ids)) is not None:
                self._uploads[tuple(tensor.shape)] = found

    def on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the inputs of an outermost forward that begins, if it is due."""
        due, self._forwards = self.is_due, self._forwards + 1
        if not due:
            return
        uploads, self._uploads = self._uploads, {}
        vocabulary = self._vocabulary(module)
        if not vocabulary:
            return
        import torch

        if is_intercepted(torch):
            return
        with torch._C.DisableTorchFunction():
            given: list[tuple[str | None, Any]] = []
            collect_tensors((args, kwargs), None, given, 0)
            labels = next(filter(None, (_find_labels(each, uploads) for _, each in given)), None)
            found = self._measure(given, vocabulary, uploads)
        self._samples += found is not None or labels is not None
        if labels is not None:
            self._write_event("labels", labels)
        if found is not None:
            del found["largest"]
            self._write_event("padding", found)

    def on_loss(self, given: Mapping[str, Any]) -> None:
        """Look at the labels among a loss's arguments, once for each call. Any thread may call
        this."""
        scores: Any = given.get("input")
        labels: Any = given.get("target")
        ignored = given.get("ignore_index", IGNORED)
        if self._losses >= MAX_SAMPLES or labels is self._labels() or type(ignored) is not int:
            return
        import torch

        if type(labels) is not torch.Tensor or type(scores) is not torch.Tensor:
            return
        with torch._C.DisableTorchFunction():
            if labels.dtype is not torch.int64 or not _is_near(labels) or scores.dim() < 2:
                return
            ids = _as_array(labels)
            classes = int(scores.shape[1])
        if ids is None:
            return
        self._losses += 1
        self._labels = ref(labels)
        share = float((ids == ignored).mean())
        found = {"ignored": share, "rows": 1, "columns": ids.size, "classes": classes}
        self._write_event("labels", found)

    def _measure(
        self,
        given: list[tuple[str | None, Any]],
        vocabulary: int,
        uploads: dict[tuple[int, ...], Any],
    ) -> dict[str, Any] | None:
        """Return the padding of a mask among the inputs, else of the largest matrix of ids."""
        best: dict[str, Any] | None = None
        for name, tensor in given:
            ids = _readable(tensor)
            if name in MASKS and ids is not None:
                found = measure_mask(ids != 0 if MASKS[name] else ids == 0)
                if found is not None and found["rows"] != found["columns"]:
                    return found  # a square one may be causal
                continue
            if ids is not None:
                found = measure_ids(ids)
            else:
                found = uploads.get(tuple(tensor.shape)) if _may_be_ids(tensor) else None
            if found is None or not MIN_VALUES <= found["largest"] < vocabulary:
                continue
            size = found["rows"] * found["columns"], found["largest"]
            if best is None or size > (best["rows"] * best["columns"], best["largest"]):
                best = found
        return best

    def _vocabulary(self, module: Any) -> int:
        known = self._vocabularies.get(id(module))
        if known is None and len(self._vocabularies) < MAX_MODELS:
            from torch.nn import Embedding

            sizes = [m.num_embeddings for m in module.modules() if isinstance(m, Embedding)]
            known = self._vocabularies[id(module)] = max(sizes, default=0)
        return known or 0


def _find_labels(tensor: Any, uploads: dict[tuple[int, ...], Any]) -> dict[str, Any] | None:
    """Return the share of ignored labels of an input; ``None``: it holds none."""
    ids = _readable(tensor)
    if ids is not None:
        return measure_labels(ids)
    return uploads.get((-1, *tensor.shape)) if _may_be_ids(tensor) else None


def measure_labels(ids: Any) -> dict[str, Any] | None:
    """Return the share of labels that a loss ignores; ``None``: these are no labels."""
    if ids.dtype.kind != "i" or int(ids.min()) != IGNORED:
        return None
    rows, columns = ids.shape
    return {"ignored": float((ids == IGNORED).mean()), "rows": rows, "columns": columns}


def _may_be_ids(tensor: Any) -> bool:
    return tensor.dim() == 2 and str(tensor.dtype) in ("torch.int64", "torch.int32")


def _readable(tensor: Any) -> Any:
    """Return a matrix of integers or booleans on the CPU as an array, without a copy; else
    ``None``."""
    if tensor.dim() != 2 or not _is_near(tensor):
        return None
    if not (_may_be_ids(tensor) or str(tensor.dtype) == "torch.bool"):
        return None
    return _as_array(tensor)


def _is_near(tensor: Any) -> bool:
    """Return whether a tensor is on the CPU, and small enough to be looked at."""
    return bool(tensor.device.type == "cpu" and 0 < tensor.numel() <= MAX_IDS)


def _as_array(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except Exception:  # a tensor of functorch, or no NumPy
        return None


def collect_tensors(
    value: Any, name: str | None, given: list[tuple[str | None, Any]], depth: int
) -> None:
    """Collect tensors, with the names that they are given under, from the usual containers."""
    from torch import Tensor

    kind = type(value)
    if kind is Tensor:
        given.append((name, value))
    elif depth > MAX_DEPTH or len(given) >= MAX_TENSORS:
        return
    elif kind is list or kind is tuple:
        for part in value[:MAX_TENSORS]:
            collect_tensors(part, name, given, depth + 1)
    elif isinstance(value, Mapping) and (kind is dict or is_mapping(value)):
        for key, part in list(value.items())[:MAX_TENSORS]:
            collect_tensors(part, key if isinstance(key, str) else None, given, depth + 1)


def measure_ids(ids: Any) -> dict[str, Any] | None:
    """Return the padding of a matrix of ids: one id that ends (or begins) most rows, without a
    mask. ``None``: these are no ids, or all of them are the same."""
    import numpy as np

    if ids.dtype.kind != "i" or int(ids.min()) < 0:
        return None
    largest = int(ids.max())
    if largest == int(ids.min()):
        return None
    best: dict[str, Any] | None = None
    # sequences may lie along either dimension; rows of one token each are no sequence
    for rows in (ids, ids.T) if ids.shape[1] > 1 else (ids,):
        for matrix in (rows, rows[:, ::-1]):
            if matrix.shape[1] < MIN_LENGTH:
                continue
            values, counts = np.unique(matrix[:, -1], return_counts=True)
            found = measure_mask(_until_last(matrix != values[counts.argmax()]))
            if found is not None and (best is None or found["padding"] > best["padding"]):
                best = found
        if best is not None and best["padding"] > 0:
            break
    return None if best is None else {**best, "largest": largest}


def _until_last(tokens: Any) -> Any:
    """Return which positions of each row have a token at or after them."""
    import numpy as np

    return np.logical_or.accumulate(tokens[:, ::-1], axis=1)[:, ::-1]


def measure_mask(tokens: Any) -> dict[str, Any] | None:
    """Return the share of padding of a matrix that is true where a token is, and the share in
    positions that hold a token in no row: a batch padded to its longest sequence has none.
    ``None``: too short, or a row without tokens."""
    rows, columns = tokens.shape
    if columns < MIN_LENGTH or not tokens.any(axis=1).all():
        return None
    return {
        "padding": 1 - float(tokens.mean()),
        "beyond": 1 - float(tokens.any(axis=0).mean()),
        "rows": rows,
        "columns": columns,
        "largest": MIN_VALUES,
    }
