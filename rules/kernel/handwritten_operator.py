"""Fused operators that a program writes by hand as a chain of pointwise ones."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.replay.selection import mask_launched_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import amount_per_step, example_steps, per_step, runs_code_of
from advisor.testing import Examples, TraceBuilder


class Pattern(NamedTuple):
    """A fused operator, and the chains of operators that it can replace."""

    name: str
    """Name of the fused operator."""
    chain: str
    """Regular expression over the operators' names, each followed by a space."""
    memory_passes: int
    """Number of times the fused kernel reads or writes a tensor of the largest size."""
    use: str
    """Call, or other code, that replaces the chain."""
    fix: str
    code: str
    reference: str
    library: str = ""
    """Regular expression of frames in transformers with such a chain. Empty if none is known."""
    library_fix: str = ""
    """Fix where the chain is in transformers, not in the user's code."""
    library_code: str = ""


FUNCTIONS = "https://pytorch.org/docs/stable/generated/torch.nn.functional."
LIGER = "https://arxiv.org/abs/2410.10989"
_SQUARE, _ROOT, _SCALE = r"(?:pow|square|mul)", r"rsqrt", r"(?:mul|div)"
_CAST = r"(?:(?:to|copy) )*"
PATTERNS = (
    Pattern(
        "layer normalisation",
        rf"mean {_CAST}(?:sub {_CAST}{_SQUARE} {_CAST}mean|(?:sub {_CAST})?var|std) {_CAST}"
        rf"(?:sub {_CAST})?(?:mul {_CAST})?add {_CAST}(?:sqrt {_CAST}div|rsqrt {_CAST}mul|div) "
        rf"{_CAST}(?:mul {_CAST})?(?:add )?",
        2,
        "F.layer_norm",
        "Call F.layer_norm (nn.LayerNorm), which is one kernel.",
        "self.norm = nn.LayerNorm(hidden, eps=1e-5)\ny = self.norm(x)",
        f"{FUNCTIONS}layer_norm.html",
    ),
    Pattern(
        "RMS normalisation",
        rf"{_CAST}{_SQUARE} {_CAST}mean {_CAST}add {_CAST}"
        rf"(?:{_ROOT}|sqrt(?: reciprocal)?) {_CAST}{_SCALE} {_CAST}(?:mul )?",
        2,
        "F.rms_norm",
        "Call F.rms_norm (nn.RMSNorm): one kernel from PyTorch 2.9 on, and with torch.compile in "
        "older versions. It computes 16-bit inputs in FP32.",
        "y = F.rms_norm(x, (hidden,), weight, eps)   # or an nn.RMSNorm",
        f"{FUNCTIONS}rms_norm.html",
    ),
    Pattern(
        "softmax",
        rf"(?:(?:amax|max) {_CAST}sub )?{_CAST}exp {_CAST}sum {_CAST}div ",
        2,
        "F.softmax",
        "Call F.softmax, one kernel that also subtracts the maximum. Inside attention, "
        "F.scaled_dot_product_attention needs no softmax at all.",
        "p = F.softmax(scores, dim=-1)",
        f"{FUNCTIONS}softmax.html",
    ),
    Pattern(
        "rotary embedding",
        rf"(?:mul {_CAST}neg {_CAST}cat {_CAST}mul {_CAST}add "
        rf"|mul {_CAST}mul {_CAST}sub {_CAST}mul {_CAST}mul {_CAST}add {_CAST}cat )",
        2,
        "a compiled rotary embedding",
        "Rotate queries and keys in one kernel: compile the function, or use a fused rotary "
        "kernel (Liger Kernel, flash-attn, TransformerEngine).",
        "@torch.compile\n"
        "def apply_rotary(x, cos, sin):\n"
        "    a, b = x.chunk(2, dim=-1)\n"
        "    return x * cos + torch.cat((-b, a), dim=-1) * sin\n"
        "# or: from liger_kernel.transformers.rope import liger_rotary_pos_emb",
        LIGER,
    ),
    Pattern(
        "GELU (tanh form)",
        rf"(?:mul )?pow {_CAST}mul {_CAST}add {_CAST}mul {_CAST}(?:mul )?tanh {_CAST}add {_CAST}"
        rf"mul {_CAST}",
        2,
        'F.gelu(x, approximate="tanh")',
        'Call F.gelu(x, approximate="tanh"), which is one kernel.',
        'y = F.gelu(x, approximate="tanh")',
        f"{FUNCTIONS}gelu.html",
        r"transformers/activations\.py\(\d+\): (?:New|Fast|Accurate)G[Ee][Ll][Uu]",
        "Name the fused GELU in the model's configuration (activation_function, or hidden_act): "
        "this code is in transformers.",
        'config.activation_function = "gelu_pytorch_tanh"   # other models: hidden_act\n'
        "model = AutoModelForCausalLM.from_pretrained(name, config=config)",
    ),
    Pattern(
        "GELU",
        rf"(?:mul {_CAST})?(?:div|mul) {_CAST}erf {_CAST}add {_CAST}mul ",
        2,
        "F.gelu",
        "Call F.gelu(x), which is one kernel.",
        "y = F.gelu(x)",
        f"{FUNCTIONS}gelu.html",
        r"transformers/activations\.py\(\d+\): GELUActivation\._gelu_python",
        "Name the fused GELU in the model's configuration (activation_function, or hidden_act): "
        "this code is in transformers.",
        'config.activation_function = "gelu"   # other models: hidden_act\n'
        "model = AutoModelForCausalLM.from_pretrained(name, config=config)",
    ),
)
"""Patterns in the order in which they are tried: an operator belongs to the first match."""

_SAME_NAME = (
    "square pow mul mean add rsqrt sqrt reciprocal div sub var exp sum amax max neg cat tanh copy "
    "to std erf"
)
PATTERN_NAMES = {name: name for name in _SAME_NAME.split()} | {
    "multiply": "mul",
    "rsub": "sub",
    "true_divide": "div",
}
"""Operator -> its name in the patterns."""
CHAIN_OPS = "^aten::(?:" + "|".join(sorted(PATTERN_NAMES)) + ")_?$"
FUSED_KERNELS = r"^triton_|multi_tensor_|foreach|jit::"
MAX_SIZE_RATIO = 4.0
"""Maximum ratio of elements between the largest and the smallest full tensor in a chain. It allows
a negated half or a cast to twice the width; beyond it, the chain is not one operator."""


_LIGER_FAMILIES = {
    **{name: name.lower() for name in "Llama Mistral Mixtral Gemma Gemma2 Qwen2 Qwen3".split()},
    **{name: name.lower() for name in "Phi3 Granite Olmo2 Glm4".split()},
    "Gemma3": "gemma3_text",
    "Qwen3Moe": "qwen3_moe",
}
"""First part of the name of Hugging Face's modules -> last part of the name of Liger Kernel's
function."""


def _liger_code(a: Analysis, patterns: list[Pattern]) -> list[str]:
    """Return code that patches the model with Liger Kernel's operators, or compiles it. Empty
    unless the modules' names show a Hugging Face model that Liger Kernel supports."""
    if a.layers is None or not {p.name for p in patterns} & {"RMS normalisation"}:
        return []
    kinds = set(a.layers.nodes["kind"])
    for name, function in _LIGER_FAMILIES.items():
        if {f"{name}RMSNorm", f"{name}DecoderLayer"} <= kinds:
            return [
                f"from liger_kernel.transformers import apply_liger_kernel_to_{function}\n"
                f"apply_liger_kernel_to_{function}()   # before the model is made",
                "# or instead: it fuses such chains too\nmodel = torch.compile(model)",
            ]
    return []


def chains_in(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the chains in a text of operator names, each followed by a space: index in PATTERNS,
    start, end."""
    for number, pattern in enumerate(PATTERNS):
        # a match begins at the start of a name: after a space or at the start of the text
        for match in re.finditer(rf"(?<![a-z_|]){pattern.chain}", text):
            yield number, match.start(), match.end()


class HandwrittenOperator(Rule):
    """A normalisation, softmax, rotary embedding or activation written by hand in tensor arithmetic
    is a chain of kernels. Each reads and writes the whole tensor. One fused kernel reads it once
    and writes the result once.

    The rule recognises the sequence of operators on one stream, casts in between allowed, over
    tensors of one size: ``pow mean add rsqrt mul`` is RMS normalisation, ``mean sub pow mean add
    sqrt div`` layer normalisation, ``exp sum div`` softmax, ``mul neg cat mul add`` a rotary
    embedding, ``pow mul add mul tanh add mul`` a GELU. The kernels of their backward pass, found by
    autograd's sequence numbers, count too. The factor comes from bytes. The fused kernel takes one
    read and one write of the largest tensor at the memory rate measured for such a GPU. In the
    backward pass it takes one more read. Compiled kernels are already fused and have other names.
    """

    id = "handwritten-operator"
    title = "Hand-written operator runs as unfused pointwise kernels"
    found_in = ("traces/h100_qwen_inference",)
    silent_in = public_traces(
        "a100_train_6steps v100_train_copy_heavy mi300_timesformer_inference b200_eager "
        "pairs/sam_3_bf16_compiled_sdpa"
    )
    validation_note = (
        "H100 inference of a 0.5B language model (RMS normalisation 49 times, rotary embedding 48 "
        "times a pass: fires); A100 and V100 training, MI300X and B200 inference (silent)"
    )
    references = (*dict.fromkeys(pattern.reference for pattern in PATTERNS),)

    min_share = Threshold(
        0.05, "of kernel time in such chains; below it, other findings save more", TRIED_ON_TRACES
    )
    min_busy = Threshold(
        0.2, "of the step the device is busy; below it, the host is the bottleneck", TRIED_ON_TRACES
    )
    fused_factor = Factor(
        1.5, "of the fused kernel's ideal time that such kernels take", TRIED_ON_TRACES
    )
    best_fused_factor = Factor(1.15, "of that time, at best", TRIED_ON_TRACES)
    worst_fused_factor = Factor(2.5, "of that time, at worst", TRIED_ON_TRACES)

    fix = "Call the fused operator. Compiling the model fuses such chains too."
    code = "model = torch.compile(model)"
    verify = "Profile again: one kernel in place of each chain."
    falsified_by = "code that needs an intermediate tensor of the chain"
    assumptions = (
        "a fused kernel takes {fused_factor:g} times as long as one read and one write of the "
        "tensor at the memory's rate ({best_fused_factor:g} to {worst_fused_factor:g})",
    )
    confidence = 0.75
    alternatives = "fuse"
    cases = {
        **{one.name: {"fix": one.fix, "code": one.code} for one in PATTERNS},
        **{
            f"{one.name} of transformers": {"fix": one.library_fix, "code": one.library_code}
            for one in PATTERNS
            if one.library
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        table = self._find_chains(a)
        if table.is_empty() or table["dur"].sum() < self.min_share * total:
            return
        memory = attainable_roofs(a.hardware).memory
        if memory is None or table["bytes"].sum() <= 0:
            return
        table, rows = self._add_backward(a, table)
        ops = a.kernels["op_name"].gather(np.flatnonzero(rows)).cast(pl.String).unique().sort()
        operators = kernel_work.exact_pattern(ops.to_list())
        selected = kernel_work.compute_mask(a) & mask_launched_under(a, operators)
        ideal = pl.col("bytes") / memory.rate * 1e9 + pl.col("kernels") * KERNEL_NS
        saved = (
            float(
                table.select(
                    (pl.col("dur") - fused_factor * ideal).clip(lower_bound=0).sum()
                ).item()
            )
            for fused_factor in self.range_of("fused_factor")
        )
        edits = kernel_work.fuse_kernels(
            a,
            selected,
            Select(on="gpu", kind=("kernel",), under=operators),
            saved,
            rows,
            int(table["kernels"].sum()),
        )
        by_pattern = (
            table.group_by("pattern")
            .agg(pl.len().alias("count"), pl.col("dur").sum(), pl.col("length").median())
            .sort("dur", descending=True)
        )
        patterns = [PATTERNS[n] for n in by_pattern["pattern"]]
        spent = float(table["dur"].sum())
        names = t.list_names([pattern.name for pattern in patterns])
        verb = "takes" if len(patterns) == 1 else "take"
        fix, code = self._write_replacement(a, patterns)
        is_of_library = bool(_liger_code(a, patterns)) or all(
            bool(each.library) and runs_code_of(a, each.library) for each in patterns
        )
        code_name = "The transformers library's" if is_of_library else "Hand-written"
        yield Finding(
            title=_write_title(patterns, "of the transformers library" if is_of_library else ""),
            summary=(
                f"{code_name} {names} {verb} "
                f"{kernel_work.of_kernel_time(a, spent, spent / total)} as separate pointwise "
                "kernels. Each reads and writes the whole tensor; a fused operator needs one pass."
            ),
            evidence=[
                self.compare(
                    "hand-written operators, share of kernel time", spent / total, "min_share"
                ),
                amount_per_step(a, "hand-written operators", spent),
                *(
                    Evidence(
                        pattern.name,
                        f"{count / a.step_count:,.0f}{per_step(a)} of {length:.0f} kernels each, "
                        f"{t.format_duration(dur / a.step_count)}{per_step(a)}",
                    )
                    for pattern, (_, count, dur, length) in zip(
                        patterns, by_pattern.iter_rows(), strict=True
                    )
                ),
            ],
            where=kernel_work.kernel_locations(a, rows),
            fix=fix,
            code=code,
            references=[*dict.fromkeys(pattern.reference for pattern in patterns)],
            edits=edits,
        )

    def _write_replacement(self, a: Analysis, patterns: list[Pattern]) -> tuple[str, str]:
        """Return the fix and the code that replace the patterns with fused operators."""
        advice = [
            self.case(
                f"{one.name} of transformers"
                if one.library and runs_code_of(a, one.library)
                else one.name
            )
            for one in patterns
        ]
        liger, several = _liger_code(a, patterns), len(patterns) > 1
        uses = f"Use {t.list_names([one.use for one in patterns])}."
        if liger:
            uses = "The model is from transformers: use Liger Kernel's operators, or compile it."
        fixes = [
            *([uses] if several or liger else []),
            *dict.fromkeys(one["fix"] for one in advice),
            "Compiling the model fuses such chains too.",
        ]
        code = "\n\n".join(liger) or "\n".join(
            f"# {one.name}\n{texts['code']}" if several else texts["code"]
            for one, texts in zip(patterns, advice, strict=True)
        )
        return " ".join(fixes), code

    def _add_backward(
        self, a: Analysis, table: pl.DataFrame
    ) -> tuple[pl.DataFrame, kernel_work.Mask]:
        """Return the chains with their backward passes, and a mask of ``trace.gpu`` with all their
        kernels. Columns: ``dur`` and ``bytes`` of both passes, ``kernels`` (number of fused kernels
        that replace them). The fused backward pass reads the gradient in addition to the forward
        inputs, and writes as much as the forward pass."""
        chains = np.full(a.trace.gpu.height, -1, dtype=np.int64)
        for number, rows in enumerate(table["rows"]):
            chains[rows.to_numpy()] = number
        backward = kernel_work.backward_chains(a, chains)
        in_backward = backward >= 0
        spent = np.bincount(
            backward[in_backward],
            a.trace.gpu["dur"].to_numpy()[in_backward],
            minlength=table.height,
        )
        has_backward = pl.Series(spent > 0)
        memory_passes = pl.Series([PATTERNS[n].memory_passes for n in table["pattern"]])
        table = table.with_columns(
            dur=pl.col("dur") + pl.Series(spent),
            bytes=pl.col("bytes") * (1 + has_backward * (memory_passes + 1) / memory_passes),
            kernels=1 + has_backward.cast(pl.Int64),
        )
        return table, (chains >= 0) | in_backward

    def _find_chains(self, a: Analysis) -> pl.DataFrame:
        """Return one row per chain: ``pattern`` (index in PATTERNS), ``length`` (kernels), ``dur``
        (ns), ``bytes`` (of the fused kernel), ``rows`` (of ``trace.gpu``)."""
        gpu, kernels = a.trace.gpu, a.kernels
        index = np.flatnonzero(kernel_work.compute_mask(a))
        index = index[np.lexsort((gpu["ts"].to_numpy()[index], gpu["stream"].to_numpy()[index]))]
        ops = kernels["op_name"].gather(index)
        is_chain_op = name_matches(ops, CHAIN_OPS).to_numpy()
        is_chain_op &= ~name_matches(gpu["name"].gather(index), FUSED_KERNELS).to_numpy()
        if not is_chain_op.any():
            return pl.DataFrame()
        bare = (
            ops.cast(pl.String)
            .str.strip_prefix("aten::")
            .str.strip_suffix("_")
            .replace_strict(PATTERN_NAMES, default="_", return_dtype=pl.String)
        )
        names = [name if ok else "_" for name, ok in zip(bare, is_chain_op, strict=True)]
        stream = gpu["stream"].to_numpy()[index]
        call = kernels["op_row"].gather(index).fill_null(-1).to_numpy()
        # an operator's second kernel belongs to its first; a change of stream ends a chain
        is_same_op = np.r_[False, (call[1:] == call[:-1]) & (call[1:] >= 0)]
        starts = np.flatnonzero(~is_same_op)
        is_new_stream = np.r_[False, stream[starts][1:] != stream[starts][:-1]]
        text, offsets = [], []
        length = 0
        # one pass over the operators
        for start, is_first in zip(starts, is_new_stream, strict=True):
            name = ("| " if is_first else "") + names[start] + " "
            offsets.append(length + (2 if is_first else 0))
            text.append(name)
            length += len(name)
        position = np.array([*offsets, length])
        ends = np.append(starts[1:], len(index))
        dur = gpu["dur"].to_numpy()
        inputs = a.trace.cpu["inputs"].gather(kernels["op_row"].gather(index)).fill_null(-1)
        sizes = _ChainSizes(a, inputs.to_numpy())
        chains = []
        is_taken = np.zeros(len(starts), dtype=np.bool_)
        for number, match_start, match_end in chains_in("".join(text)):
            first, last = (
                int(np.searchsorted(position, offset)) for offset in (match_start, match_end)
            )
            span = slice(int(starts[first]), int(ends[last - 1]))
            size = None if is_taken[first:last].any() else sizes.measure(span)
            if size is None:
                continue
            is_taken[first:last] = True
            members = index[span]
            size *= PATTERNS[number].memory_passes
            spent = int(dur[members].sum())
            chains.append((number, len(members), spent, float(size), members.tolist()))
        return pl.DataFrame(
            chains, schema=["pattern", "length", "dur", "bytes", "rows"], orient="row"
        )

    @staticmethod
    def examples() -> Examples:
        """Return each operator over a large tensor; RMS normalisation casts to FP32 and back."""
        cast = ["copy_", "pow", "mean", "add", "rsqrt", "mul", "copy_", "mul"]
        chain = ["pow", "mean", "add", "rsqrt", "mul"]
        return {
            "RMS normalisation, in FP32": _build_step(cast),
            "layer normalisation": _build_step(
                ["mean", "sub", "pow", "mean", "add", "sqrt", "div", "mul", "add"]
            ),
            "layer normalisation, with std": _build_step(
                ["mean", "std", "sub", "mul", "add", "div", "add"]
            ),
            "softmax": _build_step(["amax", "sub", "exp", "sum", "div"]),
            "rotary embedding": _build_step(["mul", "neg", "cat", "mul", "add"]),
            "rotary embedding, by halves": _build_step(
                ["mul", "mul", "sub", "mul", "mul", "add", "cat"]
            ),
            "GELU, with erf": _build_step(["mul", "div", "erf", "add", "mul"]),
            "GELU": _build_step(["pow", "mul", "add", "mul", "tanh", "add", "mul"]),
            "fused": (_build_step(["native_layer_norm", "gelu", "_softmax"]), "table.is_empty()"),
            "a loss": (_build_step(["sub", "pow", "mean"]), "table.is_empty()"),
            "an optimizer's arithmetic": (
                _build_step(["mul", "add", "mul", "sqrt", "add", "div"]),
                "table.is_empty()",
            ),
            "tensors that shrink": (_build_step(chain, shrink=True), "table.is_empty()"),
            "an unknown GPU": (_build_step(chain, gpu=None), "memory is None"),
            "small compared with products": (_build_step(chain, products=60_000), "min_share"),
            "no shapes": (_build_step(chain, shapes=False), "table.is_empty()"),
        }


def _write_title(patterns: list[Pattern], library: str) -> str:
    """Return the title. ``library``: where the operators come from, if not from the program."""
    text = t.list_names(pattern.name for pattern in patterns[:MAX_TITLE_NAMES])
    if len(patterns) > MAX_TITLE_NAMES:
        more = t.count_noun(len(patterns) - 1, "more operator")
        text = f"{patterns[0].name} and {more}"
    verbs = ("are", "run") if patterns[1:] else ("is", "runs")
    if library:
        return f"{t.upper_first(text)} {library} {verbs[1]} unfused"
    return f"Hand-written {text} {verbs[1]} unfused"


MAX_TITLE_NAMES = 3
"""Maximum number of operators that a title names."""


class _ChainSizes:
    """Sizes of the tensors that chains work on."""

    def __init__(self, a: Analysis, inputs: NDArray[np.int64]) -> None:
        self._inputs = inputs
        self._table = a.trace.inputs
        self._size_of_row: dict[int, tuple[int, int] | None] = {}

    def measure(self, span: slice) -> int | None:
        """Return the bytes of a chain's tensor. ``None`` if unknown, or if tensors differ in size
        other than by broadcasting."""
        largest_inputs = map(self._measure_largest, self._inputs[span].tolist())
        sizes = [size for size in largest_inputs if size is not None]
        if not sizes:
            return None
        largest = max(elements for elements, _ in sizes)
        full_sizes = [size for size in sizes if size[0] * MAX_SIZE_RATIO >= largest]
        # reductions leave small tensors (mean, add, rsqrt); at least half must be of full size
        if 2 * len(full_sizes) < len(sizes):
            return None
        return min(elements * width for elements, width in full_sizes if elements == largest)

    def _measure_largest(self, row: int) -> tuple[int, int] | None:
        """Return the number of elements of a row's largest input, and their width in bytes."""
        if row < 0:
            return None
        if row not in self._size_of_row:
            dims, types = self._table.select("dims", "types").row(row)
            tensors = OpInputs(dims or "", types or "").tensors
            top = max(tensors, key=lambda tensor: tensor.elements) if tensors else None
            known = top is not None and top.width is not None
            self._size_of_row[row] = (top.elements, top.width) if top and known else None  # type: ignore[assignment]
        return self._size_of_row[row]


def _build_step(
    ops: list[str],
    *,
    shapes: bool = True,
    shrink: bool = False,
    products: float = 500,
    gpu: str | None = "A100",
) -> TraceBuilder:
    small = {"add", "rsqrt"} if "rsqrt" in ops else {"sqrt"} if "sqrt" in ops else set()
    gemm = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn"
    pointwise = "void at::native::elementwise_kernel<128, 4>"

    def body(b: TraceBuilder) -> None:
        for _ in range(3):
            b.run("aten::mm", gemm, products, [[8192, 4096], [4096, 2048]], "c10::Half")
            for index, op in enumerate(ops):
                rows = 8192 >> (3 * index if shrink else 0)
                is_small = op in small and "mean" in ops[:index]
                shape = [rows, 1 if is_small else 4096]
                us = 4 if is_small else 120
                b.run(f"aten::{op}", pointwise, us, [shape, shape] if shapes else None, "c10::Half")

    return example_steps(body, gpu)
