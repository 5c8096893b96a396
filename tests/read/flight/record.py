"""Flight-recorder dumps with planted faults: four processes of gloo, one fault each.

``python record.py FOLDER [CASE …]`` writes FOLDER/CASE/nccl_trace_rank_N (and .json beside it).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

WORLD = 4
HERE = Path(__file__).resolve()


def healthy(rank, dist, torch):
    for n in range(6):
        dist.all_reduce(torch.ones(8, 4 + n))
    dist.broadcast(torch.ones(5), 0)
    dist.all_gather([torch.ones(3) for _ in range(WORLD)], torch.ones(3))
    dist.barrier()


def never_calls(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    if rank != 2:
        dist.all_reduce(torch.ones(16))


def other_size(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(17 if rank == 1 else 16))


def other_operation(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    if rank == 3:
        dist.broadcast(torch.ones(16), 0)
    else:
        dist.all_reduce(torch.ones(16))


def other_order(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    calls = [
        lambda: dist.all_reduce(torch.ones(16), async_op=True),
        lambda: dist.all_gather(
            [torch.ones(2) for _ in range(WORLD)], torch.ones(2), async_op=True
        ),
    ]
    work = [call() for call in (reversed(calls) if rank == 1 else calls)]
    for each in work:
        each.wait()


def other_dtype(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(16, dtype=torch.float64 if rank == 0 else torch.float32))


def died(rank, dist, torch):
    dist.all_reduce(torch.ones(8))
    if rank == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(16))


def two_groups(rank, dist, torch):
    """Ranks 0 and 1 take two groups in a different order."""
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(8))
    if rank < 2:
        for group in (one, other) if rank == 0 else (other, one):
            dist.all_reduce(torch.ones(16), group=group)


CASES = (
    healthy, never_calls, other_size, other_operation, other_order, other_dtype, died, two_groups,
)  # fmt: skip


def run(name: str, rank: int, folder: Path) -> None:
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def dump() -> None:
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(c10d._dump_fr_trace())
        text = c10d._dump_fr_trace_json()
        Path(f"{path}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        os._exit(0)

    threading.Timer(3.0, dump).start()
    try:
        {case.__name__: case for case in CASES}[name](rank, dist, torch)
    except RuntimeError as error:
        print(name, rank, str(error)[:100], file=sys.stderr)
    threading.Event().wait()


def record(name: str, folder: Path, port: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_FR_BUFFER_SIZE": "200",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "200",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE, "--rank", str(rank), name, str(folder)],
            env={**env, "RANK": str(rank)},
        )
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.wait(60)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run(sys.argv[3], int(sys.argv[2]), Path(sys.argv[4]))
    else:
        names = sys.argv[2:] or [case.__name__ for case in CASES]
        for n, each in enumerate(names):
            record(each, Path(sys.argv[1]) / each, 29700 + n)
