"""Reader of ``trtexec``'s exports: layer times (``--exportProfile``), and the layers' descriptions
(``--exportLayerInfo``, ``--profilingVerbosity=detailed``) in the file beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core.errors import AdvisorError
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Device, Trace

MAX_BYTES = 64 << 20
MAX_LAYERS = 5_000
"""Most layers."""
_PROFILE = re.compile(rb'\s*\[\s*\{\s*"count"\s*:.{0,4000}"averageMs"', re.DOTALL)
_LAYERS = re.compile(rb'\s*\{\s*"Layers"\s*:\s*\[')
_BESIDE = (("profile", "graph"), ("profile", "layers"), ("profile", "layerinfo"),
           ("profile", "layer_info"))  # fmt: skip
"""Parts of the names of two files that belong together."""
_PRECISIONS = (
    ("fp8", r"FP8"), ("int8", r"Int8|INT8"), ("int4", r"INT4|Int4"), ("bf16", r"BF16|BFloat16"),
    ("fp16", r"FP16|Half"), ("fp32", r"FP32|Float"),
)  # fmt: skip


class TensorRTReader(Reader):
    """Reader of one inference, layer after layer, with the mean time of each."""

    name = "tensorrt"
    description = "TensorRT layer times (.profile.json)"
    suffixes = ()
    tool = Tool(
        "nsys profile --trace=cuda,nvtx,osrt trtexec --loadEngine=model.plan",
        "an NVTX range around each inference",
        "NVTX ranges around the host's work, under nsys profile --trace=cuda,nvtx,osrt",
        records_device=True,
        program="trtexec --loadEngine=model.plan --warmUp=0 --duration=0 --iterations=3",
    )
    layer_times = True

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise either file by its first keys."""
        known = _PROFILE.match(head) or _LAYERS.match(head)
        return ReaderClaim.SURE if known else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return layers as device work, back to back: their starts, and what the host did, are not
        in the file. Raises AdvisorError if there are no times."""
        import polars as pl

        from advisor.core.trace import CUDA, TraceMeta
        from advisor.read.build import build_trace

        if _LAYERS.match(source.head()):
            raise AdvisorError(
                f"{source.path}: layers of a TensorRT engine without times; give the file of "
                "trtexec --exportProfile (with this one beside it, named graph where it is "
                "named profile)"
            )
        profile = _decoded(_bytes(source, options), source.path)
        if type(profile) is not list:
            raise AdvisorError(f"{source.path}: no list of layers of trtexec --exportProfile")
        kinds = dict(_layers(source.path))
        rows: list[dict[str, Any]] = []
        at = 0
        for layer in profile[: MAX_LAYERS + 1]:
            name, ms = (
                (layer.get("name"), layer.get("averageMs")) if type(layer) is dict else (0, 0)
            )
            if not isinstance(name, str) or not isinstance(ms, int | float) or not 0 < ms < 1e6:
                continue
            ns = round(ms * 1e6)
            rows.append({"ts": at, "dur": ns, "kind": "kernel", "device": 0, "stream": 0,
                         "name": f"{_kind(name, kinds.get(name))} {name}"[:1000]})  # fmt: skip
            at += ns
        if not rows:
            raise AdvisorError(f"{source.path}: no layer with a time in it")
        meta = TraceMeta(
            path=source.path, framework=CUDA, vendor="nvidia", devices=_device(source.path),
            bytes_read=source.bytes_read, truncated=source.truncated, damage=source.damage,
        )  # fmt: skip
        return build_trace(meta, device=pl.DataFrame(rows))


def _bytes(source: ByteSource, options: ReadOptions) -> bytes:
    most = min(MAX_BYTES, options.max_bytes)
    return source.read_all(most, f"larger than {MAX_BYTES >> 20} MiB")


def _decoded(data: bytes, path: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise AdvisorError(f"{path}: damaged JSON ({error})") from None


def _beside(path: str, part: str) -> Any:
    """Read the file whose name differs in one part; ``None`` if there is none, or it is damaged."""
    own = Path(path)
    other = own.with_name(own.name.replace("profile", part))
    if other == own or not other.is_file():
        return None
    try:
        return _decoded(_bytes(ByteSource(str(other), limit=MAX_BYTES), ReadOptions()), str(other))
    except AdvisorError:
        return None


def _layers(path: str) -> list[tuple[str, dict[str, Any]]]:
    for _, part in _BESIDE:
        found = _beside(path, part)
        layers = found.get("Layers") if type(found) is dict else None
        if type(layers) is list:
            named = [layer for layer in layers[:MAX_LAYERS] if type(layer) is dict]
            return [(each["Name"], each) for each in named if type(each.get("Name")) is str]
    return []


def _kind(name: str, layer: dict[str, Any] | None) -> str:
    """Return a layer's kind and computing precision: ``CaskConvolution_int8``."""
    if layer is None:
        return "Reformat" if name.startswith("Reformatting CopyNode") else "Layer"
    kind = layer.get("LayerType")
    kind = kind if type(kind) is str and re.fullmatch(r"\w{1,60}", kind) else "Layer"
    weights = layer.get("Weights")
    texts = [str(weights.get("Type"))] if type(weights) is dict else []
    for side in ("Inputs", "Outputs"):
        tensors = layer.get(side)
        texts += [
            str(tensor.get("Format/Datatype"))
            for tensor in (tensors if type(tensors) is list else [])[:1]
            if type(tensor) is dict
        ]
    for text in texts[:1] if kind != "Reformat" else texts[-1:]:
        for precision, pattern in _PRECISIONS:
            if re.search(pattern, text):
                return f"{kind}_{precision}"
    return kind


def _device(path: str) -> tuple[Device, ...]:
    from advisor.core.trace import Device

    found = _beside(path, "metadata")
    about = found.get("device_information") if type(found) is dict else None
    name = about.get("Selected Device") if type(about) is dict else None
    return (Device(id=0, name=name[:200]),) if type(name) is str else ()
