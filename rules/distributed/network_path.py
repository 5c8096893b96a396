"""Path between GPUs that NCCL chose: its log, the topology of a node, and its settings."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from advisor.core import text as t
from advisor.core.auxiliary_inputs import NETWORK_LOG, NetworkLog
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, impact_without_gain
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.links import ScaledCollectives, scale_collectives
from advisor.rules.support.citations import CHOSEN, NCCL_OVERHEAD
from advisor.testing import Examples, TraceBuilder

NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
NCCL_HELP = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
VIRTUAL = re.compile(r"docker|br-|virbr|veth|cni|flannel|tailscale|wg|tun|tap|wl|lo$")
"""Beginnings of names of interfaces that should carry no data: bridges, tunnels, wireless."""
NO_GDR = re.compile(r"GeForce|TITAN|RTX \d")
"""Boards without GPUDirect RDMA and, mostly, without peer access."""


class NetworkRule(Rule):
    """Base of the rules that read a network log and say how collectives become faster."""

    auxiliary_inputs = (NETWORK_LOG,)
    alternatives = "network-path"
    references = (NCCL_ENV, NCCL_HELP)
    sources = (NCCL_OVERHEAD,)
    validation_note = "logs in the formats of public issues (tests/read/nccl); no real job"

    def check(self, a: Analysis) -> Outcomes:
        log = a.trace.meta.network
        if log is not None:
            yield from self.examine_log(a, log)

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        """Yield what the log says of the path between ranks."""
        raise NotImplementedError

    def estimate(self, scaled: ScaledCollectives | None) -> dict[str, Any]:
        """Return the edit of a faster path. Without a trace, or if the rate of that path is
        unknown, return an impact that says so."""
        if scaled is None:
            why = "needs a trace with large collectives, and the rate of the faster link"
            return {"impact": impact_without_gain(why)}
        factor, worst_factor = scaled.factor, (1 + scaled.factor) / 2
        edit = Edit(op="scale", select=scaled.select, factor=factor, worst_factor=worst_factor)
        return {"edits": [edit]}


def of_path(log: NetworkLog) -> list[Evidence]:
    """Return connections by transport, as evidence."""
    connections = "; ".join(f"{path} {count:,}" for path, count in log.paths.items())
    return [Evidence("connections by transport", connections)] if connections else []


def bandwidth_evidence(scaled: ScaledCollectives | None) -> list[Evidence]:
    """Return measured and attainable bus bandwidth, as evidence."""
    if scaled is None:
        return []
    return [
        Evidence("measured bus bandwidth", scaled.measured * 1e9, "bytes/s"),
        Evidence("attainable bus bandwidth", scaled.attainable * 1e9, "bytes/s"),
    ]


def known_settings(a: Analysis) -> dict[str, str]:
    """Return NCCL's environment, from its log, else from the recorder."""
    log = a.trace.meta.network
    env = {} if a.rank_record is None else a.rank_record.rank.env
    return {name: value for name, value in env.items() if name.startswith("NCCL_")} | (
        {} if log is None else log.settings
    )


class NcclSettings(NetworkRule):
    """A variable that switches a fast path of NCCL off is set. Such variables are for finding
    faults. Scripts are copied with them, and the fast path stays off on machines that have it.

    The rule reads NCCL's log (``set by environment to``), else the environment that the recorder
    keeps. ``NCCL_IB_DISABLE`` is ignored where all ranks share a node."""

    id = "nccl-settings"
    title = "An NCCL setting switches a fast path off"
    reads_record = True
    fix = "Unset the variable, unless it works around a fault that is still there."
    code = "unset NCCL_P2P_DISABLE NCCL_IB_DISABLE NCCL_SHM_DISABLE"
    verify = "Run with NCCL_DEBUG=INFO: the log no longer says 'set by environment to' for it."
    falsified_by = "the same bus bandwidth of all_reduce_perf without the setting"
    confidence = 0.8
    off: ClassVar[Mapping[str, tuple[str, str]]] = {
        "NCCL_P2P_DISABLE": (r"[1-9]", "GPUs of a node exchange data through host memory"),
        "NCCL_P2P_LEVEL": (r"0|LOC", "GPUs of a node exchange data through host memory"),
        "NCCL_SHM_DISABLE": (r"[1-9]", "processes of a node send over the network"),
        "NCCL_IB_DISABLE": (r"[1-9]", "nodes send over sockets, not InfiniBand or RoCE"),
        "NCCL_NET": (r"(?i:socket)", "nodes send over sockets, not InfiniBand or RoCE"),
        "NCCL_NET_GDR_LEVEL": (r"0|LOC", "data between nodes goes through host memory"),
        "NCCL_NVLS_ENABLE": (r"0", "NVLink SHARP is off"),
        "NCCL_MAX_NCHANNELS": (r"[1-2]", "two channels or fewer cannot fill a fast link"),
        "NCCL_ALGO": (r".+", "NCCL cannot choose between ring, tree and NVLS by size"),
        "NCCL_PROTO": (r".+", "NCCL cannot choose the protocol by size"),
    }

    def check(self, a: Analysis) -> Outcomes:
        slow_paths = {
            name: effect
            for name, value in known_settings(a).items()
            if (setting := self.off.get(name)) is not None
            and re.fullmatch(setting[0], value.strip())
            and (effect := setting[1])
            and (name not in ("NCCL_IB_DISABLE", "NCCL_NET") or _spans_nodes(a))
        }
        if not slow_paths:
            return
        settings = known_settings(a)
        named = {f"{name}={settings[name].strip()}": effect for name, effect in slow_paths.items()}
        yield Finding(
            title=f"{next(iter(named))} is set: {next(iter(named.values()))}",
            summary=f"{'; '.join(f'{name}: {effect}' for name, effect in named.items())}.",
            code=f"unset {' '.join(slow_paths)}",
            evidence=[Evidence("NCCL setting", name) for name in named],
            impact=impact_without_gain("run once without it: all_reduce_perf shows the bandwidth"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "peer access off": _build_log(settings={"NCCL_P2P_DISABLE": "1"}),
            "InfiniBand off": _build_log(hosts=2, settings={"NCCL_IB_DISABLE": "1"}),
            "in a recording": _build_record(NCCL_ALGO="Ring", WORLD_SIZE="8"),
            "harmless": (
                _build_log(settings={"NCCL_P2P_DISABLE": "0", "NCCL_IB_HCA": "mlx5"}),
                "not slow_paths",
            ),
            "one node": (_build_log(hosts=1, settings={"NCCL_IB_DISABLE": "1"}), "not slow_paths"),
        }


def _spans_nodes(a: Analysis) -> bool:
    log = a.trace.meta.network
    if log is not None and log.ranks and log.node_ranks:
        return log.ranks > log.node_ranks
    if log is not None and log.hosts:
        return log.hosts > 1
    env = {} if a.rank_record is None else a.rank_record.rank.env
    return env.get("WORLD_SIZE", "1") != env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1"))


def _is_off(a: Analysis, *names: str) -> bool:
    settings = known_settings(a)
    return any(
        name in settings and re.fullmatch(NcclSettings.off[name][0], settings[name].strip())
        for name in names
    )


class NcclSockets(NetworkRule):
    """NCCL sends between nodes over TCP sockets. InfiniBand and RoCE send without the processor,
    and several times as much.

    The log says why: libibverbs is missing in the container, its devices may not be opened, or
    NET/IB found none. An interface of a bridge or tunnel (docker0) is slower still. Where nothing
    shows that the machine has such adapters, the finding says so and has low confidence: on plain
    Ethernet sockets are right."""

    id = "nccl-sockets"
    title = "NCCL sends between nodes over sockets"
    fix = (
        "Make the adapters visible to the process, and name them: NCCL_IB_HCA. On clouds install "
        "the network plugin (AWS: aws-ofi-nccl; Google Cloud: gpudirect; OCI, Azure: InfiniBand)."
    )
    code = (
        "docker run --gpus all --network=host --ipc=host --ulimit memlock=-1 \\\n"
        "    --device=/dev/infiniband …\n"
        "ibv_devinfo                    # inside: lists the adapters, PORT_ACTIVE\n"
        "export NCCL_IB_HCA=mlx5"
    )
    verify = "Run with NCCL_DEBUG=INFO: 'Using network IB', channels 'via NET/IB/…/GDRDMA'."
    falsified_by = "ibv_devinfo on the host that lists no adapter"
    confidence = 0.8
    cases = {
        "no verbs": {
            "title": "NCCL sends over sockets: libibverbs is missing",
            "fix": "Install libibverbs (rdma-core) in the container or environment: NET/IB opens "
            "it when the program starts.",
            "code": "apt-get install -y libibverbs1 ibverbs-providers",
        },
        "not opened": {
            "title": "NCCL sends over sockets: the adapters may not be opened",
            "fix": "Give the container the devices and locked memory.",
        },
        "virtual": {
            "title": "NCCL sends through a bridge or tunnel",
            "fix": "Name the interface that connects the nodes: NCCL_SOCKET_IFNAME. Start "
            "containers with --network=host.",
            "code": "ip -br addr                    # which interface has the nodes' network\n"
            "export NCCL_SOCKET_IFNAME==ens1f0",
        },
    }

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        if not log.hosts:
            return
        network = {path: n for path, n in log.paths.items() if path.startswith("NET/")}
        sockets = network.get("NET/Socket", 0)
        if not network and log.networks.get("Socket") and _spans_nodes(a):
            sockets = log.networks["Socket"]
        if not sockets:
            yield from (PassedCheck(text=f"nodes send over {path}") for path in list(network)[:1])
            return
        if _is_off(a, "NCCL_IB_DISABLE", "NCCL_NET"):
            return
        virtual = [name for name in log.interfaces if VIRTUAL.match(name)]
        adapters = [*log.devices, *log.nics, *(n for n in log.interfaces if n.startswith("ib"))]
        failed = [text for text in log.warnings if "open_device" in text or "open device" in text]
        case = (
            "virtual" if virtual else "no verbs" if log.no_verbs else "not opened" if failed else ""
        )
        reason = {
            "virtual": f"It uses {', '.join(virtual)}.",
            "no verbs": "libibverbs cannot be opened.",
            "not opened": f"{next(iter(failed), '')}.",
        }.get(case, "NET/IB found no device." if log.without_device else "")
        certain = bool(adapters or case)
        node = f" The node has {', '.join(adapters[:4])}." if adapters else ""
        node = node if reason else node.lstrip()
        names = f" ({', '.join(log.interfaces)})" if log.interfaces else ""
        yield Finding(
            summary=f"{t.count_noun(sockets, 'connection')} between nodes "
            f"{'go' if sockets > 1 else 'goes'} over TCP{names}. {reason}{node}".rstrip(),
            evidence=[
                *of_path(log),
                Evidence("network interface", ", ".join(log.interfaces) or None),
            ],
            confidence=self.confidence if certain else 0.4,
            confidence_notes=[]
            if certain
            else ["nothing shows that the node has a faster adapter"],
            **(self.case(case) if case else {}),
            **self.estimate(scale_collectives(a, across=True) if log.devices else None),
        )

    @staticmethod
    def examples() -> Examples:
        sockets: dict[str, Any] = {"hosts": 2, "paths": {"NET/Socket": 4}, "interfaces": ["eth0"]}
        return {
            "no device": _build_log(**sockets, without_device=4),
            "no library": _build_log(**sockets, no_verbs=True),
            "docker0": _build_log(**{**sockets, "interfaces": ["docker0"]}),
            "not opened": _build_log(**sockets, warnings={"Call to ibv_open_device failed": 1}),
            "InfiniBand": (_build_log(hosts=2, paths={"NET/IB/GDRDMA": 4}), "not sockets"),
            "one node": (
                _build_log(hosts=1, ranks=8, node_ranks=8, networks={"Socket": 8}),
                "not sockets",
            ),
            "switched off": (
                _build_log(hosts=2, paths={"NET/Socket": 4}, settings={"NCCL_IB_DISABLE": "1"}),
                "_is_off(a, 'NCCL_IB_DISABLE', 'NCCL_NET')",
            ),
        }


class NcclGpuDirect(NetworkRule):
    """Data between GPU and adapter goes through host memory: GPUDirect RDMA is not used. That
    costs bandwidth of the processor's memory and PCIe, and latency.

    Channels ``via NET/IB/0`` lack ``/GDRDMA``. The log names the reason: the kernel module is not
    loaded, or GPU and adapter are too far from each other. Boards without it (GeForce) are left
    out."""

    id = "nccl-gpudirect"
    title = "GPUDirect RDMA is not used between nodes"
    fix = (
        "Load nvidia-peermem on the host (or use DMA-BUF: driver 515, kernel 5.12). In virtual "
        "machines enable ATS; on bare metal switch ACS of the PCIe switches off."
    )
    code = "sudo modprobe nvidia-peermem\nlsmod | grep peermem"
    verify = "Run with NCCL_DEBUG=INFO: 'via NET/IB/0/GDRDMA'."
    falsified_by = "the same bus bandwidth of all_reduce_perf with NCCL_NET_GDR_LEVEL=SYS"
    confidence = 0.8
    cases = {
        "far": {
            "fix": "Use adapters near the GPUs: on the same PCIe switch (PIX, PXB in nvidia-smi "
            "topo -m). Name them by NCCL_IB_HCA. Where all are far, try a higher level, and "
            "measure: it may also be slower.",
            "code": "nvidia-smi topo -m\nexport NCCL_NET_GDR_LEVEL=SYS   # PIX, PXB, PHB, SYS",
        }
    }

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        verbs = {
            path: n
            for path, n in log.paths.items()
            if path.startswith("NET/") and path != "NET/Socket"
        }
        through_host = sum(n for path, n in verbs.items() if not path.endswith("/GDRDMA"))
        if not verbs and log.gdr_disabled and not log.gdr_enabled and log.networks.get("IB"):
            through_host = sum(log.gdr_disabled.values())
        if not through_host:
            if verbs:
                yield PassedCheck(text="GPUDirect RDMA is used between nodes")
            return
        if _is_off(a, "NCCL_NET_GDR_LEVEL"):
            return
        if a.hardware is not None and NO_GDR.search(a.hardware.name):
            return
        reason = next(iter(log.gdr_disabled), "")
        scaled = scale_collectives(a, across=True)
        yield Finding(
            summary=f"{t.count_noun(through_host, 'connection')} between nodes "
            f"{'go' if through_host > 1 else 'goes'} through host memory"
            f"{f': {reason}' if reason else ''}.",
            evidence=[
                *of_path(log),
                *(
                    Evidence("GPUDirect RDMA disabled", f"{why} ({n}×)")
                    for why, n in log.gdr_disabled.items()
                ),
                *bandwidth_evidence(scaled),
            ],
            **(self.case("far") if reason.startswith("distance") else {}),
            **self.estimate(scaled),
        )

    @staticmethod
    def examples() -> Examples:
        with_trace = _build_log(
            hosts=2, ranks=16, node_ranks=8, paths={"NET/IB": 8}, nic_gb_per_s=200.0,
            trace=_build_large_all_reduce(16, 40.0),
        )  # fmt: skip
        return {
            "no module": _build_log(hosts=2, paths={"NET/IB": 8}, gdr_disabled={"no module": 4}),
            "far": _build_log(hosts=2, paths={"NET/IB": 8}, gdr_disabled={"distance 7 > 4": 4}),
            "next to a trace": with_trace,
            "used": (_build_log(hosts=2, paths={"NET/IB/GDRDMA": 8}), "not through_host"),
            "far adapters, used near ones": (
                _build_log(
                    hosts=2,
                    paths={"NET/IB/GDRDMA": 8},
                    gdr_disabled={"distance 7 > 4": 4},
                    gdr_enabled=4,
                ),
                "not through_host",
            ),
        }


class NcclNodePath(NetworkRule):
    """GPUs of a node exchange data through host memory (``via SHM``) though NVLink or peer access
    connects them. Or the board's NVLink is missing from the topology.

    Shared memory is NCCL's choice where GPUs belong to different sockets, and not a fault there. It
    is a fault where the driver reports that peer access is off (ACS, IOMMU, a virtual machine), or
    where all pairs have NVLink. ``P2P/IPC``, ``P2P/CUMEM`` and ``P2P/direct pointer`` are peer
    access, over NVLink or PCIe."""

    id = "nccl-node-path"
    title = "GPUs of a node exchange data through host memory"
    fix = (
        "Enable peer access. Switch ACS off on PCIe switches (or use ATS in virtual machines), and "
        "set iommu=pt. Give one container all GPUs, and let processes share memory (--ipc=host)."
    )
    code = (
        "nvidia-smi topo -p2p r         # OK for each pair\n"
        "sudo lspci -vvv | grep ACSCtl  # no SrcValid+\n"
        "docker run --gpus all --ipc=host …"
    )
    verify = "Run with NCCL_DEBUG=INFO: channels 'via P2P/CUMEM' or 'P2P/IPC', none 'via SHM'."
    falsified_by = "p2pBandwidthLatencyTest with the same bandwidth with and without peer access"
    confidence = 0.7
    cases = {
        "no NVLink": {
            "title": "The GPUs' NVLink is missing from the topology",
            "fix": "Check the links and the fabric manager on the host; a virtual machine needs "
            "all GPUs of the board, and NVSwitch passed through.",
            "code": "nvidia-smi nvlink --status\nsystemctl status nvidia-fabricmanager",
            "verify": "nvidia-smi topo -m shows NV# between all GPUs.",
        }
    }

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        peer = sum(n for path, n in log.paths.items() if path.startswith("P2P"))
        shared = log.paths.get("SHM", 0)
        fast = [link for link in log.gpu_links if re.match(r"NV\d|XGMI", link)]
        board = None if a.hardware is None else a.hardware.link
        missing = board is not None and bool(log.gpu_links) and not fast
        if not shared and not missing:
            if peer:
                yield PassedCheck(text="GPUs of a node reach each other's memory directly")
            return
        if _is_off(a, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
            return
        all_fast = (
            len(fast) == len(log.gpu_links) if log.gpu_links else (log.ring or "")[:3] == "NVL"
        )
        if not (missing or log.p2p_disabled or (fast and not peer) or (all_fast and fast)):
            return
        scaled = scale_collectives(a, across=False) if fast or board is not None else None
        links = ", ".join(f"{link} {n}" for link, n in log.gpu_links.items())
        why = f" The driver reports {t.count_noun(log.p2p_disabled, 'pair')} without peer access."
        yield Finding(
            summary=(
                f"The board has {board.name}, and the topology shows none ({links})."
                if missing and board is not None
                else f"{t.count_noun(shared, 'connection')} between GPUs of a node "
                f"{'go' if shared > 1 else 'goes'} through host memory (SHM)."
                f"{why if log.p2p_disabled else ''}"
            ),
            evidence=[
                *of_path(log),
                Evidence("links of GPU pairs", links or None),
                *bandwidth_evidence(scaled),
            ],
            **(self.case("no NVLink") if missing else {}),
            **self.estimate(scaled),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "NVLink unused": _build_log(hosts=1, paths={"SHM": 8}, gpu_links={"NV12": 28}),
            "peer access off": _build_log(hosts=1, paths={"SHM": 8}, p2p_disabled=8),
            "NVLink missing": _build_log(
                gpu_links={"PIX": 4, "SYS": 24},
                node_ranks=8,
                trace=_build_large_all_reduce(8, 20.0),
            ),
            "peer access": (_build_log(hosts=1, paths={"P2P/CUMEM": 8}), "not missing"),
            "pairs with NVLink, others across sockets": (
                _build_log(hosts=1, paths={"SHM": 4, "P2P/IPC": 4}, gpu_links={"NV4": 2, "SYS": 4}),
                "all_fast",
            ),
            "no NVLink, across sockets": (
                _build_log(hosts=1, paths={"SHM": 8}, gpu_links={"SYS": 6}),
                "fast",
            ),
        }


class NcclNvls(NetworkRule):
    """NVLink SHARP adds up in the NVSwitch: an all-reduce then sends each byte once. NCCL's log
    says that multicast is not available, though the GPUs are Hopper or newer and all connected."""

    id = "nccl-nvls"
    title = "NVLink SHARP is not available to NCCL"
    fix = (
        "Start the fabric manager of the driver's version; use NCCL 2.17, CUDA 12.1 and a driver "
        "for it. In containers the multicast devices must be there (nvidia-container-toolkit; "
        "IMEX channels across nodes)."
    )
    code = "systemctl status nvidia-fabricmanager\nnvidia-smi -q | grep -A2 Fabric"
    verify = "Run with NCCL_DEBUG=INFO: 'NVLS multicast support is available'."
    falsified_by = "the same bus bandwidth of all_reduce_perf with NCCL_NVLS_ENABLE=0 afterwards"
    confidence = 0.6

    min_gpus = Threshold(4, "GPUs of the node: pairs gain nothing", CHOSEN)

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        if log.nvls is None:
            return
        if log.nvls:
            yield PassedCheck(text="NVLink SHARP is available to NCCL")
            return
        is_switched = set(log.gpu_links) == {"NV18"}
        if not is_switched or log.gpus < self.min_gpus or _is_off(a, "NCCL_NVLS_ENABLE"):
            return
        yield Finding(
            summary=f"All {log.gpus} GPUs are connected by NV18, and NCCL finds no multicast: "
            "all-reduce cannot add up in the switch.",
            evidence=[
                Evidence("GPUs of the node", log.gpus, "count"),
                Evidence("NVLS channels", log.nvls_channels, "count"),
            ],
            impact=impact_without_gain("run all_reduce_perf with and without it"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "eight H100": _build_log(nvls=False, gpus=8, gpu_links={"NV18": 28}, nvls_channels=0),
            "A100": (_build_log(nvls=False, gpus=8, gpu_links={"NV12": 28}), "not is_switched"),
            "available": (_build_log(nvls=True, gpus=8, gpu_links={"NV18": 28}), "log.nvls"),
        }


class NcclLimits(NetworkRule):
    """A limit of the container or the system stops NCCL: locked memory for InfiniBand, or shared
    memory between processes. NCCL warns, and falls back to a slower path or ends the job."""

    id = "nccl-limits"
    title = "A limit of the container stops NCCL"
    fix = "Raise the limit for the container, or in /etc/security/limits.conf."
    code = "docker run --gpus all --ipc=host --ulimit memlock=-1 …"
    verify = "ulimit -l says unlimited, df /dev/shm some GB; the warnings are gone."
    falsified_by = "the same warning with unlimited memlock and --ipc=host"
    confidence = 0.85
    known: ClassVar[Mapping[str, str]] = {
        r"ibv_(reg_mr|create_cq|create_qp)\w* failed.*Cannot allocate": "locked memory "
        "(ulimit -l) is too small for InfiniBand",
        r"/dev/shm|shared memory segment|No space left on device": "shared memory (/dev/shm) is "
        "too small",
    }

    def examine_log(self, a: Analysis, log: NetworkLog) -> Outcomes:
        failures = {
            meaning: text
            for text in log.warnings
            for pattern, meaning in self.known.items()
            if re.search(pattern, text)
        }
        if not failures:
            return
        yield Finding(
            title=f"NCCL fails: {next(iter(failures))}",
            summary=f"{'; '.join(failures)}. NCCL warns: {next(iter(failures.values()))}",
            evidence=[Evidence("warning in the log", text) for text in failures.values()],
            impact=impact_without_gain("communication fails or takes a slower path"),
        )

    @staticmethod
    def examples() -> Examples:
        failed = "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"
        return {
            "locked memory": _build_log(hosts=1, warnings={failed: 8}),
            "another warning": (_build_log(hosts=1, warnings={"Timeout": 1}), "not failures"),
        }


def _build_log(trace: TraceBuilder | None = None, **fields: Any) -> TraceBuilder:
    """Build a log with these fields, alone or next to a trace."""
    b = trace or TraceBuilder()
    b.logs["network"] = NetworkLog(files=1, **fields)
    return b


def _build_record(**env: str) -> TraceBuilder:
    b = TraceBuilder()
    b.record_of_run(env=env).steps(10, 10)
    return b


def _build_large_all_reduce(ranks: int, gb_per_s: float) -> TraceBuilder:
    """Build steps with an exposed all-reduce of 256 MiB at this bus bandwidth."""
    from advisor.rules.support.common import example_steps

    size = 256 << 20
    us = size * 2 * (ranks - 1) / ranks / gb_per_s / 1e3

    def body(b: TraceBuilder) -> None:
        b.run("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", 3000)
        b.collective("allreduce", size, us, group_size=ranks, wait=True)

    return example_steps(body, "A100")
