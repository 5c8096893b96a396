"""The sampled stacks show lines outside the model."""

from __future__ import annotations

from advisor.measure.host.sampled_code import (
    COMPUTING,
    LEARNING,
    SampledCode,
    code_outside,
    find_step_part,
)
from advisor.measure.host.stacks import SampledStack

MODULE = "torch/nn/modules/module.py(1779): Module._wrapped_call_impl"
MAIN = "serve.py(90): main"
NORMALIZE = "torchvision/transforms/transforms.py(277): Normalize.forward"
NET = (MAIN, "serve.py(69): tag", MODULE, "model.py(9): Net.forward")
BACKWARD = "torch/_tensor.py(9): Tensor.backward"


def find_code_outside(*stacks: tuple[int, tuple[str, ...]], **options: object) -> SampledCode:
    code = code_outside([SampledStack(*s) for s in stacks], COMPUTING, **options)  # type: ignore[arg-type]
    assert code is not None
    return code


def test_transform_module_is_not_a_forward() -> None:
    prepared = (MAIN, "serve.py(65): tag", MODULE, NORMALIZE)
    assert find_step_part(SampledStack(1, prepared)) == "loop"
    assert find_step_part(SampledStack(1, NET)) == "forward"
    code = find_code_outside((80, prepared), (20, NET))
    assert (code.place, code.share) == ("tag (serve.py:65)", 0.8)
    assert code.library_function == "Normalize.forward (torchvision/transforms/transforms.py:277)"


def test_lines_calling_the_model_or_inside_it_are_not_named() -> None:
    inside = (*NET, "model.py(30): table")
    assert code_outside([SampledStack(90, inside), SampledStack(5, NET)], COMPUTING) is None


def test_function_is_named_if_its_lines_share_the_time() -> None:
    around = (MAIN, "serve.py(50): step")
    lines = [(*around, f"serve.py({line}): count") for line in (11, 12, 13)]
    code = find_code_outside((30, lines[0]), (40, lines[1]), (30, lines[2]), (50, NET))
    assert (code.location.function, code.location.line, code.samples) == ("count", 12, 100)


def test_minimum_share_selects_functions() -> None:
    steps = (60, (MAIN, "serve.py(20): learn", BACKWARD))
    long, short = (30, (MAIN, "serve.py(8): validate")), (10, (MAIN, "serve.py(7): log"))
    stacks = [SampledStack(*s) for s in (steps, long, short)]
    largest = code_outside(stacks, LEARNING)
    near = code_outside(stacks, LEARNING, 0.05, 0.2)
    assert largest is not None and largest.location.function == "validate"
    assert near is not None and near.location.function == "log"


def test_few_samples_name_nothing() -> None:
    assert code_outside([SampledStack(7, (MAIN, "serve.py(7): log"))], COMPUTING) is None
