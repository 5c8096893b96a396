"""Passes of an optimizer over its parameter groups, which run the same operators for each group."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from advisor.measure import Analysis
from advisor.measure.device.embedding_tables import MAX_DESCRIBED
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.steps.steps import rows_in_steps

_LIST_OPS = r"^aten::_(?:foreach|fused)_"
"""Operators that update a list of tensors."""
_FUSED_PREFIX = "aten::_fused_"


class GroupRounds(NamedTuple):
    """Passes of one optimizer's step over its groups: the same operators for each group in turn."""

    groups: int
    tensors: float
    """Mean number of tensors that an operator updates."""
    settings: int | None
    """Number of different settings of the passes, such as the learning rate, or ``None`` if plain
    arguments are not recorded."""
    fused: bool


def optimizer_steps(a: Analysis) -> np.ndarray:
    """Return the rows of ``trace.cpu`` that are optimizer steps in the analysed window."""
    rows = np.flatnonzero(name_matches(a.trace.cpu["name"], OPTIMIZER_STEP).to_numpy()).astype(
        np.int64
    )
    return rows_in_steps(a, rows)


def rounds_of_a_step(a: Analysis, steps: np.ndarray) -> dict[int, GroupRounds]:
    """Count the groups in each optimizer step of the last training step, by its row."""
    last_steps = steps[-max(1, round(len(steps) / a.step_count)) :]
    return {int(row): _count_rounds(a, int(row)) for row in last_steps}


def updates_few_tensors(a: Analysis) -> bool:
    """Return whether the operators of an optimizer's step update at most two tensors each, judging
    by the recorded shapes."""
    rounds = rounds_of_a_step(a, optimizer_steps(a)).values()
    return any(group_rounds.groups > 1 and group_rounds.tensors <= 2 for group_rounds in rounds)


def _count_rounds(a: Analysis, step: int) -> GroupRounds:
    """Count the groups that one optimizer step updates. ``step`` is its row of ``trace.cpu``."""
    cpu = a.trace.cpu
    ts, is_list_op = (cpu["ts"].to_numpy(), name_matches(cpu["name"], _LIST_OPS).to_numpy())
    start = int(ts[step])
    is_inside = is_list_op & (ts >= start) & (ts < start + int(cpu["dur"][step]))
    rows = np.flatnonzero(is_inside & (cpu["thread"] == cpu["thread"][step]).to_numpy())
    calls: list[tuple[str, tuple[Any, ...]]] = []
    lengths: Counter[str] = Counter()
    for row in rows[:MAX_DESCRIBED].tolist():  # bounded, since arguments are parsed
        index, name = cpu["inputs"][row], str(cpu["name"][row])
        inputs = None if index is None else inputs_at(a, index)
        shapes = [] if inputs is None else inputs.shapes(0)
        if inputs is None or not any(shapes):  # step counters are scalars on the host
            continue
        lengths[name] += len(shapes)
        calls.append((name, _read_numbers(inputs) if inputs.has_arguments else ()))
    if not calls:
        return GroupRounds(0, 0.0, None, False)
    counts = Counter(name for name, _ in calls)
    # decay and momentum may apply to some groups only: ignore operators on few of the tensors
    main_names = [name for name in counts if lengths[name] >= 0.5 * max(lengths.values())]
    rarest = min(counts[name] for name in main_names)
    last_name = [name for name, _ in calls if name in main_names and counts[name] == rarest][-1]
    return GroupRounds(
        rarest,
        lengths[last_name] / rarest,
        _count_settings(calls, counts, last_name) if any(numbers for _, numbers in calls) else None,
        last_name.startswith(_FUSED_PREFIX),
    )


def _read_numbers(inputs: OpInputs) -> tuple[Any, ...]:
    """Return the plain numbers of a call, and of a list with one per tensor the distinct ones."""
    values = (inputs.argument(position) for position in range(len(inputs)))
    return tuple(
        tuple(sorted({repr(number) for number in value})) if isinstance(value, list) else value
        for value in values
    )


def _count_settings(
    calls: list[tuple[str, tuple[Any, ...]]], counts: Counter[str], last: str
) -> int:
    """Count the rounds with different settings. A round ends with its call of ``last``. An operator
    that runs equally often in each round is assigned by call number, others by position."""
    rounds = counts[last]
    settings_by_round: list[list[Any]] = [[] for _ in range(rounds)]
    ends = np.array([position for position, (name, _) in enumerate(calls) if name == last])
    calls_done: Counter[str] = Counter()
    for position, (name, numbers_given) in enumerate(calls):
        round_index = int(np.searchsorted(ends, position))
        if counts[name] % rounds == 0:
            round_index = calls_done[name] // (counts[name] // rounds)
        calls_done[name] += 1
        settings_by_round[min(round_index, rounds - 1)].append((name, numbers_given))
    return len({repr(sorted(settings, key=repr)) for settings in settings_by_round})
