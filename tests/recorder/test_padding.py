"""Padding is seen in the token ids that a model is called with, wherever they come from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

Recorded = Callable[..., Any]
LENGTH, LONGEST, ROWS = 40, 20, 4


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 4, device=device)

    def forward(self, ids: Any, **kwargs: Any) -> Any:
        return self.embedding(ids["input_ids"] if isinstance(ids, dict) else ids)


class HashedModel(Model):
    def forward(self, ids: Any, **kwargs: Any) -> Any:
        return self.embedding(ids % 50)


def ids_of(pad: int = 0) -> Any:
    """Rows of 5, 10, 15 and 20 tokens, padded to 40."""
    ids = torch.full((ROWS, LENGTH), pad)
    for row, length in enumerate((5, 10, 15, LONGEST)):
        ids[row, :length] = torch.arange(1, length + 1)
    return ids


def forwards(model: Any, *args: Any, **kwargs: Any) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                model(*args, **kwargs)

    return run


def uploaded() -> None:
    model, ids = Model("meta"), ids_of()
    with torch.no_grad():
        for _ in range(20):
            model(ids.to("meta"))


SEEN = {
    "one tensor": forwards(Model(), ids_of()),
    "another padding id": forwards(Model(), ids_of(49)),
    "padding on the left": forwards(Model(), ids_of().flip(1)),
    "sequences along the first dimension": forwards(Model(), ids_of().T),
    "a dictionary with a mask": forwards(
        Model(), {"input_ids": torch.ones_like(ids_of()), "attention_mask": ids_of() != 0}
    ),
    "segment numbers beside": forwards(
        Model(), ids_of(), token_type_ids=torch.ones(ROWS, LENGTH, dtype=torch.long)
    ),
    "uploaded to a device": uploaded,
}


@pytest.mark.parametrize("name", SEEN)
def test_padding_of_a_forwards_ids_is_sampled(record_run: Recorded, name: str) -> None:
    events = record_run(SEEN[name]).events_of("padding")
    assert len(events) == 4  # one forward in five
    for event in events:
        assert event["padding"] == pytest.approx(1 - (5 + 10 + 15 + 20) / (ROWS * LENGTH))
        assert event["beyond"] == pytest.approx(1 - LONGEST / LENGTH)
        assert {event["rows"], event["columns"]} == {ROWS, LENGTH}


UNSEEN = {
    "numbers that no embedding takes": forwards(torch.nn.Linear(LENGTH, 1), ids_of().float()),
    "ids of no model with an embedding": forwards(torch.nn.Flatten(), ids_of()),
    "numbers beyond the vocabulary": forwards(HashedModel(), ids_of() * 7),
    "one value": forwards(Model(), torch.ones(ROWS, LENGTH, dtype=torch.long)),
    "one token at a time": forwards(Model(), ids_of()[:, :1]),
    "ids made on a device": forwards(Model("meta"), torch.empty_like(ids_of(), device="meta")),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_other_values_are_not_taken_for_padding(record_run: Recorded, name: str) -> None:
    shares = [event["padding"] for event in record_run(UNSEEN[name]).events_of("padding")]
    assert all(share < 0.1 for share in shares)


def test_sampling_is_unseen_by_the_programs_modes(record_run: Recorded) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    def run() -> None:
        with Mode():
            forwards(Model(), ids_of())()

    run()
    unrecorded_calls, calls = calls.copy(), []
    record_run(run)
    assert calls == unrecorded_calls


def labels_of(ignored: int) -> Any:
    labels = ids_of()
    labels[:, :ignored] = -100
    return labels


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_share_of_ignored_labels_is_recorded(record_run: Recorded, device: str) -> None:
    """Labels beside the ids; on a device, as the program uploads them."""
    model = Model(device)

    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                model(ids_of().to(device), labels=labels_of(30).to(device))

    result = record_run(run).events_of("labels")
    assert len(result) >= 3
    assert all(each == {"ignored": 0.75, "rows": ROWS, "columns": LENGTH} for each in result)
    assert record_run(forwards(Model(), ids_of(), labels=ids_of())).events_of("labels") == []


def losses(seconds: float, labels: Any, **options: Any) -> Callable[[], None]:
    """A loss over many classes, outside any module, on labels of its own for each call."""
    scores = torch.randn(labels.numel(), 20_000)

    def run() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.nn.functional.cross_entropy(scores, labels.flatten(), **options)

    return run


@pytest.mark.timed
@pytest.mark.parametrize("ignored", [-100, 7])
def test_labels_are_read_where_a_sample_meets_the_loss(record_run: Recorded, ignored: int) -> None:
    """Three in four labels are ignored, by whatever number; others have none."""
    labels = torch.arange(400).reshape(4, 100) % 5
    labels[:, 25:] = ignored
    events = record_run(losses(2, labels, ignore_index=ignored)).events_of("labels")
    assert len(events) >= 3
    expected = {"ignored": 0.75, "rows": 1, "columns": 400, "classes": 20_000}
    assert all(event == expected for event in events)


@pytest.mark.timed
def test_loss_without_ignored_labels_is_recorded(record_run: Recorded) -> None:
    events = record_run(losses(4, torch.arange(400))).events_of("labels")
    assert {event["ignored"] for event in events} == {0.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": torch.zeros(4, 9), "target": torch.zeros(4, 9)},  # shares of classes
        {"input": torch.zeros(9), "target": torch.tensor(3)},
        {"input": torch.zeros(4, 9), "target": torch.zeros(4, dtype=torch.long, device="meta")},
        {"input": None, "target": 5},
    ],
)
def test_tensors_other_than_labels_are_ignored(fields: dict[str, Any]) -> None:
    from advisor.recorder.padding import TokenPadding

    written: list[Any] = []
    TokenPadding(lambda *event: written.append(event)).on_loss(fields)
    assert written == []


def test_one_token_of_each_sequence_has_no_padding() -> None:
    """A batch that generates: ids [sequences, 1]. The last ones may be equal by chance."""
    from advisor.recorder.padding import measure_ids

    ids = torch.tensor([[5], [9], [4], [8], [3], [2], [7], [7], [7], [7], [7]])
    assert measure_ids(ids.numpy()) is None
    result = measure_ids(ids.T.numpy())
    assert result is not None and result["padding"] == pytest.approx(5 / 11)


def test_rows_in_order_of_length_say_what_smaller_batches_save() -> None:
    """Rows of 10, 10, 10 and 40 tokens: two batches of 2 x 10 and 2 x 40 for one of 4 x 40."""
    from advisor.recorder.padding import measure_mask

    lengths = torch.tensor([10, 10, 10, 40])
    tokens = (torch.arange(40) < lengths[:, None]).numpy()
    result = measure_mask(tokens)
    assert result is not None and result["split"] == pytest.approx(1 - (2 * 10 + 2 * 40) / 160)
    shuffled = measure_mask(tokens[[0, 3, 1, 2]])
    assert shuffled is not None and "split" not in shuffled
    assert shuffled["padding"] == result["padding"]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_spectrogram_padding_is_a_constant_row_end(order: tuple[int, ...]) -> None:
    from advisor.recorder.padding import measure_signal

    frames = torch.randn(4, 400, 80)
    for row, length in enumerate((100, 120, 160, 200)):
        frames[row, length:] = 0
    result = measure_signal(frames.permute(order).contiguous().numpy())
    assert result is not None
    assert result["padding"] == pytest.approx(1 - (100 + 120 + 160 + 200) / 1600)
    assert result["beyond"] == pytest.approx(0.5) and result["signal"]
    later = measure_signal(frames.permute(order).contiguous().numpy(), varies=False)
    full = measure_signal(torch.randn(4, 400, 80).permute(order).contiguous().numpy(), varies=False)
    assert later == result and full is not None and full["padding"] == 0


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(8, 400, 16),  # no padding
        torch.nn.functional.pad(torch.randn(8, 200, 16), (0, 0, 0, 200)),  # all end at one place
        (torch.rand(64, 2000) > 0.98).float(),  # sparse vectors
        torch.rand(64, 30),  # features of samples
        torch.zeros(4, 2000),
    ],
)
def test_unpadded_values_have_no_padding(values: torch.Tensor) -> None:
    from advisor.recorder.padding import measure_signal

    assert measure_signal(values.numpy()) is None


def test_padding_of_spectrogram_inputs_is_recorded() -> None:
    from advisor.recorder.padding import TokenPadding

    written: list[Any] = []
    padding = TokenPadding(lambda *event: written.append(event))
    frames = torch.randn(2, 100, 8)
    frames[0, 50:] = 0
    model = torch.nn.Linear(8, 8)
    padding.on_forward(model, (frames, torch.tensor([50, 100])), {})
    assert [(kind, data["columns"], data["padding"]) for kind, data in written] == [
        ("padding", 100, 0.25)
    ]


def test_features_without_padding_are_not_examined_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from advisor.recorder import padding as module

    measured: list[Any] = []
    monkeypatch.setattr(module, "measure_signal", lambda values, **_: measured.append(values))
    padding = module.TokenPadding(lambda *event: None)
    for _ in range(2 * module.EVERY * module.MAX_SIGNAL_MISSES):
        padding.on_forward(torch.nn.Linear(8, 8), (torch.randn(2, 100, 8),), {})
    assert len(measured) == module.MAX_SIGNAL_MISSES


def test_labels_of_one_call_count_once() -> None:
    from advisor.recorder.padding import TokenPadding

    written: list[Any] = []
    padding = TokenPadding(lambda *event: written.append(event))
    fields = {"input": torch.zeros(4, 9), "target": torch.full((4,), -100)}
    for _ in range(3):
        padding.on_loss(fields)
    padding.on_loss({**fields, "target": torch.zeros(4, dtype=torch.long)})
    assert [data["ignored"] for _, data in written] == [1.0, 0.0]
