"""Which optimizer of a script trains the queries, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_the_optimizer_is_built_after_the_first_call(run: Any) -> None:
    ran = run(
        "model = Net()\nmodel(ids())\noptimizer = torch.optim.AdamW(groups(model), lr=0.1)\ntrain(model, optimizer)"
    )
    (held,) = ran.outcome.conversion.held
    assert (held.how, held.group, held.groups, held.lr, held.weight_decay) == ("own", 1, 2, 0.1, 0.0)
    assert ran.told[-1] == "AdamW, group 2 of 2 (lr 0.1, weight decay 0) has the queries among its parameters"
    check(ran)


def check(ran: Any, times: int = 1) -> None:
    """All queries were trained, and each is in the optimizers so many times."""
    assert ran.outcome.ending.error is None
    assert len(ran.queries) == 4
    assert all(norm > 0 for norm in ran.outcome.conversion.moved().values())
    optimizers = [value for value in ran.names.values() if isinstance(value, torch.optim.Optimizer)]
    assert optimizers
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert [held.count(id(query)) for query in ran.queries.values()] == [times] * 4


@pytest.mark.parametrize(
    ("build", "group", "groups"),
    [
        ("AdamW(model.parameters(), lr=0.1)", 0, 1),
        ("AdamW(groups(model), lr=0.1)", 1, 2),
        ("AdamW(groups(model)[::-1], lr=0.1)", 0, 2),
        ("Adam(groups(model), lr=0.1, fused=True)", 1, 2),
        ("Adam(groups(model), lr=0.1, foreach=True)", 1, 2),
        ("SGD(model.parameters(), lr=0.1, momentum=0.9)", 0, 1),
        # Vectors with weight decay are better company than matrices.
        ("AdamW([dict(params=g['params']) for g in groups(model)], lr=0.1)", 1, 2),
        ("AdamW([p for p in model.parameters() if p.dim() > 1], lr=0.1)", 0, 1),
        ("AdamW(model.named_parameters(), lr=0.1)", 0, 1),
    ],
)
def test_an_optimizer_that_was_built_first_is_given_them(run: Any, build: str, group: int, groups: int) -> None:
    ran = run(f"model = Net()\noptimizer = torch.optim.{build}\ntrain(model, optimizer, steps=3)")
    (held,) = ran.outcome.conversion.held
    assert (held.how, held.group, held.groups) == ("added", group, groups)
    assert "; added to " in ran.told[0]
    assert len(ran.told) == 1
    check(ran)
    optimizer = ran.names["optimizer"]
    names = optimizer.param_groups[group].get("param_names")
    assert names is None or names[-4:] == list(ran.outcome.conversion.parameters())
    # What it saves it takes back.
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    index = [id(p) for g in optimizer.param_groups for p in g["params"]].index(id(next(iter(ran.queries.values()))))
    assert index in saved["state"] or "momentum" in build


@pytest.mark.parametrize(
    "schedule",
    [
        "LambdaLR(optimizer, [lambda step: 1 / (step + 1)] * 2)",
        "OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10)",
        "CosineAnnealingLR(optimizer, T_max=5)",
        "ReduceLROnPlateau(optimizer, min_lr=[0.0, 0.0])",
    ],
)
def test_schedulers_that_counted_the_groups(run: Any, schedule: str) -> None:
    ran = run(
        "model = Net()\n"
        "optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)\n"
        f"scheduler = torch.optim.lr_scheduler.{schedule}\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    scaler.scale(loss_of(model)).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)\n"
        "    scaler.step(optimizer); scaler.update()\n"
        "    scheduler.step(*([0.0] if 'Plateau' in type(scheduler).__name__ else []))\n"
        "grads = [p.grad for p in model.parameters()]"
    )
    check(ran)
    # The clipping saw them: the norm of all gradients, queries included, is what was asked for.
    total = torch.stack([grad.norm() for grad in ran.names["grads"]]).norm().item()
    assert total == pytest.approx(1e-3, rel=1e-3)


def test_optimizers_that_take_turns_each_get_them(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "first = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "second = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
        "train(model, first)\ntrain(model, second)"
    )
    assert sorted(held.optimizer for held in ran.outcome.conversion.held) == ["AdamW", "SGD"]
    check(ran, times=2)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("first_call", ["", "model(ids())\n"])
def test_optimizers_that_divide_the_model_up_get_them_once(run: Any, order: int, first_call: str) -> None:
    """Whoever holds the vectors; whether the model was called before they were built or not."""
    ran = run(
        f"model = Net()\n{first_call}"
        "matrices = lambda: torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)\n"
        "vectors = lambda: torch.optim.AdamW([p for p in model.blocks.parameters() if p.dim() < 2], lr=0.1)\n"
        f"a, b = [build() for build in (matrices, vectors)[::{order}]]\n"
        "train(model, a, b)"
    )
    assert [(held.optimizer, held.how) for held in ran.outcome.conversion.held] == [("AdamW", "added")]
    check(ran)


def test_muon_is_not_given_vectors(run: Any) -> None:
    muon = "muon = torch.optim.Muon([p for p in model.blocks.parameters() if p.dim() == 2], lr=0.1)\n"
    ran = run(
        f"model = Net()\n{muon}"
        "adam = torch.optim.AdamW([p for n, p in model.named_parameters() if p.dim() < 2], lr=0.1)\n"
        "train(model, muon, adam)"
    )
    assert [held.optimizer for held in ran.outcome.conversion.held] == ["AdamW"]
    check(ran)
    ran = run(f"model = Net()\n{muon}train(model, muon)")
    assert ran.outcome.ending.error is None
    assert ran.outcome.conversion.held == []


def test_other_models_optimizers_are_left_alone(run: Any) -> None:
    ran = run(
        "other, model = Plain(), Net()\n"
        "other_optimizer = torch.optim.AdamW(other.parameters())\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "other(torch.randn(2, 20)).sum().backward()\n"
        "other_optimizer.step()\n"
        "train(model, optimizer)"
    )
    check(ran)
    assert len(ran.names["other_optimizer"].param_groups[0]["params"]) == 4


def test_a_copied_optimizer_is_found(run: Any) -> None:
    ran = run(
        "import copy\n"
        "model = Net()\n"
        "model, optimizer = copy.deepcopy((model, torch.optim.AdamW(model.parameters(), lr=0.1)))\n"
        "train(model, optimizer)"
    )
    assert [held.how for held in ran.outcome.conversion.held] == ["added"]
    check(ran)


def test_a_second_optimizer_for_a_later_phase(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train(model, optimizer)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)\n"
        "train(model, optimizer)"
    )
    assert [(held.optimizer, held.how) for held in ran.outcome.conversion.held] == [("SGD", "added"), ("AdamW", "own")]
    check(ran)


def test_without_an_optimizer(run: Any) -> None:
    assert run("Net()(ids())").outcome.conversion.held == []
