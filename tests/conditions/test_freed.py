"""What a call knew of a model goes with the model: nothing here or in dynamo keeps it alive."""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile.dynamo_graphs import CompiledCall, own_code
from attnres_compile.verification import check
from tests.helpers import randomize_queries, relative_error
from tests.models import build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")
X = example()


def _pause(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def explained(model: nn.Module) -> None:
    ac.explain(model, X, CONFIG)


def refused(model: nn.Module) -> None:
    with pytest.raises(ac.NoStreamError):
        ac.transform(model, X, ac.AttnResConfig(min_sublayers=99))


def fed_wrongly(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="positional"):
        ac.transform(model, (X, X, X, X), CONFIG)


def trained(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    model(X).sum().backward()


def reported(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    str(ac.report(model)), ac.pseudo_queries(model)


def reverted(model: nn.Module) -> None:
    trained(model)
    ac.revert(model)
    model(X)


def copied(model: nn.Module) -> None:
    trained(model)
    copy.deepcopy(model)(X)


def differentiated(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    weights = dict(model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(weights)


def mapped(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    torch.vmap(model)(X)


def verified(model: nn.Module) -> None:
    ac.verify(model, X, CONFIG)


def verified_in_full(model: nn.Module) -> None:
    check(model, X, CONFIG, lowerings=("eager",))


def checked(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG, verify=True)
    model(X)


def looked_at(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    ac.depth_weights(model, X)


def compiled_here(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="attnres", options={"num_blocks": 2, "lowering": "eager"})
    compiled(X)
    ac.depth_weights(compiled, X)


def compiled_again(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    torch.compile(model, backend="attnres", options={"lowering": "eager"})(X).sum().backward()


def exported(model: nn.Module) -> None:
    ac.export_program(model, X, CONFIG)


def not_exported(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    with pytest.raises(Exception, match="attention"):
        torch.export.export(model, (X,), strict=False)


def as_a_graph(model: nn.Module) -> None:
    ac.rewrite_graph(fx.symbolic_trace(model, concrete_args={"scale": None}), (X,), CONFIG)


def saved(model: nn.Module) -> None:
    ac.transform(model, X, CONFIG)
    model.load_state_dict(copy.deepcopy(model.state_dict()))


USES = (
    *(explained, refused, fed_wrongly, trained, reported, reverted, copied, differentiated, mapped, verified),
    *(verified_in_full, checked, looked_at, compiled_here, compiled_again, exported, not_exported, as_a_graph, saved),
)


@pytest.mark.parametrize("use", USES)
def test_model_and_weights_are_freed(use: Callable[[nn.Module], None]) -> None:
    """Without ``torch._dynamo.reset()``, which a program does not call."""
    model = build()
    kept = [weakref.ref(model), weakref.ref(model.encoder), weakref.ref(model.encoder.layers[0].mixer.weight)]
    use(model)
    del model
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 3


@pytest.mark.parametrize("use", [explained, trained, reverted], ids=lambda use: use.__name__)
def test_model_with_a_graph_break_is_freed(use: Callable[[nn.Module], None]) -> None:
    model = build(between=_pause)
    kept = [weakref.ref(model), weakref.ref(model.encoder.layers[0].mixer.weight)]
    use(model)
    del model
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 2


@pytest.mark.parametrize(("use", "times"), [(explained, 20), (reverted, 8)])
def test_many_conversions_hold_what_one_does(use: Callable[[nn.Module], None], times: int) -> None:
    """Modules, parameters and compiled code. What dynamo and the test's log keep of each compilation, guards and graphs
    without weights, is of no model.
    """

    def held() -> Counter[str]:
        gc.collect()
        modules = [o for o in gc.get_objects() if isinstance(o, nn.Module) and not isinstance(o, fx.GraphModule)]
        found = Counter(type(o).__name__ for o in modules)
        found["parameters"] = sum(type(o) is nn.Parameter for o in gc.get_objects())
        # By code: what dynamo has made of it, for good if nobody takes it away.
        found["code"] = len(torch._dynamo.utils.orig_code_map.refs)
        return found

    def once() -> None:
        use(build(layers=2))

    once()
    once()
    before = held()
    for _ in range(times):
        once()
    assert held() - before == Counter()


def test_a_backend_is_told_whose_graph_it_compiles() -> None:
    """Two threads compile at once, each for its own: no graph comes to the other's compiler."""
    start = threading.Barrier(2)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def work(name: str, width: int) -> None:
        def compiler(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            seen[name] += [value.shape[-1] for value in inputs if isinstance(value, Tensor)]
            return module.forward

        def body(x: Tensor) -> Tensor:
            return x.sin() + x

        start.wait(60)
        for _ in range(5):
            CompiledCall(own_code(body, name), compiler)(torch.zeros(3, width))

    threads = [threading.Thread(target=work, args=each) for each in (("a", 5), ("b", 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert seen == {"a": [5] * 5, "b": [7] * 5}


def test_code_of_its_own_goes_with_the_function() -> None:
    def body(x: Tensor) -> Tensor:
        return x + 1

    function = own_code(body, "gone")
    before = len(torch._dynamo.utils.orig_code_map.refs)
    compiled = CompiledCall(function, lambda module, inputs: module.forward)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    assert isinstance(function, types.FunctionType)
    assert len(torch._dynamo.utils.orig_code_map.refs) == before + 1
    del function, compiled
    gc.collect()
    assert len(torch._dynamo.utils.orig_code_map.refs) == before


def test_converted_models_of_one_class_keep_their_own_numbers() -> None:
    """They share the code that dynamo compiles, and what it is told of backends says nothing of a model."""
    models = [build() for _ in range(3)]
    plain = [copy.deepcopy(model) for model in models]
    for seed, model in enumerate(models):
        ac.transform(model, X, CONFIG)
        model(X)
        randomize_queries(ac.pseudo_queries(model), seed)
    results = [model(X) for model in models]
    assert relative_error(results[0], results[1]) > 1e-6
    for model, original in zip(models, plain, strict=True):
        ac.revert(model)
        assert torch.equal(model(X), original(X))
