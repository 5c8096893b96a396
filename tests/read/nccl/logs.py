"""Logs of NCCL and RCCL, and topologies, written in the formats of public issues (README.md)."""

from __future__ import annotations

from collections.abc import Iterator

HEAD = {
    "2.14": "NCCL version 2.14.3+cuda11.7",
    "2.18": "NCCL version 2.18.1+cuda12.1",
    "2.21": "NCCL version 2.21.5+cuda12.4",
    "2.27": "NCCL version 2.27.3+cuda12.9",
    "rccl": "RCCL version : 2.21.5-HEAD:a29a210",
}


def job(
    version: str = "2.21",
    *,
    hosts: int = 2,
    gpus: int = 4,
    network: str = "IB",
    within: str = "P2P/CUMEM/read",
    across: str = "NET/IB/{gpu}/GDRDMA",
    more: tuple[str, ...] = (),
    prefix: str = "",
) -> str:
    """The log of all ranks of a job; ``more``: lines of each process."""
    lines = [HEAD[version]]
    for rank in range(hosts * gpus):
        lines += (prefix + line for line in process(
            version, rank, hosts, gpus, network, within, across, more
        ))  # fmt: skip
    return "\n".join(lines) + "\n"


def process(
    version: str, rank: int, hosts: int, gpus: int, network: str, within: str, across: str,
    more: tuple[str, ...],
) -> Iterator[str]:  # fmt: skip
    node, gpu, world = rank // gpus, rank % gpus, hosts * gpus
    old = version in ("2.14", "rccl")
    bus = f"{16 * (gpu + 1):x}000"
    name = bus if old else str(gpu)
    prefix = f"node{node}:{1000 + rank}:{1100 + rank} [{gpu}] NCCL INFO"
    at = f"comm 0x55cc8aa86c70 rank {rank} nranks {world} cudaDev {gpu}"
    tail = f" comm 0x9e4d8d0 nRanks {world:02}" if version == "rccl" else ""
    yield f"{prefix} Bootstrap : Using eth0:10.0.0.{node}<0>"
    for line in more:
        warning = line.startswith("WARN ")
        text = line.removeprefix("WARN ").format(rank=rank, gpu=gpu, bus=bus)
        start = prefix.replace("NCCL INFO", "misc/ibvwrap.cc:278 NCCL WARN") if warning else prefix
        yield f"{start} {text}"
    yield f"{prefix} Using network {network}"
    if not old:
        yield f"{prefix} {at} nvmlDev {gpu} busId {bus} commId 0x65e0bd6ee7449db4 - Init START"
    if version in ("2.21", "2.27"):
        local = f"nNodes {hosts} localRanks {gpus} localRank {gpu} MNNVL 0"
        yield f"{prefix} comm 0x55cc8aa86c70 rank {rank} nRanks {world} {local}"
    to, back = (rank + 1) % world, (rank - 1) % world
    for channel in range(2):
        number = f"{channel:02}/0"
        if to // gpus == node:
            other = f"{16 * (to % gpus + 1):x}000" if old else to % gpus
            yield f"{prefix} Channel {number} : {rank}[{name}] -> {to}[{other}] via {within}{tail}"
        else:
            way = across.format(gpu=gpu)
            yield f"{prefix} Channel {number} : {rank}[{name}] -> {to}[0] [send] via {way}{tail}"
        if back // gpus != node:
            way = across.format(gpu=gpu)
            yield (
                f"{prefix} Channel {number} : {back}[0] -> {rank}[{name}] [receive] via {way}{tail}"
            )
    yield f"{prefix} Connected all rings" + (", use ring PXN 0 GDR 1" if version == "2.27" else "")
    counted = {
        "2.14": "2 coll channels, 2 p2p channels, 2 p2p channels per peer",
        "rccl": "2 coll channels, 2 p2p channels, 2 p2p channels per peer",
        "2.18": "2 coll channels, 0 nvls channels, 8 p2p channels, 8 p2p channels per peer",
    }.get(
        version,
        "2 coll channels, 2 collnet channels, 0 nvls channels, 8 p2p channels, "
        "8 p2p channels per peer",
    )
    yield f"{prefix} {counted}"
    completion = f"{at} busId {bus} - Init COMPLETE"
    yield f"{prefix} {completion if old else f'ncclCommInitRank {completion}'}"


SOCKET = "NET/Socket : Using [0]eth0:10.0.0.{rank}<0>"
NO_DEVICE = "NET/IB : No device found."
VERBS = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.{rank}<0>"
NO_MODULE = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"
FAR = "GPU Direct RDMA Disabled for GPU {bus} / HCA 0 (distance 7 > 4)"
GRAPH = "Pattern 4, crossNic 0, nChannels 8, bw 24.000000/24.000000, type NVL/PIX, sameChannels 1"
SYSTEM = "+ NET[50.0] - NET/{gpu} (a2761f0003bd70c4/1/50.000000)"


def matrix(gpus: int, link: str, nics: int = 0, near: str = "PIX", legend: bool = True) -> str:
    """Output of ``nvidia-smi topo -m``, with its colors."""
    names = [f"GPU{n}" for n in range(gpus)]
    cards = [f"NIC{n}" if legend else f"mlx5_{n}" for n in range(nics)]
    lines = ["\t\x1b[4m" + "\t".join([*names, *cards, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for row in range(gpus):
        cells = [" X " if row == n else link for n in range(gpus)]
        cells += [near if row == n else "SYS" for n in range(nics)]
        lines.append("\t".join([names[row], *cells, "0-31", "0"]))
    lines += ["\t".join([card, *(["SYS"] * gpus), *([" X "] * nics)]) for card in cards]
    if legend:
        lines += ["", "NIC Legend:", ""] + [f"  NIC{n}: mlx5_{n}" for n in range(nics)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])


def rocm(gpus: int, link: str) -> str:
    """Output of ``rocm-smi --showtopo``."""
    head = "       " + "".join(f"GPU{n:<10}" for n in range(gpus))
    blocks = []
    for title, value in (("Weight", "15"), ("Hops", "1"), ("Link Type", link)):
        blocks += [f"============= {title} between two GPUs =============", head]
        for row in range(gpus):
            cells = "".join(f"{'0' if row == n else value:<13}" for n in range(gpus))
            blocks.append(f"GPU{row}   {cells}")
        blocks.append("")
    return "\n".join(blocks)
