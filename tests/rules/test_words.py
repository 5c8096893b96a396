"""Texts of rules fit the program: nothing of training where nothing is trained, nothing of
PyTorch where there is none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

import pytest

from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.core.finding import Finding, Outcomes, impact_risk
from advisor.core.rule import ANY_FRAMEWORK, Program, Rule
from advisor.core.trace import CUDA, JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.render.formats.terminal import MAX_CODE
from advisor.testing import TraceBuilder

RULES = load_rules(config={})
TEXTS = ("title", "fix", "code", "verify", "falsified_by", "assumptions", "confidence")
TRAINING = re.compile(
    r"\bloss(?:es)?\b|optimizer|zero_grad|backward|learning rate|criterion|\btrains? |micro-batch",
    re.IGNORECASE,
)
OF_TRAINED_STATE = (
    "set_to_none",
    "8-bit optimizer",
    "16-bit optimizer state",
    "offload optimizer state",
    "fused optimizer",
    "checkpointing",
    "offload activations",
    "BF16 autocast",
)
OF_OPTIMIZERS = {
    ("implicit-sync", "inside the optimizer"),
    ("loop-phases", "scores"),
    ("loop-phases", "the loss"),
    *(("out-of-memory", case) for case in OF_TRAINED_STATE),
}
"""Cases that need an optimizer, or a backward pass, in the recording."""
TORCH = re.compile(r"torch|DataLoader|num_workers|autograd|\.item\(\)|non_blocking", re.IGNORECASE)


def texts_of_rule(rule: Rule) -> Iterator[tuple[str, str]]:
    """Name of an attribute, or of a case, and a text of it."""
    for name in TEXTS:
        yield name, str(getattr(rule, name))
    for case, texts in rule.cases.items():
        for text in texts.values():
            yield case, str(text)


def test_code_fits_a_terminal_of_80_columns() -> None:
    """Beside the four columns of its place; a comment may go above its line, on one of its own. No
    alternative is cut in a short report."""
    long = []
    for rule in RULES:
        snippets = [rule.code, *(advice.code for advice in rule.framework_advice.values())]
        snippets += [str(texts.get("code", "")) for texts in rule.cases.values()]
        alternatives = [part for code in snippets for part in code.split("\n\n")]
        long += [(rule.id, part) for part in alternatives if part.count("\n") >= MAX_CODE]
        for line in "\n".join(snippets).splitlines():
            body, mark, comment = line.rpartition("  # ")
            parts = [body, comment] if mark and body.strip() else [line]
            long += [(rule.id, line) for part in parts if len(part.rstrip()) > 74]
    assert long == []


@pytest.mark.parametrize(
    "rule", [r for r in RULES if not r.training_only], ids=lambda rule: rule.id
)
def test_rules_do_not_mention_training_without_training(rule: Rule) -> None:
    other = rule.for_program(Program(trains=False))
    assert [
        (name, text)
        for name, text in texts_of_rule(other)
        if TRAINING.search(text) and (rule.id, name) not in OF_OPTIMIZERS
    ] == []
    assert set(rule.inference) <= {*TEXTS, "cases"}
    assert set(rule.inference.get("cases", {})) <= set(rule.cases)
    assert set(other.cases) == set(rule.cases)


def _launches(*ops: str) -> list[str]:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            for _ in range(100):
                for op in ops:
                    with b.op(op, [[64, 64]], "float", host_us=40):
                        b.launch("void at::native::vectorized_elementwise_kernel<4>", 3)
            b.sync()
    (rule,) = [rule for rule in RULES if rule.id == "cuda-graphs-unused"]
    return [finding.fix for finding in run_rules(0, b.analysis(), [rule]).findings]


def test_training_rules_do_not_run_without_training() -> None:
    class Training(Rule):
        """A rule that finds something in every trace."""

        id, title, category = "of-training", "Found", "host"
        training_only = True

        def check(self, a: Analysis) -> Outcomes:
            yield Finding(summary="Found.", fix="Mend it.", impact=impact_risk("unknown"))

    learns, infers = TraceBuilder(), TraceBuilder()
    for b, sequence in ((learns, 3), (infers, None)):
        for _ in b.steps():
            with b.op("aten::mm", sequence=sequence):
                b.product(100)
            if sequence:
                with b.op("autograd::engine::evaluate_function: MmBackward0", sequence=sequence):
                    b.product(100)
    result = [run_rules(0, b.analysis(), [Training()]).findings for b in (learns, infers)]
    assert list(map(len, result)) == [1, 0]


def test_finding_text_fits_the_kind_of_loop() -> None:
    """A hundred kernels of 3 µs that take the host 40 µs each, with a backward and without."""
    (inference,), (training,) = _launches("aten::mul"), _launches("aten::mul", "MulBackward0")
    assert "backward" in training and "backward" not in inference
    assert [rule for rule in RULES if "fix" in vars(rule)] == []  # the rule itself stays as it is


@pytest.mark.parametrize("rule", [r for r in RULES if r.framework_advice], ids=lambda rule: rule.id)
def test_advice_for_other_programs_names_nothing_of_pytorch(rule: Rule) -> None:
    assert set(rule.framework_advice) <= {ANY_FRAMEWORK, CUDA, TENSORFLOW, JAX}
    for advice in rule.framework_advice.values():
        texts = (advice.fix, advice.code, advice.verify, advice.title, advice.falsified_by)
        assert advice.fix and not any(map(TORCH.search, texts))
        assert not any(map(TORCH.search, advice.terms.values()))
        assert set(advice.terms) <= set(rule.terms)


@pytest.mark.parametrize("framework", [TENSORFLOW, JAX])
@pytest.mark.parametrize("rule", [r for r in RULES if r.framework_advice], ids=lambda rule: rule.id)
def test_default_texts_of_findings_name_nothing_of_pytorch(rule: Rule, framework: str) -> None:
    other = rule.for_program(Program(framework, foreign=True))
    if other.advice is None:
        return
    cases = [{}, *(other.case(name) for name in other.cases)]
    for texts in cases:
        result = other.complete(Finding(summary="", **{**texts, "confidence": 0.5}))
        finding_texts = (result.title, result.fix, result.code, result.verify, result.falsified_by)
        assert not any(
            map(TORCH.search, (*finding_texts, result.alternatives, *result.assumptions))
        )
        assert not any(map(TORCH.search, result.references))


def test_every_memory_remedy_has_a_text() -> None:
    from advisor.measure.memory import memory_savings

    source = inspect.getsource(memory_savings)
    changes = set(re.findall(r'(?:FreedMemory|MemoryChange|_[a-z]+)\(\s*"([^"]+)"', source))
    (rule,) = [rule for rule in RULES if rule.id == "out-of-memory"]
    assert len(changes) == 16
    assert all(rule.cases[change]["fix"] and rule.cases[change]["code"] for change in changes)


NO_ACTION = re.compile(r"(?:The|Its?|An?|This|These|Where|There|JAX)\b|\W|\d")
"""Beginnings of a sentence that says what is so, and not what to do."""


def fixes_in(texts: object) -> Iterator[str]:
    """Fixes in nested texts of a rule."""
    if isinstance(texts, Mapping):
        for name, text in texts.items():
            yield from [text] if name == "fix" else fixes_in(text)
    elif hasattr(texts, "fix"):
        yield str(texts.fix)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_fix_text_starts_with_an_action(rule: Rule) -> None:
    """Short reports show its first sentence alone."""
    texts = [
        rule.fix,
        *fixes_in(rule.cases),
        *fixes_in(rule.inference),
        *fixes_in(rule.framework_advice),
    ]
    assert [text for text in texts if NO_ACTION.match(text)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_calls_in_code_have_their_dots_first(rule: Rule) -> None:
    """``f(...,  x=1)`` can be completed in place; ``f(x=1, ...)`` is no Python."""
    for name, code in texts_of_rule(rule):
        if "code" in name:
            assert not re.search(r"\(\w[^()]*\w+=[^()]*, \.\.\.\)", code), (name, code)
