"""Reader of the paths between GPUs: logs of NCCL and RCCL (``NCCL_DEBUG=INFO``), and topologies of
a node (``nvidia-smi topo -m``, ``rocm-smi --showtopo``), in separate files or in a job's log.

The lines of NCCL 2.14 to 2.28 are known. Other wordings of other versions are left out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from advisor.core.auxiliary_inputs import NetworkLog
from advisor.core.credentials import clean_value
from advisor.core.errors import AdvisorError
from advisor.core.files import cut_lines
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

_MAX_BYTES = 1 << 30
_MAX_LINE, _MAX_NAMES, _MAX_PAIRS, _MAX_GPUS = 4_096, 64, 65_536, 64
_LINE = re.compile(
    rb"(?<![\w.-])([\w.-]{1,255}):(\d{1,10}):\d{1,10} \[\d{1,4}\] (?:[\w./-]{1,200}:\d{1,6} )?"
    rb"NCCL (INFO|WARN) ([^\r\n]+)"
)
_VERSION = re.compile(rb"\b(N|R)CCL version *:? (\d[\w.+-]{1,40})")
_COLOR = re.compile(rb"\x1b\[[0-9;]{0,16}m")
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d{1,7})\[\w+\] -> (\d{1,7})\[\w+\](?: \[(send|receive)\])? via (.+)"
)
_DEVICE = re.compile(r"\[\d+\](\w[\w.:+-]{0,60}/(?:IB|RoCE))")
_SOCKET = re.compile(r"\[\d+\]([\w.@-]{1,32}):")
_SETTING = re.compile(r"(NCCL_\w{1,60}|RCCL_\w{1,60}) set (?:by environment )?to (.{1,200})")
_COMM = re.compile(r"comm 0x\w+ rank (\d{1,7}) n[rR]anks (\d{1,7})")
_NODES = re.compile(r"n[rR]anks (\d{1,7}) nNodes \d+ localRanks (\d{1,5})")
_CHANNELS = re.compile(r"(\d{1,4}) coll channels(?:.*?(\d{1,4}) nvls channels)?")
_GDR = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for (.+)")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_GRAPH = re.compile(
    r"Pattern 4, crossNic \d, nChannels (\d{1,4}), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+)"
)
_NIC = re.compile(r"NET/(\w{1,8}) \(\w+/\w+/([\d.]{1,12})\)")
_ALGORITHM = re.compile(r"-> Algo (\w{1,20}) proto (\w{1,20})")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_COLUMN = re.compile(r"(?:GPU|NIC)\d{1,3}|(?:mlx|bnxt|irdma|efa|ib|hns)\w*")
_LEGEND = re.compile(r"(NIC\d{1,3}): (\w{1,60})$")
DISTANCE = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Links of ``nvidia-smi topo -m``, from near to far."""


class NetworkLogReader(Reader):
    """Reader of any text with lines of NCCL or with a matrix of links."""

    name = "nccl-log"
    description = "an NCCL log or topology"
    meta_field = "network"
    suffixes = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns for the usual names of such files."""
        return (
            "*nccl*.log", "*nccl*.txt", "*rccl*.log", "*rccl*.txt", "nccl[._-]*", "nccldebug*",
            "*topo*.txt",
        )  # fmt: skip

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a line of NCCL, or the header of a matrix. The claim is less sure if the log
        has an out-of-memory exception, which is more important."""
        del path
        has_matrix = b"GPU0" in head and (b"CPU Affinity" in head or b"Link Type between" in head)
        if b"\0" in head[:1024] or not (has_matrix or _LINE.search(head) or _VERSION.search(head)):
            return ReaderClaim.NO
        is_other_log = b"out of memory. Tried to allocate" in head or head.lstrip()[:1] in (
            b"{",
            b"[{",
        )
        return ReaderClaim.PERHAPS if is_other_log else ReaderClaim.SURE

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return a blank trace with the log. Raises AdvisorError if nothing in it is from NCCL."""
        from advisor.core.trace import blank_trace

        facts = _LogFacts()
        for line in cut_lines(source.blocks(), _MAX_LINE):
            facts.add(line)
            if source.bytes_read > _MAX_BYTES:
                raise AdvisorError(f"{source.path}: a log of more than {_MAX_BYTES >> 20} MiB")
        if not (facts.lines or facts.gpus):
            raise AdvisorError(f"{source.path}: no line of NCCL and no topology in it")
        bytes_read = source.bytes_read
        return blank_trace(
            source.path, bytes_read=bytes_read, events_read=facts.lines, network=facts.log()
        )

    def merge(self, values: list[NetworkLog]) -> NetworkLog:
        return merged_networks(values)


def merged_networks(logs: list[NetworkLog]) -> NetworkLog:
    """Merge logs of several processes and hosts: counts are added, lists are joined, and of other
    values the worst one is kept."""
    fields: dict[str, Any] = {}
    for name in NetworkLog.__struct_fields__:
        values = [getattr(log, name) for log in logs]
        if isinstance(values[0], dict) and name != "settings":
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            fields[name] = dict(total.most_common(_MAX_NAMES))
        elif name == "settings":
            fields[name] = {key: text for value in values for key, text in value.items()}
        elif isinstance(values[0], list):
            fields[name] = list(dict.fromkeys(item for v in values for item in v))[:_MAX_NAMES]
        else:
            fields[name] = _merge_values(name, [value for value in values if value is not None])
    return NetworkLog(**fields)


_MINIMUM_FIELDS = ("channels", "nvls_channels", "nvls", "ring_gb_per_s", "nic_gb_per_s", "ring")
_MAXIMUM_FIELDS = ("ranks", "node_ranks", "gpus", "no_verbs")


def _merge_values(name: str, values: list[Any]) -> Any:
    """Return one value for all files, or ``None`` if none is known."""
    if not values:
        return None
    if name in _MINIMUM_FIELDS:
        return min(values)
    return max(values) if name in _MAXIMUM_FIELDS else sum(values)


@dataclass
class _LogFacts:
    """Facts collected from the lines of one file."""

    lines: int = 0
    versions: dict[str, None] = field(default_factory=dict)
    hosts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ranks of the largest communicator on each host."""
    values: dict[str, Any] = field(default_factory=dict)
    """Single values of NetworkLog's other fields."""
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    names: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    settings: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, float] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of fact and process, for facts that count once per process."""
    columns: list[str] = field(default_factory=list)
    gpus: dict[str, dict[str, str]] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)

    def add(self, raw: bytes) -> None:
        if b"CCL version" in raw and (version := _VERSION.search(raw)) is not None:
            self.lines += 1
            self._add_name(self.versions, f"{version[1].decode()}CCL {version[2].decode()}")
        line = _LINE.search(raw) if b" NCCL " in raw else None
        if line is None:
            if b"GPU" in raw or b"NIC" in raw or (self.columns and raw.strip()):
                self._add_matrix_line(_COLOR.sub(b"", raw).decode("utf-8", "replace"))
            return
        self.lines += 1
        host, process = line[1].decode(), f"{line[1].decode()}:{line[2].decode()}"
        if len(self.hosts) < _MAX_PAIRS:
            self.hosts[host]
        text = line[4].decode("utf-8", "replace").strip()
        if line[3] == b"WARN":
            self._count_text("warnings", _shorten(text))
        for key, read in _LINE_READERS:
            if key in text:
                read(self, text, host, process)

    def _add_channel(self, text: str, host: str, process: str) -> None:
        match = _CHANNEL.match(text)
        if match is not None and match[3] != "receive":
            path = transport_name(match[4])
            if self._is_first(f"{match[1]}->{match[2]} {path}", process):
                self._count_text("paths", path)

    def _add_network(self, text: str, host: str, process: str) -> None:
        if self._is_first("network", process):
            self._count_text("networks", text.partition("Using network ")[2])

    def _add_socket(self, text: str, host: str, process: str) -> None:
        for name in _SOCKET.findall(text):
            self._add_name(self.names["interfaces"], name)

    def _add_verbs(self, text: str, host: str, process: str) -> None:
        if "No device found" in text and self._is_first("no device", process):
            self.values["without_device"] = self.values.get("without_device", 0) + 1
        for name in _DEVICE.findall(text):
            self._add_name(self.names["devices"], name)

    def _add_no_verbs(self, text: str, host: str, process: str) -> None:
        self.values["no_verbs"] = True

    def _add_setting(self, text: str, host: str, process: str) -> None:
        match = _SETTING.search(text)
        if match is not None and len(self.settings) < _MAX_NAMES:
            self.settings[match[1]] = _shorten(clean_value(match[2]).rstrip(". "))

    def _add_communicator(self, text: str, host: str, process: str) -> None:
        if (nodes := _NODES.search(text)) is not None:
            self._set_ranks(int(nodes[1]))
            if int(nodes[1]) == self.values["ranks"]:
                self.values["node_ranks"] = int(nodes[2])
        if (match := _COMM.search(text)) is not None:
            self._set_ranks(int(match[2]))
            if int(match[2]) == self.values["ranks"] and len(self.hosts[host]) < _MAX_PAIRS:
                self.hosts[host].add(match[1])

    def _set_ranks(self, ranks: int) -> None:
        """Set the size of a communicator. Facts about smaller ones are dropped."""
        if ranks > self.values.get("ranks", 0):
            self.values["ranks"] = ranks
            self.values.pop("node_ranks", None)
            for host_ranks in self.hosts.values():
                host_ranks.clear()

    def _add_channels(self, text: str, host: str, process: str) -> None:
        if (match := _CHANNELS.search(text)) is not None:
            self._keep_minimum("channels", int(match[1]))
            if match[2] is not None:
                self.values["nvls_channels"] = max(
                    int(match[2]), self.values.get("nvls_channels", 0)
                )

    def _add_gpu_direct(self, text: str, host: str, process: str) -> None:
        match = _GDR.search(text)
        if match is None or not self._is_first(match[2][:80], process):
            return
        if match[1] == "Enabled":
            self.values["gdr_enabled"] = self.values.get("gdr_enabled", 0) + 1
            return
        reason = re.search(r"\((no module|distance \d+ > \d+)[^)]*\)", match[2])
        self._count_text("gdr_disabled", reason[1] if reason is not None else "no reason given")

    def _add_nvls(self, text: str, host: str, process: str) -> None:
        if (match := _NVLS.search(text)) is not None:
            self.values["nvls"] = match[1] is None and self.values.get("nvls", True)

    def _add_graph(self, text: str, host: str, process: str) -> None:
        match = _GRAPH.search(text)
        if match is None:
            return
        channels, intra_node, inter_node = int(match[1]), _to_float(match[2]), _to_float(match[3])
        expected = (
            channels * min(rate for rate in (intra_node, inter_node) if rate)
            if intra_node
            else None
        )
        if expected is not None:
            self._keep_minimum("ring_gb_per_s", expected)
            self.values["ring"] = f"{match[4]}/{match[5]}"

    def _add_nic(self, text: str, host: str, process: str) -> None:
        if (match := _NIC.search(text)) is not None and len(self.adapters) < _MAX_NAMES:
            self.adapters[match[1]] = _to_float(match[2])

    def _add_algorithm(self, text: str, host: str, process: str) -> None:
        if (match := _ALGORITHM.search(text)) is not None:
            algorithm, protocol = (
                names[int(name[:3])] if name.isdecimal() and int(name[:3]) < len(names) else name
                for name, names in ((match[1], _ALGORITHMS), (match[2], _PROTOCOLS))
            )
            self._count_text("algorithms", f"{algorithm}/{protocol}")

    def _add_disabled_peer(self, text: str, host: str, process: str) -> None:
        if self._is_first(text[:100], host):
            self.values["p2p_disabled"] = self.values.get("p2p_disabled", 0) + 1

    def _add_matrix_line(self, text: str) -> None:
        """Add a line of a matrix of links."""
        if (name := _LEGEND.search(text)) is not None:
            self.legend[name[1]] = name[2]
            return
        words = text.split()
        if (words[:1] == ["GPU0"] and words[1:2] in ([], ["GPU1"])) or words[:2] == ["GPU0", "CPU"]:
            columns = [word for word in words if _COLUMN.fullmatch(word)]
            self.columns = columns[: 2 * _MAX_GPUS] if words[:2] != ["GPU0", "X"] else self.columns
            return
        if not words or words[0] not in self.columns or not words[0].startswith("GPU"):
            return
        links = dict(zip(self.columns, words[1:], strict=False))
        known_links = {
            target: link
            for target, link in links.items()
            if re.fullmatch(r"[A-Z]{2,5}\d{0,3}", link)
        }
        if known_links and len(self.gpus) < _MAX_GPUS:
            self.gpus.setdefault(words[0], {}).update(known_links)

    def log(self) -> NetworkLog:
        links: Counter[str] = Counter()
        nearest: Counter[str] = Counter()
        index = {name: position for position, name in enumerate(self.columns)}
        for gpu, row in self.gpus.items():
            for target, link in row.items():
                links[link] += target in self.gpus and index[target] > index[gpu]
            distances = [DISTANCE.index(link) for target, link in row.items()
                    if not target.startswith("GPU") and link in DISTANCE]  # fmt: skip
            if distances:
                nearest[DISTANCE[min(distances)]] += 1
        nics = [name for name in self.columns if not name.startswith("GPU")]
        largest_host = max((len(ranks) for ranks in self.hosts.values()), default=0)
        fields: dict[str, Any] = {"node_ranks": largest_host or None, **self.values}
        fields |= {
            name: dict(counts.most_common(_MAX_NAMES)) for name, counts in self.counts.items()
        }
        fields |= {name: list(counts) for name, counts in self.names.items()}
        return NetworkLog(
            files=1,
            versions=list(self.versions),
            hosts=len(self.hosts),
            settings=self.settings,
            nic_gb_per_s=sum(self.adapters.values()) or None,
            gpus=len(self.gpus),
            gpu_links={link: count for link, count in links.most_common() if count},
            nics=[self.legend.get(name, name) for name in nics],
            nic_links=dict(nearest),
            **fields,
        )

    def _is_first(self, fact: str, process: str) -> bool:
        """Return whether a process logs a fact for the first time."""
        is_new = (fact, process) not in self.seen and len(self.seen) < _MAX_PAIRS
        if is_new:
            self.seen.add((fact, process))
        return is_new

    def _keep_minimum(self, name: str, value: float) -> None:
        self.values[name] = min(value, self.values.get(name, value))

    def _count_text(self, name: str, key: str) -> None:
        counter = self.counts[name]
        if key in counter or len(counter) < _MAX_NAMES:
            counter[_shorten(key)] += 1

    @staticmethod
    def _add_name(names: dict[str, None], name: str) -> None:
        if len(names) < _MAX_NAMES:
            names[name] = None


_LINE_READERS: tuple[tuple[str, Callable[[_LogFacts, str, str, str], None]], ...] = (
    (" via ", _LogFacts._add_channel),
    ("Using network ", _LogFacts._add_network),
    ("NET/Socket : Using", _LogFacts._add_socket),
    ("NET/IB : ", _LogFacts._add_verbs),
    ("Failed to open libibverbs", _LogFacts._add_no_verbs),
    (" to ", _LogFacts._add_setting),
    ("ranks ", _LogFacts._add_communicator),
    ("Ranks ", _LogFacts._add_communicator),
    ("coll channels", _LogFacts._add_channels),
    ("GPU Direct RDMA", _LogFacts._add_gpu_direct),
    ("NVLS multicast", _LogFacts._add_nvls),
    ("Pattern 4,", _LogFacts._add_graph),
    ("NET/", _LogFacts._add_nic),
    ("-> Algo ", _LogFacts._add_algorithm),
    ("P2P is disabled between", _LogFacts._add_disabled_peer),
)
"""Text that a line must contain, and the method that reads the line."""


def transport_name(text: str) -> str:
    """Shorten ``NET/IB/0(7)/GDRDMA/Shared`` to ``NET/IB/GDRDMA``, ``P2P/x/y`` to ``P2P/x``."""
    text = re.split(r" comm 0x| \[", text)[0].strip()
    kind, _, remaining_path = text.partition("/")
    if kind == "NET":
        name = _shorten(remaining_path.partition("/")[0])
        return f"NET/{name}/GDRDMA" if "GDRDMA" in remaining_path else f"NET/{name}"
    if kind == "P2P":
        return f"P2P/{_shorten(remaining_path.partition('/')[0])}"
    return "SHM" if kind == "SHM" or "shared memory" in text else _shorten(kind)


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _shorten(text: str) -> str:
    return text[:120].strip()
