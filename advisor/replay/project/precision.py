"""Projection of the measured step with its matrix products in a narrower number format, or with 2:4
sparse weights: which layers to convert, which to leave, and the replayed step afterwards."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.gpus import GpuSpec
from advisor.core.intervals import Array
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_product
from advisor.measure.device.shapes import OpInputs, width_of
from advisor.measure.host.layers import range_label, work_nodes
from advisor.measure.host.operators import attainable_roofs
from advisor.replay.graph import EdgeKind, NodeKind
from advisor.replay.project.device_scaling import (
    FORMATS,
    MULTIPLE,
    SPARSE,
    Gemm,
    ProductEstimate,
    Role,
    Three,
    estimate_product,
    missing_unit,
)
from advisor.replay.project.project import scaled_step
from advisor.replay.window_replayer import WindowReplayer

LINEAR_OPS = ("mm", "addmm", "linear", "matmul", "_addmm_activation", "_grouped_mm", "_scaled_mm")
"""Products with a weight, as PyTorch records them; ``bmm`` multiplies activations."""
FUSED_OP = "_addmm_activation"
"""Product that includes its activation; a narrower product leaves it to a separate kernel."""
TOO_SMALL = "too small: quantising costs more than the product saves"
NO_SAVING = "arithmetic limits it: fewer bytes save nothing"
MEASURE = (
    "how accurate the model is afterwards is not in a recording: measure it on your own data "
    "before you keep the change"
)


class LinearLayerGroup(NamedTuple):
    """Equal matrix products: one shape, in modules of one kind. Times are ns per step."""

    where: str
    """Modules, or the operator if modules are not recorded."""
    shape: str
    """``m x n x k``."""
    role: Role
    calls: float
    """Calls per step."""
    ns: float
    """Measured time."""
    low_ns: float
    after_ns: float
    high_ns: float
    """Upper end of the time in the other format, including the quantising of its inputs."""
    convert: bool
    why: str
    """Reason why it is not converted. Empty if it is."""


class PrecisionResult(NamedTuple):
    """Step in a narrower format. Times are ns per step, or null if unknown."""

    format: str
    gpu: str
    training: bool
    measured_step_ns: float
    step_ns: float
    low_ns: float
    high_ns: float
    all_step_ns: float
    """Step with every possible product converted, even if it gets slower."""
    replayed: bool
    layers: tuple[LinearLayerGroup, ...]
    """Groups of equal products, the most time first."""
    unknown_ns: float
    """Time of matrix products that stay because their shapes or formats are not recorded."""
    narrow_ns: float
    """Time of matrix products that are already in 8 bits."""
    freed_bytes: float | None
    """Memory saved by converted weights, or null for training, which keeps its master weights."""
    weight_bytes: float | None
    """Recorded bytes of the weights of all known products, each read once per step."""
    weight_read_ns: float | None
    """Time to read these weights at the attainable memory rate."""
    refused: str
    """Reason why nothing is estimated, and the step stays as measured. Empty if it is estimated."""
    snippet: str
    notes: tuple[str, ...]

    @property
    def gain_ns(self) -> float:
        """Time saved per step."""
        return self.measured_step_ns - self.step_ns


@dataclass
class _ProductCall:
    """Matrix product of one operator call, with its kernels."""

    rows: list[int]
    node: int
    gemm: Gemm | None
    """Shape and format, or ``None`` if already narrow or of unknown format."""
    fused: bool
    ns: float
    estimate: ProductEstimate | None = None
    why: str = ""


def project_precision(a: Analysis, name: str) -> PrecisionResult:
    """Project the step with its linear layers in ``name``, one of ``FORMATS``.

    Raises AdvisorError for an unknown format or GPU, or without device work or a step."""
    if name not in FORMATS:
        raise AdvisorError(f"precision {name!r}: there are {', '.join(FORMATS)}")
    path = a.trace.meta.path or "trace"
    gpu = a.hardware
    if a.device_id is None or a.steps.used.is_empty() or a.span_ns <= 0:
        raise AdvisorError(f"{path}: no device work or no step, so nothing to convert")
    if gpu is None:
        raise AdvisorError(f"{path}: its GPU is not one whose rates are known")
    training = not a.forward_only
    return _Conversion(a, name, gpu, training).result()


class _Conversion:
    def __init__(self, a: Analysis, name: str, gpu: GpuSpec, training: bool) -> None:
        self.a, self.name, self.gpu, self.training = a, name, gpu, training
        self.narrow = FORMATS[name]
        self.unknown = self.already = 0.0
        self.dur = a.trace.gpu["dur"].to_numpy().astype(float)
        self.calls = self._find_calls()

    def result(self) -> PrecisionResult:
        a = self.a
        refused = missing_unit(self.name, self.gpu, training=self.training)
        calls = [call for call in self.calls if call.gemm is not None]
        if not refused and not calls:
            refused = (
                "no matrix product with a weight has recorded shapes (record_shapes=True)"
                if self.unknown
                else "no matrix product with a weight is in a wider format"
            )
        step: Three = (a.step_ns, a.step_ns, a.step_ns)
        all_step, captured, replayed = a.step_ns, a.step_ns, False
        if not refused:
            for call in calls:
                self._judge(call)
            self._choose_groups(calls)
            replayer = WindowReplayer(a)
            replayed = not replayer.unusable_reason
            step = self._step([c for c in calls if not c.why], replayer)
            captured = self._step([c for c in calls if not c.why], replayer, launching=False)[1]
            all_step = self._step([c for c in calls if c.estimate is not None], replayer)[1]
        per = 1 / a.step_count
        layers = tuple(self._group_layers(calls)) if not refused else ()
        weights = float(sum(g.k * g.n * g.width for g in self._list_distinct(calls)))
        freed = None
        if not self.training and not refused:
            freed = self._count_freed_bytes([c for c in calls if not c.why])
        memory = attainable_roofs(self.gpu).memory
        return PrecisionResult(
            format=self.name,
            gpu=self.gpu.name,
            training=self.training,
            measured_step_ns=a.step_ns,
            step_ns=step[1],
            low_ns=min(step[0], step[1]),
            high_ns=max(step[2], step[1]),
            all_step_ns=all_step,
            replayed=replayed,
            layers=layers,
            unknown_ns=self.unknown * per,
            narrow_ns=self.already * per,
            freed_bytes=freed,
            weight_bytes=weights or None,
            weight_read_ns=weights / memory.rate * 1e9 if memory is not None and weights else None,
            refused=refused,
            snippet="" if refused else self._snippet(layers),
            notes=() if refused else tuple(self._notes(step, captured, replayed)),
        )

    # -- what is multiplied -------------------------------------------------------------------

    def _find_calls(self) -> list[_ProductCall]:
        """Return the products with a weight, one per operator call."""
        a = self.a
        kernels = a.kernels.with_columns(row=pl.int_range(pl.len()), dur=a.trace.gpu["dur"])
        matrix = kernels.filter(pl.Series(a.in_window) & (pl.col("family") == "gemm"))
        nodes = work_nodes(a)
        backward = np.asarray(self.a.forward_op >= 0)
        inputs = a.trace.cpu["inputs"].fill_null(-1).to_numpy()
        shapes: dict[tuple[str, int], Gemm | None] = {}
        result: dict[int, _ProductCall] = {}
        for row, op, name, dtype, dur in (
            matrix.select("row", "op_row", "op_name", pl.col("dtype").cast(pl.String), "dur")
        ).iter_rows():
            op_name = (name or "").removeprefix("aten::").removesuffix("_")
            if op in result:
                result[op].rows.append(row)
                result[op].ns += dur
                continue
            if dtype in ("fp8", "int8"):
                self.already += dur
                continue
            if op is None or op_name not in LINEAR_OPS or inputs[op] < 0 or dtype is None:
                self.unknown += 0.0 if op_name in ("bmm", "baddbmm") else dur
                continue
            key = name, int(inputs[op])
            if key not in shapes:
                shapes[key] = self._parse_gemm(name, key[1], dtype)
            gemm = shapes[key]
            if gemm is None:
                self.unknown += dur
                continue
            if self.training:
                role: Role = "input gradient" if backward[op] else "forward"
                gemm = gemm._replace(role=role)
            node = int(nodes[row])
            result[op] = _ProductCall([row], node, gemm, op_name == FUSED_OP, float(dur))
        calls = list(result.values())
        self._weight_gradients(calls)
        return calls

    def _parse_gemm(self, name: str, row: int, dtype: str) -> Gemm | None:
        texts = self.a.trace.inputs.select("dims", "types").row(row)
        product = parse_product(name, OpInputs(*(text or "" for text in texts)))
        size = width_of(product.a.dtype) if product is not None else None
        if product is None or size is None or product.batch != 1:
            return None
        return Gemm(product.m, product.n, product.k, dtype, size, "inference")

    def _weight_gradients(self, calls: list[_ProductCall]) -> None:
        """Find the products of the backward pass whose output has the sizes of a weight."""
        forward = {
            frozenset((c.gemm.k, c.gemm.n))
            for c in calls
            if c.gemm is not None and c.gemm.role == "forward"
        }
        for call in calls:
            if call.gemm is not None and call.gemm.role == "input gradient":
                sizes = frozenset((call.gemm.m, call.gemm.n))
                rows = {c.gemm.m for c in calls if c.gemm is not None and c.gemm.role == "forward"}
                if sizes in forward and call.gemm.k in rows:
                    call.gemm = call.gemm._replace(role="weight gradient")

    def _judge(self, call: _ProductCall) -> None:
        gemm = call.gemm
        assert gemm is not None
        if any(size % MULTIPLE for size in (gemm.n, gemm.k)) and self.name != SPARSE:
            call.why = f"n or k is not a multiple of {MULTIPLE}"
            return
        call.estimate = estimate_product(gemm, self.name, self.gpu, call.ns)
        if call.estimate is None:
            call.why = "the rate of its format is unknown"
            return
        if call.fused:
            memory = attainable_roofs(self.gpu).memory
            extra = 2 * gemm.m * gemm.n * gemm.width / memory.rate * 1e9 if memory else 0.0
            best, middle, worst = call.estimate.quantize
            call.estimate = call.estimate._replace(quantize=(best, middle + extra, worst + extra))

    def _choose_groups(self, calls_with_shapes: list[_ProductCall]) -> None:
        """Leave products that would take longer unconverted: products of one shape together; in
        training, a layer's three products, which share their quantised tensors."""
        groups: dict[tuple[int, frozenset[int]] | Gemm, list[_ProductCall]] = {}
        for call in calls_with_shapes:
            gemm = call.gemm
            assert gemm is not None
            if not self.training:
                groups.setdefault(gemm, []).append(call)
                continue
            rows, sides = gemm.m, (gemm.k, gemm.n)
            if gemm.role == "weight gradient":
                rows, sides = gemm.k, (gemm.m, gemm.n)
            groups.setdefault((rows, frozenset(sides)), []).append(call)
        for calls in groups.values():
            why = next((call.why for call in calls if call.why), "")
            after = sum(call.estimate.total[1] for call in calls if call.estimate is not None)
            if not why and after >= sum(call.ns for call in calls):
                why = TOO_SMALL if self.narrow.inputs is not None else NO_SAVING
            for call in calls:
                call.why = why

    # -- the step -----------------------------------------------------------------------------

    def _step(
        self, calls: list[_ProductCall], replayer: WindowReplayer, *, launching: bool = True
    ) -> Three:
        """Return (best, central, worst) of the step, ns: each product takes its estimated time. If
        the host launches each kernel (``launching``), each quantising kernel adds a launch."""
        steps = []
        for index in range(3):
            factor = np.ones(len(self.dur))
            launches = np.zeros(len(self.dur))
            for call in calls:
                assert call.estimate is not None
                factor[call.rows] = call.estimate.total[index] / max(call.ns, 1.0)
                launches[call.rows[0]] = call.estimate.launches[index] * launching
            steps.append(self._replay(factor, launches, replayer))
        miss = 0.0 if replayer.unusable_reason else replayer.quality.step_error
        best, middle, worst = steps
        return min(best, middle) * (1 - miss), middle, max(worst, middle) * (1 + miss)

    def _replay(self, factor: Array, launches: Array, replayer: WindowReplayer) -> float:
        a = self.a
        if replayer.unusable_reason:
            return scaled_step(replayer, factor)
        graph = replayer.graph
        dur, weight = graph.dur.copy(), graph.weight.copy()
        device = graph.device
        dur[device] *= factor[graph.row[device]]
        edge = np.flatnonzero((graph.edge == EdgeKind.LAUNCH) & (graph.src > 0))
        launch_counts = np.bincount(
            graph.src[edge], launches[graph.row[graph.dst[edge]]], minlength=len(graph)
        )
        program = (graph.edge == EdgeKind.PROGRAM) & (graph.kind[graph.dst] == NodeKind.LAUNCH)
        weight[program] += launch_counts[graph.dst[program]] * self._launch_ns(replayer)
        before = replayer.plan.steady_step()
        return a.step_ns * replayer.plan.steady_step(weight, dur) / max(before, 1.0)

    def _launch_ns(self, replayer: WindowReplayer) -> float:
        """Return host time from one launch to the next, ns: the median of these steps."""
        graph = replayer.graph
        between = (graph.edge == EdgeKind.PROGRAM) & (graph.kind[graph.dst] == NodeKind.LAUNCH)
        between &= graph.kind[graph.src] == NodeKind.LAUNCH
        gaps = graph.weight[between]
        gaps = gaps[gaps > 0]
        return float(np.median(gaps)) if len(gaps) else 0.0

    # -- what is reported -------------------------------------------------------------------------

    def _group_layers(self, calls_with_shapes: list[_ProductCall]) -> list[LinearLayerGroup]:
        layers = self.a.layers
        groups: dict[tuple[str, Gemm, str], list[_ProductCall]] = {}
        for call in calls_with_shapes:
            assert call.gemm is not None
            kind = ""
            if layers is not None and call.node >= 0:
                path = layers.path(call.node)[-2:]
                kind = ".".join(layers.nodes["kind"].gather(path).to_list())
            groups.setdefault((kind, call.gemm, call.why), []).append(call)
        per, result = 1 / self.a.step_count, []
        for (_, gemm, why), calls in groups.items():
            where = "mm"
            if layers is not None and calls[0].node >= 0:
                levels = zip(*(layers.path(c.node)[-2:] for c in calls), strict=False)
                names = layers.nodes["name"]
                where = " > ".join(
                    range_label([names[n] for n in sorted(set(level))]) for level in levels
                )
            totals = [c.estimate.total if c.estimate is not None else (c.ns,) * 3 for c in calls]
            low, after, high = (float(sum(column)) * per for column in zip(*totals, strict=True))
            result.append(
                LinearLayerGroup(
                    where,
                    f"{gemm.m}x{gemm.n}x{gemm.k}",
                    gemm.role,
                    len(calls) * per,
                    sum(c.ns for c in calls) * per,
                    low,
                    after,
                    high,
                    not why,
                    why,
                )
            )
        return sorted(result, key=lambda layer: -layer.ns)

    def _list_distinct(self, calls: list[_ProductCall]) -> list[Gemm]:
        """Return one product per weight: one per module, else the products of one step."""
        by_module: dict[tuple[int, Gemm], Gemm] = {}
        counts: Counter[Gemm] = Counter()
        for call in calls:
            gemm = call.gemm
            if gemm is None or gemm.role not in ("inference", "forward"):
                continue
            if call.node >= 0:
                by_module[call.node, gemm._replace(m=0)] = gemm
            else:
                counts[gemm] += 1
        single = [g for g, n in counts.items() for _ in range(max(1, n // self.a.step_count))]
        return [*by_module.values(), *single]

    def _count_freed_bytes(self, calls: list[_ProductCall]) -> float:
        narrow = self.narrow
        return float(
            sum(
                g.k * g.n * (g.width - narrow.weight * (g.width if self.name == SPARSE else 1.0))
                for g in self._list_distinct(calls)
            )
        )

    def _notes(self, step: Three, captured: float, replayed: bool) -> list[str]:
        notes = [MEASURE]
        total = sum(c.ns for c in self.calls) + self.unknown
        if self.unknown > 0.05 * total:
            notes.append(
                f"{self.unknown / total:.0%} of the time of matrix products stays as it is: shapes "
                "or formats are not recorded (record_shapes=True)"
            )
        wide_ns = sum(c.ns for c in self.calls if c.gemm and c.gemm.dtype in ("fp32", "tf32"))
        if wide_ns > 0.05 * total:
            notes.append(
                "these products are in fp32 or TF32: convert the model to bfloat16 first, which "
                "saves a part of this without a narrower format, and record that"
            )
        if any(c.node < 0 for c in self.calls):
            notes.append(
                "modules are not recorded (with_modules=True): each call of a step is taken for a "
                "weight of its own"
            )
        if any(c.why == TOO_SMALL for c in self.calls):
            notes.append(
                "converting the small layers as well makes steps longer: FP8 took 1.25 times as "
                "long for 1024x1024x2048 on an H100 (torchao, torchao/float8/README.md), and twice "
                "as long for a GPT of 1.5B (github.com/pytorch/ao/issues/1297)"
            )
        if self.gpu.vendor == "amd" and tuple(self.gpu.compute) < (9, 5) and self.name == "fp8":
            notes.append(
                "torchao's float8 is documented for MI350 and newer; vLLM and SGLang have FP8 for "
                "MI300"
            )
        if step[1] >= self.a.step_ns * 0.99:
            notes.append("it does not pay here: the step does not become 1% shorter")
        elif step[2] > self.a.step_ns:
            notes.append("it may not pay: at the end of the range the step is longer")
        if captured < 0.99 * min(step[1], self.a.step_ns):
            notes.append(
                "launching the kernels that quantise holds the host up: with torch.compile, which "
                f"fuses them, or in CUDA graphs the step takes {t.format_duration(captured)}"
            )
        if self.training:
            notes.append(
                "three products per layer are converted; master weights, optimizer and attention "
                "stay as they are. Estimated with dynamic scaling, at best with delayed scaling "
                "fused by torch.compile, at worst without fusion"
            )
        if not replayed:
            notes.append("the steps cannot be replayed: busy time is changed, idle time kept")
        return notes

    def _snippet(self, layers: tuple[LinearLayerGroup, ...]) -> str:
        precise_layers = sorted({x.where for x in layers if not x.convert and " > " in x.where})
        return conversion_snippet(
            self.name, training=self.training, engine=self.a.engine, leave=precise_layers
        )


def conversion_snippet(name: str, *, training: bool, engine: str | None, leave: list[str]) -> str:
    """Return the lines that convert a PyTorch model, with the versions of their documentation."""
    if engine in SERVERS and name in SERVED_FORMATS:
        return f"# {SERVERS[engine][1]}\n{SERVERS[engine][0].format(SERVED_FORMATS[name])}"
    comment = f"  # leave: {', '.join(leave[:3])}" if leave else ""
    lines = TRAINING if training else INFERENCE
    return lines[name].format(kept=comment)


SERVERS = {
    "vllm": ("vllm serve MODEL --quantization {}", "docs.vllm.ai, features/quantization"),
    "sglang": ("python -m sglang.launch_server --model-path MODEL --quantization {}",
               "docs.sglang.ai, advanced_features/quantization"),
}  # fmt: skip
SERVED_FORMATS = {"fp8": "fp8"}
"""Formats to which servers quantise a model as they load it; others need a quantised checkpoint."""
_QUANTIZE = (
    "from torchao.quantization import quantize_, {config}  # torchao 0.15: docs.pytorch.org/ao\n"
    "def wanted(module, name):{{kept}}\n"
    "    return isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0\n"
    "quantize_(model, {config}(), filter_fn=wanted)\n"
    "model = torch.compile(model)"
)
_MX = _QUANTIZE.replace("from torchao.quantization import quantize_, {config}",
                        "from torchao.prototype.mx_formats import {config}\n"
                        "from torchao.quantization import quantize_")  # fmt: skip
INFERENCE = {
    "fp8": _QUANTIZE.format(config="Float8DynamicActivationFloat8WeightConfig"),
    "mxfp8": _MX.format(config="MXDynamicActivationMXWeightConfig"),
    "nvfp4": _MX.format(config="NVFP4DynamicActivationNVFP4WeightConfig"),
    "int8": _QUANTIZE.format(config="Int8DynamicActivationInt8WeightConfig"),
    "int8-weights": _QUANTIZE.format(config="Int8WeightOnlyConfig"),
    "int4-weights": _QUANTIZE.format(config="Int4WeightOnlyConfig"),
    SPARSE: (
        "# PyTorch 2.1 and newer; prune and fine-tune first, or the model loses its accuracy\n"
        "from torch.sparse import to_sparse_semi_structured\n"
        "for module in model.modules():{kept}\n"
        "    if isinstance(module, torch.nn.Linear):\n"
        "        module.weight = torch.nn.Parameter(to_sparse_semi_structured(module.weight))"
    ),
}
_ENGINE = (
    "import transformer_engine.pytorch as te  # Transformer Engine 2.x; layers are te.Linear\n"
    "from transformer_engine.common.recipe import {recipe}\n"
    "with te.autocast(enabled=True, recipe={recipe}()):{{kept}}\n"
    "    loss = criterion(model(x), y)"
)
TRAINING = {
    "fp8": (
        "from torchao.float8 import convert_to_float8_training  # torchao 0.15\n"
        "def wanted(module, name):{kept}\n"
        "    return module.in_features % 16 == 0 and module.out_features % 16 == 0\n"
        "convert_to_float8_training(model, module_filter_fn=wanted)\n"
        "model = torch.compile(model)"
    ),
    "mxfp8": _ENGINE.format(recipe="MXFP8BlockScaling"),
    "nvfp4": _ENGINE.format(recipe="NVFP4BlockScaling"),
}
