"""The code of a fix does what the fix says: run on the CPU, with stand-ins for what needs a GPU."""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from advisor.advise.rule_loading import load_rules
from advisor.core.rule import Rule
from advisor.rules.support.framework_advice import STAGING_CODE

torch = pytest.importorskip("torch")
RULES: dict[str, Rule] = {rule.id: rule for rule in load_rules(config={})}


class FakeTensor:
    """A tensor that is copied to a device."""

    def __init__(self, number: int) -> None:
        self.number = number

    def to(self, _device: str, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking
        return self

    def pin_memory(self) -> FakeTensor:
        return self


@pytest.mark.parametrize("count", [1, 3])
def test_a_prefetch_trains_on_every_batch(count: int) -> None:
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    cuda = SimpleNamespace(
        Stream=lambda: stream, stream=lambda _s: nullcontext(), current_stream=lambda: stream
    )
    trained: list[int] = []
    fields = {
        "torch": SimpleNamespace(cuda=cuda),
        "device": "cuda",
        "loader": [(FakeTensor(number),) for number in range(count)],
        "train_step": lambda x: trained.append(x.number),
    }
    exec(RULES["copies-not-overlapped"].code, fields)
    assert trained == list(range(count))
    fields |= {"data": fields["loader"]}
    kept = str(RULES["pageable-copies"].case("no DataLoader")["code"]).partition("\n\n")[0]
    exec(kept, fields)
    assert trained == 2 * list(range(count))


def test_a_pinned_buffer_is_refilled_only_after_its_last_copy() -> None:
    order: list[str] = []
    event = SimpleNamespace(
        synchronize=lambda: order.append("wait"), record=lambda: order.append("record")
    )

    def empty(shape: tuple[int, ...], *, dtype: Any, pin_memory: bool) -> Any:
        assert pin_memory
        return torch.empty(shape, dtype=dtype)

    batches = [torch.arange(4.0) + n for n in range(3)]
    fields = {
        "torch": SimpleNamespace(empty=empty, cuda=SimpleNamespace(Event=lambda: event)),
        "device": "cpu",
        "loader": batches,
        "max_batch_shape": (8,),
        "dtype": torch.float32,
    }
    exec(STAGING_CODE, fields)
    assert order == ["wait", "record"] * 3
    assert torch.equal(fields["x"], batches[-1])  # type: ignore[call-overload]


def test_padded_widths_also_change_reading_layers() -> None:
    rule, owner = RULES["misaligned-gemm"], SimpleNamespace()
    fields: dict[str, Any] = {
        "nn": torch.nn, "F": torch.nn.functional, "self": owner,
        "width": 1613, "hidden": 32, "vocab": 50257,
        "x": torch.randn(2, 1613), "hidden_states": torch.randn(2, 32),
    }  # fmt: skip
    exec(rule.code, fields)
    assert owner.first.in_features == 1664
    assert fields["y"].shape == (2, 32)
    exec(str(rule.case("a vocabulary")["code"]), fields)
    assert owner.head.out_features == owner.embedding.num_embeddings == 50304
    assert fields["logits"].shape == (2, 50257)


def test_a_padded_image_fits_the_padded_layer() -> None:
    case = RULES["slow-convolution"].case("channels are not multiples of 8")
    fields = {
        "nn": torch.nn, "F": torch.nn.functional, "self": SimpleNamespace(),
        "width": 16, "x": torch.randn(2, 3, 8, 8),
    }  # fmt: skip
    exec(str(case["code"]), fields)
    assert fields["self"].first(fields["x"]).shape == (2, 16, 8, 8)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layer", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("name", ["Adagrad", "SGD"])
def test_the_advised_optimizers_take_sparse_gradients(name: str, layer: str) -> None:
    rule = RULES["dense-embedding-gradient"]
    case = rule.case("the optimizer takes sparse gradients", optimizer=name, layer=layer)
    fields: dict[str, Any] = {"torch": torch, "rows": 50, "size": 4}
    exec(str(case["code"]), fields)
    table = fields["table"]
    before = table.weight.detach().clone()
    optimizer = getattr(torch.optim, name)(table.parameters(), lr=0.1)
    table(torch.tensor([[3]])).sum().backward()
    assert table.weight.grad.is_sparse
    optimizer.step()
    changed = (table.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3]


@pytest.mark.parametrize(
    ("change", "module", "name"),
    [
        ("offload optimizer state", "torchao.optim", "CPUOffloadOptimizer"),
        ("16-bit optimizer state", "torchao.optim", "_AdamW"),
        ("8-bit optimizer", "bitsandbytes", "optim"),
    ],
)
def test_another_optimizer_keeps_the_settings(
    change: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []

    def optimizer(*_args: object, **settings: Any) -> None:
        kept.append(settings)

    stand_in: Any = optimizer
    if name == "optim":
        stand_in = SimpleNamespace(AdamW8bit=optimizer)
    for part in ("torchao", module):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[module], name, stand_in)
    fields = {
        "torch": torch, "model": torch.nn.Linear(2, 2),
        "lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1,
    }  # fmt: skip
    exec(str(RULES["out-of-memory"].case(change)["code"]), fields)
    kept_settings = {key: kept[0][key] for key in ("lr", "betas", "weight_decay")}
    assert kept_settings == {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def test_token_batches_hold_each_sample_once_within_the_limit() -> None:
    lengths = [5, 90, 7, 12, 40, 3, 11]
    fields: dict[str, Any] = {"lengths": lengths, "limit": 90, "dataset": [], "pad": list}
    fields["DataLoader"] = lambda _dataset, batch_sampler, collate_fn: batch_sampler
    exec(str(RULES["out-of-memory"].case("an unusually large batch")["code"]), fields)
    batches: list[list[int]] = fields["loader"]
    assert sorted(index for batch in batches for index in batch) == [*range(len(lengths))]
    assert max(len(batch) * max(lengths[i] for i in batch) for batch in batches) == 90


def _channels_last(shape: tuple[int, ...]) -> Any:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("case", "order"),
    [
        ("different orders", lambda: torch.randn(8, 4).t()),
        ("channels last and another order", lambda: _channels_last((2, 4, 8, 8))),
    ],
)
def test_both_inputs_have_one_memory_order_afterwards(case: str, order: Callable[[], Any]) -> None:
    x = order()
    y = torch.randn(x.shape)
    code = str(RULES["low-bandwidth"].case(case)["code"]).rpartition("\n\n")[2]
    fields = {"torch": torch, "x": x, "y": y}
    exec(code, fields)
    assert fields["y"].stride() == x.stride() != y.stride()
    assert torch.equal(fields["y"], y)


@pytest.mark.parametrize("case", ["", "one query", "two products", "a mask, FP32 or large heads"])
def test_grouped_attention_without_copies_is_equal(case: str) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    b, heads, kv_heads, d = 2, 12, 3, 8
    t = 1 if case == "one query" else 16
    q, k, v = (torch.randn(b, n, m, d) for n, m in ((heads, t), (kv_heads, 16), (kv_heads, 16)))
    mask = torch.randn(1, 1, t, 16) if "products" in case or "mask" in case else None
    fields = {"F": torch.nn.functional, "q": q, "k": k, "v": v, "b": b, "t": t, "d": d}
    fields |= {"heads": heads, "kv_heads": kv_heads, "mask": mask}
    rule = RULES["repeated-keys-values"]
    exec(rule.cases[case]["code"] if case else rule.code, fields)
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    expected = attend(q, keys, values, attn_mask=mask, is_causal=not case)
    assert torch.allclose(fields["y"], expected, atol=1e-5)


def _list_snippets(rule: Rule) -> list[str]:
    cases = getattr(rule, "cases", {}) or {}
    texts = [rule.code, *(case.get("code", "") for case in cases.values())]
    return [text for text in texts if isinstance(text, str) and text]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_snippet_says_what_it_adds_to(rule: Rule) -> None:
    """A sum has a value, or a comment that says what it is, before something is added to it."""
    for code in _list_snippets(rule):
        for match in re.finditer(r"^ *(\w+)(?:\[\w+\])? \+= ", code, re.MULTILINE):
            assert re.search(rf"\b{match[1]}\b", code[: match.start()]), code


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_constructor_shown_in_part_keeps_the_other_arguments(rule: Rule) -> None:
    for code in _list_snippets(rule):
        if re.search(r"(?:DataLoader|DDP)\((?:\.\.\.|model, )", code):
            assert "your other arguments" in code, code


def test_a_long_filter_is_convolved_as_conv1d_does() -> None:
    """The product of spectra, with the weight flipped, is conv1d with padding on the left."""
    x, weight = torch.randn(1, 1, 50), torch.randn(1, 1, 7)
    fields = {"torch": torch, "x": x, "taps": weight.flip(-1)}
    exec(RULES["long-filter"].code, fields)
    padded = torch.nn.functional.pad(x, (weight.shape[-1] - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight)
    torch.testing.assert_close(fields["y"], expected)


def test_a_hook_works_in_every_hundredth_call_of_a_module() -> None:
    fields: dict[str, Any] = {"collections": collections}
    exec(RULES["module-hooks"].code.replace("...", "worked.append(module)"), fields)
    fields["worked"] = []
    for _ in range(200):
        for module in ("first", "second"):
            fields["hook"](module, None, None)
    assert fields["worked"] == ["first", "second"] * 2
