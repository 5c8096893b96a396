"""Number formats: how wide each one is, and in what order types are promoted."""

from __future__ import annotations

from functools import lru_cache

import polars as pl

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
"""Number formats as ``hardware.Peaks`` names them."""
Format = pl.Enum(FORMATS)

_WIDTHS = {
    "double": 8, "float64": 8, "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2,
    "long int": 8, "long": 8, "int64": 8, "int": 4, "int32": 4, "short int": 2, "short": 2,
    "int16": 2, "signed char": 1, "char": 1, "int8": 1, "unsigned char": 1, "byte": 1, "uint8": 1,
    "unsigned short": 2, "unsigned int": 4, "unsigned long": 8, "bool": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "complex<half>": 4, "complex<c10::half>": 4, "complex<float>": 8,
    "complex<double>": 16, "complexhalf": 4, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
"""Bytes an element. ``Input type`` holds C++ type names (``c10::BFloat16``, ``long int``)."""

_SCALAR_TYPES = {
    0: "unsigned char", 1: "signed char", 2: "short", 3: "int", 4: "long", 5: "half", 6: "float",
    7: "double", 8: "complex<half>", 9: "complex<float>", 10: "complex<double>", 11: "bool",
    15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn", 25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
}  # fmt: skip
"""``c10::ScalarType`` numbers, as ``Concrete Inputs`` write a dtype argument."""


def bare(dtype: str) -> str:
    """A type name without namespace, in lower case."""
    return dtype.strip().casefold().removeprefix("c10::").removeprefix("torch.")


@lru_cache(maxsize=256)
def width(dtype: str) -> int | None:
    """Bytes an element; ``None``: not a tensor type, or not known."""
    return _WIDTHS.get(bare(dtype))


def scalar_type(number: object) -> str | None:
    """The type that a dtype argument's number stands for; ``None``: not known."""
    return _SCALAR_TYPES.get(number) if isinstance(number, int) else None


def kind(dtype: str) -> int:
    """0 bool, 1 integer, 2 floating point, 3 complex: the order of type promotion."""
    name = bare(dtype)
    if name == "bool":
        return 0
    if name.startswith("complex"):
        return 3
    return 2 if name.startswith(("double", "float", "half", "bfloat")) else 1
