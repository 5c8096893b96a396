"""Batch norm in inference that the preceding convolution could do."""

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import climb_stack, is_operator, parent_rows
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import SILENT_TRACES, TRIED_ON_TRACES
from advisor.rules.support.common import amount_per_step, example_steps
from advisor.testing import Examples, TraceBuilder

INFERENCE = r"(?i)bn_fw_inf|BatchNormFwdInfer|batchnorm_inference"
"""Kernels of cuDNN (``bn_fw_inf_1C11_kernel_NCHW``) and MIOpen that normalise with stored means."""
CONVOLUTION = r"^aten::(_?convolution|conv_?(transpose)?\d?d?|cudnn_convolution|miopen_convolution)"


class FoldableBatchNorm(Rule):
    """Batch norm runs on its own after convolutions in inference: each reads its whole input and
    writes it again. In inference it is a multiplication and an addition with known numbers. These
    can be folded once into the weights of the preceding convolution.

    A batch norm counts if its kernel normalises with stored means and the operator before it on its
    thread is a convolution. In training the means come from the batch, and nothing can be folded.
    Other kernels run there, and the rule is silent. The gain is the time of these kernels. Where
    the convolution had no bias, it has one afterwards."""

    id = "foldable-batch-norm"
    title = "Batch norm runs on its own after convolutions in inference"
    found_in = ("traces/pairs/particle_batch128",)
    silent_in = SILENT_TRACES
    validation_note = (
        "particle transformer at batch 128 (inference batch norm after 1x1 convolutions, 5% of "
        "kernel time: fires); ResNet training on MI210 (silent)"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.fusion.fuse_conv_bn_eval.html",
        "https://docs.pytorch.org/tutorials/intermediate/torch_compile_conv_bn_fuser.html",
    )
    min_share = Threshold(
        0.03, "of kernel time: folding changes the model's modules", TRIED_ON_TRACES
    )
    min_busy = kernel_work.MIN_BUSY

    fix = (
        "Fold each batch norm into the convolution before it, once, after loading the weights. The "
        "outputs stay the same up to rounding."
    )
    code = (
        "from torch.nn.utils.fusion import fuse_conv_bn_eval\n"
        "model.eval()\n"
        "block.conv = fuse_conv_bn_eval(block.conv, block.bn)   # for each pair\n"
        "block.bn = torch.nn.Identity()\n"
        "# or all pairs: TORCHINDUCTOR_FREEZING=1 with torch.compile(model)"
    )
    verify = "Profile again: the batch norm kernels are gone. Compare the model's outputs."
    falsified_by = "an output of the convolution that is used elsewhere too, before the batch norm"
    assumptions = ("the convolution's output goes to the batch norm alone",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.forward_only:
            return
        norms = (
            kernel_work.compute_mask(a) & name_matches(a.trace.gpu["name"], INFERENCE).to_numpy()
        )
        rows = norms & _follows_convolution(a, norms)
        ns, total = (
            kernel_work.summed_duration(a, rows),
            kernel_work.summed_duration(a, kernel_work.kernel_mask(a)),
        )
        if not ns or ns < self.min_share * total:
            return
        if kernel_work.busy_share(a) < self.min_busy:
            return
        moved = a.kernels["moved"].filter(pl.Series(rows)).sum()
        yield Finding(
            summary=(
                f"Batch norm after convolutions takes "
                f"{kernel_work.of_kernel_time(a, ns, ns / total)}. In inference the convolutions "
                "can do its work."
            ),
            evidence=[
                amount_per_step(a, "batch norm after convolutions", ns),
                self.compare("batch norm after convolutions, kernel time", ns / total, "min_share"),
                amount_per_step(a, "batch norms", int(rows.sum()), "count"),
                *(
                    [
                        amount_per_step(
                            a, "bytes read and written by batch norms", int(moved), "bytes"
                        )
                    ]
                    if moved
                    else []
                ),
            ],
            where=kernel_work.kernel_locations(a, rows),
            edits=[
                kernel_work.scale_kernels(
                    a, norms, (ns, ns, ns), Select(on="gpu", kind=("kernel",), name=INFERENCE)
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        """Return convolutions with batch norm in eval mode, on each vendor's library. The traps:
        training, after a linear layer, and small compared with the convolutions."""
        cudnn = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(…)"
        return {
            "cuDNN": _build_network(cudnn),
            "MIOpen": _build_network("MIOpenBatchNormFwdInferSpatialEst"),
            "training": (_build_network("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>"), "not ns"),
            "after a linear layer": (_build_network(cudnn, before="aten::linear"), "not ns"),
            "small": (_build_network(cudnn, us=5), "min_share"),
        }


def _follows_convolution(a: Analysis, rows: kernel_work.Mask) -> kernel_work.Mask:
    """Return a mask of ``trace.gpu``: the rows that the operator right after a convolution
    launched."""
    trace, indices = a.trace, np.flatnonzero(rows)
    is_op = is_operator(trace)
    op_rows = np.flatnonzero(is_op)
    top = climb_stack(parent_rows(trace), is_op, op_rows, top=True)
    outermost = np.unique(np.where(top >= 0, top, op_rows))  # rows are in order of thread and time
    launcher = trace.gpu["op"].gather(indices).fill_null(-1).to_numpy()
    launcher = np.where(
        launcher >= 0, climb_stack(parent_rows(trace), is_op, launcher, top=True), -1
    )
    previous = np.searchsorted(outermost, launcher) - 1
    previous_op = outermost[np.maximum(previous, 0)]
    thread = trace.cpu["thread"].to_numpy()
    convolves = name_matches(trace.cpu["name"], CONVOLUTION).to_numpy()
    result = np.zeros(len(rows), dtype=bool)
    same_thread = (launcher >= 0) & (previous >= 0) & (thread[previous_op] == thread[launcher])
    result[indices] = same_thread & convolves[previous_op]
    return result


def _build_network(kernel: str, us: float = 100, before: str = "aten::conv2d") -> TraceBuilder:
    shapes = [[64, 256, 56, 56], [256, 256, 1, 1]]

    def body(b: TraceBuilder) -> None:
        for _ in range(5):
            b.run(before, "sm80_xmma_fprop_implicit_gemm_f16f16", 400, shapes, "c10::Half")
            with b.op("aten::batch_norm", shapes[:1], "c10::Half"):
                b.run("aten::cudnn_batch_norm", kernel, us, shapes[:1], "c10::Half")

    return example_steps(body)
