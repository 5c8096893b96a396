"""Modules that get an input again, in the recorder's samples of forward passes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from advisor.core.finding import Location
from advisor.measure.host.stacks import CodeOwner, code_owner, parse_frame
from advisor.rules.support.common import sum_of_events


class ModuleRepeats(NamedTuple):
    """Forward passes of one module in the recorder's samples. Times are in ns, and 0 in a
    training."""

    module: str
    place: Location | None
    forwards: int
    again: int
    """Number that repeat an earlier pass, with the same outputs where they were compared."""
    same_input: int
    """Number with the input of an earlier pass, whatever their outputs."""
    ns: int
    again_ns: int
    samples: int

    @property
    def share_again(self) -> float:
        """Share of the calls that repeat an earlier one, without the first call of each sample."""
        return min(1.0, self.again / max(1, self.forwards - self.samples))

    @property
    def has_one_input(self) -> bool:
        """Return whether all calls of each sample have one input, as in a benchmark."""
        return self.same_input >= self.forwards - self.samples

    @property
    def share_with_same_input(self) -> float:
        """Return the same of the calls with the input of an earlier one."""
        return min(1.0, self.same_input / max(1, self.forwards - self.samples))


def read_repeats(events: Iterable[Mapping[str, Any]]) -> Iterator[ModuleRepeats]:
    """Yield the modules that the recorder saw repeat, over all samples (``repeated_inputs``)."""
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        modules = event.get("modules")
        for entry in modules if isinstance(modules, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("frames"), list):
                key = str(entry.get("name")), str(entry["frames"][:1])
                entries.setdefault(key, []).append(entry)
    for (name, _), calls in entries.items():
        forwards, again, same_input, ns, again_ns = (
            sum_of_events(calls, key)
            for key in ("forwards", "again", "same_input", "ns", "again_ns")
        )
        place = _locate(calls[0]["frames"])
        same_input = max(again, same_input)
        yield ModuleRepeats(name, place, forwards, again, same_input, ns, again_ns, len(calls))


def _locate(frames: list[Any]) -> Location | None:
    """Return the innermost frame of the user's code, or of a library if there is none."""
    names = [name for name in frames if isinstance(name, str)]
    frame = next((parse_frame(name) for name in names if code_owner(name) == CodeOwner.USER), None)
    frame = frame or next(
        (parse_frame(name) for name in names if code_owner(name) == CodeOwner.LIBRARY), None
    )
    return None if frame is None else frame.location
