"""Parameters that get gradients and that no optimizer holds, as the recorder finds them."""

from __future__ import annotations

import gc
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import optimizer as optim

from advisor.recorder.gradients import UnusedGradientFinder

Reports = list[dict[str, Any]]


def watch_modules(*modules: nn.Module) -> tuple[UnusedGradientFinder, Reports]:
    reports: Reports = []
    watch = UnusedGradientFinder([get_ident()], lambda kind, data: reports.append(data))
    for module in modules:
        watch.add_module(module)
    watch.install()
    return watch, reports


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 12) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def test_untrained_base_is_found_with_its_unused_gradients() -> None:
    model = net()
    watch, reports = watch_modules(model)
    train(model, torch.optim.SGD(model[2].parameters(), 1e-3))
    watch.remove()
    assert len(reports) == 1
    assert (reports[0]["unused"], reports[0]["total"]) == (4, 6)
    assert reports[0]["bytes"] == 4 * (4 * 8 + 8 + 8 * 8 + 8)
    assert [n < 0 for n in reports[0]["order"]] == [True] * 4 + [False] * 2


def test_untrained_model_is_named_by_its_class() -> None:
    class Teacher(nn.Sequential):
        pass

    teacher, student = Teacher(net()), nn.Sequential(nn.Linear(4, 3))
    watch, reports = watch_modules(teacher, student)
    optimizer = torch.optim.SGD(student.parameters(), 1e-3)
    for _ in range(12):
        (teacher(torch.ones(2, 4)) - student(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.zero_grad()
    watch.remove()
    assert [event["models"] for event in reports] == [["Teacher"]]
    watch, reports = watch_modules(student[0], student)
    train(student, torch.optim.SGD([student[0].bias], 1e-3))
    watch.remove()
    assert [event["models"] for event in reports] == [[]]


def test_frozen_base_and_full_training_give_no_warning() -> None:
    before = len(optim._global_optimizer_pre_hooks)
    trainable, frozen = net(), net()
    frozen[0].requires_grad_(False)
    for model in (trainable, frozen):
        _, reports = watch_modules(model)
        train(model, torch.optim.SGD(model.parameters(), 1e-3))
        assert reports == []
        assert len(optim._global_optimizer_pre_hooks) == before


def test_later_optimizer_step_corrects_the_record() -> None:
    model = net()
    often, seldom = (torch.optim.SGD(model[n : n + 2].parameters(), 1e-3) for n in (0, 2))
    watch, reports = watch_modules(model)
    train(model, often)
    train(model, often, seldom, steps=1)
    watch.remove()
    assert [event["unused"] for event in reports] == [2, 0]


def test_leftover_gradients_and_manual_updates_are_ignored() -> None:
    model = net()
    train(model, steps=1)
    model[0].weight.grad, model[0].bias.grad = torch.ones(8, 4), torch.ones(8)
    watch, reports = watch_modules(model)
    optimizer = torch.optim.SGD(model[2].parameters(), 1e-3)
    for _ in range(12):
        model[1:](torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter -= 1e-3 * parameter.grad
        optimizer.step()
        model[1:].zero_grad()
    watch.remove()
    assert reports == []


def test_copies_in_another_precision_are_not_a_reason_to_speak() -> None:
    model = net()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    watch, reports = watch_modules(model)
    train(model, torch.optim.SGD(copies, 1e-3))
    watch.remove()
    assert reports == []


def test_gradient_tracking_keeps_no_references() -> None:
    model = net()
    watch, _ = watch_modules(model)
    optimizer = torch.optim.SGD(model[2].parameters(), 1e-3)
    train(model, optimizer)
    references = [ref(model), ref(model[0].weight), ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [each() for each in references] == [None] * 3
    watch.remove()


def train_gan(*, detach: bool = False, to_none: bool = True, rounds: int = 1) -> Reports:
    """Train a generator and a discriminator in turn, as GANs do."""
    maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    watch, reports = watch_modules(maker, judge)
    of_maker, of_judge = (torch.optim.SGD(net.parameters(), 1e-3) for net in (maker, judge))
    for _ in range(8):
        for _ in range(rounds):
            fake = maker(torch.ones(2, 4))
            of_judge.zero_grad(set_to_none=to_none)
            judge(fake.detach() if detach else fake).sum().backward()
            of_judge.step()
        of_maker.zero_grad(set_to_none=to_none)
        judge.requires_grad_(False)
        judge(maker(torch.ones(2, 4))).sum().backward()
        judge.requires_grad_(True)
        of_maker.step()
    watch.remove()
    return reports


def test_gradients_dropped_before_the_optimizer_step_are_found() -> None:
    before = len(optim._global_optimizer_pre_hooks)
    (reports,) = train_gan()
    (only,) = reports["passes"]  # that of the discriminator's loss
    assert (only["unused"], only["total"]) == (2, 4)
    assert only["shapes"] == [[8, 4], [8], [1, 8]] or only["shapes"][0] == [8, 4]
    assert [n < 0 for n in only["order"]] == [True, True, False, False]
    # the discriminator may step several times for each step of the generator
    for rounds in (2, 5):
        (reports,) = train_gan(rounds=rounds)
        assert [each["order"] for each in reports["passes"]] == [only["order"]]
        assert train_gan(detach=True, rounds=rounds) == []
    assert train_gan(detach=True) == []
    assert train_gan(to_none=False) == []  # zeroed in place: looks like added up
    assert len(optim._global_optimizer_pre_hooks) == before


def test_optimizers_that_share_a_backward_drop_nothing() -> None:
    model = net()
    _, reports = watch_modules(model)
    parts = (model[0], model[1], model[2])
    train(model, *(torch.optim.SGD(part.parameters(), 1e-3) for part in parts), steps=12)
    assert reports == []


def test_gradients_summed_over_several_losses_are_used() -> None:
    """The second loss adds to gradients that its own optimizer has not used yet."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    _, reports = watch_modules(first, second)
    one, other = (torch.optim.SGD(part.parameters(), 1e-3) for part in (first, second))
    for _ in range(12):
        second(first(torch.ones(2, 4))).sum().backward()
        one.step()
        one.zero_grad()
        second(torch.ones(2, 4)).sum().backward()
        other.step()
        other.zero_grad()
    assert reports == []
