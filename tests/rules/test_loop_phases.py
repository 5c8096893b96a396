"""Time of the loop's own code where steps vary."""

from __future__ import annotations

import pytest

from advisor.core.finding import Finding, Location
from advisor.rules.host.loop_phases import LoopPhases
from advisor.rules.support.loop_operators import LoopRule, case_by_name
from advisor.testing import TraceBuilder

MS = 1_000_000


def test_the_loops_own_code_is_of_the_mean_step_where_steps_vary() -> None:
    """20 of 100 steps take 40 ms, 36 of them between steps; the others 10 and 6 ms."""
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    for _ in range(20):
        run.steps(4, 10, forward=4, **{"between steps": 6})
        run.steps(1, 40, forward=4, **{"between steps": 36})
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert finding.impact is not None
    assert finding.impact.gain_ns == pytest.approx(12 * MS, rel=0.06)
    assert "of the mean step" in finding.summary


@pytest.mark.parametrize(
    ("name", "samples"), [("a sort of all values", False), ("a sort before sampling", True)]
)
def test_token_sampling_is_found_only_in_sampling_programs(name: str, *, samples: bool) -> None:
    example = LoopPhases.examples()[name]
    assert isinstance(example, TraceBuilder)
    (finding,) = (f for f in LoopPhases().check(example.analysis()) if isinstance(f, Finding))
    assert "torch.topk" in str(finding.code)
    assert ("multinomial" in str(finding.code)) == ("sample" in str(finding.fix)) == samples


def test_sort_in_the_loss_gains_its_own_time() -> None:
    """The loss mines hard negatives for a detector: 3 ms of sorting in 6 ms of loss and 10 ms of
    step."""
    example = LoopPhases.examples()["a sort in the loss"]
    assert isinstance(example, TraceBuilder)
    (finding,) = (f for f in LoopPhases().check(example.analysis()) if isinstance(f, Finding))
    assert "torch.topk" in str(finding.code)
    assert "aten::sort (33%)" in finding.summary
    sorts = 3e6 / 13e6 * 10e6
    assert finding.impact is not None
    assert finding.impact.gain_ns == pytest.approx(0.9 * sorts, rel=0.05)


def with_a_loss(*operators: tuple[str, list[list[int]], float]) -> TraceBuilder:
    """Steps of 10 ms, 6 of them in these operators beside the model, which have a gradient."""
    b = TraceBuilder(gpu=None)
    b.record_of_run().steps(60, 10, forward=2, backward=2)
    for number in b.steps():
        with b.range("advisor::forward"), b.op("aten::linear", host_us=2000):
            pass
        for place, (name, shapes, us) in enumerate(operators):
            with b.op(name, shapes, sequence=10 * number + place, host_us=us):
                pass
        for place, (name, _, _) in enumerate(operators):
            node = f"autograd::engine::evaluate_function: {name}"
            with b.op(node, sequence=10 * number + place):
                b.host(500)
    return b


SCORES = ("aten::linear", [[20, 50, 96], [4001, 96]], 4500.0)
LOSS = ("aten::cross_entropy_loss", [[1000, 4001], [1000]], 1500.0)


def test_many_class_scores_differ_from_a_handwritten_loss() -> None:
    (finding,) = (f for f in LoopPhases().check(with_a_loss(SCORES, LOSS).analysis()))
    assert isinstance(finding, Finding)
    assert "aten::linear on 20×50×96 and 4001×96" in finding.summary
    assert "Scores of many classes" in str(finding.title)
    assert "one_hot" not in str(finding.code)
    assert finding.impact is not None and finding.impact.currency == "unknown"


def test_known_ignored_labels_belong_to_another_rule() -> None:
    b = with_a_loss(SCORES, LOSS)
    b.record_of_run().event("labels", ignored=0.0, rows=1, columns=1000, classes=4001)
    assert list(LoopPhases().check(b.analysis())) == []


def test_product_outside_the_model_is_named_without_a_function() -> None:
    b = with_a_loss(("aten::mm", [[512, 512], [512, 512]], 6000.0))
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert finding.title == "aten::mm outside the model takes much of the step"
    assert "512×512 and 512×512" in finding.summary
    assert not any(word in str(finding.fix) for word in ("cross_entropy", "compile", "cdist"))


def test_handwritten_loss_gains_only_its_own_time() -> None:
    """4.5 of 6 ms are written by hand: 40% of these and of their backward, at most all."""
    product = ("aten::mm", [[512, 512], [512, 512]], 1500.0)
    b = with_a_loss(product, ("aten::log", [[512, 512]], 4500.0))
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert "cross_entropy" in str(finding.fix)
    assert finding.impact is not None and finding.impact.high_ns is not None
    assert finding.impact.high_ns < 5.5 * MS


@pytest.mark.parametrize(
    ("leaf", "python"),
    [
        ("", True),  # its own arithmetic
        ("<built-in function builtins.min>", True),
        ("<built-in function .append>", True),
        ("<built-in function time.sleep>", False),
        ("<built-in function .recv>", False),
        ("numpy/_core/fromnumeric.py(70): _wrapreduction", False),
    ],
)
def test_python_loop_differs_from_waits_and_libraries(leaf: str, python: bool) -> None:
    """20 samples in a function of the loop, each in a line that calls this."""
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    run.steps(60, 10, forward=2, backward=2)
    frames = ["serve.py(50): <module>", "serve.py(30): main", "serve.py(12): overlap", leaf]
    inside = [0, 1, 2, 3] if leaf else [0, 1, 2]
    run.event("stacks", frames=frames, stacks=[[20, inside]])
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert finding.where[0].function == "overlap"
    assert finding.title.startswith("A loop in Python") == python


@pytest.mark.parametrize(
    ("tests", "searches"), [([[2, 3]], True), ([], False), ([[1, 3]], False), ([[2, 9]], False)]
)
def test_line_that_may_search_a_list_is_named(tests: list[list[int]], searches: bool) -> None:
    """20 samples in a function, and a test ``x in items`` below it or elsewhere."""
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    run.steps(60, 10, forward=2, backward=2)
    frames = [
        *("train.py(50): <module>", "train.py(30): main", "train.py(12): Batches.build"),
        "train.py(44): Log.has_seen",
    ]
    run.event("stacks", frames=frames, stacks=[[20, [0, 1, 2]]], tests=tests)
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert ("line 44 (Log.has_seen) searches with `in`" in str(finding.fix)) == searches
    assert str(finding.title).endswith("in a list") == searches


def test_boxes_gain_the_time_of_the_functions_around_too() -> None:
    """The innermost function has half of the samples, the suppression around it all."""
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    for _ in b.steps():
        with b.range("advisor::forward"):
            b.on_host("aten::linear", 2000)
        for _ in range(100):
            b.on_host("aten::minimum", 60)
    run.steps(60, 10, forward=2)
    frames = ["serve.py(30): main", "serve.py(12): nms", "serve.py(5): iou"]
    run.event("stacks", frames=frames, stacks=[[20, [0, 1, 2]], [20, [0, 1]]])
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert "compares boxes" in str(finding.title) and finding.impact is not None
    assert finding.impact.high_ns == pytest.approx(8 * MS)


def test_names_of_functions_say_what_their_many_operators_do() -> None:
    expected = {
        "TeacherBank.update": "averaged weights",
        "update_ema": "averaged weights",
        "ModelEMA.update": "averaged weights",
        "Monitor.stats": "figures to show",
        "log_norms": "figures to show",
        "box_iou_one": "overlapping boxes",
        "NMS.__call__": "overlapping boxes",
        "nms": "overlapping boxes",
        "previous_batch": "many operators",
        "semantic_losses": "many operators",
        "catalogue": "many operators",
        "rescale": "many operators",
    }
    for function, case in expected.items():
        place = Location(file="train.py", line=3, function=function)
        assert case_by_name("many operators", place, LoopRule.cases) == case, function
    assert case_by_name("the loss", place, LoopRule.cases) == "the loss"
    assert case_by_name("many operators", None, LoopRule.cases) == "many operators"
    # of inference, which averages no weights
    teacher = Location(function="TeacherBank.update")
    assert case_by_name("many operators", teacher, LoopRule.inference["cases"]) == "many operators"
