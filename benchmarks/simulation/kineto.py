"""The files that PyTorch's profiler would have written of a simulated job, one a rank."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from advisor.testing.builder import DEVICES
from benchmarks.simulation.engine import (
    BACKWARD,
    BEGIN_NS,
    COMPUTE_STREAM,
    Call,
    SimulatedRun,
    Table,
)
from benchmarks.simulation.jobs import Job

DEVICE = "A100"
PID = 4000
BASE_NS = BEGIN_NS - 345_600_000_000_000
"""Kineto counts from the beginning of a quarter."""
MAX_LISTED_RANKS = 30
"""Longer lists are written with an ellipsis (``kTruncatLength`` in torch/csrc/profiler)."""
_KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    ),
}
_SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
_OPERATORS = {
    "allreduce": "c10d::allreduce_",
    "_allgather_base": "c10d::_allgather_base_",
    "_reduce_scatter_base": "c10d::_reduce_scatter_base_",
    "all_to_all": "c10d::alltoall_base_",
    "send": "c10d::send",
    "recv": "c10d::recv_",
}
_RANGES = {
    "allreduce": "nccl:all_reduce",
    "_allgather_base": "nccl:_all_gather_base",
    "_reduce_scatter_base": "nccl:_reduce_scatter_base",
    "all_to_all": "nccl:all_to_all",
    "send": "nccl:send",
    "recv": "nccl:recv",
}
_FROM_HOST = re.compile(r'\{"ph": "X", "cat": "(cpu_op|user_annotation)"')
COPY = "Memcpy DtoH (Device -> Pinned)"


def kernel_of(call: Call) -> str:
    """Name of the kernel of a collective."""
    return _KERNELS.get(call.kind, _SEND)


def format_ranks(members: list[int]) -> str:
    """The members of a group as PyTorch writes them."""
    if len(members) <= MAX_LISTED_RANKS:
        return "[" + ", ".join(map(str, members)) + "]"
    first = ", ".join(map(str, members[: MAX_LISTED_RANKS - 1]))
    return f"[{first}, ..., {members[-1]}]"


def file_name(job: Job, rank: int) -> str:
    """File name in the form of ``tensorboard_trace_handler``: host, process, time."""
    return f"{job.host_name(rank)}_{PID + rank}.{BEGIN_NS // 10**6 + rank}.pt.trace.json.gz"


def write(played: SimulatedRun, folder: Path) -> list[Path]:
    """A file for each rank that is not lost; those that are cut end in the middle.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(played.job.ranks):
        if rank in played.job.lost:
            continue
        path = folder / file_name(played.job, rank)
        data = gzip.compress(trace(played, rank), 1)
        if rank in played.job.cut:
            data = data[: len(data) // 2]
        path.write_bytes(data)
        written.append(path)
    return written


def trace(played: SimulatedRun, rank: int) -> bytes:
    """The JSON of one rank."""
    job = played.job
    lists = _configs(job, rank)
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, **DEVICES[DEVICE]}],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": job.ranks,
            "pg_count": len(lists),
            "pg_config": lists,
            "nccl_version": "2.21.5",
        },
        "cuda_runtime_version": 12040,
        "cuda_driver_version": 12040,
        "baseTimeNanoseconds": BASE_NS,
        "displayTimeUnit": "ms",
        "traceName": file_name(job, rank).removesuffix(".gz"),
    }
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n'
    return (text + ",\n".join(_Events(played, rank).all()) + "\n]}\n").encode()


def _configs(job: Job, rank: int) -> list[dict[str, Any]]:
    configs = [(0, "default_pg", list(range(job.ranks)))]
    for name, groups in job.groups.items():
        rows = np.flatnonzero((groups.members == rank).any(axis=1)).tolist()
        configs += [
            (groups.first + row, name, groups.members[row].tolist())
            for row in rows
            if groups.first + row
        ]
    return [
        {
            "pg_name": str(number),
            "pg_desc": name,
            "backend_config": "cuda:nccl",
            "pg_size": len(ranks),
            "ranks": ranks,
        }
        for number, name, ranks in configs
    ]


class _Events:
    """The events of one rank, as JSON texts."""

    def __init__(self, played: SimulatedRun, rank: int) -> None:
        self.played, self.rank = played, rank
        self.pid = PID + rank
        self.identity = 0

    def all(self) -> Iterator[str]:
        """Every event: operators and ranges first, then calls and device work, as they come out of
        the profiler's buffers."""
        played = self.played
        name = {"name": "process_name", "ph": "M", "ts": 0, "pid": self.pid, "tid": 0}
        yield json.dumps({**name, "args": {"name": "python3"}})
        for table, text in ((played.steps, "ProfilerStep#{}"), (played.loads, "")):
            for row in self._rows(table):
                loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
                label = text.format(row["step"] + 3) or loader
                yield self._host("user_annotation", label, row["start"], row["end"], self.pid)
        calls = [
            *((row["call"], self._kernel, row) for row in self._rows(played.kernels)),
            *((row["call"], self._talk, row) for row in self._rows(played.talks)),
            *((row["call"], self._read, row) for row in self._rows(played.reads)),
        ]
        later: list[str] = []
        for _, write, row in sorted(calls, key=lambda each: each[0]):
            for text in write(row):
                if _FROM_HOST.match(text):
                    yield text
                else:
                    later.append(text)
        yield from later

    def _rows(self, table: Table) -> Iterator[dict[str, int]]:
        is_own = table["rank"] == self.rank
        columns = [values[is_own].tolist() for values in table.values()]
        for values in zip(*columns, strict=True):  # a line of text each
            yield dict(zip(table, values, strict=True))

    def _kernel(self, row: dict[str, int]) -> Iterator[str]:
        kernel = self.played.catalogue[row["spec"]]
        tid = self._thread(row)
        op, call, called, closed = row["op"], row["call"], row["called"], row["closed"]
        external = self._next()
        if row["thread"] == BACKWARD:
            node = kernel.op.removeprefix("aten::").removesuffix("_backward").strip("_")
            label = f"autograd::engine::evaluate_function: {node.title().replace('_', '')}Backward0"
            yield self._host("cpu_op", label, op, closed + 1, tid)
        args = f'"External id": {external}'
        if kernel.query is not None:
            args += f", {_attention(list(kernel.query))}"
        yield self._host("cpu_op", kernel.op, op, closed, tid, args)
        if row["held"]:
            part = (call - op) // 4
            yield self._call("cudaStreamWaitEvent", op + 2 * part, op + 3 * part, tid, self._next())
        yield self._call("cudaLaunchKernel", call, called, tid, external)
        yield from self._device(
            kernel.name, row["start"], row["end"], COMPUTE_STREAM, external, called, tid,
            f'"registers per thread": 128, "shared memory": 0, "blocks per SM": '
            f'{kernel.blocks / 108:.6f}, "warps per SM": {kernel.blocks / 108 * 8:.6f}, '
            f'"grid": [{kernel.blocks}, 1, 1], "block": [{kernel.threads}, 1, 1], '
            '"est. achieved occupancy %": 50',
        )  # fmt: skip

    def _talk(self, row: dict[str, int]) -> Iterator[str]:
        call = self.played.calls[row["spec"]]
        tid = self._thread(row)
        external = self._next()
        begin, launch, returned, closed = row["op"], row["call"], row["called"], row["closed"]
        part = (launch - begin) // 8
        arguments = self._arguments(call, row)
        yield self._host("cpu_op", _OPERATORS[call.kind], begin, closed, tid)
        yield self._host(
            "cpu_op", "record_param_comms", begin + part, closed - 1, tid, arguments
        )  # fmt: skip
        label = _RANGES[call.kind]
        if row["peer"] >= 0:
            arrow = "->" if call.kind == "send" else "<-"
            label += f" {self.rank}{arrow}{row['peer']}"
        yield self._host("user_annotation", label, begin + 2 * part, closed - 2, tid)
        for name, place in (("cudaEventRecord", 3), ("cudaStreamWaitEvent", 5)):
            start = begin + place * part
            yield self._call(name, start, start + part, tid, self._next())
        yield self._call("cudaLaunchKernelExC", launch, returned, tid, external)
        yield from self._device(
            kernel_of(call), row["start"], row["end"], row["stream"], external, returned, tid,
            '"registers per thread": 96, "shared memory": 82240, "blocks per SM": 0.222222, '
            '"warps per SM": 3.777778, "grid": [24, 1, 1], "block": [544, 1, 1], '
            f'"est. achieved occupancy %": 0, {arguments}',
        )  # fmt: skip

    def _read(self, row: dict[str, int]) -> Iterator[str]:
        tid = self.pid
        external = self._next()
        begin, closed = row["op"], row["closed"]
        yield self._host("cpu_op", "aten::item", begin, closed, tid)
        yield self._host("cpu_op", "aten::_local_scalar_dense", begin + 1_000, closed - 500, tid)
        yield self._call("cudaMemcpyAsync", row["call"], row["called"], tid, external)
        yield self._call("cudaStreamSynchronize", row["wait"], closed - 600, tid, self._next())
        ns = row["end"] - row["start"]
        yield from self._device(
            COPY, row["start"], row["end"], COMPUTE_STREAM, external, row["called"], tid,
            f'"bytes": 4, "memory bandwidth (GB/s)": {4 / ns:.6f}', "gpu_memcpy",
        )  # fmt: skip

    # -- texts ------------------------------------------------------------------------------

    def _arguments(self, call: Call, row: dict[str, int]) -> str:
        groups = self.played.job.groups[call.groups]
        members = groups.members[row["row"] - groups.first].tolist()
        arguments: dict[str, Any] = {
            "Collective name": call.kind,
            "In msg nelems": row["given"],
            "Out msg nelems": row["out"],
            "Group size": len(members),
            "dtype": "BFloat16",
            "In split size": _split(call, row["given"], len(members)),
            "Out split size": _split(call, row["out"], len(members)),
            "Global rank start": members[0],
            "Global rank stride": members[1] - members[0],
            "Process Group Name": str(row["row"]),
            "Process Group Description": "default_pg" if not row["row"] else call.groups,
            "Process Group Ranks": format_ranks(members),
            "Rank": members.index(self.rank),
            "Seq": row["sequence"],
        }
        if row["peer"] >= 0:
            ends = (self.rank, row["peer"]) if call.kind == "send" else (row["peer"], self.rank)
            arguments |= {"Src Rank": ends[0], "Dst Rank": ends[1]}
        return json.dumps(arguments)[1:-1]

    def _thread(self, row: dict[str, int]) -> int:
        return self.pid + 100_000 * row["thread"]

    def _next(self) -> int:
        self.identity += 1
        return self.identity

    def _host(
        self, category: str, name: str, start: int, end: int, tid: int, arguments: str = ""
    ) -> str:
        arguments = arguments or f'"External id": {self._next()}'
        return (
            f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": {self.pid}, "tid": {tid}, '
            f'"ts": {_us(start - BASE_NS)}, "dur": {_us(end - start)}, "args": {{{arguments}}}}}'
        )

    def _call(self, name: str, start: int, end: int, tid: int, correlation: int) -> str:
        args = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
        return self._host("cuda_runtime", name, start, end, tid, args)

    def _device(
        self,
        name: str,
        start: int,
        end: int,
        stream: int,
        correlation: int,
        called: int,
        tid: int,
        arguments: str,
        category: str = "kernel",
    ) -> Iterator[str]:
        args = (
            f'"External id": {correlation}, "device": 0, "context": 1, "stream": {stream}, '
            f'"correlation": {correlation}, {arguments}'
        )
        yield (
            f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 0, "tid": {stream}, '
            f'"ts": {_us(start - BASE_NS)}, "dur": {_us(end - start)}, "args": {{{args}}}}}'
        )
        flow = f'"id": {correlation}, "cat": "ac2g", "name": "ac2g"'
        at = _us(called - 1 - BASE_NS)
        yield f'{{"ph": "s", {flow}, "pid": {self.pid}, "tid": {tid}, "ts": {at}}}'
        at = _us(start - BASE_NS)
        yield f'{{"ph": "f", {flow}, "pid": 0, "tid": {stream}, "ts": {at}, "bp": "e"}}'


def _attention(query: list[int]) -> str:
    """Inputs of ``aten::_flash_attention_forward``, as ``record_shapes`` writes them."""
    attributes = {
        "Input Dims": [query] * 3 + [[]] * 11,
        "Input type": ["c10::BFloat16"] * 3 + [""] * 2 + ["Scalar"] * 5 + [""] * 4,
        "Concrete Inputs": [""] * 5
        + [str(query[1]), str(query[1]), "0.", "True", "False"]
        + [""] * 4,
    }
    return json.dumps(attributes)[1:-1]


def _split(call: Call, elements: int, members: int) -> str:
    """An all-to-all of parts of different sizes says them; the last takes what is left over."""
    if call.kind != "all_to_all":
        return "[]"
    part = elements // members
    return str([part] * (members - 1) + [elements - part * (members - 1)])


def _us(ns: int) -> str:
    """Microseconds with three digits, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"
