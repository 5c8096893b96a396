"""NVTX and ROCTX ranges: which of them are PyTorch operators, and the details in their texts.

``torch.autograd.profiler.emit_nvtx`` writes ``aten::addmm, seq = 5, op_id = 12, sizes = [[8, 4]],
input_op_ids = [(3,0)]``: an operator's name, its autograd sequence number and its shapes."""

import re

import polars as pl

from advisor.core.trace import CUDA, JAX, PYTORCH, TENSORFLOW
from advisor.read.event_columns import NAME_LIMIT

_DETAIL_START = r", (?:seq|op_id|sizes|input_op_ids) = "
_OPERATOR_NAMESPACES = (
    r"^(?:aten|prims?|c10|c10d|_?c10d_functional|torch\w*|quantized|mkldnn|inductor|flash_attn|"
    r"xformers|fbgemm|autograd)::"
)
_PLAIN_NAME = r"^[A-Za-z_]\w*(?:::\w+)*(?:\.\w+)?$"
_KNOWN_RANGES = (
    r"^(?:ProfilerStep|Optimizer\.|##|DistributedDataParallel\.|\[|FSDP|enumerate\(|nccl:)"
)
_BACKWARD_NAME = r"^(?:autograd::engine::evaluate_function: )?\w+Backward\d*$"
_MAX_SHAPES = 4096
"""Maximum number of characters of an operator's shapes."""


def parse_ranges(texts: pl.Series) -> pl.DataFrame:
    """Parse range texts into columns: ``name`` without details, ``kind`` (op or annotation),
    ``sequence`` (null: none) and ``dims`` (JSON text, null: not recorded)."""
    text = pl.col("text").fill_null("")
    shapes = text.str.extract(r", sizes = (\[[\[\]\d, -]*\])", 1)
    table = pl.DataFrame({"text": texts}).select(
        name=text.str.replace(_DETAIL_START + r"(?s:.*)$", "").str.slice(0, NAME_LIMIT),
        detailed=text.str.contains(_DETAIL_START),
        sequence=text.str.extract(r", seq = (\d{1,18})", 1).cast(pl.Int64, strict=False),
        dims=pl.when(shapes.str.len_bytes() <= _MAX_SHAPES)
        .then(shapes.str.replace_all(" ", ""))
        .otherwise(None),
    )
    # few names are distinct, so each name is classified once
    name = pl.col("name")
    always = name.str.contains(_OPERATOR_NAMESPACES)
    perhaps = always | name.str.contains(_BACKWARD_NAME) | name.str.contains(_PLAIN_NAME)
    never = name.str.contains(_KNOWN_RANGES)
    kinds = table.select("name").unique().with_columns(always=always, perhaps=perhaps, never=never)
    operator = pl.col("always") | (pl.col("detailed") & pl.col("perhaps"))
    operator = (operator | pl.col("sequence").is_not_null()) & ~pl.col("never")
    return (
        table.join(kinds, on="name", how="left", maintain_order="left")
        .select(
            "name",
            "sequence",
            "dims",
            kind=pl.when(operator).then(pl.lit("op")).otherwise(pl.lit("annotation")),
        )
        .select("name", "kind", "sequence", "dims")
    )


def number_inputs(ranges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Return ranges with the row of their inputs (``inputs``, null: no shapes) in place of
    ``dims``, and the table of inputs or ``None``."""
    dims, ranges = ranges["dims"], ranges.drop("dims")
    distinct = dims.drop_nulls().unique(maintain_order=True)
    if not len(distinct):
        return ranges.with_columns(inputs=pl.lit(None, dtype=pl.Int64)), None
    rows = dims.replace_strict(
        distinct, pl.Series(range(len(distinct))), default=None, return_dtype=pl.Int64
    )
    return ranges.with_columns(inputs=rows), pl.DataFrame({"dims": distinct})


_PYTHON_PROGRAM = re.compile(
    r"(?:^|/)(?:i?python|pypy|pytest|torchrun|accelerate|deepspeed|jupyter)"
)
_FRAMEWORK_PATTERNS = (
    (
        PYTORCH,
        r"^aten::|\bat::native::|\bc10::|^void at::|torch::|^nccl:all_|^ProfilerStep#"
        r"|\bTensorIteratorBase\b",  # Nsight Compute's pages leave namespaces out
    ),
    (TENSORFLOW, r"\btensorflow::|^TensorFlow|tensorflow-core|^tf_|_TensorFlow"),
    (JAX, r"^(?:TSL:)?Xla(?:Module|Op)|\bjit_\w+|\bxla::|^TSL:|^input_\w*fusion"),
)


def framework_of(names: pl.Series, programs: list[str]) -> str | None:
    """Return the framework of a program, by the names of its ranges and kernels, else of its
    processes. ``None`` if no process is recorded, or if the process is Python (CuPy, RAPIDS,
    Numba, …)."""
    distinct = names.drop_nulls().unique().cast(pl.String)
    for framework, pattern in _FRAMEWORK_PATTERNS:
        if distinct.str.contains(pattern).any():
            return framework
    if not programs or any(_PYTHON_PROGRAM.search(name.lower()) for name in programs):
        return None
    return CUDA
