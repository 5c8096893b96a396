"""Recorded inputs of operators: shapes, types, strides, arguments; number formats.

All of it is text from the trace, so everything is checked, and invalid values count as absent.
"""

from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import polars as pl

from advisor.core.gpus import canonical_dtype

Shape = tuple[int, ...]
"""Sizes of a tensor's dimensions."""
MAX_ELEMENTS = 1 << 60
"""Upper limit of the elements of a tensor; larger figures come from damaged files."""
MAX_LIST = 100_000
"""Maximum number of tensors of a list that are read."""

_MAIN_INPUT = {
    "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1, "aten::baddbmm_": 1,
    "aten::addbmm": 1, "aten::addmv": 1, "aten::_addmm_activation": 1, "aten::copy_": 1,
    "_C::static_scaled_fp8_quant": 1, "_C::dynamic_scaled_fp8_quant": 1,
    "_C::dynamic_per_token_scaled_fp8_quant": 1, "vllm::inplace_fused_experts": 1,
    "vllm::outplace_fused_experts": 1,
}  # fmt: skip
"""Operator -> position of its main operand, if that is not the first floating-point tensor."""


class Tensor(NamedTuple):
    """Recorded shape, type and strides of one tensor argument."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_elements(self) -> int:
        """Elements that exist in memory: a broadcast dimension (stride 0) is stored once."""
        if self.strides is None or len(self.strides) != len(self.shape):
            return self.elements
        if 0 in self.shape:
            return 0
        return prod(
            size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0
        )

    @property
    def width(self) -> int | None:
        """Bytes per element, or ``None`` if the type is unknown."""
        return width_of(self.dtype)

    @property
    def bytes(self) -> float | None:
        """Bytes read when each stored element is read once."""
        return None if self.width is None else float(self.stored_elements * self.width)


MAX_LISTED = 30
"""Maximum length of tensor lists whose shapes PyTorch's profiler writes."""


class OpInputs:
    """The inputs of one operator call, by position, from a row of ``Trace.inputs``."""

    def __init__(self, dims: str, types: str, strides: str = "", concrete: str = "") -> None:
        self._dims = _parse_list(dims)
        self._types = _parse_list(types)
        self._strides = strides
        self._concrete = concrete
        self._parsed_tensors: dict[int, Tensor | None] = {}

    def __len__(self) -> int:
        return len(self._dims)

    @cached_property
    def _stride_list(self) -> list[Any]:
        return _parse_list(self._strides)

    @cached_property
    def _concrete_list(self) -> list[Any]:
        return _parse_list(self._concrete)

    def tensor(self, index: int) -> Tensor | None:
        """Return the tensor at a position, or ``None`` if none is recorded there."""
        if index not in self._parsed_tensors:
            self._parsed_tensors[index] = self._parse_tensor(index)
        return self._parsed_tensors[index]

    def _parse_tensor(self, index: int) -> Tensor | None:
        if index >= len(self._dims) or index >= len(self._types):
            return None
        dtype = self._types[index]
        if not isinstance(dtype, str) or width_of(dtype) is None:
            return None
        shape = _parse_shape(self._dims[index])
        if shape is None:
            return None
        strides = _parse_sizes(self._stride_list[index]) if index < len(self._stride_list) else None
        return Tensor(shape, dtype, strides)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All single tensors, in order."""
        result = (self.tensor(at) for at in range(len(self._dims)))
        return [tensor for tensor in result if tensor is not None]

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """Return the shapes of a list of tensors, empty if no list is recorded there."""
        if (
            index >= len(self._dims)
            or index >= len(self._types)
            or self._types[index] != "TensorList"
        ):
            return []
        parsed = [_parse_shape(sizes) for sizes in _limit_list(self._dims[index])]
        return [shape for shape in parsed if shape is not None]

    def is_long_list(self, index: int) -> bool:
        """Return whether an input is a list of more than ``MAX_LISTED`` tensors. Their shapes are
        not recorded."""
        types = self._types
        return index < len(types) and types[index] == "TensorList" and not self.shapes(index)

    @property
    def has_arguments(self) -> bool:
        """Whether plain arguments (``Concrete Inputs``) were recorded."""
        return bool(self._concrete_list)

    def argument(self, index: int) -> Any:
        """Return a plain argument: int, float, bool, or a list of them. ``None`` if not recorded,
        not given, or of another kind."""
        if index >= len(self._concrete_list):
            return None
        text = self._concrete_list[index]
        return _parse_literal(text) if isinstance(text, str) else None

    def flag(self, index: int) -> bool | None:
        """Return a boolean argument, or ``None`` if not recorded."""
        value = self.argument(index)
        return value if isinstance(value, bool) else None

    def integers(self, index: int) -> list[int] | None:
        """Return a list of integers; a single integer counts as a list of one."""
        value = self.argument(index)
        values = value if isinstance(value, list) else [value]
        all_integers = all(isinstance(item, int) and not isinstance(item, bool) for item in values)
        return values if all_integers else None


def read_inputs(table: pl.DataFrame, row: int) -> OpInputs:
    """Return the recorded inputs in a row of ``Trace.inputs``."""
    recorded = table.row(row, named=True)
    return OpInputs(*(recorded[name] or "" for name in ("dims", "types", "strides", "concrete")))


def main_dtype(op: str, inputs: OpInputs) -> str | None:
    """Return the format an operator computes in (one of FORMATS), from its recorded input types. It
    is the format of its first tensor with a known one, or of the operand in _MAIN_INPUT."""
    position = _MAIN_INPUT.get(op)
    if position is not None:
        tensor = inputs.tensor(position)
        return None if tensor is None else canonical_dtype(tensor.dtype)
    # A list comprehension would look up all types; the first tensor nearly always matches.
    for tensor in inputs.tensors:
        result = canonical_dtype(tensor.dtype)
        if result is not None:
            return result
    return None


def _parse_list(text: str) -> list[Any]:
    if not text:
        return []
    try:
        result = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return []
    return result if isinstance(result, list) else []


def _limit_list(value: Any) -> list[Any]:
    return value[:MAX_LIST] if isinstance(value, list) else []


def _parse_sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 64:
        return None
    for size in value:
        if type(size) is not int or not 0 <= size < MAX_ELEMENTS:
            return None
    return tuple(value)


def _parse_shape(value: Any) -> tuple[int, ...] | None:
    sizes = _parse_sizes(value)
    return sizes if sizes is not None and prod(sizes) < MAX_ELEMENTS else None


def _parse_literal(text: str) -> Any:
    """Parse ``True``, ``3``, ``0.``, ``[1, 1]``, ``[True, False]``; anything else is ``None``."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        content = text[1:-1].strip()
        return [_parse_literal(part) for part in content.split(",")] if content else []
    if text in ("True", "False"):
        return text == "True"
    if len(text) > 40:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


# -- number formats --------------------------------------------------------------------------------

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
"""Number formats, named as in ``GpuSpec.peak``."""
Format = pl.Enum(FORMATS)

_WIDTHS = {
    "double": 8, "float64": 8, "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2,
    "long int": 8, "long": 8, "int64": 8, "int": 4, "int32": 4, "short int": 2, "short": 2,
    "int16": 2, "signed char": 1, "char": 1, "int8": 1, "unsigned char": 1, "byte": 1, "uint8": 1,
    "unsigned short": 2, "unsigned int": 4, "unsigned long": 8, "bool": 1, "long long": 8,
    "int64_t": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "complex<half>": 4, "complex<c10::half>": 4, "complex<float>": 8,
    "complex<double>": 16, "complexhalf": 4, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
"""Bytes per element. ``Input type`` holds C++ type names (``c10::BFloat16``, ``long int``)."""

_SCALAR_TYPES = {
    0: "unsigned char", 1: "signed char", 2: "short", 3: "int", 4: "long", 5: "half", 6: "float",
    7: "double", 8: "complex<half>", 9: "complex<float>", 10: "complex<double>", 11: "bool",
    15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn", 25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
}  # fmt: skip
"""``c10::ScalarType`` numbers, as ``Concrete Inputs`` write a dtype argument."""


def bare_type_name(dtype: str) -> str:
    """Return a type name without namespace, in lower case."""
    return dtype.strip().casefold().removeprefix("c10::").removeprefix("torch.")


@lru_cache(maxsize=256)
def width_of(dtype: str) -> int | None:
    """Return the bytes per element, or ``None`` if this is not a known tensor type."""
    return _WIDTHS.get(bare_type_name(dtype))


def scalar_type(number: object) -> str | None:
    """Return the type that a dtype argument's number means, or ``None`` if unknown."""
    return _SCALAR_TYPES.get(number) if isinstance(number, int) else None


def type_order(dtype: str) -> int:
    """Return the order of type promotion: 0 for bool, 1 integer, 2 floating point, 3 complex."""
    name = bare_type_name(dtype)
    if name == "bool":
        return 0
    if name.startswith("complex"):
        return 3
    return 2 if name.startswith(("double", "float", "half", "bfloat")) else 1
