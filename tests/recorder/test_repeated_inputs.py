"""Forwards with the weights and the input of an earlier one are told from others like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

Recorded = Callable[..., Any]
STEPS = 10


def training(second: Callable[[Any, Any, Any], Any]) -> Callable[[], None]:
    """Ten steps; ``second(model, other, batch)`` runs before the trained forward of each."""

    def run() -> None:
        model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            batch = torch.randn(3, 4)
            with torch.no_grad():
                second(model, other, batch)
            model(batch).sum().backward()
            optimizer.step()

    return run


def changed(model: Any, other: Any, batch: Any) -> None:
    model(batch)
    batch.add_(1)


@pytest.mark.parametrize(
    ("second", "again"),
    [
        (lambda model, other, batch: model(batch), 6),
        (lambda model, other, batch: model(batch.detach()), 6),
        (lambda model, other, batch: other(batch), 0),
        (lambda model, other, batch: model(batch + 1), 0),
        (changed, 0),
        (lambda model, other, batch: model(batch.to_sparse()), 0),
    ],
    ids=["twice", "detached", "another module", "another batch", "changed in place", "sparse"],
)
def test_only_the_same_module_with_the_same_input_counts(
    recorded: Recorded, second: Callable[[Any, Any, Any], Any], again: int
) -> None:
    """One sample of twelve forwards, from the first backward on."""
    (event,) = recorded(training(second)).events_of("repeated_inputs")
    assert event["again"] in (again, max(again - 1, 0))
    assert 6 <= event["forwards"] <= 12
