"""Leaves out of traces and reports what is nobody's business: credentials, users, hosts, folders.

What is kept is what advice needs: names of operators and kernels, shapes, files by their name or
by their place below site-packages, lines. What is replaced is written as ``[redacted]``, so that
it is seen to be missing. Patterns find what looks like a credential, not every secret there is: a
password that is an ordinary word in an ordinary place stays.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from advisor.errors import AdvisorError

_S = TypeVar("_S", bound=Struct)

GONE = "[redacted]"
MOST_REMEMBERED = 200_000
"""Distinct texts of which the outcome is kept: those of a trace repeat massively."""
MOST_NAMES = 1000

_PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:pytorch\.org|nvidia\.com|github\.com|python\.org|huggingface\.co|arxiv\.org"
    r"|amd\.com|readthedocs\.io|oasis-open\.org|intel\.com|kernel\.org)"
)
"""Hosts of documentation, which rules refer to."""

# -- credentials --------------------------------------------------------------------------------

_KEY_WORD = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|auth(?:orization)?|cookie|session[_-]?id|signature)"
)
_CREDENTIALS = re.compile(
    r"|".join(
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
            r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{8,}",
            r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}",
            r"(?:AKIA|ASIA|AGPA|AROA|AIDA)[0-9A-Z]{12,}",
            r"AIza[0-9A-Za-z_-]{20,}",
            r"(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,}",
            r"github_pat_[A-Za-z0-9_]{16,}",
            r"glpat-[A-Za-z0-9_-]{16,}",
            r"xox[a-z]-[A-Za-z0-9-]{8,}",
            r"(?<![A-Za-z0-9])pypi-[A-Za-z0-9_-]{16,}",
            r"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{20,}",
            r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?",
            r"(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
        )
    )
)
_USER_INFO = re.compile(r"(?<=://)[^\s/@'\"]+@")
_ASSIGNED = re.compile(
    r"(?i)(\b[\w.-]*" + _KEY_WORD + r"[\w.-]*['\"]?\s*(?:=|:(?!:))\s*)"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s,;&'\"]+)"
)
_ARGUMENT = re.compile(r"(?i)(--?[\w-]*" + _KEY_WORD + r"[\w-]*\s+)(?!-)[^\s]+")
_ENTROPY = re.compile(r"\b_Z\w+|[A-Za-z0-9]{20,}|[A-Za-z0-9+/_=-]{32,}")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_ALNUM = re.compile(r"[A-Za-z0-9]")
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")
_LONG_WORDS = re.compile(r"[a-z]{4,}")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")

# -- people, machines, folders ------------------------------------------------------------------

_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_HOST = re.compile(
    r"(?i)(?<![\w/.-])(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+"
    r"(?:com|net|org|edu|gov|mil|internal|local|localdomain|lan|corp|intra|home|cloud|svc|ai|dev"
    r"|co|eu|de|uk|fr|ch|jp|cn|in|us)(?![\w-])"
)
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)([^\s/?#'\"<>]+)([^\s'\"<>]*)")
_PATH = re.compile(
    r"(?<![\w.:/\\-])(?:file:/*)?(?:/|~/|~\w+/|[A-Za-z]:[\\/]|\\\\)[^\s:;,'\"<>|()]+"
)
_LIBRARY = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]")
_HOME = re.compile(r"(?:/home/|/Users/|[\\/]Users[\\/]|~)([A-Za-z0-9._-]{2,40})")
_HOMES = re.compile(rb"(?:/home/|/Users/|Users\\+|~|torchinductor_)([A-Za-z0-9._-]{2,40})")
_HOME_MARKS = (b"/home/", b"/Users/", b"Users\\", b"~", b"torchinductor_")
_TOLD_MARKS = {
    b"host": (b'hostname"', b'host_name"', b'"host"', b"hostname=", b"host="),
    b"node": (b'nodename"', b'node_name"'),
    b"user": (b'username"', b'user_name"', b'"user"', b"user="),
    b"log": (b'"login"', b'"logname"', b"logname="),
}
"""What there is of it in small letters, to be found quickly: what follows is far slower."""
_TOLD = re.compile(
    rb'(?i)"(?:host_?name|node_?name|host|user_?name|user|login|logname)"\s*:\s*"([^"\\]{2,80})"'
    rb"|\b(?:USER|LOGNAME|HOSTNAME|HOST)=([\w.-]{2,80})"
)
_PRIVATE_KEY = re.compile(
    r"(?i)^(?:.*" + _KEY_WORD + r"|(?:host|node|user)_?name|host|user|login|logname|home|environ\w*"
    r"|env|argv|cmd(?:line)?|command(?:_?line)?|cwd|pwd|trace_?name|git_?remote)$"
)
_KEEP_KEY = re.compile(r"(?i)token(?:s|ize|izer)|author")

_COMMON = frozenset(
    {
        "user", "users", "root", "home", "work", "data", "torch", "aten", "cuda", "python",
        "admin", "ubuntu", "runner", "model", "train", "test", "main", "local", "host",
        "localhost", "node", "name", "none", "null", "true", "false", "tmp", "src", "lib", "bin",
        "usr", "opt", "var", "gpu", "cpu", "step", "stream",
    }
)  # fmt: skip
"""Names that mean something else as well: they are only left out of paths."""

HEAD_KEYS = frozenset(
    {
        "schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit",
        "baseTimeNanoseconds", "record_shapes", "with_stack", "with_flops", "with_modules",
        "profile_memory", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
        "trace_id", "hip_runtime_version", "hip_driver_version", "roctracer_version",
        "rocprofiler_version", "torch_version",
    }
)  # fmt: skip
"""What is kept of the keys beside a trace's events: the others hold the environment or anything
else that somebody put there."""


_STRINGS = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
"""The strings of JSON text that has escapes."""
_COLON = re.compile(rb"\s*:\s*")
_CONTAINER = re.compile(rb"\s*:\s*[\[{]")


class _Everything(Exception):
    """There is a key of which all goes: strings alone cannot be replaced."""


class Redactor:
    """Redacts texts and what holds them. ``names``: of users and hosts, replaced as words."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        wanted = {*names, *own_names()}
        wanted = {n for n in wanted if len(n) >= 3 and n.lower() not in _COMMON}
        listed = sorted(wanted, key=lambda name: (-len(name), name))[:MOST_NAMES]
        self._names = (
            re.compile(
                r"(?i)(?<![A-Za-z0-9])(?:" + "|".join(map(re.escape, listed)) + r")(?![A-Za-z0-9])"
            )
            if listed
            else None
        )
        self._texts: dict[str, str] = {}
        self._clean: set[bytes] = set()
        self._private: set[bytes] = set()
        self._replaced: dict[bytes, bytes] = {}

    def text(self, text: str) -> str:
        """A text without what is private."""
        known = self._texts.get(text)
        if known is None:
            known = self._redact(text)
            if len(self._texts) < MOST_REMEMBERED:
                self._texts[text] = known
        return known

    def _redact(self, text: str) -> str:
        text = _CREDENTIALS.sub(GONE, text)
        text = _USER_INFO.sub(f"{GONE}@", text)
        text = _ASSIGNED.sub(rf"\1{GONE}", text)
        text = _ARGUMENT.sub(rf"\1{GONE}", text)
        text = _ENTROPY.sub(_unless_random, text)
        text = _URL.sub(_url, text)
        text = _PATH.sub(_path, text)
        text = _HOME.sub(lambda found: found[0].replace(found[1], GONE), text)
        text = _EMAIL.sub(GONE, text)
        text = _ADDRESS.sub(GONE, text)
        text = _HOST.sub(lambda found: found[0] if _PUBLIC.fullmatch(found[0]) else GONE, text)
        return self._names.sub(GONE, text) if self._names is not None else text

    def value(self, value: Any) -> Any:
        """The same for texts anywhere inside lists and dicts, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            found = {}
            for key, item in value.items():
                name = self.text(key) if isinstance(key, str) else key
                if is_private(key) and isinstance(item, str):
                    item = GONE
                elif is_secret_list(key) and isinstance(item, list | tuple | dict):
                    item = {} if isinstance(item, dict) else []
                found[name] = self.value(item)
            return found
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def json(self, text: bytes) -> bytes:
        """The same for valid JSON text, of which all but the strings stays byte by byte.

        Raises msgspec.DecodeError for a string that is not valid.
        """
        # Traces hold some eight strings in a hundred bytes, most of them over and over: so the text
        # is cut at its quotes, each distinct string is looked at once, and the rest is lookups.
        parts = text.split(b'"') if b"\\" not in text else _STRINGS.split(text)
        strings = parts[1::2]
        distinct = set(strings)
        if len(self._clean) + len(self._replaced) > MOST_REMEMBERED:
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
        for at in gone:
            parts[at] = _GONE_INNER
        return b'"'.join(parts)

    def _learn(self, strings: set[bytes]) -> None:
        """Decide on strings, as they are between their quotes."""
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
        """The same by way of the values: also empties what :func:`is_secret_list` names."""
        text = bytes(raw)
        if text[:1] not in b'"{[' or b'"' not in text:
            return Raw(text)
        if text[:1] == b'"':
            return Raw(msgspec.json.encode(self.text(_string.decode(text))))
        if text[:1] == b"[":
            return Raw(msgspec.json.encode([self.raw(item) for item in _items.decode(text)]))
        found = {}
        for key, item in _fields.decode(text).items():
            start = bytes(item)[:1]
            if start == b'"' and is_private(key):
                item = _GONE
            elif start in b"{[" and is_secret_list(key):
                item = Raw(b"{}" if start == b"{" else b"[]")
            found[self.text(key)] = self.raw(item)
        return Raw(msgspec.json.encode(found))


_GONE = Raw(msgspec.json.encode(GONE))
_GONE_INNER = bytes(_GONE)[1:-1]
_string = msgspec.json.Decoder(str)
_items = msgspec.json.Decoder(list[Raw])
_fields = msgspec.json.Decoder(dict[str, Raw])


def _private_values(parts: list[bytes], private: set[bytes]) -> list[int]:
    """Where the texts of private keys are in JSON text that was cut at its quotes: odd places are
    strings. Raises _Everything for a key of which all goes."""
    found = []
    for at in range(1, len(parts), 2):
        if parts[at] not in private:
            continue
        after = parts[at + 1]
        if _COLON.fullmatch(after):
            found.append(at + 2)
        elif _CONTAINER.match(after) and is_secret_list(_string.decode(b'"%b"' % parts[at])):
            raise _Everything
    return found


def is_secret_list(key: Any) -> bool:
    """A key of which everything below it is private: the environment, the command line, secrets."""
    return is_private(key) and re.search(r"(?i)env|arg|cmd|command|" + _KEY_WORD, key) is not None


@lru_cache(maxsize=10_000)
def is_private(key: Any) -> bool:
    """A key of which a text is private whatever it says."""
    if not isinstance(key, str) or _PRIVATE_KEY.match(key) is None:
        return False
    return _KEEP_KEY.search(key) is None


def own_names() -> set[str]:
    """The user and the host of this machine, on which the file may well have been recorded."""
    found = set()
    with suppress(OSError, KeyError, ImportError):  # no such user, as in some containers
        found.add(getpass.getuser())
    host = socket.gethostname()
    return {*found, host, host.split(".")[0]}


def names_in(text: bytes) -> set[str]:
    """Names of users and hosts that a piece of JSON text tells: in paths of homes, and beside keys
    such as ``hostname``."""
    found: set[bytes] = set()
    for mark in _HOME_MARKS:
        at = text.find(mark)
        while at >= 0:
            match = _HOMES.match(text, at)
            if match is not None:
                found.add(match[1])
            at = text.find(mark, at + len(mark))
    lower = text.lower()
    if any(part in lower and any(m in lower for m in marks) for part, marks in _TOLD_MARKS.items()):
        for match in _TOLD.finditer(text):
            value = match[1] or match[2]
            found |= {value, value.split(b".")[0]}
    return {name.decode("utf-8", "replace") for name in found}


def redact(value: _S, names: Iterable[str] = ()) -> _S:
    """A report or comparison without what is private. Links to documentation stay."""
    text = msgspec.json.encode(value)
    redactor = Redactor({*names, *names_in(text)})
    try:
        return msgspec.convert(redactor.value(msgspec.to_builtins(value)), type(value))
    except msgspec.ValidationError as error:
        raise AdvisorError(f"cannot be redacted: {error}") from None


# -- one kind each ------------------------------------------------------------------------------


def _unless_random(found: re.Match[str]) -> str:
    text = found[0]
    if text.startswith("_Z"):  # a mangled C++ name
        return text
    if is_random(text):
        return GONE
    return _RUN.sub(lambda run: GONE if is_random(run[0]) else run[0], text)


def is_random(text: str) -> bool:
    """A run of characters that no person wrote and no compiler: a key, a digest.

    Keys change between lower case, upper case and digits from character to character and spell no
    words. Measured on kernel and file names of public traces, none of which is taken for one, and
    on random keys of 32 letters and digits, of which some three in a hundred are missed; of keys
    in lower case and digits alone, most are.
    """
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


def _url(found: re.Match[str]) -> str:
    scheme, host, rest = found.groups()
    if _PUBLIC.fullmatch(host) and "=" not in rest:
        return found[0]
    return f"{scheme}{GONE}"


def _path(found: re.Match[str]) -> str:
    """Below site-packages or the standard library, else the file's own name."""
    path = found[0]
    if path.startswith("//"):  # what is left of a link
        return path
    library = _LIBRARY.match(path)
    if library is not None:
        return path[library.end() :]
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return name if re.search(r"\.\w{1,10}$", name) else GONE


def shown_name(path: str) -> str:
    """A file's own name, for messages about a redacted file."""
    return Path(path).name or path
