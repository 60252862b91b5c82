"""Weights and modules that stand in several places; adapters; quantised linears."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.small import CONFIG, WIDTH, Steps, plain, tokens


def _loop() -> None:
    def step(net: Steps, i: int, x: Tensor) -> Tensor:
        return x + net.f(0, x)

    ac.transform(Steps(step), tokens(), CONFIG)


class _Announced(nn.Module):
    """An adapter that does something dynamo cannot trace."""

    def __init__(self, below: nn.Linear) -> None:
        super().__init__()
        self.below, self.down, self.up = below, nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            warnings.warn("large", stacklevel=1)
        return self.below(x) + self.up(self.down(x))


def _adapter_later() -> None:
    model = ac.transform(Steps(plain), tokens(), CONFIG)
    model.branches[1] = _Announced(model.branches[1])
    model(tokens())


_SHARED = "tests/conditions/test_shared_modules.py::"
_ADAPTERS = "tests/conditions/test_adapters.py::"

CONDITION = Condition(
    order=40,
    title="Shared weights, adapters, quantised linears",
    holds=(
        Holds("tied weights stay tied, and are counted once", (_SHARED + "test_tied_weights_stay_tied",)),
        Holds(
            "with `depth_loops=True`, layers that share their weights (one for all, or some in turn) have a query for "
            "each place in depth, equal to the equations written by hand",
            (
                _SHARED + "test_shared_layers_have_a_query_per_place_in_depth",
                _SHARED + "test_one_layer_under_several_names",
            ),
        ),
        Holds(
            "a layer that comes back once is a layer in two places",
            (_SHARED + "test_a_layer_that_comes_back_once",),
        ),
        Holds(
            "a network that is called several times in one forward, by modules, functions or `torch.func.grad` (energy "
            'and forces): a stream per call, all with one set of queries; with `calls="separate"` a set for each. '
            "Calls are told by the lines and weights of their steps: a graph from `torch.fx.symbolic_trace`, which has "
            "no lines, has a set for each",
            (
                "tests/test_calls.py::test_forces_are_the_gradient_of_the_energy",
                "tests/test_calls.py::test_calls_are_one_network_with_one_set_of_queries",
                "tests/test_calls.py::test_two_networks_in_one_function_have_queries_of_their_own",
                _SHARED + "test_a_module_that_is_called_twice",
            ),
        ),
        Holds(
            "LoRA, DoRA, IA3 and LoHa of PEFT, put in before the conversion: counted right, exact, and trained "
            "together with the queries",
            (_ADAPTERS + "test_adapters_first",),
        ),
        Holds(
            "adapters that are switched off, merged and unloaded",
            (_ADAPTERS + "test_adapters_on_off_and_merged",),
        ),
        Holds(
            "`get_peft_model` on a converted model; it freezes the queries like all that is no adapter, unless "
            '`modules_to_save=["attnres"]` asks for them, which also saves them',
            (
                _ADAPTERS + "test_adapters_put_into_a_converted_model",
                _ADAPTERS + "test_queries_as_modules_to_save",
            ),
        ),
        Holds(
            "linears of int8 and packed four-bit weights, as a matrix made on the fly, an operator of their own, an "
            "`autograd.Function`, a tensor subclass, or a product of integers",
            ("tests/conditions/test_quantised_linears.py::test_quantised_branches_are_sublayers",),
        ),
    ),
    limits=(
        Limit(
            "layers that share their weights, without saying that they are a loop over depth",
            _loop,
            ac.NoStreamError,
            "A loop over time looks the same, and its steps are no depth.",
            "`AttnResConfig(depth_loops=True)`.",
            reason="shared_weights",
        ),
        Limit(
            "an adapter whose code breaks the graph, put into a converted model",
            _adapter_later,
            ac.PlanMismatchError,
            "The queries were made for one graph, and the sources do not cross a break that was not there.",
            "Put the adapter in first and transform then, as the DoRA and LoHa of PEFT need it.",
            foreign=r"(?<=Tracing stops: )[^(]*(?= \()",
        ),
    ),
)
