"""Reader of the path between GPUs: logs of NCCL and RCCL (``NCCL_DEBUG=INFO``), and topologies of a
node (``nvidia-smi topo -m``, ``rocm-smi --showtopo``), in files of their own or in a job's log.

The lines of NCCL 2.14 to 2.28 are known; what other versions say in other words is left out."""

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

MAX_BYTES = 1 << 30
MAX_LINE, MAX_NAMES, MAX_PAIRS, MAX_GPUS = 4_096, 64, 65_536, 64
_LINE = re.compile(
    rb"(?<![\w.-])([\w.-]{1,255}):(\d{1,10}):\d{1,10} \[\d{1,4}\] (?:[\w./-]{1,200}:\d{1,6} )?"
    rb"NCCL (INFO|WARN) ([^\r\n]+)"
)
_VERSION = re.compile(rb"\b(N|R)CCL version *:? (\d[\w.+-]{1,40})")
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,16}m")
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
"""Links of ``nvidia-smi topo -m`` from near to far."""


class NetworkLogReader(Reader):
    """Reader of any text with lines of NCCL, or with a matrix of links."""

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
        """Recognise a line of NCCL, or the head of a matrix. Less sure if an out-of-memory
        exception is in the same log, which tells more."""
        del path
        matrix = b"GPU0" in head and (b"CPU Affinity" in head or b"Link Type between" in head)
        if b"\0" in head[:1024] or not (matrix or _LINE.search(head) or _VERSION.search(head)):
            return ReaderClaim.NO
        failed = b"out of memory. Tried to allocate" in head or head.lstrip()[:1] in (b"{", b"[{")
        return ReaderClaim.PERHAPS if failed else ReaderClaim.SURE

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return a blank trace with the log. Raises AdvisorError if nothing of NCCL is in it."""
        from advisor.core.trace import blank_trace

        found = _Found()
        for line in cut_lines(source.blocks(), MAX_LINE):
            found.add(line)
            if source.bytes_read > MAX_BYTES:
                raise AdvisorError(f"{source.path}: a log of more than {MAX_BYTES >> 20} MiB")
        if not (found.lines or found.gpus):
            raise AdvisorError(f"{source.path}: no line of NCCL and no topology in it")
        read = source.bytes_read
        return blank_trace(
            source.path, bytes_read=read, events_read=found.lines, network=found.log()
        )

    def merge(self, values: list[NetworkLog]) -> NetworkLog:
        return merged_networks(values)


def merged_networks(logs: list[NetworkLog]) -> NetworkLog:
    """Merge logs of several processes and hosts: counts add up, lists are joined, of other values
    the worst is kept."""
    fields: dict[str, Any] = {}
    for name in NetworkLog.__struct_fields__:
        values = [getattr(log, name) for log in logs]
        if isinstance(values[0], dict) and name != "settings":
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            fields[name] = dict(total.most_common(MAX_NAMES))
        elif name == "settings":
            fields[name] = {key: text for value in values for key, text in value.items()}
        elif isinstance(values[0], list):
            fields[name] = list(dict.fromkeys(item for v in values for item in v))[:MAX_NAMES]
        else:
            fields[name] = _joined(name, [value for value in values if value is not None])
    return NetworkLog(**fields)


_MINIMA = ("channels", "nvls_channels", "nvls", "ring_gb_per_s", "nic_gb_per_s", "ring")
_MAXIMA = ("ranks", "node_ranks", "gpus", "no_verbs")


def _joined(name: str, known: list[Any]) -> Any:
    """Return one value for all files; ``None`` if none is known."""
    if not known:
        return None
    if name in _MINIMA:
        return min(known)
    return max(known) if name in _MAXIMA else sum(known)


@dataclass
class _Found:
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
            self._name(self.versions, f"{version[1].decode()}CCL {version[2].decode()}")
        line = _LINE.search(raw) if b" NCCL " in raw else None
        if line is None:
            if b"GPU" in raw or b"NIC" in raw or (self.columns and raw.strip()):
                self._matrix(_COLOUR.sub(b"", raw).decode("utf-8", "replace"))
            return
        self.lines += 1
        host, process = line[1].decode(), f"{line[1].decode()}:{line[2].decode()}"
        if len(self.hosts) < MAX_PAIRS:
            self.hosts[host]
        text = line[4].decode("utf-8", "replace").strip()
        if line[3] == b"WARN":
            self._count("warnings", _plain(text))
        for key, read in _READERS:
            if key in text:
                read(self, text, host, process)

    def _channel(self, text: str, host: str, process: str) -> None:
        found = _CHANNEL.match(text)
        if found is not None and found[3] != "receive":
            path = transport_name(found[4])
            if self._once(f"{found[1]}->{found[2]} {path}", process):
                self._count("paths", path)

    def _network(self, text: str, host: str, process: str) -> None:
        if self._once("network", process):
            self._count("networks", text.partition("Using network ")[2])

    def _socket(self, text: str, host: str, process: str) -> None:
        for name in _SOCKET.findall(text):
            self._name(self.names["interfaces"], name)

    def _verbs(self, text: str, host: str, process: str) -> None:
        if "No device found" in text and self._once("no device", process):
            self.values["without_device"] = self.values.get("without_device", 0) + 1
        for name in _DEVICE.findall(text):
            self._name(self.names["devices"], name)

    def _no_verbs(self, text: str, host: str, process: str) -> None:
        self.values["no_verbs"] = True

    def _setting(self, text: str, host: str, process: str) -> None:
        found = _SETTING.search(text)
        if found is not None and len(self.settings) < MAX_NAMES:
            self.settings[found[1]] = _plain(clean_value(found[2]).rstrip(". "))

    def _comm(self, text: str, host: str, process: str) -> None:
        if (nodes := _NODES.search(text)) is not None:
            self._ranks(int(nodes[1]))
            if int(nodes[1]) == self.values["ranks"]:
                self.values["node_ranks"] = int(nodes[2])
        if (found := _COMM.search(text)) is not None:
            self._ranks(int(found[2]))
            if int(found[2]) == self.values["ranks"] and len(self.hosts[host]) < MAX_PAIRS:
                self.hosts[host].add(found[1])

    def _ranks(self, ranks: int) -> None:
        """Set the size of a communicator; facts about smaller ones are dropped."""
        if ranks > self.values.get("ranks", 0):
            self.values["ranks"] = ranks
            self.values.pop("node_ranks", None)
            for own in self.hosts.values():
                own.clear()

    def _channels(self, text: str, host: str, process: str) -> None:
        if (found := _CHANNELS.search(text)) is not None:
            self._least("channels", int(found[1]))
            if found[2] is not None:
                self.values["nvls_channels"] = max(
                    int(found[2]), self.values.get("nvls_channels", 0)
                )

    def _gdr(self, text: str, host: str, process: str) -> None:
        found = _GDR.search(text)
        if found is None or not self._once(found[2][:80], process):
            return
        if found[1] == "Enabled":
            self.values["gdr_enabled"] = self.values.get("gdr_enabled", 0) + 1
            return
        reason = re.search(r"\((no module|distance \d+ > \d+)[^)]*\)", found[2])
        self._count("gdr_disabled", reason[1] if reason is not None else "no reason given")

    def _nvls(self, text: str, host: str, process: str) -> None:
        if (found := _NVLS.search(text)) is not None:
            self.values["nvls"] = found[1] is None and self.values.get("nvls", True)

    def _graph(self, text: str, host: str, process: str) -> None:
        found = _GRAPH.search(text)
        if found is None:
            return
        channels, inside, across = int(found[1]), _number(found[2]), _number(found[3])
        expected = channels * min(each for each in (inside, across) if each) if inside else None
        if expected is not None:
            self._least("ring_gb_per_s", expected)
            self.values["ring"] = f"{found[4]}/{found[5]}"

    def _nic(self, text: str, host: str, process: str) -> None:
        if (found := _NIC.search(text)) is not None and len(self.adapters) < MAX_NAMES:
            self.adapters[found[1]] = _number(found[2])

    def _algorithm(self, text: str, host: str, process: str) -> None:
        if (found := _ALGORITHM.search(text)) is not None:
            algorithm, protocol = (
                names[int(name[:3])] if name.isdecimal() and int(name[:3]) < len(names) else name
                for name, names in ((found[1], _ALGORITHMS), (found[2], _PROTOCOLS))
            )
            self._count("algorithms", f"{algorithm}/{protocol}")

    def _peer(self, text: str, host: str, process: str) -> None:
        if self._once(text[:100], host):
            self.values["p2p_disabled"] = self.values.get("p2p_disabled", 0) + 1

    def _matrix(self, text: str) -> None:
        """Add a line of a matrix of links."""
        if (name := _LEGEND.search(text)) is not None:
            self.legend[name[1]] = name[2]
            return
        words = text.split()
        if (words[:1] == ["GPU0"] and words[1:2] in ([], ["GPU1"])) or words[:2] == ["GPU0", "CPU"]:
            columns = [word for word in words if _COLUMN.fullmatch(word)]
            self.columns = columns[: 2 * MAX_GPUS] if words[:2] != ["GPU0", "X"] else self.columns
            return
        if not words or words[0] not in self.columns or not words[0].startswith("GPU"):
            return
        links = dict(zip(self.columns, words[1:], strict=False))
        named = {to: link for to, link in links.items() if re.fullmatch(r"[A-Z]{2,5}\d{0,3}", link)}
        if named and len(self.gpus) < MAX_GPUS:
            self.gpus.setdefault(words[0], {}).update(named)

    def log(self) -> NetworkLog:
        links: Counter[str] = Counter()
        nearest: Counter[str] = Counter()
        index = {name: place for place, name in enumerate(self.columns)}
        for gpu, row in self.gpus.items():
            for to, link in row.items():
                links[link] += to in self.gpus and index[to] > index[gpu]
            near = [DISTANCE.index(link) for to, link in row.items()
                    if not to.startswith("GPU") and link in DISTANCE]  # fmt: skip
            if near:
                nearest[DISTANCE[min(near)]] += 1
        nics = [name for name in self.columns if not name.startswith("GPU")]
        own = max((len(ranks) for ranks in self.hosts.values()), default=0)
        fields: dict[str, Any] = {"node_ranks": own or None, **self.values}
        fields |= {name: dict(found.most_common(MAX_NAMES)) for name, found in self.counts.items()}
        fields |= {name: list(found) for name, found in self.names.items()}
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

    def _once(self, fact: str, process: str) -> bool:
        """Return whether a process logs this for the first time."""
        new = (fact, process) not in self.seen and len(self.seen) < MAX_PAIRS
        if new:
            self.seen.add((fact, process))
        return new

    def _least(self, name: str, value: float) -> None:
        self.values[name] = min(value, self.values.get(name, value))

    def _count(self, name: str, key: str) -> None:
        counter = self.counts[name]
        if key in counter or len(counter) < MAX_NAMES:
            counter[_plain(key)] += 1

    @staticmethod
    def _name(names: dict[str, None], name: str) -> None:
        if len(names) < MAX_NAMES:
            names[name] = None


_READERS: tuple[tuple[str, Callable[[_Found, str, str, str], None]], ...] = (
    (" via ", _Found._channel), ("Using network ", _Found._network),
    ("NET/Socket : Using", _Found._socket), ("NET/IB : ", _Found._verbs),
    ("Failed to open libibverbs", _Found._no_verbs), (" to ", _Found._setting),
    ("ranks ", _Found._comm), ("Ranks ", _Found._comm), ("coll channels", _Found._channels),
    ("GPU Direct RDMA", _Found._gdr), ("NVLS multicast", _Found._nvls),
    ("Pattern 4,", _Found._graph), ("NET/", _Found._nic), ("-> Algo ", _Found._algorithm),
    ("P2P is disabled between", _Found._peer),
)  # fmt: skip
"""Text that a line must contain, and the method that reads it."""


def transport_name(text: str) -> str:
    """Shorten ``NET/IB/0(7)/GDRDMA/Shared`` to ``NET/IB/GDRDMA``, ``P2P/x/y`` to ``P2P/x``."""
    text = re.split(r" comm 0x| \[", text)[0].strip()
    kind, _, rest = text.partition("/")
    if kind == "NET":
        name = _plain(rest.partition("/")[0])
        return f"NET/{name}/GDRDMA" if "GDRDMA" in rest else f"NET/{name}"
    if kind == "P2P":
        return f"P2P/{_plain(rest.partition('/')[0])}"
    return "SHM" if kind == "SHM" or "shared memory" in text else _plain(kind)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _plain(text: str) -> str:
    return text[:120].strip()
