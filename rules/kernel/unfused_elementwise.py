"""Chains of pointwise and reduction kernels that could be one kernel each."""

from math import prod

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.replay.selection import mask_launched_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    ARITHMETIC,
    REAL_KERNEL,
    SILENT_TRACES,
    TRACELENS,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import amount_per_step, example_steps, of_step
from advisor.rules.support.framework_advice import TF_COMPILE
from advisor.testing import Examples, TraceBuilder

FUSIBLE = ("elementwise", "reduction", "copy", "random")
"""Families that a pointwise compiler merges: arithmetic, reductions, casts, dropout."""
ROW_NORMS = r"^aten::(native_)?(layer|group)_norm|^aten::(_fused_)?rms_norm"
"""Normalisations of a tensor's rows. Inductor generates them in one kernel with the pointwise work
around them. Batch norm in training is left out: compiled, it reads the tensor twice, but the
library's kernel can read it once."""
FUSED_KERNELS = r"^triton_|multi_tensor_|foreach|jit::|_fused_"
"""Kernels that are already fused, or that work on many tensors at once."""
_VERIFY_FUSED = "Profile again: fusion kernels in place of the chains."
_SAME_CHAINS = "the same chains in a profile of the compiled step"


class UnfusedElementwise(Rule):
    """Each pointwise operator run eagerly is a kernel. It reads its inputs from memory and writes
    its output back, for the next kernel to read again. A merged kernel only reads the inputs and
    writes the outputs of the whole chain.

    A chain is three or more fusible kernels that follow each other on one stream and work on
    tensors of the same number of elements. Tensors that broadcast count too, as a mean does. (If
    shapes are recorded: consecutive kernels over parameters of different sizes are not a chain.)
    Layer, group and RMS norms belong to a chain, batch norm does not. Compiled (Triton) and foreach
    kernels are already fused, and another rule checks the optimizer's kernels.

    The factor comes from bytes. Fusion removes the write and the read of the tensor between two
    kernels of a chain. The merged kernel takes at least as long as the longest kernel. All links
    count (70 to 100% in the range). Compiled training does not keep pointwise results: the backward
    pass recomputes them from inputs and outputs of products. Two measured programs gained more,
    because compiled code also reads a tensor only once for several kernels."""

    id = "unfused-elementwise"
    title = "Pointwise kernels are not fused"
    knobs = ("compile",)
    found_in = ("traces/h100_qwen_inference", "traces/pairs/particle_batch128")
    silent_in = SILENT_TRACES
    validation_note = (
        "fires on h100_qwen_inference (RMSNorm and rotary embedding written as pointwise chains, 5 "
        "kernels long). Silent on A100 and V100 training and MI210 ResNet (3, 7 and 11% of kernel "
        "time in chains)"
    )
    references = (
        "https://pytorch.org/docs/stable/generated/torch.compile.html",
        "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#fuse-operations",
    )

    min_share = Threshold(
        0.20, "of kernel time in chains; healthy public traces have 3 to 11%", REAL_KERNEL
    )
    min_chain = Threshold(
        3, "kernels: shorter runs also occur between fused operators", TRIED_ON_TRACES
    )
    max_chain = Threshold(15, "kernels merged into one", TRACELENS)
    min_busy = kernel_work.MIN_BUSY
    kept_share = Factor(1.0, "of the links whose tensor is no longer written", TRIED_ON_TRACES)
    best_kept_share = Factor(1.0, "of the links, at best", TRIED_ON_TRACES)
    worst_kept_share = Factor(0.7, "of the links, at worst", TRIED_ON_TRACES)
    saved_share_without_shapes = Factor(
        2 / 3,
        "of a chain's bytes without shapes: binary operators, 2 reads and 1 write",
        ARITHMETIC,
    )

    fix = (
        "Compile the model: Inductor merges such chains into one kernel each. Where that is not "
        "possible, compile the function around the chain, or use the fused form of the operator "
        "(F.layer_norm, F.gelu, a fused loss)."
    )
    code = (
        "model = torch.compile(model)\n\n"
        "# or only the function around the chain\n"
        "@torch.compile\n"
        "def block(x, y): ..."
    )
    verify = "Profile again: triton_poi_… and triton_red_… kernels in place of the chains."
    falsified_by = "graph breaks in the middle of the chains (TORCH_LOGS=graph_breaks)"
    confidence = 0.7
    alternatives = "fuse"
    assumptions = (
        "merged kernels keep {kept_share:.0%} of their intermediate results in registers "
        "({worst_kept_share:.0%} at worst)",
    )
    cases = {
        "shapes are not recorded": {
            "confidence": 0.5,
            "assumptions": (
                *assumptions,
                "intermediate results are {saved_share_without_shapes:.0%} of their bytes",
            ),
        }
    }

    inference = {"fix": fix.replace(", a fused loss", "")}
    framework_advice = {
        TENSORFLOW: FrameworkAdvice(
            "Compile the step with XLA, which fuses the chains.",
            TF_COMPILE,
            verify=_VERIFY_FUSED,
            falsified_by=_SAME_CHAINS,
        ),
        JAX: FrameworkAdvice(
            "Put the chains into one jax.jit with the code around them: XLA fuses within a jit.",
            "@jax.jit\ndef train_step(state, batch): ...",
            verify=_VERIFY_FUSED,
            falsified_by=_SAME_CHAINS,
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        rows = kernel_work.compute_mask(a)
        selected, select = _select_fusible(a, rows)
        if kernel_work.summed_duration(a, selected) < self.min_share * total:
            return
        fusible = selected & ~name_matches(a.trace.gpu["name"], FUSED_KERNELS).to_numpy()
        fusible &= ~mask_launched_under(a, OPTIMIZER_STEP)
        in_chain, chains, known_share = self._find_chains(a, rows, fusible)
        share = kernel_work.summed_duration(a, in_chain) / total
        if share < self.min_share:
            return
        saved = float(chains["saved"].sum())
        edits = kernel_work.fuse_kernels(
            a,
            selected,
            select,
            (saved * kept_share for kept_share in self.range_of("kept_share")),
            in_chain,
            chains.height,
        )
        length = int(in_chain.sum()) / chains.height
        yield Finding(
            summary=(
                f"Unfused chains of about {length:.0f} pointwise and reduction kernels take "
                f"{share:.0%} of kernel time. Writing and rereading each tensor in between takes "
                f"{of_step(a, saved)}."
            ),
            evidence=[
                self.compare(
                    "chains of pointwise kernels, share of kernel time", share, "min_share"
                ),
                amount_per_step(a, "kernels in chains", int(in_chain.sum()), "count"),
                amount_per_step(a, "chains of pointwise kernels", chains.height, "count"),
                amount_per_step(a, "writing and rereading within chains", saved),
            ],
            where=kernel_work.kernel_locations(a, in_chain),
            edits=edits,
            confidence_notes=[]
            if known_share >= 0.5
            else ["shapes are not recorded: bytes are estimated from the number of kernels"],
            **({} if known_share >= 0.5 else self.case("shapes are not recorded")),
        )

    def _find_chains(
        self, a: Analysis, rows: kernel_work.Mask, fusible: kernel_work.Mask
    ) -> tuple[kernel_work.Mask, pl.DataFrame, float]:
        """Return a mask of rows in chains, a table of chains, and the share of chain kernels with
        known shapes. The table has ``count``, ``dur`` and ``saved`` (ns, if every link's tensor
        stayed on the chip)."""
        gpu = a.trace.gpu
        index = np.flatnonzero(rows)
        index = index[np.lexsort((gpu["ts"].to_numpy()[index], gpu["stream"].to_numpy()[index]))]
        is_fusible = fusible[index]
        stream = gpu["stream"].to_numpy()[index]
        inputs = a.trace.cpu["inputs"].gather(gpu["op"].gather(index)).fill_null(-1).to_numpy()
        size, width, shapes = self._measure_inputs(a, np.unique(inputs[is_fusible]))
        sizes_match = _match_sizes(shapes, inputs)
        size, width = size[inputs], width[inputs]
        # whether a kernel continues the previous kernel's chain
        link = np.zeros(len(index), dtype=bool)
        link[1:] = is_fusible[1:] & is_fusible[:-1] & (stream[1:] == stream[:-1]) & sizes_match
        launched = (
            a.trace.cpu["ts"].gather(gpu["launch"].gather(index)).fill_null(gpu["ts"].gather(index))
        )
        step = np.searchsorted(a.steps.marks["ts"].to_numpy(), launched.to_numpy(), side="right")
        link[1:] &= step[1:] == step[:-1]
        chain = np.cumsum(~link)
        offset = np.arange(len(index)) - np.flatnonzero(~link)[chain - 1] if len(index) else chain
        chain = chain * (len(index) + 1) + offset // self.max_chain  # cut where one kernel is full
        moved = a.kernels["moved"].gather(index).cast(pl.Float64)
        # a kernel passes on no more than the next one reads
        bytes_passed = np.minimum(size * width, np.append(size[1:] * width[1:], 0))
        between = np.minimum(2.0 * bytes_passed, moved.fill_null(0.0).to_numpy())
        table = (
            pl.DataFrame(
                {
                    "chain": chain,
                    "row": index,
                    "able": is_fusible,
                    "dur": gpu["dur"].to_numpy()[index],
                    "moved": moved,
                    "between": between,
                    "known": (size > 0) & moved.is_not_null().to_numpy(),
                }
            )
            .filter("able")
            .group_by("chain", maintain_order=True)
            .agg(
                pl.col("row"),
                pl.len().alias("count"),
                pl.col("dur").sum(),
                pl.col("dur").max().alias("longest"),
                pl.col("moved").sum(),
                # the last kernel's output leaves the chain
                (pl.col("between").sum() - pl.col("between").last()).alias("between"),
                pl.col("known").all(),
            )
            .filter(pl.col("count") >= self.min_chain)
        )
        by_bytes = (pl.col("between") / pl.col("moved")).clip(0.0, 1.0)
        blind = self.saved_share_without_shapes * (1 - 1 / pl.col("count"))
        table = table.with_columns(
            saved=pl.min_horizontal(
                pl.col("dur") * pl.when("known").then(by_bytes).otherwise(blind),
                (pl.col("dur") - pl.col("longest")).cast(pl.Float64),
            )
        )
        in_chain = np.zeros(len(rows), dtype=bool)
        if table.height:
            in_chain[table["row"].explode().to_numpy()] = True
        chain_ns = float(table["dur"].sum())
        known = float(table.filter("known")["dur"].sum()) / chain_ns if chain_ns else 0.0
        return in_chain, table, known

    def _measure_inputs(
        self, a: Analysis, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, tuple[int, ...]]]:
        """Return the largest tensor's elements, its bytes per element, and its shape by row. The
        arrays are aligned with ``trace.inputs``, with a last row for no input; 0 if unknown or not
        ``wanted``."""
        table = a.trace.inputs
        shapes: dict[int, tuple[int, ...]] = {}
        size = np.zeros(table.height + 1, dtype=np.int64)
        width = np.zeros(table.height + 1, dtype=np.int64)
        rows = wanted[wanted >= 0]
        # a loop over distinct input descriptions, not over events
        descriptions = table.select("dims", "types")[rows]
        for row, (dims, types) in zip(rows.tolist(), descriptions.iter_rows(), strict=True):
            tensors = OpInputs(dims, types).tensors
            if tensors:
                largest = max(tensors, key=lambda tensor: tensor.elements)
                size[row], width[row] = largest.elements, largest.width or 0
                shapes[row] = tuple(largest.shape)
        return size, width, shapes

    @staticmethod
    def examples() -> Examples:
        def add_compiled(b: TraceBuilder) -> None:
            _add_product(b)
            for n in range(4):
                b.launch(f"triton_poi_fused_add_mul_tanh_{n}", 300)

        def add_single_kernels(b: TraceBuilder) -> None:
            for _ in range(4):
                _add_product(b)
                _add_pointwise(b, "aten::relu", [64, 1024, 1024])

        def add_layer_norm(b: TraceBuilder) -> None:
            _add_product(b)
            for op, kernel in (
                ("aten::add", "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>"),
                ("aten::native_layer_norm", "void vectorized_layer_norm_kernel<float, float>"),
                ("aten::copy_", "void unrolled_elementwise_kernel<direct_copy_kernel_cuda>"),
            ):
                b.run(op, kernel, 300, [[64, 1024, 1024]], "float")

        def add_batch_norm(b: TraceBuilder) -> None:
            _add_product(b)
            shape = [[64, 256, 64, 64]]
            b.run("aten::cudnn_batch_norm", "void cudnn::bn_fw_tr_1C11_kernel", 300, shape, "float")
            b.run("aten::relu", "void vectorized_elementwise_kernel<4, relu>", 300, shape, "float")

        def add_different_sizes(b: TraceBuilder) -> None:
            _add_product(b)
            for n in range(1, 9):
                _add_pointwise(b, "aten::mul", [n, 1024, 1024])

        return {
            "an activation by hand": _build_step(8, [64, 1024, 1024]),
            "no shapes": _build_step(8, None),
            "a layer norm between an addition and a cast": example_steps(add_layer_norm),
            "compiled": (example_steps(add_compiled), "share < self.min_share"),
            "one kernel after each product": (example_steps(add_single_kernels), "min_chain"),
            "batch norm and activation": (example_steps(add_batch_norm), "min_chain"),
            "parameters of different sizes": (example_steps(add_different_sizes), "min_chain"),
            "a short chain beside long products": (
                _build_step(3, [4, 1024, 1024], 20),
                "min_share",
            ),
        }


def _select_fusible(a: Analysis, rows: kernel_work.Mask) -> tuple[kernel_work.Mask, Select]:
    """Return the mask of ``rows`` that a pointwise compiler can generate, and their selection."""
    norms = rows & kernel_work.family_mask(a, "normalisation")
    operators = a.trace.cpu["name"].gather(a.trace.gpu["op"])
    row_norms = norms & name_matches(operators, ROW_NORMS).fill_null(value=False).to_numpy()
    selected = rows & kernel_work.family_mask(a, *FUSIBLE) | row_norms
    select = Select(on="gpu", kind=("kernel",), family=FUSIBLE)
    if row_norms.any():
        select = replace(select, family=(*FUSIBLE, "normalisation"))
    if row_norms.any() and (norms & ~row_norms).any():
        names = a.trace.gpu["name"].filter(pl.Series(selected)).unique().sort()
        select = replace(select, name=kernel_work.exact_pattern(names.cast(pl.String).to_list()))
    return selected, select


def _match_sizes(
    shapes: dict[int, tuple[int, ...]], inputs: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether each kernel's tensor has the size of the previous one or broadcasts with it,
    as a mean does. True if either is unknown."""
    pairs, which = np.unique(np.stack([inputs[:-1], inputs[1:]]), axis=1, return_inverse=True)
    shape_pairs = [(shapes.get(one), shapes.get(other)) for one, other in pairs.T.tolist()]
    return np.array([_is_one_loop(*pair) for pair in shape_pairs], dtype=bool)[which.ravel()]


def _is_one_loop(shape: tuple[int, ...] | None, next_shape: tuple[int, ...] | None) -> bool:
    if shape is None or next_shape is None or prod(shape) == prod(next_shape):
        return True
    small, large = sorted((shape, next_shape), key=prod)
    ends = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(size in (1, large_size) for size, large_size in ends)


def _add_product(b: TraceBuilder) -> None:
    kernel = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn"
    b.run("aten::mm", kernel, 600, [[4096, 4096], [4096, 4096]], "c10::Half")


def _add_pointwise(b: TraceBuilder, op: str, shape: list[int] | None, us: float = 300) -> None:
    kernel = "void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<Half>>"
    b.run(op, kernel, us, None if shape is None else [shape, shape], "c10::Half")


def _build_step(count: int, shape: list[int] | None, us: float = 300) -> TraceBuilder:
    def body(b: TraceBuilder) -> None:
        _add_product(b)
        for n in range(count):
            _add_pointwise(b, "aten::mul" if n % 2 else "aten::add", shape, us)
        _add_product(b)

    return example_steps(body)
