"""Which part of a served model each piece of device work is: names that stay the same from one
engine, version or graph mode to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from advisor.measure.host.names import map_names, remembered

if TYPE_CHECKING:
    from advisor.measure import Analysis

ROLES: tuple[tuple[str, str], ...] = (
    (
        "kv cache",
        r"(?i)reshape_?and_?cache|store_?kv|store_?cache|concat_?and_?cache|kv_?cache_?(update|copy|write)"
        r"|set_(mla_)?kv_buffer|append_paged|copy_?blocks|page_?indices|kv_indices",
    ),
    ("moe combine", r"(?i)finalize_?(moe|matmul|kernel)|moe_?(sum|combine|reduce)|unpermute"),
    (
        "moe routing",
        r"(?i)routing|bitmatrix|moe_?(align|sort|gate|permute|fused_gate|topk)|topk_?(softmax|sigmoid|forward|gating)"
        r"|expert_?(offsets|map|count)|grouped_?topk|moe_forward_0",
    ),
    (
        "moe experts",
        r"(?i)fused_?moe|matmul_ogs|moe_?(gemm|mm|forward|i?q\d)|fmoe|group(ed)?_?(gemm|mm)|experts"
        r"|bmm_(Mx|E4m3|E2m1|Bfloat16_Mx)|deep_?gemm.*grouped|cutlass_moe|marlin_moe|ck_moe",
    ),
    (
        "attention",
        r"(?i)reduce_segments|attention|fmha|flash_(fwd|attn|mla)|mla_|merge_(attn_)?states|sage_",
    ),
    ("rotary", r"(?i)rotary|(^|[_:])rope"),
    ("norm", r"(?i)rms_?norm|layer_?norm|group_?norm"),
    ("quantise", r"(?i)quant|scaled_fp8|per_token_group|mxfp|cvt_(fp16|fp32)"),
    ("activation", r"(?i)(silu|gelu|swiglu|act)_?and_?mul|silu|gelu|swiglu"),
    (
        "sampling",
        r"(?i)sampling|sampler|argmax|multinomial|top_?k_?top_?p|penalt|logits|exponential|min_p|gumbel",
    ),
)
"""Role -> pattern of a kernel's or its operator's name; the first that fits wins."""

_OF_FAMILY = {
    "gemm": "dense gemm",
    "communication": "collectives",
    "attention": "attention",
    "normalisation": "norm",
    "copy": "copies",
    "memset": "copies",
    "layout": "copies",
}


@remembered
def _by_name(names: pl.Series) -> pl.DataFrame:
    column = pl.col("name")
    fits = [pl.when(column.str.contains(pattern)).then(pl.lit(r)) for r, pattern in ROLES]
    return names.alias("name").to_frame().select(role=pl.coalesce(*fits))


def roles(a: Analysis) -> pl.Series:
    """Aligned with ``trace.gpu``: the part of a layer, by the kernel's name, then its operator's,
    then its family. Matrix products that are no expert's are ``dense gemm``."""
    measured = a.kernels
    family = measured["family"].cast(pl.String)
    names = [
        map_names(column.cast(pl.Categorical), _role, pl.String)
        for column in (a.trace.gpu["name"], measured["op_name"])
    ]
    fallback = family.replace(_OF_FAMILY)
    frame = pl.DataFrame(
        {"kernel": names[0], "op": names[1], "family": family, "fallback": fallback}
    )
    matrix = pl.col("family") == "gemm"
    expert = pl.coalesce("kernel", "op").is_in(["moe experts", "moe combine"])
    own = pl.when(matrix & ~expert).then(pl.lit("dense gemm"))
    fixed = pl.when(pl.col("family") == "communication").then(pl.lit("collectives"))
    return frame.select(role=pl.coalesce(fixed, own, "kernel", "op", "fallback")).to_series()


def _role(name: str) -> str | None:
    result = _by_name(pl.Series([name]))["role"][0]
    return None if result is None else str(result)
