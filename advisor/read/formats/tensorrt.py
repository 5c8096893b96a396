"""Reader of ``trtexec``'s exports: layer times (``--exportProfile``), and the layers' descriptions
(``--exportLayerInfo``, ``--profilingVerbosity=detailed``) in the file next to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core.errors import AdvisorError
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Device, Trace

_MAX_BYTES = 64 << 20
_MAX_LAYERS = 5_000
"""Maximum number of layers."""
_PROFILE_START = re.compile(rb'\s*\[\s*\{\s*"count"\s*:.{0,4000}"averageMs"', re.DOTALL)
_LAYERS_START = re.compile(rb'\s*\{\s*"Layers"\s*:\s*\[')
_NAME_PARTS = (("profile", "graph"), ("profile", "layers"), ("profile", "layerinfo"),
           ("profile", "layer_info"))  # fmt: skip
"""Parts in which the names of two files that belong together differ."""
_PRECISIONS = (
    ("fp8", r"FP8"), ("int8", r"Int8|INT8"), ("int4", r"INT4|Int4"), ("bf16", r"BF16|BFloat16"),
    ("fp16", r"FP16|Half"), ("fp32", r"FP32|Float"),
)  # fmt: skip


class TensorRTReader(Reader):
    """Reader of one inference, layer by layer, with the mean time of each layer."""

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
        match = _PROFILE_START.match(head) or _LAYERS_START.match(head)
        return ReaderClaim.SURE if match else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return layers as device work, back to back, because their starts and the host's work are
        not in the file. Raises AdvisorError if there are no times."""
        import polars as pl

        from advisor.core.trace import CUDA, TraceMeta
        from advisor.read.build import build_trace

        if _LAYERS_START.match(source.head()):
            raise AdvisorError(
                f"{source.path}: layers of a TensorRT engine without times; give the file of "
                "trtexec --exportProfile (with this one next to it, named graph where it is "
                "named profile)"
            )
        profile = _decode_json(_read_bytes(source, options), source.path)
        if type(profile) is not list:
            raise AdvisorError(f"{source.path}: not a list of layers of trtexec --exportProfile")
        layers = dict(_read_layers(source.path))
        rows: list[dict[str, Any]] = []
        start_ns = 0
        for layer in profile[: _MAX_LAYERS + 1]:
            name, ms = (
                (layer.get("name"), layer.get("averageMs")) if type(layer) is dict else (0, 0)
            )
            if not isinstance(name, str) or not isinstance(ms, int | float) or not 0 < ms < 1e6:
                continue
            ns = round(ms * 1e6)
            rows.append(
                {
                    "ts": start_ns,
                    "dur": ns,
                    "kind": "kernel",
                    "device": 0,
                    "stream": 0,
                    "name": f"{_layer_kind(name, layers.get(name))} {name}"[:1000],
                }
            )
            start_ns += ns
        if not rows:
            raise AdvisorError(f"{source.path}: no layer with a time in it")
        meta = TraceMeta(
            path=source.path, framework=CUDA, vendor="nvidia", devices=_read_device(source.path),
            bytes_read=source.bytes_read, truncated=source.truncated, damage=source.damage,
        )  # fmt: skip
        return build_trace(meta, device=pl.DataFrame(rows))


def _read_bytes(source: ByteSource, options: ReadOptions) -> bytes:
    max_bytes = min(_MAX_BYTES, options.max_bytes)
    return source.read_all(max_bytes, f"larger than {_MAX_BYTES >> 20} MiB")


def _decode_json(data: bytes, path: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise AdvisorError(f"{path}: damaged JSON ({error})") from None


def _read_companion(path: str, part: str) -> Any:
    """Read the file whose name differs in one part. ``None`` if it is missing or damaged."""
    profile = Path(path)
    companion = profile.with_name(profile.name.replace("profile", part))
    if companion == profile or not companion.is_file():
        return None
    try:
        return _decode_json(
            _read_bytes(ByteSource(str(companion), limit=_MAX_BYTES), ReadOptions()), str(companion)
        )
    except AdvisorError:
        return None


def _read_layers(path: str) -> list[tuple[str, dict[str, Any]]]:
    for _, part in _NAME_PARTS:
        companion = _read_companion(path, part)
        layers = companion.get("Layers") if type(companion) is dict else None
        if type(layers) is list:
            dicts = [layer for layer in layers[:_MAX_LAYERS] if type(layer) is dict]
            return [(layer["Name"], layer) for layer in dicts if type(layer.get("Name")) is str]
    return []


def _layer_kind(name: str, layer: dict[str, Any] | None) -> str:
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


def _read_device(path: str) -> tuple[Device, ...]:
    from advisor.core.trace import Device

    companion = _read_companion(path, "metadata")
    device_information = companion.get("device_information") if type(companion) is dict else None
    name = device_information.get("Selected Device") if type(device_information) is dict else None
    return (Device(id=0, name=name[:200]),) if type(name) is str else ()
