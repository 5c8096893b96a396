"""Passes of an optimizer over its parameter groups: operators that it runs for each in turn."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from advisor.measure import Analysis
from advisor.measure.device.embedding_tables import MAX_DESCRIBED
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.steps.steps import rows_in_steps

_MANY = r"^aten::_(?:foreach|fused)_"
"""Operators that update a list of tensors."""
_FUSED = "aten::_fused_"


class GroupRounds(NamedTuple):
    """Passes of one optimizer's step over its groups: the same operators for each in turn."""

    groups: int
    tensors: float
    """Tensors that an operator updates, on average."""
    settings: int | None
    """Different numbers that the operators of a pass were given, such as the learning rate;
    ``None``: plain arguments are not recorded."""
    fused: bool


def optimizer_steps(a: Analysis) -> np.ndarray:
    """Return the rows of ``trace.cpu`` that are optimizer steps in the analysed window."""
    rows = np.flatnonzero(name_matches(a.trace.cpu["name"], OPTIMIZER_STEP).to_numpy()).astype(
        np.int64
    )
    return rows_in_steps(a, rows)


def rounds_of_a_step(a: Analysis, steps: np.ndarray) -> dict[int, GroupRounds]:
    """Count the groups in each optimizer step of the last training step, by its row."""
    last = steps[-max(1, round(len(steps) / max(a.step_count, 1))) :]
    return {int(row): _count_rounds(a, int(row)) for row in last}


def updates_few_tensors(a: Analysis) -> bool:
    """Return whether the operators of an optimizer's step update two tensors each at most, as far
    as shapes are recorded."""
    rounds = rounds_of_a_step(a, optimizer_steps(a)).values()
    return any(one.groups > 1 and one.tensors <= 2 for one in rounds)


def _count_rounds(a: Analysis, step: int) -> GroupRounds:
    """Count the groups that one optimizer step updates, ``step`` its row of ``trace.cpu``."""
    cpu = a.trace.cpu
    ts, many = cpu["ts"].to_numpy(), name_matches(cpu["name"], _MANY).to_numpy()
    begin = int(ts[step])
    inside = many & (ts >= begin) & (ts < begin + int(cpu["dur"][step]))
    rows = np.flatnonzero(inside & (cpu["thread"] == cpu["thread"][step]).to_numpy())
    calls: list[tuple[str, tuple[Any, ...]]] = []
    lengths: Counter[str] = Counter()
    for row in rows[:MAX_DESCRIBED].tolist():  # some thousands: arguments are parsed
        index, name = cpu["inputs"][row], str(cpu["name"][row])
        inputs = None if index is None else inputs_at(a, index)
        shapes = [] if inputs is None else inputs.shapes(0)
        if inputs is None or not any(shapes):  # step counters are scalars on the host
            continue
        lengths[name] += len(shapes)
        calls.append((name, _numbers(inputs) if inputs.has_arguments else ()))
    if not calls:
        return GroupRounds(0, 0.0, None, False)
    counts = Counter(name for name, _ in calls)
    # decay and momentum may be of some groups only: operators on few of the tensors do not count
    whole = [name for name in counts if lengths[name] >= 0.5 * max(lengths.values())]
    rarest = min(counts[name] for name in whole)
    last = [name for name, _ in calls if name in whole and counts[name] == rarest][-1]
    return GroupRounds(
        rarest,
        lengths[last] / rarest,
        _count_settings(calls, counts, last) if any(numbers for _, numbers in calls) else None,
        last.startswith(_FUSED),
    )


def _numbers(inputs: OpInputs) -> tuple[Any, ...]:
    """Return the plain numbers of a call; of a list, one for each tensor, its different ones."""
    values = (inputs.argument(at) for at in range(len(inputs)))
    return tuple(
        tuple(sorted({repr(each) for each in value})) if isinstance(value, list) else value
        for value in values
    )


def _count_settings(
    calls: list[tuple[str, tuple[Any, ...]]], counts: Counter[str], last: str
) -> int:
    """Count different rounds. A round ends with its call of ``last``. An operator that runs as
    often in each round belongs to the round of its number, and another to the one around it."""
    rounds = counts[last]
    numbers: list[list[Any]] = [[] for _ in range(rounds)]
    ends = np.array([at for at, (name, _) in enumerate(calls) if name == last])
    done: Counter[str] = Counter()
    for at, (name, given) in enumerate(calls):
        number = int(np.searchsorted(ends, at))
        if counts[name] % rounds == 0:
            number = done[name] // (counts[name] // rounds)
        done[name] += 1
        numbers[min(number, rounds - 1)].append((name, given))
    return len({repr(sorted(each, key=repr)) for each in numbers})
