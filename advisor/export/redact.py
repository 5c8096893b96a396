"""Redaction of traces and reports: removal of credentials, users, hosts and folders.

Kept is only what advice needs: names of operators and kernels, shapes, line numbers, and files by
their name or by their path below site-packages. Removed text is replaced by ``[redacted]``, so
that readers see it is missing. Patterns find what looks like a credential, not every secret: a
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

from advisor.core.credentials import hide_known, hide_values, is_identity_variable, is_secret_name
from advisor.core.errors import AdvisorError
from advisor.core.files import BLOCK, open_regular
from advisor.core.run_directory import EVENTS, MANIFEST, RANK
from advisor.measure.host.stacks import LIBRARIES, TORCH

_S = TypeVar("_S", bound=Struct)

REDACTED = "[redacted]"
MAX_REMEMBERED_TEXTS = 200_000
"""Maximum number of distinct texts whose result is cached; texts of a trace repeat massively."""
_MAX_NAMES = 1000
MAX_COLLECTED_NAMES = 20_000
"""Maximum number of names that are collected; the longest ``_MAX_NAMES`` of them are redacted. A
malicious file can have any number of names."""

_PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:pytorch\.org|nvidia\.com|github\.com|python\.org|huggingface\.co|arxiv\.org"
    r"|amd\.com|readthedocs\.io|oasis-open\.org|intel\.com|kernel\.org)"
)
"""Pattern of the documentation hosts that rules refer to."""
_REPOSITORY = re.compile(
    r"(?i)\b(?:github\.com|gitlab\.com|huggingface\.co|wandb\.ai)/(?!(?:docs|pytorch|openxla|rocm"
    r"|nvidia|linkedin|amd-agi|traceopt-ai|peppe-tringali|gitleaks)(?:/|$))[^\s'\"<>]*+"
)
"""Pattern of repositories. Their owners are private unless rules refer to them."""

# -- credentials --------------------------------------------------------------------------------

_KEY_CANDIDATE = re.compile(r"\b_Z\w+|[A-Za-z0-9]{20,}|[A-Za-z0-9+/_=-]{32,}")
_ALPHANUMERIC_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_ALNUM = re.compile(r"[A-Za-z0-9]")
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")
_LONG_WORDS = re.compile(r"[a-z]{4,}")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")

_TRITON_SUFFIX = re.compile(r"(?:\d{1,3}[cde]{0,2}+)++")
"""Pattern of the suffix that Triton in 2023 added to kernel names for specialised arguments."""

# -- people, machines, folders ------------------------------------------------------------------
# Each pattern takes time in proportion to the text: it begins where no character of its own kind
# precedes it, and repeats possessively or a bounded number of times.

_VERSION = r"@(?!(?:GLIBC|GLIBCXX|CXXABI|GCC|plt|got|PLT|GOT)(?![A-Za-z0-9]))"
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++" + _VERSION + r"[\w-]++(?:\.[\w-]++)+")
_LOGIN = re.compile(r"(?<![\w.+@-])[A-Za-z_][\w.+-]*+" + _VERSION + r"[A-Za-z][\w-]*+(?!\w|\.\w)")
"""Pattern of ``alice@gpu17``, as in ssh and prompts, but not of symbols with a version."""
_GIT_REMOTE = re.compile(r"(?<![\w.+@-])[A-Za-z_][\w.+-]*+@[\w.-]++:(?!/)[^\s'\"<>|(),;]++")
"""Pattern of ``git@host:organisation/project.git``."""
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{4,45}(?:%\w{1,16})?(?![\w:])")
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
"""Pattern of host names. The second group of endings are also words, so three parts or more are
needed. Names with underscores need an ending that no attribute has."""
_SHORT_HOST = re.compile(
    r"(?<![\w.:/\\-])(?!localhost)[A-Za-z][\w.-]{1,62}(?=:(?:29[45]\d\d|2222|6006|6379|8000|8080"
    r"|8265|878[67]|8888|90[09]0|10001)(?![\d.]))|(?<=\bhost=)[\w.-]{2,64}"
)
"""Pattern of a short host name before the port of a rendezvous, a scheduler or a server."""
_MODULES = re.compile(
    r"(?i)(?:[\w-]+\.)*(?:torch\w*|numpy|scipy|skimage|pandas|tensorflow|tf|jax|keras|lightning\w*"
    r"|transformers|datasets|nvidia|dali|fn|readers|decoders|plotly|av|cv2|self|aten|prim|nn|utils)"
    r"\.(?:io|in|dev|co|us|home|local|home|info)"
)
"""Pattern of modules and operators whose names end like host names."""
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)([^\s/?#'\"<>]++)([^\s'\"<>]*+)")
_REMOTE_PATH = re.compile(
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
"""Pattern of a Python frame with any characters in its folders."""
_TRACEBACK_FILE = re.compile(r"(?<=File \")[^\"\n]++(?=\", line)")
_ESCAPED_PATH = re.compile(r"(?<![\\\w.])(?:\\++/[^\s\\/:;,'\"<>|()]++){2,}+")
_ENCODED_PATH = re.compile(r"(?i)(?<![\w.~+%-])%(?:2F|5C)(?:[\w.~+-]|%[0-9A-F]{2})++")
_RELATIVE = re.compile(r"(?<![\w./\\~%+=-])(?:[\w.+=-]++[/\\]++)++([\w.+=-]++)")
"""Pattern of relative paths, as in names of Python frames. A path counts as a file only with a
known ending or in a folder that programs write to, because a/b may be anything."""
_FILE_ENDING = re.compile(
    r"\.(?:pyi?|pyx|ipynb|cu|cuh|cpp|cc|c|h|hpp|rs|json|gz|jsonl|pt|pth|ckpt|ya?ml|toml|sh|parquet"
    r"|arrow|csv|txt|log|zip|tar|bin|so(?:\.\d{1,4}){0,3}|dll|dylib|onnx|safetensors|np[yz]|h5"
    r"|pkl|pickle|db|sqlite|pb|rpd|lmdb|tfrecord|(?:ncu|nsys)-rep|engine|plan|png|jpe?g|wav|mp4|raw)$"
)
"""Pattern of file endings. Of a path, only a file name with such an ending is kept."""
_OUTPUT_FOLDERS = frozenset(
    """
        outputs checkpoints checkpoint ckpt ckpts runs logs results experiments datasets
        workspace scratch wandb mlruns lightning_logs
        """.split()
)
_LIBRARY = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d{1,3})[/\\]")
_HOME = re.compile(r"(?:/home/|/Users/|[\\/]Users[\\/]|~)([A-Za-z0-9._-]{2,40})")
_HOME_BYTES = re.compile(
    rb"(?:\\*/home\\*/|\\*/Users\\*/|Users\\+|%2[Ff]home%2[Ff]|~|torchinductor_)"
    rb"([A-Za-z0-9._-]{2,40})"
)
_HOME_MARKS = (
    b"/home/", b"/home\\", b"/Users/", b"/Users\\", b"Users\\", b"%2Fhome%2F", b"%2fhome%2f", b"~",
    b"torchinductor_",
)  # fmt: skip
_NAME_SETTING_MARKS = {
    b"host": (b'host"', b'hostname"', b'host_name"', b"hostname=", b"host="),
    b"node": (b'nodename"', b'node_name"', b"nodename="),
    b"user": (b'user"', b'username"', b'user_name"', b"user=", b"username="),
    b"log": (b'"login"', b'logname"', b"logname=", b"login="),
}
"""Lower-case marks of ``_NAME_SETTING``, by part: a quick search before the far slower pattern."""
_NAME_SETTING = re.compile(
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

_COMMON_NAMES = frozenset(
    """
        user users root home work data torch aten cuda python admin ubuntu runner model
        train test main local host localhost node name none null true false tmp src lib
        bin usr opt var gpu cpu step stream default unknown cluster worker master forward
        backward optimizer kernel conda anaconda
        """.split()
)
"""Names that also have other meanings. They are removed from paths only."""

HEAD_KEYS = frozenset(
    """
        schemaVersion deviceProperties distributedInfo displayTimeUnit baseTimeNanoseconds
        record_shapes with_stack with_flops with_modules profile_memory
        cuda_runtime_version cuda_driver_version cupti_version trace_id
        hip_runtime_version hip_driver_version roctracer_version rocprofiler_version
        torch_version advisor
        """.split()
)
"""Keys of a trace, other than its events, that are kept. The others may hold the environment or
anything else that somebody added."""


_JSON_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
"""Pattern of strings in JSON text with escapes."""
_KEY_END = re.compile(rb"\s*:\s*")
_CONTAINER_START = re.compile(rb"\s*:\s*[\[{]")


class _WholeValueRemoved(Exception):
    """Raised for a key whose whole value is removed, so that replacing strings is not enough."""


class Redactor:
    """Redactor of texts and JSON values. ``names``: users and hosts to replace as words."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        wanted = {*names, *find_local_names()}
        wanted = {n for n in wanted if 3 <= len(n) <= 200 and n.lower() not in _COMMON_NAMES}
        listed = sorted(wanted, key=lambda name: (-len(name), name))[:_MAX_NAMES]
        self._names = _build_names_pattern(listed) if listed else None
        self._texts: dict[str, str] = {}
        self._clean: set[bytes] = set()
        self._private: set[bytes] = set()
        self._replaced: dict[bytes, bytes] = {}

    def text(self, text: str) -> str:
        redacted = self._texts.get(text)
        if redacted is None:
            redacted = self._redact(text)
            if len(self._texts) < MAX_REMEMBERED_TEXTS:
                self._texts[text] = redacted
        return redacted

    def _redact(self, text: str) -> str:
        text = hide_known(text, REDACTED)
        text = hide_values(text, REDACTED, _names_private_value)
        text = _KEY_CANDIDATE.sub(_redact_if_random, text)
        if "@" in text:
            text = _GIT_REMOTE.sub(REDACTED, text)
        if "/" in text or "\\" in text or "~" in text:
            text = _TRACEBACK_FILE.sub(lambda result: _redact_path(result[0]), text)
            if (frame := _FRAME.fullmatch(text)) is not None:
                text = _redact_library_path(frame[1]) + frame[2]
            text = _REPOSITORY.sub(REDACTED, text)
            text = _URL.sub(_redact_url, text)
            text = _REMOTE_PATH.sub(lambda result: f"{REDACTED}:{_redact_path(result[1])}", text)
            text = _PATH.sub(lambda result: _redact_path(result[0]), text)
            text = _RELATIVE.sub(_redact_relative, text)
            text = _ESCAPED_PATH.sub(lambda result: _redact_path(result[0].replace("\\", "")), text)
            text = _HOME.sub(lambda result: result[0].replace(result[1], REDACTED), text)
        if "%" in text:
            text = _ENCODED_PATH.sub(_redact_encoded_path, text)
        if "@" in text:
            text = _EMAIL.sub(REDACTED, text)
            text = _LOGIN.sub(REDACTED, text)
        if "." in text:
            text = _IPV4.sub(REDACTED, text)
            text = _HOST.sub(_redact_host, text)
        if ":" in text or "-" in text or "=" in text:
            text = _SHORT_HOST.sub(REDACTED, text)
            text = _IPV6.sub(_redact_ipv6, text)
            text = _MAC.sub(REDACTED, text)
        return self._names.sub(REDACTED, text) if self._names is not None else text

    def pattern(self, pattern: str) -> str:
        """Return a regular expression that matches names both redacted and unredacted. Its literal
        parts are redacted, and ``.*`` replaces removed text. If that fails, return ``.*``."""
        parts = _split_regex(pattern)
        redacted_parts = [self.text(part) if literal else part for part, literal in parts]
        if all(
            redacted_part == part
            for redacted_part, (part, _) in zip(redacted_parts, parts, strict=True)
        ):
            return ".*" if self.text(literals := _join_literals(parts)) != literals else pattern
        result = "".join(
            _match_both(part, redacted_part) if literal else part
            for redacted_part, (part, literal) in zip(redacted_parts, parts, strict=True)
        )
        try:
            re.compile(result)
        except (re.error, RecursionError, OverflowError):
            return ".*"
        return (
            ".*"
            if self.text(literals := _join_literals(_split_regex(result))) != literals
            else result
        )

    def value(self, value: Any) -> Any:
        """Redact the texts anywhere inside lists and dicts, keys included."""
        return msgspec.json.decode(self.raw(msgspec.json.encode(value)))

    def json(self, text: bytes) -> bytes:
        """Redact the strings of valid JSON text, and keep everything else byte by byte.

        Raises msgspec.DecodeError for a string that is not valid."""
        # Traces have about eight strings per hundred bytes, and most of them repeat. So the text is
        # split at its quotes, each distinct string is examined once, and the others are looked up.
        parts = text.split(b'"') if b"\\" not in text else _JSON_STRING.split(text)
        strings = parts[1::2]
        distinct = set(strings)
        if len(self._clean) + len(self._replaced) > MAX_REMEMBERED_TEXTS:
            for cache in (self._clean, self._replaced, self._private):
                cache.clear()
        self._classify_strings(distinct - self._clean)
        private = distinct & self._private
        if not private and self._replaced.keys().isdisjoint(distinct):
            return text
        try:
            removed_indices = _find_private_values(parts, private) if private else []
        except _WholeValueRemoved:
            return bytes(self.raw(text))
        parts[1::2] = map(self._replaced.get, strings, strings)
        for index in removed_indices:
            parts[index] = _REDACTED_INNER
        return b'"'.join(parts)

    def _classify_strings(self, strings: set[bytes]) -> None:
        """Decide which strings, given without their quotes, are private or replaced."""
        for inner in strings:
            if inner in self._replaced:
                continue
            text = _string_decoder.decode(b'"%b"' % inner)
            if is_private(text):
                self._private.add(inner)
            clean = self._redact(text)
            if clean == text:
                self._clean.add(inner)
            else:
                self._replaced[inner] = msgspec.json.encode(clean)[1:-1]

    def raw(self, raw: Raw | bytes) -> Raw:
        """Redact JSON value by value, and empty the containers of :func:`is_secret_list` keys."""
        text = bytes(raw)
        if text[:1] not in b'"{[' or b'"' not in text:
            return Raw(text)
        if text[:1] == b'"':
            return Raw(msgspec.json.encode(self.text(_string_decoder.decode(text))))
        if text[:1] == b"[":
            return Raw(msgspec.json.encode([self.raw(item) for item in _list_decoder.decode(text)]))
        result = {}
        for key, item in _dict_decoder.decode(text).items():
            first_byte = bytes(item)[:1]
            if first_byte == b'"' and is_private(key):
                item = _REDACTED_JSON
            elif first_byte in b"{[" and is_secret_list(key):
                item = Raw(b"{}" if first_byte == b"{" else b"[]")
            result[self.text(key)] = self.raw(item)
        return Raw(msgspec.json.encode(result))


_REDACTED_JSON = Raw(msgspec.json.encode(REDACTED))
_REDACTED_INNER = bytes(_REDACTED_JSON)[1:-1]
_string_decoder = msgspec.json.Decoder(str)
_list_decoder = msgspec.json.Decoder(list[Raw])
_dict_decoder = msgspec.json.Decoder(dict[str, Raw])


def _find_private_values(parts: list[bytes], private: set[bytes]) -> list[int]:
    """Return the indices of the values of private keys in JSON text that was split at its quotes.
    Every second part is a string. Raises _WholeValueRemoved if a key's whole value is removed."""
    result = []
    for index in range(1, len(parts), 2):
        if parts[index] not in private:
            continue
        separator = parts[index + 1]
        if _KEY_END.fullmatch(separator):
            result.append(index + 2)
        elif _CONTAINER_START.match(separator) and is_secret_list(
            _string_decoder.decode(b'"%b"' % parts[index])
        ):
            raise _WholeValueRemoved
    return result


def is_secret_list(key: Any) -> bool:
    """Return whether everything below a key is private: environment, command line, secrets."""
    return is_private(key) and (
        is_secret_name(key) or re.search(r"(?i)env|arg|cmd|command", key) is not None
    )


@lru_cache(maxsize=10_000)
def is_private(key: Any) -> bool:
    """Return whether a text is private because of its key, whatever the text is."""
    if not isinstance(key, str):
        return False
    return _names_private_value(key) or _PRIVATE_KEY.fullmatch(key) is not None


def find_local_names() -> set[str]:
    """Return this machine's user and host, because the file may have been recorded here."""
    result = set()
    with suppress(OSError, KeyError, ImportError):  # no such user, as in some containers
        result.add(getpass.getuser())
    host = socket.gethostname()
    return {*result, host, host.split(".")[0]}


def names_in(text: bytes) -> set[str]:
    """Return the users and hosts in a piece of JSON text: in paths of home folders and in values of
    keys such as ``hostname``."""
    result: set[bytes] = set()
    for mark in _HOME_MARKS:
        index = text.find(mark)
        while index >= 0:
            match = _HOME_BYTES.match(text, index)
            if match is not None:
                result.add(match[1])
            index = text.find(mark, index + len(mark))
    lower = text.lower()
    if any(
        part in lower and any(mark_of_part in lower for mark_of_part in marks)
        for part, marks in _NAME_SETTING_MARKS.items()
    ):
        for match in _NAME_SETTING.finditer(text):
            value = match[1] or match[2]
            result |= {value, value.split(b".")[0]}
    return {name.decode("utf-8", "replace") for name in result if not _NUMBERS.fullmatch(name)}


class NameMap:
    """Names of users and hosts in a file, collected block by block."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._block_end = b""

    def scan(self, block: bytes) -> None:
        """Collect the names in the next block of the text."""
        if len(self.found) < MAX_COLLECTED_NAMES:
            self.found |= names_in(self._block_end + block)
        self._block_end = block[-256:]

    def scan_run(self, folder: str | Path) -> None:
        """Collect the names in the files of a run directory other than its traces."""
        for pattern in (MANIFEST, f"rank*/{RANK}", f"rank*/{EVENTS}"):
            for path in sorted(Path(folder).glob(pattern))[:_MAX_NAMES]:
                with suppress(OSError, ValueError), open_regular(path) as stream:
                    while block := stream.read(BLOCK):
                        self.scan(block)


def redact(value: _S, names: Iterable[str] = ()) -> _S:
    """Return a report or comparison without private texts. Links to documentation stay, and edits
    are valid and select as before. ``names``: users and hosts that the traces name."""
    return redact_with(value, names)[0]


def redact_with(value: _S, names: Iterable[str] = ()) -> tuple[_S, Redactor]:
    """Redact like :func:`redact`, and also return the redactor for other texts that are shown."""
    redactor = Redactor({*names, *names_in(msgspec.json.encode(value))})
    plain = redact_fields(msgspec.to_builtins(value), redactor)
    try:
        return msgspec.convert(plain, type(value)), redactor
    except msgspec.ValidationError as error:
        raise AdvisorError(f"cannot be redacted: {error}") from None


def redact_fields(value: Any, redactor: Redactor, parent_key: str = "") -> Any:
    """Redact the fields of advisor's own structs; no field is private because of its name. Patterns
    are redacted so that they still match, and an input's path is redacted as a path."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, list | tuple):
        return [redact_fields(item, redactor, parent_key) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if parent_key == "select" and key in ("name", "under") and isinstance(item, str):
            result[key] = redactor.pattern(item)
        elif key == "path" and isinstance(item, str):
            result[key] = redactor.text(Path(item).name or item)
        else:
            result[redactor.text(key)] = redact_fields(item, redactor, key)
    return result


# -- one function per kind ----------------------------------------------------------------------


def _redact_if_random(result: re.Match[str]) -> str:
    text = result[0]
    if text.startswith("_Z"):  # a mangled C++ name
        return text
    if is_random(text):
        return REDACTED
    return _ALPHANUMERIC_RUN.sub(lambda run: REDACTED if is_random(run[0]) else run[0], text)


def is_random(text: str) -> bool:
    """Return whether a run of characters is random, such as a key or a digest.

    Keys change between lower case, upper case and digits from character to character, and spell
    no words. Measured on kernel and file names of public traces: none is taken for a key. Of
    random keys with 32 letters and digits, about 3% are missed; of keys with only lower case and
    digits, most are missed."""
    if _TRITON_SUFFIX.fullmatch(text):
        return False
    if _HEX.fullmatch(text):
        return any(char.isdigit() for char in text) and any(char.isalpha() for char in text)
    letters = "".join(_ALNUM.findall(text))
    if len(letters) < 20:
        return False
    kinds = [0 if char.islower() else 1 if char.isupper() else 2 for char in letters]
    changes = sum(a != b for a, b in pairwise(kinds)) / (len(kinds) - 1)
    present = len(set(kinds))
    distinct = len(set(letters))
    if text.count("_") > len(text) / 16:  # words joined by underscores, as in kernels' names
        return False
    if present == 3:
        word_share = sum(map(len, _WORDS.findall(letters))) / len(letters)
        only_alphanumeric = len(letters) == len(text)
        return (
            changes >= (0.35 if only_alphanumeric else 0.45)
            and word_share < (0.5 if only_alphanumeric else 0.4)
            and distinct >= min(18, 0.6 * len(letters))
        )
    if present == 2 and 2 in kinds and len(letters) == len(text) and len(letters) >= 30:
        word_share = sum(map(len, _LONG_WORDS.findall(letters.lower()))) / len(letters)
        return changes >= 0.3 and word_share < 0.4 and distinct >= 15
    return False


def _names_private_value(name: str) -> bool:
    """Return whether a name belongs to a private value: a credential, a user or a host."""
    return is_secret_name(name) or is_identity_variable(name)


def _redact_url(result: re.Match[str]) -> str:
    scheme, host, path_and_query = result.groups()
    if _PUBLIC.fullmatch(host) and "=" not in path_and_query:
        return result[0]
    return f"{scheme}{REDACTED}"


def _redact_host(result: re.Match[str]) -> str:
    name = result[0]
    if result[3] and name.count(".") < 2:
        return name
    if _PUBLIC.fullmatch(name) or _MODULES.fullmatch(name):
        return name
    return REDACTED


def _redact_ipv6(result: re.Match[str]) -> str:
    text = result[0]
    if text.count(":") < 2:
        return text
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    groups = sum(map(bool, text.split(":")))
    return text if address.is_loopback or groups < 2 else REDACTED


def _redact_path(path: str) -> str:
    """Return a path below site-packages or the standard library, or else only the file name."""
    if path.startswith("//") and "/" not in path.strip("/"):  # a comment, a division
        return path
    library = _LIBRARY.match(path)
    if library is not None:
        return path[library.end() :]
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return name if _FILE_ENDING.search(name) else REDACTED


def _redact_relative(result: re.Match[str]) -> str:
    top_folder = re.split(r"[/\\]", result[0], maxsplit=1)[0]
    is_file = _FILE_ENDING.search(result[1]) or top_folder in _OUTPUT_FOLDERS
    return _redact_library_path(result[0]) if is_file else result[0]


def _redact_library_path(path: str) -> str:
    """Return the file name, or for a known library the path as below site-packages."""
    top = re.split(r"[/\\]", path, maxsplit=1)[0]
    public = top in TORCH or top in LIBRARIES or top in sys.stdlib_module_names
    return path if public else _redact_path(path)


def _redact_encoded_path(result: re.Match[str]) -> str:
    path = unquote(result[0])
    if path.count("/") + path.count("\\") < 2:
        return result[0]
    return _redact_path(path)


def _build_names_pattern(names: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the names as a word, in any case. It is a prefix tree,
    so that each position of a text is examined once and not once per name."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name.lower():
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(rf"(?i)(?<![A-Za-z0-9])(?:{_tree_pattern(tree)})(?![A-Za-z0-9])")


def _tree_pattern(tree: dict[str, Any]) -> str:
    chain = ""
    while len(tree) == 1 and "" not in tree:  # no branch, so no recursion per character
        ((char, tree),) = tree.items()
        chain += re.escape(char)
    branches = [re.escape(char) + _tree_pattern(subtree) for char, subtree in tree.items() if char]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


_REGEX_SPECIAL = frozenset(".^$*+?{}[]|()")


def _split_regex(pattern: str) -> list[tuple[str, bool]]:
    """Split a regular expression into literal texts (True, without escapes) and other parts."""
    result: list[tuple[list[str], bool]] = []

    def add(text: str, literal: bool) -> None:
        if not result or result[-1][1] is not literal:
            result.append(([], literal))
        result[-1][0].append(text)

    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\" and index + 1 < len(pattern):
            escaped = pattern[index + 1]
            if escaped.isalnum():
                add(char + escaped, False)
            else:
                add(escaped, True)
            index += 2
        elif char == "[":  # a whole character class
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
            add(char, char not in _REGEX_SPECIAL)
            index += 1
    return [("".join(texts), literal) for texts, literal in result]


def _join_literals(parts: list[tuple[str, bool]]) -> str:
    """Join the literal texts of a regular expression."""
    return "".join(part for part, literal in parts if literal)


def _match_both(text: str, clean: str) -> str:
    """Return a pattern that matches a text and its redacted form. It has their common words in
    order, and ``.*`` where they differ."""
    if text == clean:
        return re.escape(text)
    result = [] if clean.startswith(text[:1]) else [".*"]
    offset = 0
    for word in re.findall(r"\[redacted\]|\w+|\W", clean):
        found_at = -1 if word == REDACTED else text.find(word, offset)
        if found_at != offset and result[-1:] != [".*"]:
            result.append(".*")
        if found_at >= 0:
            result.append(re.escape(word))
            offset = found_at + len(word)
    if offset < len(text) and result[-1:] != [".*"]:
        result.append(".*")
    return "".join(result)
