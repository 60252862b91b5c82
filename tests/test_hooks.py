"""Hooks on inner modules that come and go after the first call: as on the original, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils as utils
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrize, prune

import attnres_compile as ac
from tests.helpers import relative_error

EAGER = ac.AttnResConfig(num_blocks=None, lowering="eager")
Register = Callable[[nn.Module], Callable[[], Any]]


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        branch = self.linear(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + branch


def build(breaks: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block(breaks) for _ in range(4)), nn.LayerNorm(8)).double().eval()


class Upper(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu()


def linear(model: nn.Module) -> nn.Module:
    return model.get_submodule("3.linear")


def hook(method: str, function: Callable[..., Any], where: str = "3.linear", **options: Any) -> Register:
    return lambda model: getattr(model.get_submodule(where), method)(function, **options).remove


def other(register: Callable[[nn.Module], Any], remove: Callable[[nn.Module], Any]) -> Register:
    def both(model: nn.Module) -> Callable[[], Any]:
        register(linear(model))
        return lambda: remove(linear(model))

    return both


def bare(module: nn.Module) -> Any:
    return parametrize.remove_parametrizations(module, "weight")


KINDS: dict[str, Register] = {
    "of a block": hook("register_forward_hook", lambda module, args, out: out * 3, "3"),
    "forward": hook("register_forward_hook", lambda module, args, out: out * 3),
    "forward, keywords": hook("register_forward_hook", lambda module, args, kwargs, out: out / 2, with_kwargs=True),
    "forward, always": hook("register_forward_hook", lambda module, args, out: out * 3, always_call=True),
    "before": hook("register_forward_pre_hook", lambda module, args: (args[0] * 2,)),
    "before, keywords": hook("register_forward_pre_hook", lambda m, args, kw: ((args[0] * 2,), kw), with_kwargs=True),
    "parametrisation": other(lambda m: parametrize.register_parametrization(m, "weight", Upper()), bare),
    "weight norm": other(lambda m: utils.weight_norm(m).weight_g.data.mul_(2), utils.remove_weight_norm),
    "pruning": other(lambda m: prune.l1_unstructured(m, "weight", amount=0.5), lambda m: prune.remove(m, "weight")),
    "spectral norm": other(utils.spectral_norm, utils.remove_spectral_norm),
}


def ran(model: nn.Module) -> tuple[Tensor, ...]:
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = model(x)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), [x, model[0].weight, model[4].linear.weight])


def transformed(model: nn.Module) -> nn.Module:
    return ac.transform(copy.deepcopy(model), torch.randn(2, 3, 8, dtype=torch.float64), EAGER)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(relative_error(a, b) <= 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_after_the_first_call_runs_and_goes(kind: str) -> None:
    original, register = build(), KINDS[kind]
    model = transformed(original)
    plain = ran(original)
    assert_same(ran(model), plain)
    removes = []
    for each in (original, model):
        torch.manual_seed(1)
        removes.append(register(each))
    changed = ran(original)
    assert relative_error(changed[0], plain[0]) > 1e-3, "the hook does something"
    assert_same(ran(model), changed)
    for remove in removes:
        remove()
    assert_same(ran(model), ran(original))


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "through graph breaks"])
def test_a_hook_that_looks_sees_each_call_and_costs_one_compilation(breaks: bool) -> None:
    model = transformed(build(breaks))
    ran(model)
    for _ in range(12):  # more often than dynamo makes variants of one code
        seen: list[Tensor] = []
        handle = model[2].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.detach()))
        ran(model)
        ran(model)
        handle.remove()
        ran(model)
        assert len(seen) == 2


@pytest.mark.parametrize("kind", ["forward", "before"])
def test_through_graph_breaks(kind: str) -> None:
    original = build(breaks=True)
    model = transformed(original)
    assert_same(ran(model), ran(original))
    removes = [KINDS[kind](each) for each in (original, model)]
    assert_same(ran(model), ran(original))
    for remove in removes:
        remove()
    assert_same(ran(model), ran(original))


def test_what_changes_a_stream_between_graphs_is_refused() -> None:
    model = transformed(build(breaks=True))
    plain = ran(model)
    remove = KINDS["of a block"](model)
    with pytest.raises(ac.GraphBreakError, match="a residual stream is lost"):
        ran(model)
    remove()
    assert_same(ran(model), plain)


@pytest.mark.parametrize("where", ["2", "3.norm", "3"])
def test_what_only_looks_changes_nothing_at_any_queries(where: str) -> None:
    model = transformed(build())
    with torch.no_grad():
        for query in ac.pseudo_queries(model).values():
            query.normal_()
    plain = ran(model)
    seen: list[Tensor] = []
    for method in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(model.get_submodule(where), method)(lambda m, args, *out: seen.append(args[0].detach().abs()))
        assert_same(ran(model), plain)
        handle.remove()
    assert len(seen) == 2 and relative_error(seen[1], seen[0]) == 0.0


def test_hooks_of_all_modules() -> None:
    original = build()
    model = transformed(original)
    plain = ran(model)
    for register, hooked in (
        (
            of_all.register_module_forward_hook,
            lambda module, args, out: out.sin() if type(module) is nn.Linear else None,
        ),
        (of_all.register_module_forward_pre_hook, lambda m, args: (args[0].sin(),) if type(m) is nn.Linear else None),
    ):
        handle = register(hooked)
        try:
            assert_same(ran(model), ran(original))
            assert relative_error(ran(model)[0], plain[0]) > 1e-3
        finally:
            handle.remove()
        assert_same(ran(model), plain)


def test_hooks_of_all_modules_through_graph_breaks_are_refused() -> None:
    model = transformed(build(breaks=True))
    plain = ran(model)
    handle = of_all.register_module_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(ac.PlanMismatchError, match="hooks of all modules"):
            model(torch.randn(2, 3, 8, dtype=torch.float64))
    finally:
        handle.remove()
    assert_same(ran(model), plain)


@pytest.mark.parametrize("method", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_refused(method: str) -> None:
    model = transformed(build())
    ran(model)
    handle = getattr(linear(model), method)(lambda *args: None)
    with pytest.raises(ac.PlanMismatchError, match="backwards hooks"):
        ran(model)
    handle.remove()
    ran(model)
