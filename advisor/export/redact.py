"""Redaction of traces and reports: removal of credentials, users, hosts and folders.

What is kept is what advice needs: names of operators and kernels, shapes, files by their name or
by their place below site-packages, lines. What is replaced is written as ``[redacted]``, so that
it is seen to be missing. Patterns find what looks like a credential, not every secret there is: a
password that is an ordinary word in an ordinary place stays."""

import getpass
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Raw, Struct

from advisor.core.credentials import hide_known, hide_values, is_secret_name, names_who
from advisor.core.errors import AdvisorError
from advisor.core.files import BLOCK, open_regular
from advisor.core.run_directory import EVENTS, MANIFEST, RANK
from advisor.measure.host.stacks import LIBRARIES, TORCH

_S = TypeVar("_S", bound=Struct)

REDACTED = "[redacted]"
MAX_REMEMBERED = 200_000
"""Number of distinct texts whose result is kept: those of a trace repeat massively."""
MAX_NAMES = 1000
MAX_FOUND = 20_000
"""Number of names that are collected; the longest MAX_NAMES are redacted. A malicious file has any
number of them."""

_PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:pytorch\.org|nvidia\.com|github\.com|python\.org|huggingface\.co|arxiv\.org"
    r"|amd\.com|readthedocs\.io|oasis-open\.org|intel\.com|kernel\.org)"
)
"""Pattern of documentation hosts, which rules refer to."""
_REPOSITORY = re.compile(
    r"(?i)\b(?:github\.com|gitlab\.com|huggingface\.co|wandb\.ai)/(?!(?:docs|pytorch|openxla|rocm"
    r"|nvidia|linkedin|amd-agi|traceopt-ai|peppe-tringali|gitleaks)(?:/|$))[^\s'\"<>]*+"
)
"""Pattern of repositories, whose owners are private unless rules refer to them."""

# -- credentials --------------------------------------------------------------------------------

_ENTROPY = re.compile(r"\b_Z\w+|[A-Za-z0-9]{20,}|[A-Za-z0-9+/_=-]{32,}")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_ALNUM = re.compile(r"[A-Za-z0-9]")
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")
_LONG_WORDS = re.compile(r"[a-z]{4,}")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")

_SPECIALISED = re.compile(r"(?:\d{1,3}[cde]{0,2}+)++")
"""Pattern of what Triton of 2023 appends to a kernel's name: constant or divisible arguments."""

# -- people, machines, folders ------------------------------------------------------------------
# Each pattern takes time in proportion to the text: it begins where nothing of its own kind stands
# before it, repeats possessively, or a bounded number of times.

_VERSION = r"@(?!(?:GLIBC|GLIBCXX|CXXABI|GCC|plt|got|PLT|GOT)(?![A-Za-z0-9]))"
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++" + _VERSION + r"[\w-]++(?:\.[\w-]++)+")
_LOGIN = re.compile(r"(?<![\w.+@-])[A-Za-z_][\w.+-]*+" + _VERSION + r"[A-Za-z][\w-]*+(?!\w|\.\w)")
"""Pattern of ``alice@gpu17``, as in ssh and prompts; not of symbols with a version."""
_CLONED = re.compile(r"(?<![\w.+@-])[A-Za-z_][\w.+-]*+@[\w.-]++:(?!/)[^\s'\"<>|(),;]++")
"""Pattern of ``git@host:organisation/project.git``."""
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_ADDRESS_6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{4,45}(?:%\w{1,16})?(?![\w:])")
_MAC = re.compile(
    r"(?<![\w:-])[0-9A-Fa-f]{2}(?:([:-])[0-9A-Fa-f]{2})(?:\1[0-9A-Fa-f]{2}){4}(?![\w:-])"
)
_HOST = re.compile(
    r"(?i)(?<![\w/.-])([a-z0-9](?:[a-z0-9-]{0,62}\.){1,20})(?:"
    r"(com|net|org|edu|gov|mil|internal|local|localdomain|lan|corp|intra|home|cloud|svc|ai|dev"
    r"|co|eu|de|uk|fr|ch|jp|cn|in|us|io|cluster|arpa|tech|info|biz)"
    r"|(ca|au|nl|se|it|es|kr|ru|pl|br|tw|sg|hk|il|cz|fi|dk|be|no|at|pt|za|nz|mx|tr|gr|ie))"
    r"(?![\w-])"
    r"|(?<![\w/.-])(?:[a-z0-9][\w-]{0,62}\.){1,20}(?:internal|local|localdomain|lan|corp|intra"
    r"|cluster|com|edu)(?![\w-])"
)
"""Pattern of host names. Endings of its second kind are words elsewhere and need three parts or
more. Names with underscores count only with endings that no attribute has."""
_SHORT_HOST = re.compile(
    r"(?<![\w.:/\\-])(?!localhost)[A-Za-z][\w.-]{1,62}(?=:(?:29[45]\d\d|2222|6006|6379|8000|8080"
    r"|8265|878[67]|8888|90[09]0|10001)(?![\d.]))|(?<=\bhost=)[\w.-]{2,64}"
)
"""Pattern of a short host name before a port of a rendezvous, a scheduler or a server."""
_MODULES = re.compile(
    r"(?i)(?:[\w-]+\.)*(?:torch\w*|numpy|scipy|skimage|pandas|tensorflow|tf|jax|keras|lightning\w*"
    r"|transformers|datasets|nvidia|dali|fn|readers|decoders|plotly|av|cv2|self|aten|prim|nn|utils)"
    r"\.(?:io|in|dev|co|us|home|local|home|info)"
)
"""Pattern of modules and operators whose names end like a host's."""
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)([^\s/?#'\"<>]++)([^\s'\"<>]*+)")
_REMOTE = re.compile(
    r"(?<![\w.\\/:@-])(?:[\w.-]{1,64}@)?[A-Za-z][\w.-]{1,252}:(/(?!/)[^\s:;,'\"<>|()]+)"
)
"""Pattern of ``host:/path``, as in mounts, scp and rsync."""
_PATH = re.compile(
    r"(?<![\w.:/\\-])(?:file:/*)?(?:/|~/|~\w+/|\.{1,2}[\\/]|%\w{1,40}%[\\/]|\\\\[?.]\\[A-Za-z]:\\"
    r"|[A-Za-z]:[\\/]|\\\\)[^\s:;,'\"<>|()]+|(?<=[\w\]]:)/(?!/)[^\s:;,'\"<>|()]+"
)
_FRAME = re.compile(
    r"((?:[^\s/\\]*+ ){0,3}[^\s/\\]*+[/\\][^\n]*[^\n/\\])(\(\d{1,9}\): [^\s/\\]{1,200})"
)
"""Pattern of a Python frame, whatever characters its folders have."""
_TRACED = re.compile(r"(?<=File \")[^\"\n]++(?=\", line)")
_ESCAPED_PATH = re.compile(r"(?<![\\\w.])(?:\\++/[^\s\\/:;,'\"<>|()]++){2,}+")
_ENCODED_PATH = re.compile(r"(?i)(?<![\w.~+%-])%(?:2F|5C)(?:[\w.~+-]|%[0-9A-F]{2})++")
_RELATIVE = re.compile(r"(?<![\w./\\~%+=-])(?:[\w.+=-]++[/\\]++)++([\w.+=-]++)")
"""Pattern of relative paths, as in names of Python frames. Only those with a known ending, or in a
folder that programs write to, are taken for files: a/b may be anything."""
_FILE = re.compile(
    r"\.(?:pyi?|pyx|ipynb|cu|cuh|cpp|cc|c|h|hpp|rs|json|gz|jsonl|pt|pth|ckpt|ya?ml|toml|sh|parquet"
    r"|arrow|csv|txt|log|zip|tar|bin|so(?:\.\d{1,4}){0,3}|dll|dylib|onnx|safetensors|np[yz]|h5"
    r"|pkl|pickle|db|sqlite|pb|rpd|lmdb|tfrecord|(?:ncu|nsys)-rep|engine|plan|png|jpe?g|wav|mp4|raw)$"
)
"""Pattern of file endings: a name with one is kept of a path, all else is removed."""
_WRITTEN = frozenset(
    """
        outputs checkpoints checkpoint ckpt ckpts runs logs results experiments datasets
        workspace scratch wandb mlruns lightning_logs
        """.split()
)
_LIBRARY = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d{1,3})[/\\]")
_HOME = re.compile(r"(?:/home/|/Users/|[\\/]Users[\\/]|~)([A-Za-z0-9._-]{2,40})")
_HOMES = re.compile(
    rb"(?:\\*/home\\*/|\\*/Users\\*/|Users\\+|%2[Ff]home%2[Ff]|~|torchinductor_)"
    rb"([A-Za-z0-9._-]{2,40})"
)
_HOME_MARKS = (
    b"/home/", b"/home\\", b"/Users/", b"/Users\\", b"Users\\", b"%2Fhome%2F", b"%2fhome%2f", b"~",
    b"torchinductor_",
)  # fmt: skip
_NAMED_MARKS = {
    b"host": (b'host"', b'hostname"', b'host_name"', b"hostname=", b"host="),
    b"node": (b'nodename"', b'node_name"', b"nodename="),
    b"user": (b'user"', b'username"', b'user_name"', b"user=", b"username="),
    b"log": (b'"login"', b'logname"', b"logname=", b"login="),
}
"""Lower-case marks of ``_NAMED``, by part: a quick search before the far slower pattern."""
_NAMED = re.compile(
    rb'(?i)"(?:[A-Z0-9]{1,40}_){0,8}(?:host_?name|node_?name|host|user_?name|user|login|logname)'
    rb'"\s{0,20}:\s{0,20}"([^"\\]{2,80})"'
    rb"|(?<![A-Za-z0-9_])(?:[A-Z0-9]{1,40}_){0,8}(?:USER|USERNAME|LOGNAME|LOGIN|HOSTNAME|HOST"
    rb"|NODENAME)=([\w.-]{2,80})"
)
_NUMBERS = re.compile(rb"[\d.]*")
_PRIVATE_KEY = re.compile(
    r"(?i)(?:host|node|user)_?name|host|user|login|logname|home|environ\w*|env|argv|cmd(?:line)?"
    r"|command(?:_?line)?|cwd|pwd|trace_?name|git_?remote"
)

_COMMON = frozenset(
    """
        user users root home work data torch aten cuda python admin ubuntu runner model
        train test main local host localhost node name none null true false tmp src lib
        bin usr opt var gpu cpu step stream default unknown cluster worker master forward
        backward optimizer kernel conda anaconda
        """.split()
)
"""Names with other meanings as well: they are removed from paths only."""

HEAD_KEYS = frozenset(
    """
        schemaVersion deviceProperties distributedInfo displayTimeUnit baseTimeNanoseconds
        record_shapes with_stack with_flops with_modules profile_memory
        cuda_runtime_version cuda_driver_version cupti_version trace_id
        hip_runtime_version hip_driver_version roctracer_version rocprofiler_version
        torch_version advisor
        """.split()
)
"""Keys beside a trace's events that are kept: the others may hold the environment or anything else
that somebody put there."""


_STRINGS = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
"""Pattern of the strings in JSON text that has escapes."""
_COLON = re.compile(rb"\s*:\s*")
_CONTAINER = re.compile(rb"\s*:\s*[\[{]")


class _Everything(Exception):
    """Raised for a key whose whole value is removed: replacing strings is then not enough."""


class Redactor:
    """Redactor of texts and JSON values. ``names``: users and hosts, replaced as words."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        wanted = {*names, *find_local_names()}
        wanted = {n for n in wanted if 3 <= len(n) <= 200 and n.lower() not in _COMMON}
        listed = sorted(wanted, key=lambda name: (-len(name), name))[:MAX_NAMES]
        self._names = _any_of(listed) if listed else None
        self._texts: dict[str, str] = {}
        self._clean: set[bytes] = set()
        self._private: set[bytes] = set()
        self._replaced: dict[bytes, bytes] = {}

    def text(self, text: str) -> str:
        known = self._texts.get(text)
        if known is None:
            known = self._redact(text)
            if len(self._texts) < MAX_REMEMBERED:
                self._texts[text] = known
        return known

    def _redact(self, text: str) -> str:
        text = hide_known(text, REDACTED)
        text = hide_values(text, REDACTED, _tells)
        text = _ENTROPY.sub(_unless_random, text)
        if "@" in text:
            text = _CLONED.sub(REDACTED, text)
        if "/" in text or "\\" in text or "~" in text:
            text = _TRACED.sub(lambda result: _path(result[0]), text)
            if (frame := _FRAME.fullmatch(text)) is not None:
                text = _place(frame[1]) + frame[2]
            text = _REPOSITORY.sub(REDACTED, text)
            text = _URL.sub(_url, text)
            text = _REMOTE.sub(lambda result: f"{REDACTED}:{_path(result[1])}", text)
            text = _PATH.sub(lambda result: _path(result[0]), text)
            text = _RELATIVE.sub(_relative, text)
            text = _ESCAPED_PATH.sub(lambda result: _path(result[0].replace("\\", "")), text)
            text = _HOME.sub(lambda result: result[0].replace(result[1], REDACTED), text)
        if "%" in text:
            text = _ENCODED_PATH.sub(_encoded_path, text)
        if "@" in text:
            text = _EMAIL.sub(REDACTED, text)
            text = _LOGIN.sub(REDACTED, text)
        if "." in text:
            text = _ADDRESS.sub(REDACTED, text)
            text = _HOST.sub(_host, text)
        if ":" in text or "-" in text or "=" in text:
            text = _SHORT_HOST.sub(REDACTED, text)
            text = _ADDRESS_6.sub(_address_6, text)
            text = _MAC.sub(REDACTED, text)
        return self._names.sub(REDACTED, text) if self._names is not None else text

    def pattern(self, pattern: str) -> str:
        """Return a regular expression that finds names both redacted and as they were. Its literal
        parts are redacted; ``.*`` replaces what is removed. If that fails, the result is ``.*``."""
        parts = _regex_parts(pattern)
        clean = [self.text(part) if literal else part for part, literal in parts]
        if all(item == part for item, (part, _) in zip(clean, parts, strict=True)):
            return ".*" if self.text(bare := _bare(parts)) != bare else pattern
        result = "".join(
            _finds_both(part, item) if literal else part
            for item, (part, literal) in zip(clean, parts, strict=True)
        )
        try:
            re.compile(result)
        except (re.error, RecursionError, OverflowError):
            return ".*"
        return ".*" if self.text(bare := _bare(_regex_parts(result))) != bare else result

    def value(self, value: Any) -> Any:
        """Redact the texts anywhere inside lists and dicts, keys included."""
        return msgspec.json.decode(self.raw(msgspec.json.encode(value)))

    def json(self, text: bytes) -> bytes:
        """Redact the strings of valid JSON text; all else stays byte by byte.

        Raises msgspec.DecodeError for a string that is not valid."""
        # Traces hold some eight strings in a hundred bytes, most of them over and over: so the text
        # is cut at its quotes, each distinct string is looked at once, and the rest is lookups.
        parts = text.split(b'"') if b"\\" not in text else _STRINGS.split(text)
        strings = parts[1::2]
        distinct = set(strings)
        if len(self._clean) + len(self._replaced) > MAX_REMEMBERED:
            for known in (self._clean, self._replaced, self._private):
                known.clear()
        self._learn(distinct - self._clean)
        private = distinct & self._private
        if not private and self._replaced.keys().isdisjoint(distinct):
            return text
        try:
            gone = _private_values(parts, private) if private else []
        except _Everything:
            return bytes(self.raw(text))
        parts[1::2] = map(self._replaced.get, strings, strings)
        for index in gone:
            parts[index] = _GONE_INNER
        return b'"'.join(parts)

    def _learn(self, strings: set[bytes]) -> None:
        """Decide which strings, given as between their quotes, are private or replaced."""
        for inner in strings:
            if inner in self._replaced:
                continue
            text = _string.decode(b'"%b"' % inner)
            if is_private(text):
                self._private.add(inner)
            clean = self._redact(text)
            if clean == text:
                self._clean.add(inner)
            else:
                self._replaced[inner] = msgspec.json.encode(clean)[1:-1]

    def raw(self, raw: Raw | bytes) -> Raw:
        """Redact JSON by its values; also empty what :func:`is_secret_list` names."""
        text = bytes(raw)
        if text[:1] not in b'"{[' or b'"' not in text:
            return Raw(text)
        if text[:1] == b'"':
            return Raw(msgspec.json.encode(self.text(_string.decode(text))))
        if text[:1] == b"[":
            return Raw(msgspec.json.encode([self.raw(item) for item in _items.decode(text)]))
        result = {}
        for key, item in _fields.decode(text).items():
            start = bytes(item)[:1]
            if start == b'"' and is_private(key):
                item = _GONE
            elif start in b"{[" and is_secret_list(key):
                item = Raw(b"{}" if start == b"{" else b"[]")
            result[self.text(key)] = self.raw(item)
        return Raw(msgspec.json.encode(result))


_GONE = Raw(msgspec.json.encode(REDACTED))
_GONE_INNER = bytes(_GONE)[1:-1]
_string = msgspec.json.Decoder(str)
_items = msgspec.json.Decoder(list[Raw])
_fields = msgspec.json.Decoder(dict[str, Raw])


def _private_values(parts: list[bytes], private: set[bytes]) -> list[int]:
    """Return the indices of private keys' texts in JSON text that was cut at its quotes. Every
    second part is a string. Raises _Everything for a key whose whole value is removed."""
    result = []
    for index in range(1, len(parts), 2):
        if parts[index] not in private:
            continue
        after = parts[index + 1]
        if _COLON.fullmatch(after):
            result.append(index + 2)
        elif _CONTAINER.match(after) and is_secret_list(_string.decode(b'"%b"' % parts[index])):
            raise _Everything
    return result


def is_secret_list(key: Any) -> bool:
    """Tell whether all below a key is private: environment, command line, secrets."""
    return is_private(key) and (
        is_secret_name(key) or re.search(r"(?i)env|arg|cmd|command", key) is not None
    )


@lru_cache(maxsize=10_000)
def is_private(key: Any) -> bool:
    """Tell whether a text is private because of its key, whatever it says."""
    if not isinstance(key, str):
        return False
    return _tells(key) or _PRIVATE_KEY.fullmatch(key) is not None


def find_local_names() -> set[str]:
    """Return this machine's user and host: the file may well have been recorded here."""
    result = set()
    with suppress(OSError, KeyError, ImportError):  # no such user, as in some containers
        result.add(getpass.getuser())
    host = socket.gethostname()
    return {*result, host, host.split(".")[0]}


def names_in(text: bytes) -> set[str]:
    """Return the users and hosts in a piece of JSON text: in paths of home folders, and beside keys
    such as ``hostname``."""
    result: set[bytes] = set()
    for mark in _HOME_MARKS:
        at = text.find(mark)
        while at >= 0:
            match = _HOMES.match(text, at)
            if match is not None:
                result.add(match[1])
            at = text.find(mark, at + len(mark))
    lower = text.lower()
    if any(
        part in lower and any(m in lower for m in marks) for part, marks in _NAMED_MARKS.items()
    ):
        for match in _NAMED.finditer(text):
            value = match[1] or match[2]
            result |= {value, value.split(b".")[0]}
    return {name.decode("utf-8", "replace") for name in result if not _NUMBERS.fullmatch(name)}


class NameMap:
    """Users and hosts that a file names, collected block by block."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._tail = b""

    def scan(self, block: bytes) -> None:
        """Collect the names in the next block of the text."""
        if len(self.found) < MAX_FOUND:
            self.found |= names_in(self._tail + block)
        self._tail = block[-256:]

    def scan_run(self, folder: str | Path) -> None:
        """Collect the names in a run directory's own files, besides its traces."""
        for file in (MANIFEST, f"rank*/{RANK}", f"rank*/{EVENTS}"):
            for place in sorted(Path(folder).glob(file))[:MAX_NAMES]:
                with suppress(OSError, ValueError), open_regular(place) as opened:
                    while block := opened.read(BLOCK):
                        self.scan(block)


def redact(value: _S, names: Iterable[str] = ()) -> _S:
    """Return a report or comparison without private texts. Links to documentation stay, and edits
    are valid and select as before. ``names``: users and hosts that the traces name."""
    return redact_with(value, names)[0]


def redact_with(value: _S, names: Iterable[str] = ()) -> tuple[_S, Redactor]:
    """Redact as :func:`redact`, and also return the redactor for what is shown beside it."""
    redactor = Redactor({*names, *names_in(msgspec.json.encode(value))})
    plain = _fields_redacted(msgspec.to_builtins(value), redactor)
    try:
        return msgspec.convert(plain, type(value)), redactor
    except msgspec.ValidationError as error:
        raise AdvisorError(f"cannot be redacted: {error}") from None


def _fields_redacted(value: Any, redactor: Redactor, within: str = "") -> Any:
    """Redact the fields of advisor's own structs, none of which is private by its name. Patterns
    are redacted as what they stand for, and an input's path as a path."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, list | tuple):
        return [_fields_redacted(item, redactor, within) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if within == "select" and key in ("name", "under") and isinstance(item, str):
            result[key] = redactor.pattern(item)
        elif key == "path" and isinstance(item, str):
            result[key] = redactor.text(Path(item).name or item)
        else:
            result[redactor.text(key)] = _fields_redacted(item, redactor, key)
    return result


# -- one kind each ------------------------------------------------------------------------------


def _unless_random(result: re.Match[str]) -> str:
    text = result[0]
    if text.startswith("_Z"):  # a mangled C++ name
        return text
    if is_random(text):
        return REDACTED
    return _RUN.sub(lambda run: REDACTED if is_random(run[0]) else run[0], text)


def is_random(text: str) -> bool:
    """Tell whether a run of characters is random, such as a key or a digest.

    Keys change between lower case, upper case and digits from character to character and spell no
    words. Measured on kernel and file names of public traces, none of which is taken for one, and
    on random keys of 32 letters and digits, of which some three in a hundred are missed; of keys
    in lower case and digits alone, most are."""
    if _SPECIALISED.fullmatch(text):
        return False
    if _HEX.fullmatch(text):
        return any(c.isdigit() for c in text) and any(c.isalpha() for c in text)
    letters = "".join(_ALNUM.findall(text))
    if len(letters) < 20:
        return False
    kinds = [0 if c.islower() else 1 if c.isupper() else 2 for c in letters]
    changes = sum(a != b for a, b in pairwise(kinds)) / (len(kinds) - 1)
    present = len(set(kinds))
    distinct = len(set(letters))
    if text.count("_") > len(text) / 16:  # words joined by underscores, as in kernels' names
        return False
    if present == 3:
        worded = sum(map(len, _WORDS.findall(letters))) / len(letters)
        plain = len(letters) == len(text)
        return (
            changes >= (0.35 if plain else 0.45)
            and worded < (0.5 if plain else 0.4)
            and distinct >= min(18, 0.6 * len(letters))
        )
    if present == 2 and 2 in kinds and len(letters) == len(text) and len(letters) >= 30:
        worded = sum(map(len, _LONG_WORDS.findall(letters.lower()))) / len(letters)
        return changes >= 0.3 and worded < 0.4 and distinct >= 15
    return False


def _tells(name: str) -> bool:
    """Tell whether a name is of a private value: a credential, a user, a host."""
    return is_secret_name(name) or names_who(name)


def _url(result: re.Match[str]) -> str:
    scheme, host, rest = result.groups()
    if _PUBLIC.fullmatch(host) and "=" not in rest:
        return result[0]
    return f"{scheme}{REDACTED}"


def _host(result: re.Match[str]) -> str:
    name = result[0]
    if result[3] and name.count(".") < 2:
        return name
    if _PUBLIC.fullmatch(name) or _MODULES.fullmatch(name):
        return name
    return REDACTED


def _address_6(result: re.Match[str]) -> str:
    text = result[0]
    if text.count(":") < 2:
        return text
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    groups = sum(map(bool, text.split(":")))
    return text if address.is_loopback or groups < 2 else REDACTED


def _path(path: str) -> str:
    """Return a path below site-packages or the standard library, else the file's own name."""
    if path.startswith("//") and "/" not in path.strip("/"):  # a comment, a division
        return path
    library = _LIBRARY.match(path)
    if library is not None:
        return path[library.end() :]
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return name if _FILE.search(name) else REDACTED


def _relative(result: re.Match[str]) -> str:
    top = re.split(r"[/\\]", result[0], maxsplit=1)[0]
    known = _FILE.search(result[1]) or top in _WRITTEN
    return _place(result[0]) if known else result[0]


def _place(path: str) -> str:
    """Return a file's own name; a known library's file keeps its place, as below site-packages."""
    top = re.split(r"[/\\]", path, maxsplit=1)[0]
    public = top in TORCH or top in LIBRARIES or top in sys.stdlib_module_names
    return path if public else _path(path)


def _encoded_path(result: re.Match[str]) -> str:
    path = unquote(result[0])
    if path.count("/") + path.count("\\") < 2:
        return result[0]
    return _path(path)


def _any_of(names: list[str]) -> re.Pattern[str]:
    """Return a pattern of any of the names as a word, in any case. It is a tree of their
    beginnings, so that each place of a text is examined once and not once per name."""
    tree: dict[str, Any] = {}
    for name in names:
        at = tree
        for char in name.lower():
            at = at.setdefault(char, {})
        at[""] = {}
    return re.compile(rf"(?i)(?<![A-Za-z0-9])(?:{_tree_pattern(tree)})(?![A-Za-z0-9])")


def _tree_pattern(tree: dict[str, Any]) -> str:
    chain = ""
    while len(tree) == 1 and "" not in tree:  # without a branch: no call for each character
        ((char, tree),) = tree.items()
        chain += re.escape(char)
    branches = [re.escape(char) + _tree_pattern(below) for char, below in tree.items() if char]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


_META = frozenset(".^$*+?{}[]|()")


def _regex_parts(pattern: str) -> list[tuple[str, bool]]:
    """Split a regular expression into literal texts (True, without escapes) and the rest."""
    result: list[tuple[list[str], bool]] = []

    def add(text: str, literal: bool) -> None:
        if not result or result[-1][1] is not literal:
            result.append(([], literal))
        result[-1][0].append(text)

    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\" and index + 1 < len(pattern):
            after = pattern[index + 1]
            if after.isalnum():
                add(char + after, False)
            else:
                add(after, True)
            index += 2
        elif char == "[":  # a class of characters, whole
            end = pattern.find("]", index + 2)
            end = len(pattern) if end < 0 else end + 1
            add(pattern[index:end], False)
            index = end
        elif char == "(" and pattern.startswith("(?", index):
            end = index + 2
            while end < len(pattern) and pattern[end] not in ":=!>)":
                end += 1
            add(pattern[index : end + 1], False)
            index = end + 1
        else:
            add(char, char not in _META)
            index += 1
    return [("".join(texts), literal) for texts, literal in result]


def _bare(parts: list[tuple[str, bool]]) -> str:
    """Join the literal texts of a regular expression."""
    return "".join(part for part, literal in parts if literal)


def _finds_both(text: str, clean: str) -> str:
    """Return a pattern of a text and of its redacted form: their common words in order, and ``.*``
    where they differ."""
    if text == clean:
        return re.escape(text)
    result = [] if clean.startswith(text[:1]) else [".*"]
    at = 0
    for word in re.findall(r"\[redacted\]|\w+|\W", clean):
        place = -1 if word == REDACTED else text.find(word, at)
        if place != at and result[-1:] != [".*"]:
            result.append(".*")
        if place >= 0:
            result.append(re.escape(word))
            at = place + len(word)
    if at < len(text) and result[-1:] != [".*"]:
        result.append(".*")
    return "".join(result)
