"""The edit language: one line an edit, compiled to the same objects that rules yield.

    VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]

=========  ==========================================================  =====================
verb       what it does                                                NUMBER
=========  ==========================================================  =====================
remove     the work is not done, the host time not spent, the wait     none
           not made
scale      its time is multiplied                                      factor, 0 and up
roofline   kernels come up to a share of what the device can do, by    share, 0 to 1
           their FLOPs and bytes (unknown ones stay)                   (default 0.75)
resize     the batch grows: kernels that fill the device grow with     batch new / old
           it, others once they do; judge the step by time a sample
overlap    device work moves to a stream of its own; nothing waits     none
           for it but the same work one step later, and waits
           for the whole device
async      a blocking call no longer holds the host                    none
merge      neighbouring kernels of a stream become one                 factor on their summed
                                                                       time (default 1)
graph      launches become part of a CUDA graph                        host ns left a launch
                                                                       (default 1000)
spread     loader work moves to worker processes                       workers, 1 and up
punctual   collectives of rank N keep no other rank waiting            none
=========  ==========================================================  =====================

==========  ===========================================================================
target      what it selects; PATTERN is a regular expression searched in the name
==========  ===========================================================================
kernel      kernels by name
family      kernels of a family: gemm, attention, softmax, elementwise, communication …
comm        collectives (PATTERN: kernel name)
copy        copies; PATTERN is a direction: HtoD, DtoH, DtoD, PtoP
memset      memsets
work        all device work
op          operators by name
python      Python frames, ``train.py.*loss``
range       user annotations
host        any host event
sync        blocking runtime calls; PATTERN: an operator around them, ``item``
loader      waits for the data loader
gap         idle gaps of the device; PATTERN is a cause: dispatch, python, sync …
==========  ===========================================================================

``under:PATTERN`` keeps what an operator, range or Python frame of that name encloses. Patterns
with spaces are quoted: ``remove "python:train.py.* loss"``. ``rank:N`` changes that rank only, in
a run with the traces of several; without it a change is made on all ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from msgspec.structs import replace

from advisor.errors import AdvisorError
from advisor.model import Edit, Operation, Select
from advisor.trace import COPIES

VERBS: dict[str, Operation] = {
    "remove": "remove",
    "scale": "scale",
    "roofline": "roofline",
    "resize": "resize",
    "overlap": "overlap",
    "async": "asynchronous",
    "merge": "merge",
    "graph": "drop_launch",
    "spread": "spread",
    "punctual": "punctual",
}
BLOCKING = ("sync_device", "sync_stream", "sync_event", "memcpy", "memcpy_blocking")
LOADER = r"^enumerate\(Data(Loader|Pipe)\)#"


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
    "op": lambda p: Select(on="host", kind=("op",), name=p),
    "python": lambda p: Select(on="host", kind=("python",), name=p),
    "range": lambda p: Select(on="host", kind=("annotation",), name=p),
    "host": lambda p: Select(on="host", name=p),
    "sync": lambda p: Select(on="host", call=BLOCKING, under=p),
    "loader": lambda p: Select(on="host", name=p or LOADER),
    "gap": lambda p: Select(on="gap", cause=(p,) if p else ()),
}
HOST_ONLY = {"async": ("sync", "loader", "host", "op"), "spread": ("loader",)}
DEVICE_ONLY = ("overlap", "merge", "roofline", "resize")
PUNCTUAL = ("comm",)
NEEDS_PATTERN = ("family", "op", "python", "range", "host")


def parse_edit(line: str) -> Edit:
    """One line of the language to an Edit. Raises AdvisorError that says what is wrong."""

    def wrong(why: str) -> AdvisorError:
        return AdvisorError(f"edit {line.strip()!r}: {why}")

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise wrong(f"{error}".lower()) from None
    if len(words) < 2:
        raise wrong("write VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER]")
    verb, rest = words[0].lower(), words[1:]
    if verb not in VERBS:
        raise wrong(f"no verb {words[0]!r}; there are {', '.join(VERBS)}")
    number: float | None = None
    numbers = [w for w in rest[1:] if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", w)]
    if len(numbers) == 1:
        number = float(numbers[0])
        rest.remove(numbers[0])
    under = [w[len("under:") :] for w in rest if w.startswith("under:")]
    ranks = [w[len("rank:") :] for w in rest if w.startswith("rank:")]
    named = [w for w in rest if not w.startswith(("under:", "rank:"))]
    if len(named) != 1 or len(under) > 1 or len(ranks) > 1:
        raise wrong("give one target, at most one under:PATTERN, rank:N and number")
    if ranks and not re.fullmatch(r"\d{1,9}", ranks[0]):
        raise wrong(f"rank:{ranks[0]}: a rank is a whole number")
    if verb == "punctual" and not ranks:
        raise wrong("punctual needs the late rank, rank:N")
    target, _, pattern = named[0].partition(":")
    if target not in TARGETS:
        raise wrong(f"no target {target!r}; there are {', '.join(TARGETS)}")
    if target in NEEDS_PATTERN and not pattern:
        raise wrong(f"{target} needs a pattern, {target}:REGEX")
    try:
        select = TARGETS[target](pattern)
    except AdvisorError as error:
        raise wrong(str(error)) from None
    if verb in HOST_ONLY and target not in HOST_ONLY[verb]:
        raise wrong(f"{verb} takes {' or '.join(HOST_ONLY[verb])}, not {target}")
    if verb == "punctual" and target not in PUNCTUAL:
        raise wrong(f"{verb} takes comm, not {target}")
    if verb in DEVICE_ONLY and select.on != "gpu":
        raise wrong(f"{verb} is for device work, not {target}")
    for text in (select.name, select.under, *under):
        try:
            re.compile(text)
        except re.error as error:
            raise wrong(f"{text!r} is not a regular expression ({error})") from None
    if under:
        if target == "sync" and pattern:
            raise wrong("sync:PATTERN already says what the call is under")
        select = _under(select, under[0])
    edit = _edit(verb, select, number, wrong)
    return replace(edit, rank=int(ranks[0])) if ranks else edit


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
    if verb == "spread":
        if number is None or number < 1 or number != int(number) or number > 4096:
            raise wrong("spread needs a whole number of workers, 1 and up")
        return Edit(op=op, select=select, workers=int(number))
    if verb == "graph":
        if number is not None and number < 0:
            raise wrong("host time a launch cannot be negative")
        return Edit(op=op, select=select, host_ns=None if number is None else int(number))
    if number is not None:
        raise wrong(f"{verb} takes no number")
    return Edit(op=op, select=select)
