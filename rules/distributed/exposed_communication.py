"""Exposed communication: the device waits for the network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Location, Outcomes, PassedCheck, Select
from advisor.core.rule import Evidence, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.comm.links import SIMPLE, ring_latency, select_collectives
from advisor.measure.comm.messages import bus_factor
from advisor.measure.device.shapes import width_of
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    COMMUNICATION,
    ancestor_chains,
    innermost_ancestor,
    parent_rows,
)
from advisor.rules.support.citations import NCCL_TESTS, TRACELENS, TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import amount_per_step, example_steps, of_step, without_bf16
from advisor.rules.support.framework_advice import (
    FLAGS,
    NO_GRADIENT,
    OVERLAP_FLAGS,
    in_any_language,
)
from advisor.testing import Examples, TraceBuilder

if TYPE_CHECKING:
    from advisor.replay.ranks.rank_comparison import RankComparison

FEWER_BYTES = " Then send fewer bytes"
"""Beginning of the last sentence of a text."""

EMBEDDINGS = "all_to_all of embeddings"
_ALL_TO_ALL = (
    "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single"
)
_TORCHREC = "https://docs.pytorch.org/torchrec/"
PIPELINED = "all_to_all of embeddings in torchrec's pipeline"
_PIPELINE_RANGES = r"^## (?:wait_|start_)?sparse_data_dist(?: \d+)? ##$"
"""Ranges of torchrec's TrainPipelineSparseDist."""
_MIN_BLOCKED_SHARE = 0.01
"""Minimum share of the step at which a wait in the pipeline is named."""
POINT_TO_POINT = ("send", "recv", "send_recv")
"""Kinds with which a pipeline stage waits for work, whatever the network does."""
MESSAGES_DIFFER = (
    "at worst {:.0%} of this time is waiting for a late rank (the traces of all ranks show it)"
)
WAITS_REMAIN = ", which this fix does not shorten"
MIN_NETWORK_GB_PER_S = 0.125
"""Rate of 1 Gbit/s, the slowest network between GPUs, GB/s."""


class ExposedCommunication(Rule):
    """Collectives run while no compute kernel does, so the step waits for the network.

    Exposed time is the union of communication kernels minus the union of compute kernels. So time
    under compute costs nothing here, however long the collectives are. A collective also waits for
    the slowest rank inside its kernel. One rank's trace cannot tell that wait from transfer: where
    the figure is large, record the traces of all ranks. Where messages take far longer than any
    network needs, most of the time is this wait. Then neither overlap nor fewer bytes help. The
    bound is latency as NCCL models it, and 1 Gbit/s. Time beyond the fastest message of the same
    kind and size may be a wait too. The low end of the gain is without it.

    Where ranks train on CPUs, the collectives are gloo's, which run in threads of the host. The
    part that runs while no thread is in an operator is exposed. Half of what the other work could
    hide counts as the gain: gloo needs cores too."""

    id = "exposed-communication"
    title = "The GPU waits for collectives (exposed communication)"
    knobs = ("ddp-bucket-size", "ddp-static-graph")
    alternatives = "exposed communication"
    found_in = public_traces(
        "a100_train_6steps dlrm_8ranks two_ranks_rank0 two_ranks_rank1 v100_train_copy_heavy "
        "nccl_collectives"
    )
    silent_in = public_traces(
        "b200_eager h100_bert_small_inference mi250_train pairs/particle_batch128"
    )
    validation_note = (
        "A100 training, 6 steps (NCCL 19% exposed); two ranks of 128 (27% exposed); ResNet on an "
        "A100 (13 of 16 ms of all-reduce per step, counted from the intervals)"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/ddp.html",
        "https://pytorch.org/docs/stable/fsdp.html",
    )

    min_share = Threshold(0.05, "of the step", TRACELENS)
    min_other_share = Threshold(
        0.25, "of exposed communication, at which a kind is advised too", TRIED_ON_TRACES
    )
    max_small_bytes = Threshold(
        1048576, "bytes of a message: NCCL needs some MiB to reach its bandwidth", NCCL_TESTS
    )
    min_uncertain_share = Threshold(
        0.2, "of exposed time beyond the fastest messages, at which it counts", TRIED_ON_TRACES
    )
    min_healthy_overlap = Threshold(0.8, "share hidden, at which the check passes", TRIED_ON_TRACES)

    fix = (
        "Overlap collectives with compute: let DDP reduce its buckets (25 to 100 MB) during the "
        "backward pass, and prefetch FSDP all-gathers. Start all-to-alls before independent "
        "compute, and wait as late as possible. Then send fewer bytes."
    )
    code = (
        "# keep your other arguments\n"
        "model = DDP(model, bucket_cap_mb=50, gradient_as_bucket_view=True)\n\n"
        "# or, with FSDP2: call fully_shard(block) for each block, then\n"
        "block.set_modules_to_forward_prefetch([next_block])\n\n"
        "# or, with your own collectives\n"
        f"{NO_GRADIENT}work = dist.all_to_all_single(received, sent, async_op=True)\n"
        "...  # independent compute\n"
        "work.wait()"
    )
    verify = "Profile again: exposed communication falls, and the hidden share rises."
    falsified_by = (
        "traces of all ranks in which others arrive late at these collectives: the step then waits "
        "for a straggler, not the network"
    )
    assumptions = ("independent compute is left that can run during the communication",)
    confidence = 0.85
    cases = {
        "all_reduce": {
            "fix": "Overlap the all-reduces with the backward pass: DDP does so by itself, with "
            "buckets of 25 to 100 MB, as long as no work after backward needs all gradients early. "
            "Accumulate gradients over micro-batches under no_sync(). Then send fewer bytes (a "
            "BF16 compression hook).",
            "code": "# keep your other arguments\n"
            "model = DDP(model, bucket_cap_mb=50, gradient_as_bucket_view=True)\n\n"
            "# fewer bytes\n"
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        },
        "all_to_all": {
            "fix": "Start each all-to-all before compute that does not need it, and wait late. "
            "This can be the next part of the batch, or the next batch's inputs. Where the "
            "next layer needs all of it, exchange it in parts, so that one part computes while "
            "another is sent. The fullest rank decides, so balance what ranks send. Then send "
            "fewer bytes: BF16 or FP8 on the wire.",
            "code": f"{NO_GRADIENT}work = dist.all_to_all_single(received, sent, async_op=True)\n"
            "...  # independent compute\n"
            "work.wait()",
            "references": (_ALL_TO_ALL,),
        },
        EMBEDDINGS: {
            "fix": "Start each all-to-all before compute that does not need it, and wait late. "
            "This can be the dense layers, the next part of the batch, or the next batch's "
            "inputs. Balance what ranks send, because the fullest one decides: shard "
            "tables by load. Then send fewer bytes: BF16 or FP8 on the wire, pooling before "
            "sending, hot rows kept on each rank.",
            "code": f"{NO_GRADIENT}work = dist.all_to_all_single(received, sent, async_op=True)\n"
            "dense = bottom_mlp(dense_features)      # needs none of it\n"
            "work.wait()\n"
            "# torchrec: TrainPipelineSparseDist sends the next batch's meanwhile",
            "references": (_ALL_TO_ALL, _TORCHREC),
        },
        PIPELINED: {
            "fix": "TrainPipelineSparseDist is on already: balance what ranks send, because the "
            "fullest one decides. Shard tables by load. Then send fewer bytes: BF16 or FP8 on the "
            "wire, pooling before sending, hot rows kept on each rank.",
            "code": "from torchrec.distributed.planner import EmbeddingShardingPlanner\n"
            "from torchrec.distributed.planner.types import ParameterConstraints\n"
            "# ids_per_sample: mean number of ids of a sample in your data, by table\n"
            "constraints = {table: ParameterConstraints(pooling_factors=[ids])\n"
            "               for table, ids in ids_per_sample.items()}\n"
            "planner = EmbeddingShardingPlanner(constraints=constraints)\n"
            "plan = planner.collective_plan(model, sharders, dist.group.WORLD)",
        },
        "all_to_all of experts": {
            "fix": "Send tokens to their experts while other work computes: a shared expert, or "
            "the other half of the batch. The fullest rank decides, so balance the experts' load "
            "and bound an expert's capacity. Then send fewer bytes: dispatch in FP8, combine in "
            "BF16.",
            "code": f"{NO_GRADIENT}work = dist.all_to_all_single(received, tokens, async_op=True)\n"
            "shared = shared_expert(hidden)      # needs none of it\n"
            "work.wait()",
            "references": (_ALL_TO_ALL,),
        },
        "all_to_all of attention": {
            "fix": "Send the heads of sequence-parallel attention in groups: one group while the "
            "attention of another computes. Send queries while keys and values are "
            "projected. Keep the group within NVLink, or use fewer sequence-parallel ranks.",
            "code": f"{NO_GRADIENT}"
            "work = dist.all_to_all_single(queries, own_queries, async_op=True)\n"
            "key, value = project_key(x), project_value(x)   # while queries are sent\n"
            "work.wait()",
            "references": (_ALL_TO_ALL, "https://arxiv.org/abs/2309.14509"),
        },
        "the optimizer": {
            "fix": "Start the optimizer's collective for each group of parameters as soon as its "
            "update is done, while the next group is updated. Send the updates in BF16, and share "
            "the optimizer's work among fewer ranks, such as those of a node.",
            "code": "works = []\n"
            "for own, full in groups:\n"
            "    update(own)\n"
            "    works.append(dist.all_gather_into_tensor(full, own, async_op=True))\n"
            "for work in works:\n"
            "    work.wait()",
        },
        "all_gather": {
            "fix": "Gather parameters one block ahead, while the block before computes: prefetch "
            "in FSDP, in forward and backward. Keep parameters of small models gathered between "
            "forward and backward. Shard within a node and replicate across nodes (hybrid "
            "sharding); gather in BF16.",
            "code": "for block, following in zip(blocks, blocks[1:]):\n"
            "    block.set_modules_to_forward_prefetch([following])\n\n"
            "fully_shard(block, reshard_after_forward=False,   # if memory allows\n"
            "            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
        },
        "reduce_scatter": {
            "fix": "Reduce gradients while the block before is still in backward: one fully_shard "
            "per block, no work that needs all gradients early. Reduce in BF16. Accumulate over "
            "micro-batches without reducing each time.",
            "code": "model.set_requires_gradient_sync(last_micro_batch)\n\n"
            "fully_shard(block, mp_policy=MixedPrecisionPolicy(\n"
            "    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))",
        },
        "send_recv": {
            "fix": "Keep the pipeline full: more micro-batches than stages, an interleaved or "
            "zero-bubble schedule, stages of equal length. Post receives before the compute that "
            "does not need them.",
            "code": "from torch.distributed.pipelining import ScheduleInterleaved1F1B\n"
            "schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4 * len(stages))",
        },
        "the ranks train on CPUs": {
            "title": "The ranks wait for collectives (exposed communication)",
            "verify": "Record again: less time in collectives, and a shorter step.",
            "confidence": 0.5,
            "assumptions": (
                "some CPU cores are free for gloo's threads",
                "independent compute is left that can run during the communication",
            ),
        },
        "small messages": {
            "fix": "Merge the messages that are sent together, or give each rank a larger batch, "
            "which does more work with as many messages. The messages are small (median "
            "{median}): latency and waits take the time, not bytes."
        },
        "a late rank": {
            "title": "The GPU waits for a rank that enters collectives late",
            "fix": "Find the rank that enters late: the report of the traces of all ranks names "
            "it, and what it does longer. Neither overlap nor fewer bytes shorten this wait.",
            "code": "advisor analyze traces_of_all_ranks/",
            "verify": "Profile all ranks again: no rank arrives last at most collectives.",
            "assumptions": ("the late rank can be made to enter with this one",),
            "falsified_by": "traces of all ranks in which all enter these collectives together: "
            "the network is then slower than any known one",
        },
        "a late rank of this report": {
            "fix": "Let {ranks} enter with the others: its own finding says what it does longer. "
            "Neither overlap nor fewer bytes shorten this wait.",
            "code": "",
        },
        "tensor": {
            "fix": "Merge the tensor-parallel collectives with adjacent products (async "
            "tensor parallelism), so that pieces are sent while others are computed. Shard "
            "activations along the sequence between them. Keep the group within NVLink, or use "
            "fewer tensor-parallel ranks.",
            "code": "# with SequenceParallel() in the plan of parallelize_module\n"
            "torch._inductor.config._micro_pipeline_tp = True\n"
            "model = torch.compile(model)\n"
            "# Megatron: --sequence-parallel --tp-comm-overlap",
        },
        "context": {
            "fix": "Send the next block of keys and values before the attention to this one, on a "
            "stream of its own. Give each rank an equal part of the causal mask (zigzag order), "
            "or use fewer context-parallel ranks.",
            "code": "from torch.distributed.tensor.experimental import context_parallel\n"
            "with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):\n"
            "    output = model(batch)   # balances the causal mask by default",
        },
    }
    """Advice by the kind of collective with most of the exposed time. Where the trace shows what it
    sends, by its content: axis of the mesh, optimizer step, embeddings, experts."""
    sampled_part = COMMUNICATION

    inference = {
        "fix": "Overlap collectives with compute: prefetch FSDP all-gathers, start all-to-alls "
        "before independent compute and wait as late as possible. Then send fewer bytes.",
        "code": "# FSDP2: fully_shard(block) for each block, then\n"
        "block.set_modules_to_forward_prefetch([next_block])\n\n"
        "# or, with your own collectives\n"
        "work = dist.all_to_all_single(received, sent, async_op=True)\n"
        "...  # independent compute\n"
        "work.wait()",
        "cases": {
            "all_reduce": {
                "fix": "Use one-shot or two-shot all-reduce in shared memory for small messages "
                "(custom_all_reduce of inference engines, symmetric memory), merged with the "
                "addition and norm that follow. Run two halves of the batch in turns, so that one "
                "computes while the other communicates.",
                "code": "import torch.distributed._symmetric_memory as symm_mem\n"
                "x = symm_mem.empty(shape, dtype=torch.bfloat16, device='cuda')\n"
                "symm_mem.rendezvous(x, group)\n"
                "torch.ops.symm_mem.one_shot_all_reduce(x, 'sum', group)",
            },
            "all_gather": {
                "fix": "Gather parameters one block ahead, while the block before computes, or "
                "keep them on each device where they fit.",
                "code": "for block, following in zip(blocks, blocks[1:]):\n"
                "    block.set_modules_to_forward_prefetch([following])",
            },
            "reduce_scatter": {
                "fix": "Merge it with the product before it (symmetric memory, async tensor "
                "parallelism), so that pieces are sent while others are computed.",
                "code": "torch._inductor.config._micro_pipeline_tp = True\n"
                "model = torch.compile(model)",
            },
            "send_recv": {
                "fix": "Keep the pipeline full: more requests in flight than stages, stages of "
                "equal length. Post receives before the compute that does not need them.",
                "code": "work = dist.irecv(hidden, src=previous)   # before this part's compute",
            },
            "the optimizer": {
                "fix": "Start collectives before independent compute, and wait as late as "
                "possible. Then send fewer bytes."
            },
        },
    }
    framework_advice = {
        **in_any_language(
            "Start collectives before independent work, on a stream of their own, and wait for "
            "them as late as possible. Then send fewer bytes."
        ),
        TENSORFLOW: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
        JAX: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
    }

    def check(self, a: Analysis) -> Outcomes:
        if not a.breakdown.all_communication.total:
            return
        exposed = a.breakdown.communication.total
        total = a.breakdown.all_communication.total
        share = exposed / a.span_ns
        overlap = 1 - exposed / total
        if share < self.min_share:
            if overlap >= self.min_healthy_overlap:
                yield PassedCheck(text=f"{overlap:.0%} of communication runs under compute")
            return
        table = a.collectives
        optimizer = pl.col("annotation").str.starts_with("Optimizer.step").fill_null(False)
        by_kind = (
            table.with_columns(optimizer=optimizer)
            .group_by("collective", "axis", "optimizer")
            .agg(pl.col("exposed").sum(), pl.len())
            .sort("exposed", descending=True)
        )
        subject = "The GPU does nothing but communicate for"
        if a.device_id is None:
            subject = "The rank waits for collectives for"
        evidence = [
            amount_per_step(a, "exposed communication", exposed),
            self.compare("exposed communication, share", share, "min_share", per=a.per),
            amount_per_step(a, "all communication", total),
            Evidence("communication hidden under compute", overlap, "share"),
            Evidence("largest exposed communication", _list_largest_kinds(a, by_kind)),
        ]
        rank_waits = _find_rank_waits(a, table)
        waited_ns = min(int(rank_waits["wait"].sum()), exposed)
        if waited_ns > exposed / 2:
            yield self._report_late_rank(a, rank_waits, waited_ns, evidence)
            return
        wait_share = _time_beyond_fastest(table) / exposed
        advice = without_bf16(a, self._advise(a, by_kind, table))
        if a.device_id is None:
            advice = {**self.case("the ranks train on CPUs"), **advice}
        elif wait_share >= self.min_uncertain_share:
            evidence.append(
                Evidence("exposed beyond the fastest message of the same size", wait_share, "share")
            )
            balances = advice.get("code") == self.cases[PIPELINED]["code"]  # late ranks too
            text = MESSAGES_DIFFER.format(wait_share) + ("" if balances else WAITS_REMAIN)
            advice["assumptions"] = [text, *self.assumptions]
        else:
            wait_share = 0.0
        yield Finding(
            summary=(
                f"{subject} {of_step(a, exposed)}. Compute hides {overlap:.0%} of communication."
            ),
            evidence=evidence,
            where=self._find_worst(a, table),
            edits=[
                Edit(
                    op="overlap",
                    select=Select(on="gpu", family=("communication",)),
                    ahead=True,
                    worst_factor=wait_share or None,
                )
            ],
            **advice,
        )

    def _report_late_rank(
        self, a: Analysis, waits: pl.DataFrame, waited: int, evidence: list[Evidence]
    ) -> Finding:
        """Return the finding that collectives wait for other ranks, ``waited`` ns in all."""
        longest = waits.sort("wait").row(-1, named=True)
        select, part = select_collectives(a, waits)
        factor = 1 - part * waited / int(waits["dur"].sum())
        return Finding(
            summary=(
                f"In collectives the GPU waits for other ranks for {of_step(a, waited)}: "
                f"{t.format_bytes(longest['bytes'])} take "
                f"{t.format_duration(longest['dur'])}, where a network of 1 Gbit/s needs "
                f"{t.format_duration(longest['transfer'])}, latency included."
            ),
            evidence=[amount_per_step(a, "waiting for other ranks", waited), *evidence],
            where=self._find_worst(a, waits),
            edits=[Edit(op="scale", select=select, factor=factor, worst_factor=1.0)],
            **self.case("a late rank"),
        )

    def _advise(self, a: Analysis, by_kind: pl.DataFrame, table: pl.DataFrame) -> dict[str, Any]:
        """Return the advice for the collectives with most of the exposed time, and name the advice
        for another kind with much of it. Empty if the rule's own advice applies."""
        exposed = float(by_kind["exposed"].to_numpy().sum())
        names = [
            self._choose_case(a, kind, axis, table, in_optimizer=in_optimizer)
            for kind, axis, in_optimizer, ns, _ in by_kind.iter_rows()
            if ns >= self.min_other_share * exposed
        ]
        if not names or names[0] is None:
            return {}
        advice = self._adapt_to_small_messages(self.case(names[0]), by_kind, table)
        pipeline_wait = _describe_pipeline_wait(a) if names[0] == EMBEDDINGS else None
        if pipeline_wait is not None:
            advice |= self.case(PIPELINED)
            advice["fix"] += pipeline_wait
        longest = table.sort("exposed").row(-1, named=True)
        if names[0] == EMBEDDINGS and pipeline_wait is None and self._has_gradient(table):
            advice["code"] = BACKWARD_CODE
        if width_of(longest["dtype"] or "") == 1:  # fewer bytes are sent already
            advice["fix"] = re.sub(f"{FEWER_BYTES}[^.]*[.]", "", advice["fix"])
        others = [name for name in dict.fromkeys(names[1:]) if name in CLAUSES and name != names[0]]
        if self.program.trains and others:
            first, _, remaining = advice["fix"].partition(". ")
            text = ". ".join(CLAUSES[name] for name in others)
            advice["fix"] = f"{first}; {t.lower_first(text)}. {remaining}"
        return advice

    def _has_gradient(self, table: pl.DataFrame) -> bool:
        """Return whether autograd knows the all-to-alls: some are torchrec's own, or of a backward
        pass. The longest ones differ from rank to rank, although the program is the same."""
        ranges = table.filter(pl.col("collective") == "all_to_all")["annotation"]
        return self.program.trains and bool(ranges.str.contains(KNOWN_TO_AUTOGRAD).any())

    def _adapt_to_small_messages(
        self, advice: dict[str, Any], by_kind: pl.DataFrame, table: pl.DataFrame
    ) -> dict[str, Any]:
        """Replace the advice to send fewer bytes, which ends a text, if the collectives with most
        exposed time send few bytes."""
        sizes = table.join(by_kind.head(1), on=["collective", "axis"], how="semi")["bytes"]
        median = sizes.drop_nulls().median() if sizes.null_count() < sizes.len() / 2 else None
        if not isinstance(median, int | float) or median >= self.max_small_bytes:
            return advice
        fix = advice["fix"].partition(FEWER_BYTES)[0]
        small_fix = self.case("small messages", median=t.format_bytes(int(median)))["fix"]
        advice = {**advice, "fix": f"{fix} {small_fix}"}
        return {**advice, "code": advice["code"].partition("\n\n# fewer bytes")[0]}

    def _choose_case(
        self, a: Analysis, kind: str, axis: str, table: pl.DataFrame, *, in_optimizer: bool
    ) -> str | None:
        """Return the case of these collectives: by what they send, else their kind, or ``None``."""
        kind = "send_recv" if kind in POINT_TO_POINT else kind
        if in_optimizer:
            return "the optimizer"
        if kind == "all_to_all":
            rows = table.filter((pl.col("collective") == kind) & (pl.col("axis") == axis))
            content = "experts" if axis == "expert" else _find_content(a, rows)
            return kind if content is None else f"{kind} of {content}"
        if a.device_id is not None and axis in self.cases and self.program.trains:
            return axis
        return kind if kind in self.cases else None

    def _find_worst(self, a: Analysis, table: pl.DataFrame) -> list[Location]:
        """Return the collectives with most exposed time, by annotation or op."""
        locations = []
        for row in table.sort("exposed", descending=True).head(3).iter_rows(named=True):
            file, line, function = a.location(row["op"])
            locations.append(
                Location(
                    file=file,
                    line=line,
                    function=function,
                    op=row["annotation"] or row["collective"],
                    kernel=None if row["gpu"] is None else str(a.trace.gpu["name"][row["gpu"]]),
                    ts_ns=row["ts"],
                    dur_ns=row["dur"],
                )
            )
        return locations

    def cite_ranks(self, finding: Finding, comparison: RankComparison) -> Finding:
        """Return the finding with each rank's exposed communication as evidence. A rank that enters
        late is then known."""
        finding = replace(finding, evidence=[*finding.evidence, *comparison.exposed()])
        if not comparison.late or finding.title != self.cases["a late rank"]["title"]:
            return finding
        return replace(finding, **self.case("a late rank of this report", ranks=comparison.late))

    @staticmethod
    def examples() -> Examples:
        def add_exposed(b: TraceBuilder) -> None:
            _add_product(b)
            b.collective("allreduce", 100 << 20, 1000, wait=True)

        def add_hidden(b: TraceBuilder) -> None:
            b.collective("allreduce", 100 << 20, 1000)
            _add_product(b)

        def add_uneven(b: TraceBuilder) -> None:
            _add_product(b)
            for us in (400, 1600):
                b.collective("allreduce", 100 << 20, us, wait=True)

        return {
            "all-reduce after backward": example_steps(add_exposed),
            "messages of one size, one of them four times as long": example_steps(add_uneven),
            "a small message that waits for a late rank": _build_ranks(1 << 10),
            "hidden under compute": (example_steps(add_hidden), "min_share"),
            "on CPUs": _build_cpu_steps(exposed=True),
            "on CPUs, hidden": (_build_cpu_steps(exposed=False), "min_share"),
            "no communication": (
                example_steps(_add_product),
                "not a.breakdown.all_communication.total",
            ),
        }


def _list_largest_kinds(a: Analysis, by_kind: pl.DataFrame) -> str:
    """List the three kinds of collectives with most exposed time, with time and calls per step."""
    return "; ".join(
        f"{kind}{'' if axis == 'unknown' else f' ({axis})'}"
        f"{' in the optimizer step' * in_optimizer} "
        f"{t.format_duration(ns / a.step_count)} in "
        f"{t.count_noun(max(1, round(count / a.step_count)), 'call')}"
        for kind, axis, in_optimizer, ns, count in by_kind.head(3).iter_rows()
    )


def _find_rank_waits(a: Analysis, table: pl.DataFrame) -> pl.DataFrame:
    """Return the collectives that take longer than their bytes need on the slowest network, with
    that ``transfer`` and the exposed ``wait`` beyond it, ns. Sends and receives are left out, as a
    pipeline stage waits for work, and so is gloo, whose time includes the host's cores."""
    keys = table.select("collective", "group_size").unique()
    models = [
        (kind, size, latency, bus_factor(kind, ranks) or 1.0)
        for kind, size in keys.iter_rows()
        if a.device_id is not None and (ranks := size or a.trace.meta.world_size)
        for latency in (ring_latency(kind, ranks, 1, SIMPLE),)
    ]
    schema = keys.schema | {"latency": pl.Float64, "factor": pl.Float64}
    latencies = pl.DataFrame(models, schema=schema, orient="row")
    rows = table.filter(~pl.col("collective").is_in(POINT_TO_POINT))
    rows = rows.join(latencies, on=["collective", "group_size"], nulls_equal=True)
    transfer_ns = pl.col("bytes") * pl.col("factor") / MIN_NETWORK_GB_PER_S
    rows = rows.with_columns(transfer=pl.col("latency") + transfer_ns)
    rows = rows.with_columns(wait=pl.col("exposed") - pl.col("transfer"))
    return rows.filter(pl.col("wait") > 0)


def _time_beyond_fastest(table: pl.DataFrame) -> float:
    """Return the exposed time of collectives beyond what their bytes need at most, ns: a message
    takes no longer than a larger one of its kind and group, nor than its bytes at a smaller one's
    rate. The remainder is a wait for other ranks, or a busy network."""
    kind = ("collective", "axis", "group_size")
    sent = table.filter(pl.col("bytes") > 0, ~pl.col("collective").is_in(POINT_TO_POINT))
    rate = pl.col("dur") / pl.col("bytes")
    needed = pl.min_horizontal(
        pl.col("dur").cum_min(reverse=True).over(kind, order_by="bytes"),
        pl.col("bytes") * rate.cum_min().over(kind, order_by="bytes"),
    )
    wait = pl.min_horizontal("exposed", pl.col("dur") - needed)
    return float(sent.select(wait.sum()).item() or 0.0)


def _describe_pipeline_wait(a: Analysis) -> str | None:
    """Return where the host waits most in torchrec's pipeline. Empty if it does not wait long, or
    ``None`` if no range of the pipeline is recorded."""
    names, parent = a.trace.cpu["name"], parent_rows(a.trace)
    is_pipeline = name_matches(names, _PIPELINE_RANGES).to_numpy()
    if not is_pipeline.any():
        return None
    host = a.syncs["host"].to_numpy()
    in_pipeline = innermost_ancestor(parent, is_pipeline)[host] >= 0
    range_rows = innermost_ancestor(parent, name_matches(names, r"^## .* ##$").to_numpy())[host]
    waits = pl.DataFrame(
        {"name": names.gather(np.maximum(range_rows, 0)).cast(pl.String), "ns": a.syncs["waited"]}
    )
    waits = waits.filter(pl.Series(in_pipeline)).group_by("name").agg(pl.col("ns").sum())
    for name, ns in waits.sort("ns", "name").tail(1).iter_rows():
        if ns >= _MIN_BLOCKED_SHARE * a.span_ns:
            range_name = str(name).strip("# ")
            return (
                f" The pipeline still waits for the GPU, most in {range_name}, for "
                f"{of_step(a, ns)}."
            )
    return ""


CLAUSES = {
    "all_reduce": "Let DDP overlap the all-reduces with the backward pass",
    "all_gather": "Prefetch the all-gathers of the next block",
    "all_to_all": "Start the all-to-alls before compute that does not need them",
    "the optimizer": "Start the optimizer's collectives while it updates other parameters",
}
"""Clause for a second kind of collective with much of the exposed time."""
KNOWN_TO_AUTOGRAD = r"(?i)bwd|backward|^## alltoall_fwd_single ##$"
"""Ranges around all-to-alls of a backward pass, and around those of torchrec's own functions."""
BACKWARD_CODE = """\
# torchrec's function, which autograd can differentiate
work = alltoall_pooled(...)
# The bottom MLP does not need its result, and runs meanwhile.
dense = bottom_mlp(dense_features)
pooled = work.wait()
# The backward pass overlaps in the same way, in reverse order."""
EXCHANGE_PATTERNS = (
    ("embeddings", r"(?i)all2all_|kjt|embedding_?bag|split_embedding|pooled_embedding|torchrec"),
    ("experts", r"(?i)(^|[^a-z])moe|(^|[^a-z])experts?([^a-z]|$)|deep_?ep|ep_?(dispatch|combine)"),
    ("attention", r"(?i)all_?to_?all_?4d|seq_?all_?to_?all|ulysses|distributed_?attention"),
)
"""Patterns of ranges, operators and kernels that show what an all-to-all sends, by content."""


def _find_content(a: Analysis, table: pl.DataFrame) -> str | None:
    """Return what the all-to-alls send, by the ranges around them, else by the program's operators
    and kernels, or ``None`` if nothing shows it."""
    cpu, gpu = a.trace.cpu["name"], a.trace.gpu["name"]
    rows = table["op"].drop_nulls().to_numpy()
    ancestors = np.unique(ancestor_chains(parent_rows(a.trace), rows))
    range_names = [
        table["annotation"],
        cpu.gather(ancestors[ancestors >= 0]),
        gpu.gather(table["gpu"].drop_nulls()),
    ]
    for names in (range_names, [cpu, gpu]):
        all_names = pl.concat([column.cast(pl.String).unique() for column in names])
        for content, pattern in EXCHANGE_PATTERNS:
            if all_names.str.contains(pattern).any():
                return content
    return None


def _build_ranks(size: int) -> TraceBuilder:
    b = TraceBuilder(rank=0, world_size=8)
    for _ in b.steps():
        _add_product(b)
        b.collective("allreduce", size, 4000, wait=True)
    return b


def _build_cpu_steps(*, exposed: bool) -> TraceBuilder:
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps():
        b.on_host("aten::mm", 3000)
        b.host_collective("allreduce", 1 << 20, 1000, wait=exposed)
        b.host(20)
        b.on_host("aten::mm", 3000)
    return b


def _add_product(b: TraceBuilder) -> None:
    kernel = "ampere_bf16_s16816gemm_bf16_128x128"
    b.run("aten::mm", kernel, 3000, [[4096, 4096], [4096, 4096]], "c10::BFloat16")
