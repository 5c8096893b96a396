"""Gains of findings on small programs, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from advisor.advise.rule_runner import run_rules
from advisor.core.finding import Finding
from advisor.core.rule import Rule
from advisor.replay.edit_language import parse_edit
from advisor.replay.estimators import ReplayEstimator
from advisor.rules.distributed.missing_no_sync import MissingNoSync
from advisor.rules.distributed.slow_device import SlowDevice
from advisor.rules.host.periodic_stalls import PeriodicStalls
from advisor.rules.host.repeated_backward import RepeatedBackward
from advisor.rules.kernel.unfused_elementwise import UnfusedElementwise
from advisor.rules.memory.driver_allocations import PinnedAllocationInLoop
from advisor.rules.memory.huge_vocabulary import HugeVocabulary
from advisor.rules.optimizer.dense_embedding_gradient import DenseEmbeddingGradient
from advisor.rules.optimizer.single_tensor_optimizer import SingleTensorOptimizer
from advisor.rules.transfer.dtype_inflation import DtypeInflation, PingPong
from advisor.testing import TraceBuilder
from tests.rules.rank_rules import estimated_findings

_POINTWISE = "void at::native::vectorized_elementwise_kernel<4, "


def only_finding(rule: Rule, name: str) -> Finding:
    """The only finding of a rule on one of its examples, estimated by the engine."""
    (finding,) = run_rules(-1, rule.examples()[name].analysis(), [rule]).findings
    assert finding.impact is not None
    return finding


def gain_us(finding: Finding) -> float:
    assert finding.impact is not None
    assert finding.impact.gain_ns is not None
    return finding.impact.gain_ns / 1000


def test_needless_reductions_cost_their_exposed_time() -> None:
    # 8 and 25 MiB at 60 us a MiB, after the backward pass and before the next forward pass
    finding = only_finding(MissingNoSync(), "two passes, each reduced")
    assert gain_us(finding) == pytest.approx(33 * 60, rel=0.05)


def test_without_sync_the_next_forward_broadcasts_no_buffers() -> None:
    # of 4 passes 3 reduce 8 MiB at 60 us a MiB and wait 500 us for a broadcast, for nothing
    finding = only_finding(MissingNoSync(), "buffers are broadcast too")
    assert gain_us(finding) == pytest.approx(3 * (8 * 60 + 500), rel=0.05)


def test_pinned_allocation_costs_its_device_wait() -> None:
    # 2.5 ms in the call, with nothing for the device to do
    assert gain_us(
        only_finding(PinnedAllocationInLoop(), "a new buffer each step")
    ) == pytest.approx(2500, rel=0.05)


def test_a_round_trip_costs_both_copies() -> None:
    # 16 MiB at 6 GB/s there and back; the 300 us in between stay
    copies = 2 * (16 << 20) / 6e3
    finding = only_finding(PingPong(), "sorted on the CPU")
    assert copies * 0.95 <= gain_us(finding) <= copies + 400
    assert (finding.where[0].file, finding.where[0].line) == ("model.py", 30)


@pytest.mark.parametrize(
    "name",
    [name for name, b in DtypeInflation.examples().items() if not isinstance(b, tuple)],
)
def test_bytes_instead_of_floats_save_three_quarters_of_the_copy(name: str) -> None:
    copy = 4 * 64 * 3 * 224 * 224 / 20e3
    assert gain_us(only_finding(DtypeInflation(), name)) == pytest.approx(0.75 * copy, rel=0.02)


def test_slow_device_costs_its_additional_kernel_time() -> None:
    # five times 100 to 200 us in steps of 20, at 1.25 times the peers' duration; without it the
    # job waits for the next slowest, at 1.02
    rule = SlowDevice()
    ranks = dict(enumerate(b.analysis() for b in rule.examples()["third of four"]))
    (finding,) = estimated_findings(ranks, [rule]).findings
    assert finding.evidence[0].value == 2
    assert finding.evidence[1].value == pytest.approx(1.25)
    assert gain_us(finding) == pytest.approx(5 * 900 * (1.25 - 1.02), rel=0.01)


def test_slow_reported_rank_gains_on_its_own_step() -> None:
    rule = SlowDevice()
    ranks = dict(enumerate(b.analysis() for b in rule.examples()["the rank that is reported"]))
    (finding,) = estimated_findings(ranks, [rule]).findings
    assert gain_us(finding) == pytest.approx(5 * 900 * 0.20, rel=0.02)


def test_stalls_cost_their_written_time() -> None:
    # four of forty steps hold 9 ms of torch.save; time over the window, not a step
    finding = only_finding(PeriodicStalls(), "torch.save")
    assert finding.impact is not None
    assert finding.impact.currency == "run_time"
    assert gain_us(finding) == pytest.approx(4 * 9000, rel=0.01)


def test_the_log_softmax_and_one_gradient_are_named_in_bytes() -> None:
    finding = only_finding(HugeVocabulary(), "a tenth of the peak")
    assert finding.impact is not None
    assert finding.impact.freed_bytes == 2 * 10240 * 128256 * 4


def test_losses_of_two_optimizers_are_not_added_but_detached() -> None:
    one = only_finding(RepeatedBackward(), "two losses, each with its own backward pass")
    two = only_finding(RepeatedBackward(), "each loss updates a network of its own")
    assert "Add the losses" in one.fix and "Add the losses" not in two.fix
    assert "detach()" in two.fix and "fake.detach()" in two.code


def test_a_sparse_gradient_on_a_cpu_costs_more_than_its_rows() -> None:
    # two operators of 900 us on the table; a sparse update of 512 rows of 32: 250 us, 8 ns a value
    finding = only_finding(DenseEmbeddingGradient(), "on a CPU")
    assert gain_us(finding) == pytest.approx(1800 - 250 - 512 * 32 * 0.008, rel=0.02)


def _tables_updated_one_by_one(rows: int) -> TraceBuilder:
    """A step updates a table, another of 1,000 rows, and 120 small parameters, on the host."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        for number, (of, us) in enumerate(((rows, 9000), (1000, 500))):
            with b.op("aten::embedding", [[of, 32], [512]], host_us=20, sequence=number):
                pass
            node = "autograd::engine::evaluate_function: EmbeddingBackward0"
            with b.op(node, sequence=number), b.op("aten::embedding_dense_backward", host_us=us):
                pass
        with b.range("Optimizer.step#Adagrad.step"):
            for name, shape, us in [("aten::sqrt", [rows, 32], 6000)] + 120 * [
                ("aten::mul_", [32, 64], 10)
            ]:
                with b.op(name, [shape], host_us=us):
                    pass
    return b


def test_gradients_of_small_tables_stay_dense() -> None:
    a = _tables_updated_one_by_one(400_000).analysis()
    (finding,) = run_rules(-1, a, [DenseEmbeddingGradient()]).findings
    (work,) = (one for one in finding.evidence if "making the gradient" in one.label)
    assert work.value == pytest.approx(9000e3, rel=0.01)


@pytest.mark.parametrize(("rows", "beside"), [(400_000, True), (4_000, False)])
def test_fused_update_halves_large_tensors_without_sparse_ones(rows: int, *, beside: bool) -> None:
    a = _tables_updated_one_by_one(rows).analysis()
    (finding,) = run_rules(-1, a, [SingleTensorOptimizer()]).findings
    # 6 ms in one operator, of which half stays; 1.2 ms in short ones, of which 15% stay
    assert gain_us(finding) == pytest.approx(6000 * 0.5 + 1200 * 0.85, rel=0.05)
    assert ("Adagrad(others, lr=lr, fused=True)" in finding.code) == beside
    assert ("model.parameters(), lr" in finding.code) != beside


def test_fusing_gains_no_host_time_of_copies_outside_the_chain() -> None:
    # the chain's casts are aten::copy_, and so is the 4 ms copy of a batch that the host waits in
    shape, kernel, b = [64, 1024, 1024], _POINTWISE + "Half>", TraceBuilder("A100")
    for _ in b.steps():
        b.on_host("aten::copy_", 4000)
        for n in range(8):
            b.run("aten::mul" if n % 2 else "aten::copy_", kernel, 300, [shape] * 2, "c10::Half")
        for _ in range(3):  # one at a time: no chain
            b.product(300)
            b.run("aten::mul", kernel, 300, [shape] * 2, "c10::Half")
        b.sync()
    (finding,) = run_rules(-1, b.analysis(), [UnfusedElementwise()]).findings
    assert 1000 < gain_us(finding) <= 8 * 300 + 11 * 2.5


def test_fix_of_other_kernels_keeps_the_gain_of_chains() -> None:
    # 8 kernels in a row and 8 apart are all of aten::mul, by two names
    shape, b = [64, 1024, 1024], TraceBuilder("A100")
    for _ in b.steps():
        b.run("aten::mul", _POINTWISE + "Chained>", 300, [shape] * 2, "c10::Half", times=8)
        for _ in range(8):
            b.product(200)
            b.run("aten::mul", _POINTWISE + "Alone>", 300, [shape] * 2, "c10::Half")
    a = b.analysis()
    (finding,) = run_rules(-1, a, [UnfusedElementwise()]).findings
    estimator = ReplayEstimator(a)
    gain_alone = estimator.marginal(finding.edits, ())
    after = estimator.marginal(finding.edits, [parse_edit("remove kernel:Alone")])
    assert gain_alone > 800e3
    assert after == pytest.approx(gain_alone, rel=0.05)
