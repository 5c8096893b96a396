"""The edit language: one line an edit, compiled to the same objects that rules yield.

    VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]

``advisor whatif --help`` has an example of each verb; docs/whatif.md has what verbs, targets and
numbers mean. ``spread`` and ``punctual`` still mean ``parallelize`` and ``remove_skew``.

``under:PATTERN`` keeps what an operator, range or Python frame of that name encloses. Patterns
with spaces are quoted: ``remove "python:train.py.* loss"``. ``rank:N`` changes that rank only, in
a run with the traces of several; without it a change is made on all ranks.

More words narrow the target down, as the findings' own edits do: ``kind:``, ``family:``, ``copy:``,
``memory:``, ``call:``, ``cause:``, ``stream:``, ``id:`` (correlation) take one or more values with
commas between them, ``max:`` a duration in ns, ``bytes:`` the largest message of collectives,
``at:`` a moment (``at:loop``, of host events: with the time between them), ``region:`` the
compiled functions that follow a graph break, ``name:`` the event that a gap is blamed on;
``ahead`` is for ``overlap``. A factor may have a band, ``0.25..0.4..0.67``: the optimistic one, the
central one, the pessimistic one. :func:`write_edit` writes any Edit as such a line."""

import math
import re
import shlex
from collections.abc import Callable, Iterable
from typing import get_args

from msgspec.structs import replace

from advisor.core.errors import AdvisorError, suggest
from advisor.core.finding import Edit, Instants, Operation, Select
from advisor.core.trace import BLOCKING_CALLS, CALLS, COPIES, CPU_KINDS, GPU_KINDS, LOADER

VERBS: dict[str, Operation] = {
    "remove": "remove", "scale": "scale", "roofline": "roofline", "resize": "resize",
    "overlap": "overlap", "async": "make_async", "merge": "merge", "graph": "drop_launch",
    "parallelize": "parallelize", "remove_skew": "remove_skew",
}  # fmt: skip
FORMER_VERBS = {"make_async": "async", "spread": "parallelize", "punctual": "remove_skew"}
"""Former verbs that are still accepted, with their present names."""


def _copy(pattern: str) -> Select:
    if not pattern:
        return Select(on="gpu", kind=("memcpy",))
    wanted = tuple(d for d in COPIES if d.lower() == pattern.lower())
    if not wanted:
        raise AdvisorError(f"copy:{pattern}: a direction is one of {', '.join(COPIES)}")
    return Select(on="gpu", kind=("memcpy",), copy=wanted)


TARGETS: dict[str, Callable[[str], Select]] = {
    "kernel": lambda p: Select(on="gpu", kind=("kernel",), name=p),
    "family": lambda p: Select(on="gpu", family=(p,)),
    "comm": lambda p: Select(on="gpu", family=("communication",), name=p),
    "copy": _copy,
    "memset": lambda p: Select(on="gpu", kind=("memset",), name=p),
    "work": lambda p: Select(on="gpu", name=p),
    "layer": lambda p: Select(on="gpu", layer=p),
    "op": lambda p: Select(on="host", kind=("op",), name=p),
    "python": lambda p: Select(on="host", kind=("python",), name=p),
    "range": lambda p: Select(on="host", kind=("annotation",), name=p),
    "host": lambda p: Select(on="host", name=p),
    "sync": lambda p: Select(on="host", call=BLOCKING_CALLS, under=p),
    "loader": lambda p: Select(on="host", name=p or LOADER),
    "gap": lambda p: Select(on="gap", cause=tuple(p.split(",")) if p else ()),
}
WORDS = ("layer", "kind", "family", "copy", "memory", "call", "cause", "at", "region")
NUMBERS = ("stream", "id")
LIMITS = ("max", "bytes")
QUALIFIERS = ("under", "name", "rank", *LIMITS, *WORDS, *NUMBERS)
_FIELD = {"id": "correlation", "max": "max_ns", "bytes": "max_bytes"}
_SINGLE = ("memory", "at", "layer", *LIMITS)
HOST_ONLY = {
    "async": ("sync", "loader", "host", "op", "python", "range"),
    "parallelize": ("loader",),
}
DEVICE_ONLY = ("overlap", "merge", "roofline", "resize")
NO_LAUNCHES = ("sync", "loader")
"""Targets without launches, which cannot become part of a CUDA graph."""
NEEDS_PATTERN = ("family", "layer", "op", "python", "range")
NEEDS_SOMETHING = ("host",)


def parse_edit(line: str) -> Edit:
    """Parse one line of the language into an Edit. Raises AdvisorError that says what is wrong."""

    def wrong(why: str) -> AdvisorError:
        return AdvisorError(f"edit {line.strip()!r}: {why}")

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise wrong(f"{error}".lower()) from None
    verb, rest = "", words[1:]
    if words:
        verb = FORMER_VERBS.get(words[0].lower(), words[0].lower())
        if verb not in VERBS:
            raise wrong(f"no verb {words[0]!r}; {_suggest(words[0], VERBS)}")
    if not rest:
        raise wrong("write VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]")
    low, number, high = _take_number(rest, wrong)
    ahead = "ahead" in rest[1:]
    rest = [rest[0], *(w for w in rest[1:] if w != "ahead")]
    # the target is the first word: comes a qualifier of the same name, it is one
    qualifiers = [w for w in rest[1:] if w.partition(":")[0] in QUALIFIERS and ":" in w]
    under = [w[len("under:") :] for w in qualifiers if w.startswith("under:")]
    ranks = [w[len("rank:") :] for w in qualifiers if w.startswith("rank:")]
    named = [w for w in rest if w not in qualifiers or w is rest[0]]
    if len(named) != 1 or len(under) > 1 or len(ranks) > 1:
        raise wrong("give one target, at most one under:PATTERN, rank:N and number")
    if ranks and not re.fullmatch(r"\d{1,9}", ranks[0]):
        raise wrong(f"rank:{ranks[0]}: a rank is a whole number")
    if verb == "remove_skew" and not ranks:
        raise wrong("remove_skew needs the late rank, rank:N")
    target, _, pattern = named[0].partition(":")
    select = _select_target(verb, target, pattern, wrong)
    named_by = [w[len("name:") :] for w in qualifiers if w.startswith("name:")]
    for text in (select.name, select.under, *under, *named_by):
        try:
            re.compile(text)
        except re.error as error:
            raise wrong(f"{text!r} is not a regular expression ({error})") from None
    if under:
        if target == "sync" and pattern:
            raise wrong("sync:PATTERN already says what the call is under")
        select = _under(select, under[0])
    select = _narrowed(select, qualifiers, wrong)
    if select.at == "loop" and select.on != "host":
        raise wrong("at:loop is for host events")
    if target in NEEDS_SOMETHING and select == Select(on="host"):
        raise wrong(f"{target} needs a pattern, {target}:REGEX")
    kept = verb == "overlap" and low is None and high is not None and not number
    edit = _edit(verb, select, None if kept else number, wrong)
    if low is not None or high is not None:
        if verb not in ("scale", "merge", "remove_skew") and not kept:
            raise wrong(f"{verb} takes no band of factors")
        edit = replace(edit, factor_low=low, factor_high=high)
    if ahead and verb != "overlap":
        raise wrong("ahead is for overlap")
    edit = replace(edit, ahead=True) if ahead else edit
    return replace(edit, rank=int(ranks[0])) if ranks else edit


def _suggest(name: str, known: Iterable[str]) -> str:
    return suggest(name, known, f"there are {', '.join(known)}")


def _take_number(
    rest: list[str], wrong: Callable[[str], AdvisorError]
) -> tuple[float | None, float | None, float | None]:
    """Take the number, ``LOW..NUMBER..HIGH``, from the words behind the verb; its parts, ``None``
    where there is none. Raises what ``wrong`` makes of a number that is not finite."""
    numbers = [w for w in rest[1:] if _NUMBER.fullmatch(w)]
    low = middle = high = None
    if len(numbers) == 1 and (found := _NUMBER.fullmatch(numbers[0])):
        parts = found.group("low", "middle", "high")
        low, middle, high = (float(part) if part else None for part in parts)
        rest.remove(numbers[0])
    for word in (low, middle, high, *(w for w in rest[1:] if _NOT_FINITE.fullmatch(w))):
        if word is not None and not math.isfinite(float(word)):
            raise wrong(f"{numbers[0] if numbers else word} is not a finite number")
    return low, middle, high


def _select_target(
    verb: str, target: str, pattern: str, wrong: Callable[[str], AdvisorError]
) -> Select:
    """Return the selector of ``target:pattern``. Raises what ``wrong`` makes of a target that does
    not exist, or that the verb does not take."""
    if target not in TARGETS:
        raise wrong(f"no target {target!r}; {_suggest(target, TARGETS)}")
    if target in NEEDS_PATTERN and not pattern:
        raise wrong(f"{target} needs a pattern, {target}:REGEX")
    try:
        select = TARGETS[target](pattern)
    except AdvisorError as error:
        raise wrong(str(error)) from None
    if verb in HOST_ONLY and target not in HOST_ONLY[verb]:
        raise wrong(f"{verb} takes {' or '.join(HOST_ONLY[verb])}, not {target}")
    if verb == "graph" and target in NO_LAUNCHES:
        can = ", ".join(name for name in TARGETS if name not in NO_LAUNCHES)
        raise wrong(f"graph takes what is launched, or launches: {can}; not {target}")
    if verb == "remove_skew" and target != "comm":
        raise wrong(f"{verb} takes comm, not {target}")
    if verb in DEVICE_ONLY and select.on != "gpu":
        raise wrong(f"{verb} is for device work, not {target}")
    return select


def _narrowed(
    select: Select, qualifiers: list[str], wrong: Callable[[str], AdvisorError]
) -> Select:
    """Return the selector narrowed by its qualifiers. Raises what ``wrong`` makes of a bad one."""
    given: dict[str, object] = {}
    for word in qualifiers:
        key, _, text = word.partition(":")
        if key in ("under", "rank"):
            continue
        field = _FIELD.get(key, key)
        if field in given:
            raise wrong(f"{key}: is given twice")
        if key == "name":
            if select.name:
                raise wrong("name: the target says it already")
            given[field] = text
            continue
        if key == "layer" and select.layer:
            raise wrong("layer: the target says it already")
        values = text.split(",")
        if key in NUMBERS or key in LIMITS:
            if not all(re.fullmatch(r"-?\d{1,18}", value) for value in values):
                raise wrong(f"{word}: whole numbers, please")
            given[field] = tuple(int(value) for value in values)
        else:
            given[field] = tuple(values)
        if key in _SINGLE:
            if len(values) != 1:
                raise wrong(f"{word}: one value, please")
            given[field] = int(text) if key in LIMITS else text
    for name, known in _VALUES.items():
        value = given.get(name, ())
        for item in (value,) if isinstance(value, str) else value:  # type: ignore[attr-defined]
            if item not in known:
                raise wrong(f"{name}:{item}: {_suggest(item, known)}")
    try:
        return replace(select, **given)
    except TypeError as error:
        raise wrong(str(error)) from None


def write_edit(edit: Edit) -> str:
    """Write an Edit as a line of the language: :func:`parse_edit` gives the same Edit back."""
    s = edit.select
    verb = next(v for v, op in VERBS.items() if op == edit.op)
    covered = {"on", "name", "under"}
    if s.on == "gap":
        target, pattern = "gap", ",".join(s.cause)
        covered.add("cause")
    elif edit.op == "remove_skew" and s.family == ("communication",):
        target, pattern = "comm", s.name
        covered.add("family")
    elif edit.op == "parallelize":
        target, pattern = "loader", "" if s.name == LOADER else s.name
    else:
        named = _TARGET.get(s.kind)
        if named in NEEDS_PATTERN and not s.name:
            named = None
        target, pattern = named or ("work" if s.on == "gpu" else "host"), s.name
        covered |= {"kind"} if named else set()
    words = [verb, f"{target}:{pattern}" if pattern else target]
    words += [f"under:{s.under}"] if s.under else []
    words += [f"name:{s.name}"] if s.on == "gap" and s.name else []
    for key in (*WORDS, *NUMBERS, *LIMITS):
        field = _FIELD.get(key, key)
        value = getattr(s, field)
        if field not in covered and value not in ((), "", None):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"{key}:{text}")
    words += [] if edit.rank is None else [f"rank:{edit.rank}"]
    words += ["ahead"] if edit.ahead else []
    number: float | None = edit.factor
    if edit.op == "parallelize":
        number = edit.workers
    if edit.op == "drop_launch":
        number = edit.host_ns
    if edit.factor_low is not None or edit.factor_high is not None:
        middle = 0.0 if edit.op == "overlap" else edit.factor
        parts = (edit.factor_low, middle, edit.factor_high)
        words.append("..".join("" if p is None else f"{p!r}" for p in parts))
    elif number is not None:
        words.append(f"{number!r}")
    return shlex.join(words)


_TARGET: dict[tuple[str, ...], str] = {
    ("kernel",): "kernel",
    ("memset",): "memset",
    ("op",): "op",
    ("python",): "python",
    ("annotation",): "range",
}
_F = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NOT_FINITE = re.compile(r"(?i)[+-]?(?:nan|inf(?:inity)?)")
_NUMBER = re.compile(rf"(?:(?P<low>(?:{_F})?)\.\.)?(?P<middle>{_F})(?:\.\.(?P<high>(?:{_F})?))?")
_VALUES: dict[str, tuple[str, ...]] = {
    "kind": (*GPU_KINDS, *CPU_KINDS),
    "copy": COPIES,
    "memory": ("pageable", "pinned"),
    "call": CALLS,
    "at": tuple(name for name in get_args(Instants) if name),
}


def _under(select: Select, pattern: str) -> Select:
    return replace(select, under=pattern)


def _edit(
    verb: str, select: Select, number: float | None, wrong: Callable[[str], AdvisorError]
) -> Edit:
    op = VERBS[verb]
    if verb in ("scale", "merge"):
        if number is None and verb == "scale":
            raise wrong("scale needs a factor")
        if number is not None and not 0 <= number <= 1000:
            raise wrong("a factor is a number from 0 to 1000")
        return Edit(op=op, select=select, factor=1.0 if number is None else number)
    if verb in ("roofline", "resize"):
        if number is None and verb == "resize":
            raise wrong("resize needs a factor, new batch size over old")
        if number is not None and not 0 < number <= (1 if verb == "roofline" else 1000):
            raise wrong("a share is above 0 and at most 1; a batch factor above 0, at most 1000")
        return Edit(op=op, select=select, factor=number)
    if verb == "parallelize":
        if number is None or number < 1 or number != int(number) or number > 4096:
            raise wrong("parallelize needs a whole number of workers, 1 and up")
        return Edit(op=op, select=select, workers=int(number))
    if verb == "graph":
        if number is not None and number < 0:
            raise wrong("host time per launch cannot be negative")
        return Edit(op=op, select=select, host_ns=None if number is None else int(number))
    if verb == "remove_skew":
        return Edit(op=op, select=select, factor=number)
    if number is not None:
        raise wrong(f"{verb} takes no number")
    return Edit(op=op, select=select)
