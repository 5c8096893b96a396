"""Edit language: one line per edit, compiled to the same objects that rules yield.

    VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]

``advisor whatif --help`` has an example of each verb; docs/whatif.md has what verbs, targets and
numbers mean. ``spread`` and ``punctual`` still mean ``parallelize`` and ``remove_skew``.

``under:PATTERN`` keeps only events inside an operator, range or Python frame of that name. Patterns
with spaces are quoted: ``remove "python:train.py.* loss"``. ``rank:N`` changes that rank only, in a
run with traces of several ranks; without it, all ranks change.

More words narrow the target, as in the edits of findings: ``kind:``, ``family:``, ``copy:``,
``memory:``, ``call:``, ``cause:``, ``stream:``, ``id:`` (correlation) take one or more values with
commas between them, ``max:`` a duration in ns, ``bytes:`` the largest message of collectives,
``at:`` a moment (``at:loop`` for host events: with the time between them), ``region:`` the compiled
functions that follow a graph break, ``name:`` the event that explains a gap; ``ahead`` is for
``overlap``. A factor may have a range, ``0.25..0.4..0.67``: optimistic, central, pessimistic.
:func:`write_edit` writes any Edit as a line."""

import math
import re
import shlex
from collections.abc import Callable, Iterable
from typing import get_args

from msgspec.structs import replace

from advisor.core.errors import AdvisorError, suggest
from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.finding import Edit, Instants, Operation, Select
from advisor.core.text import CAUSE_LABELS, HOST_LABELS
from advisor.core.trace import BLOCKING_CALLS, CALLS, COPIES, LOADER

VERBS: dict[str, Operation] = {
    "remove": "remove", "scale": "scale", "roofline": "roofline", "resize": "resize",
    "overlap": "overlap", "async": "make_async", "merge": "merge", "graph": "drop_launch",
    "parallelize": "parallelize", "remove_skew": "remove_skew",
}  # fmt: skip
FORMER_VERBS = {"make_async": "async", "spread": "parallelize", "punctual": "remove_skew"}
"""Former verbs that are still accepted, with their present names."""


def _select_copies(pattern: str) -> Select:
    if not pattern:
        return Select(on="gpu", kind=("memcpy",))
    directions = tuple(d for d in COPIES if d.lower() == pattern.lower())
    if not directions:
        raise AdvisorError(f"copy:{pattern}: a direction is one of {', '.join(COPIES)}")
    return Select(on="gpu", kind=("memcpy",), copy=directions)


_CAUSES_BY_LABEL = {
    re.sub(r"\W+", "-", label.lower()).strip("-"): cause
    for cause, label in {**CAUSE_LABELS, "unknown": HOST_LABELS["unknown"]}.items()
}
"""Idle causes by their names in reports."""


def _find_cause(name: str) -> str:
    """Return the idle cause of this name, or of this name in reports, with ``-`` for spaces."""
    return _CAUSES_BY_LABEL.get(name.lower(), name)


TARGETS: dict[str, Callable[[str], Select]] = {
    "kernel": lambda p: Select(on="gpu", kind=("kernel",), name=p),
    "family": lambda p: Select(on="gpu", family=(p,)),
    "comm": lambda p: Select(on="gpu", family=("communication",), name=p),
    "copy": _select_copies,
    "memset": lambda p: Select(on="gpu", kind=("memset",), name=p),
    "work": lambda p: Select(on="gpu", name=p),
    "layer": lambda p: Select(on="gpu", layer=p),
    "op": lambda p: Select(on="host", kind=("op",), name=p),
    "python": lambda p: Select(on="host", kind=("python",), name=p),
    "range": lambda p: Select(on="host", kind=("annotation",), name=p),
    "host": lambda p: Select(on="host", name=p),
    "sync": lambda p: Select(on="host", call=BLOCKING_CALLS, under=p),
    "loader": lambda p: Select(on="host", name=p or LOADER),
    "gap": lambda p: Select(on="gap", cause=tuple(map(_find_cause, p.split(","))) if p else ()),
}
TEXT_QUALIFIERS = ("layer", "kind", "family", "copy", "memory", "call", "cause", "at", "region")
NUMBER_QUALIFIERS = ("stream", "id")
LIMIT_QUALIFIERS = ("max", "bytes")
QUALIFIERS = ("under", "name", "rank", *LIMIT_QUALIFIERS, *TEXT_QUALIFIERS, *NUMBER_QUALIFIERS)
_FIELDS = {"id": "correlation", "max": "max_ns", "bytes": "max_bytes"}
_SINGLE_VALUE_QUALIFIERS = ("memory", "at", "layer", *LIMIT_QUALIFIERS)
HOST_ONLY = {
    "async": ("sync", "loader", "host", "op", "python", "range"),
    "parallelize": ("loader",),
}
DEVICE_ONLY = ("overlap", "merge", "roofline", "resize")
NO_LAUNCHES = ("sync", "loader")
"""Targets without launches, so they cannot become part of a CUDA graph."""
NEEDS_PATTERN = ("family", "layer", "op", "python", "range")
NEEDS_SOMETHING = ("host",)


def parse_edit(line: str) -> Edit:
    """Parse one line of the language into an Edit. Raises AdvisorError with the reason."""

    def wrong(why: str) -> AdvisorError:
        return AdvisorError(f"edit {line.strip()!r}: {why}")

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise wrong(f"{error}".lower()) from None
    verb, arguments = "", words[1:]
    if words:
        verb = FORMER_VERBS.get(words[0].lower(), words[0].lower())
        if verb not in VERBS:
            raise wrong(f"no verb {words[0]!r}; {_suggest(words[0], VERBS)}")
    if not arguments:
        raise wrong("write VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]")
    low, number, high = _take_number(arguments, wrong)
    ahead = "ahead" in arguments[1:]
    arguments = [arguments[0], *(w for w in arguments[1:] if w != "ahead")]
    # the first word is the target: later words of the same name are qualifiers
    qualifiers = [w for w in arguments[1:] if w.partition(":")[0] in QUALIFIERS and ":" in w]
    under = [w[len("under:") :] for w in qualifiers if w.startswith("under:")]
    ranks = [w[len("rank:") :] for w in qualifiers if w.startswith("rank:")]
    targets = [w for w in arguments if w not in qualifiers or w is arguments[0]]
    if len(targets) == 2 and number is None and targets[1].partition(":")[0] not in TARGETS:
        raise wrong(f"{targets[1]!r} is not a number")
    if len(targets) != 1 or len(under) > 1 or len(ranks) > 1:
        raise wrong("give one target, at most one under:PATTERN, rank:N and number")
    if ranks and not re.fullmatch(r"\d{1,9}", ranks[0]):
        raise wrong(f"rank:{ranks[0]}: a rank is a whole number")
    if verb == "remove_skew" and not ranks:
        raise wrong("remove_skew needs the late rank, rank:N")
    target, _, pattern = targets[0].partition(":")
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
        select = replace(select, under=under[0])
    select = _narrow(select, qualifiers, wrong)
    if select.at == "loop" and select.on != "host":
        raise wrong("at:loop is for host events")
    if target in NEEDS_SOMETHING and select == Select(on="host"):
        raise wrong(f"{target} needs a pattern, {target}:REGEX")
    only_high = verb == "overlap" and low is None and high is not None and not number
    edit = _build_edit(verb, select, None if only_high else number, wrong)
    if low is not None or high is not None:
        if verb not in ("scale", "merge", "remove_skew") and not only_high:
            raise wrong(f"{verb} takes no range of factors")
        edit = replace(edit, best_factor=low, worst_factor=high)
    if ahead and verb != "overlap":
        raise wrong("ahead is for overlap")
    edit = replace(edit, ahead=True) if ahead else edit
    return replace(edit, rank=int(ranks[0])) if ranks else edit


def _suggest(name: str, choices: Iterable[str]) -> str:
    return suggest(name, choices, f"there are {', '.join(choices)}")


def _take_number(
    arguments: list[str], wrong: Callable[[str], AdvisorError]
) -> tuple[float | None, float | None, float | None]:
    """Take the number, ``LOW..NUMBER..HIGH``, from the words after the verb, and return its parts,
    ``None`` where missing. Raises ``wrong`` for a number that is not finite."""
    numbers = [w for w in arguments[1:] if _NUMBER.fullmatch(w)]
    low = middle = high = None
    if len(numbers) == 1 and (match := _NUMBER.fullmatch(numbers[0])):
        parts = match.group("low", "middle", "high")
        low, middle, high = (float(part) if part else None for part in parts)
        arguments.remove(numbers[0])
    for word in (low, middle, high, *(w for w in arguments[1:] if _NOT_FINITE.fullmatch(w))):
        if word is not None and not math.isfinite(float(word)):
            raise wrong(f"{numbers[0] if numbers else word} is not a finite number")
    return low, middle, high


def _select_target(
    verb: str, target: str, pattern: str, wrong: Callable[[str], AdvisorError]
) -> Select:
    """Return the selector of ``target:pattern``. Raises ``wrong`` for a target that does not exist,
    or that the verb does not take."""
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
        allowed = ", ".join(name for name in TARGETS if name not in NO_LAUNCHES)
        raise wrong(f"graph takes what is launched, or launches: {allowed}; not {target}")
    if verb == "remove_skew" and target != "comm":
        raise wrong(f"{verb} takes comm, not {target}")
    if verb in DEVICE_ONLY and select.on != "gpu":
        raise wrong(f"{verb} is for device work, not {target}")
    return select


def _narrow(select: Select, qualifiers: list[str], wrong: Callable[[str], AdvisorError]) -> Select:
    """Return the selector narrowed by its qualifiers. Raises ``wrong`` for an invalid qualifier."""
    fields: dict[str, object] = {}
    for word in qualifiers:
        key, _, text = word.partition(":")
        if key in ("under", "rank"):
            continue
        field = _FIELDS.get(key, key)
        if field in fields:
            raise wrong(f"{key}: is given twice")
        if key == "name":
            if select.name:
                raise wrong("name: the target already has it")
            fields[field] = text
            continue
        if key == "layer" and select.layer:
            raise wrong("layer: the target already has it")
        values = text.split(",")
        if key in NUMBER_QUALIFIERS or key in LIMIT_QUALIFIERS:
            if not all(re.fullmatch(r"-?\d{1,18}", value) for value in values):
                raise wrong(f"{word}: give whole numbers")
            fields[field] = tuple(int(value) for value in values)
        else:
            fields[field] = tuple(values)
        if key in _SINGLE_VALUE_QUALIFIERS:
            if len(values) != 1:
                raise wrong(f"{word}: give one value")
            fields[field] = int(text) if key in LIMIT_QUALIFIERS else text
    for name, allowed in _ALLOWED_VALUES.items():
        value = fields.get(name, ())
        for item in (value,) if isinstance(value, str) else value:  # type: ignore[attr-defined]
            if item not in allowed:
                raise wrong(f"{name}:{item}: {_suggest(item, allowed)}")
    try:
        return replace(select, **fields)
    except TypeError as error:
        raise wrong(str(error)) from None


def write_edit(edit: Edit) -> str:
    """Write an Edit as a line of the language that :func:`parse_edit` turns into the same Edit."""
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
        target_name = _TARGETS_BY_KIND.get(s.kind)
        if target_name in NEEDS_PATTERN and not s.name:
            target_name = None
        target, pattern = target_name or ("work" if s.on == "gpu" else "host"), s.name
        covered |= {"kind"} if target_name else set()
    words = [verb, f"{target}:{pattern}" if pattern else target]
    words += [f"under:{s.under}"] if s.under else []
    words += [f"name:{s.name}"] if s.on == "gap" and s.name else []
    for key in (*TEXT_QUALIFIERS, *NUMBER_QUALIFIERS, *LIMIT_QUALIFIERS):
        field = _FIELDS.get(key, key)
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
    if edit.best_factor is not None or edit.worst_factor is not None:
        middle = 0.0 if edit.op == "overlap" else edit.factor
        parts = (edit.best_factor, middle, edit.worst_factor)
        words.append("..".join("" if p is None else f"{p!r}" for p in parts))
    elif number is not None:
        words.append(f"{number!r}")
    return shlex.join(words)


_TARGETS_BY_KIND: dict[tuple[str, ...], str] = {
    ("kernel",): "kernel",
    ("memset",): "memset",
    ("op",): "op",
    ("python",): "python",
    ("annotation",): "range",
}
_DEC = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NOT_FINITE = re.compile(r"(?i)[+-]?(?:nan|inf(?:inity)?)")
_NUMBER = re.compile(
    rf"(?:(?P<low>(?:{_DEC})?)\.\.)?(?P<middle>{_DEC})(?:\.\.(?P<high>(?:{_DEC})?))?"
)
_ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "kind": (*GPU_KINDS, *CPU_KINDS),
    "copy": COPIES,
    "memory": ("pageable", "pinned"),
    "call": CALLS,
    "at": tuple(name for name in get_args(Instants) if name),
}


def _build_edit(
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
