"""Forwards with the weights and the input of an earlier one are recognized among others like
them."""

from __future__ import annotations

import weakref
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


def change_in_place(model: Any, other: Any, batch: Any) -> None:
    model(batch)
    batch.add_(1)


def with_other_weights(model: Any, other: Any, batch: Any) -> None:
    weights = {name: weight + 1 for name, weight in model.named_parameters()}
    torch.func.functional_call(model, weights, (batch,))


@pytest.mark.parametrize(
    ("second", "repeats"),
    [
        (lambda model, other, batch: model(batch), 6),
        (lambda model, other, batch: model(batch.detach()), 6),
        (lambda model, other, batch: other(batch), 0),
        (lambda model, other, batch: model(batch + 1), 0),
        (change_in_place, 0),
        (with_other_weights, 0),
        (lambda model, other, batch: model(batch.to_sparse()), 0),
    ],
    ids=[
        *("twice", "detached", "another module", "another batch", "changed in place"),
        *("other weights", "sparse"),
    ],
)
def test_only_the_same_module_with_the_same_input_counts(
    record_run: Recorded, second: Callable[[Any, Any, Any], Any], repeats: int
) -> None:
    """The sample holds twelve forwards, from the first backward on."""
    (event,) = record_run(training(second)).events_of("repeated_inputs")
    assert event["again"] in (repeats, max(repeats - 1, 0))
    assert 6 <= event["forwards"] <= 12
    assert sum(module["again"] for module in event["modules"]) == event["again"]
    for module in event["modules"]:
        assert module["same_input"] == module["again"]
        assert any(frame.endswith("training.run") for frame in module["frames"])


def denoising(encode: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Thirty steps of two modules; ``encode(encoder, ids)`` runs before the network of each."""

    def run() -> None:
        encoder, network = CachingModule().eval(), torch.nn.Linear(4, 4).eval()
        with torch.inference_mode():
            ids = torch.arange(12.0).reshape(3, 4)
            x = torch.randn(3, 4)
            for _ in range(30):
                x = network(x + encode(encoder, ids)) + torch.randn(3, 4)

    return run


class CachingModule(torch.nn.Module):
    """A module that may keep a state that is no tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)
        self.calls = 0

    def forward(self, ids: Any, number: int = 0, cache: Any = None, grown: bool = False) -> Any:
        self.calls += grown
        return self.dropout(self.layer(ids)) + number + self.calls


def in_place(encoder: Any, ids: Any) -> Any:
    return encoder(ids.add_(1))


def redrawn(encoder: Any, ids: Any) -> Any:
    return encoder.train()(ids)


@pytest.mark.parametrize(
    ("encode", "repeats", "same_input"),
    [
        (lambda encoder, ids: encoder(ids), 5, 5),
        (lambda encoder, ids: encoder(ids.clone()), 5, 5),
        (lambda encoder, ids: encoder(ids, grown=True), 0, 5),
        (lambda encoder, ids: encoder(ids, cache=object()), 0, 0),
        (lambda encoder, ids: encoder(ids, number=int(torch.randint(1_000_000, ()))), 0, 0),
        (lambda encoder, ids: encoder(torch.randn(3, 4)), 0, 0),
        (in_place, 0, 0),
        (redrawn, 0, 5),
    ],
    ids=[
        *("the same tensor", "an equal tensor", "a state of its own", "a cache", "another number"),
        *("another tensor", "changed in place", "random outputs"),
    ],
)
def test_an_inference_compares_values_of_inputs_and_outputs(
    record_run: Recorded, encode: Callable[[Any, Any], Any], repeats: int, same_input: int
) -> None:
    event = record_run(denoising(encode)).events_of("repeated_inputs")[0]
    assert event["again"] == repeats
    names = {
        each["name"]: tuple(each[key] for key in ("forwards", "again", "same_input"))
        for each in event["modules"]
    }
    assert names == ({"CachingModule": (6, repeats, same_input)} if same_input else {})
    assert event["ns"] > sum(each["ns"] for each in event["modules"])


def test_the_caller_is_named_by_its_line(record_run: Recorded) -> None:
    event = record_run(denoising(lambda encoder, ids: encoder(ids))).events_of("repeated_inputs")[0]
    (module,) = event["modules"]
    assert "test_repeated_inputs.py" in module["frames"][1]
    assert module["frames"][1].endswith("denoising.run")
    assert not [name for name in module["frames"] if "torch/nn" in name or "recorder/hooks" in name]


def test_blocks_all_over_a_large_tensor_are_compared() -> None:
    from advisor.recorder.repeated_inputs import BLOCK_BYTES, MAX_BLOCKS, _checksum

    values = torch.zeros(4 * BLOCK_BYTES * MAX_BLOCKS, dtype=torch.uint8)
    sums = {_checksum(values)}
    for index in (0, 17 * BLOCK_BYTES, len(values) - 1):
        other = values.clone()
        other[index : index + 4 * BLOCK_BYTES] = 1
        sums.add(_checksum(other))
    assert len(sums) == 4
    assert _checksum(values.view(2, -1).T) is None
    given_back = torch.zeros(100)
    given_back.untyped_storage().resize_(8)
    assert _checksum(given_back) is None


@pytest.mark.parametrize("make", [torch.nn.ReLU, lambda: torch.nn.Linear(4, 4)])
@pytest.mark.parametrize("trained", [False, True])
def test_no_module_is_kept_alive(make: Callable[[], Any], trained: bool) -> None:
    """Modules that are made for one call are freed after it, so that their memory is reused."""
    from advisor.recorder.repeated_inputs import RepeatedInputs

    seen = RepeatedInputs(lambda kind, data: None)
    module = make()
    kept = weakref.ref(module)
    seen.on_forward(module, (torch.ones(4),), {}, trained=trained)
    del module
    assert kept() is None
