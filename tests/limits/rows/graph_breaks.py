"""Graph breaks in the loop over layers, layers compiled on their own, hooks on layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.small import CONFIG, Steps, tokens


def _printing(net: Steps, i: int, x: Tensor) -> Tensor:
    print(end="")
    return x + net.f(i, x)


@torch.compiler.disable
def _added_outside(net: Steps, i: int, x: Tensor) -> Tensor:
    return x + net.f(i, x)


def _cloned(net: Steps, i: int, x: Tensor) -> Tensor:
    return _uncompiled_clone(x + net.f(i, x))


@torch.compiler.disable
def _uncompiled_clone(x: Tensor) -> Tensor:
    return x.clone()


def _transforming(step: Callable[[Steps, int, Tensor], Tensor]) -> Callable[[], object]:
    return lambda: ac.transform(Steps(step), tokens(), CONFIG)


def _break_that_came_later() -> None:
    model = ac.transform(Steps(lambda net, i, x: x + net.f(i, x)), tokens(), CONFIG)
    model.step = _printing
    model(tokens())


_TESTS = "tests/test_graph_breaks.py::"

CONDITION = Condition(
    order=20,
    title="Graph breaks, regional compilation, hooks on layers",
    holds=(
        Holds(
            "hooks on inner modules, or on all modules, that are registered or removed after the first call, "
            "parametrisations and pruning: they run as on the original. Hooks on the backward of a module raise "
            "`PlanMismatchError`, because dynamo does not trace them. Inside a `torch.compile` of your own, dynamo "
            "does not look for hooks that came later, converted or not: "
            "`torch._dynamo.config.skip_nnmodule_hook_guards = False` makes it",
            (
                "tests/test_hooks.py::test_what_comes_after_the_first_call_runs_and_goes",
                "tests/test_hooks.py::test_through_graph_breaks",
                "tests/test_hooks.py::test_hooks_of_all_modules",
                "tests/test_hooks.py::test_backward_hooks_are_refused",
            ),
        ),
        Holds(
            "prints, values read from the stream, data-dependent branches, hooks (also ones that return views) and "
            "attention that is not compiled: the stream goes on behind the break, and the depth attention is that of "
            "the same network without a break, at zero and at random queries, gradients included",
            (
                _TESTS + "test_depth_attention_goes_on_behind_the_break",
                _TESTS + "test_every_layout",
                _TESTS + "test_batch_sizes_modes_and_no_grad",
            ),
        ),
        Holds(
            "layers share dynamo's graphs, and each graph has one variant per number of sources and pattern of block "
            "ends, for 4 layers and for 12",
            (_TESTS + "test_layers_share_graphs_and_variants",),
        ),
        Holds(
            "layers that are compiled on their own, by `layer.compile()` or `torch.compile(layer)`",
            (_TESTS + "test_layers_that_are_compiled_on_their_own",),
        ),
        Holds(
            "such models are reverted, copied, pickled, exported, run inside an outer `torch.compile` and in threads",
            (
                _TESTS + "test_it_is_reverted_copied_pickled_and_exported",
                _TESTS + "test_inside_an_outer_compiler",
                _TESTS + "test_threads_and_models_of_one_class_are_independent",
            ),
        ),
        Holds(
            "a stream that is written to, detached, replaced or taken another way between two graphs raises",
            (
                _TESTS + "test_a_stream_that_changes_behind_our_back_raises",
                _TESTS + "test_a_branch_taken_the_other_way_raises",
                _TESTS + "test_steps_in_another_order_raise",
                _TESTS + "test_other_layers_raise",
                _TESTS + "test_checkpointing_outside_of_the_graphs_raises",
            ),
        ),
        Holds(
            "FSDP2: `fully_shard` on layers before `transform`, on the root as well, and around layers that are "
            "compiled on their own, in either way",
            ("tests/conditions/test_sharded.py::test_sharded_layers_are_converted",),
        ),
    ),
    limits=(
        Limit(
            "the residual add itself in code that is not compiled",
            _transforming(_added_outside),
            ac.GraphBreakError,
            "Depth attention is put where the adds are, and there is no graph there.",
            "Leave the add to the compiled part, and disable the branch alone.",
        ),
        Limit(
            "code between two graphs that hands on a clone of the stream",
            _transforming(_cloned),
            ac.GraphBreakError,
            "Nothing shows that a copy is the same sum.",
            "Return the tensor itself, or a view of it.",
        ),
        Limit(
            "a break that is added after `transform`",
            _break_that_came_later,
            ac.PlanMismatchError,
            "The model was found whole, and nothing was recorded that would carry its stream over a break.",
            "Revert the model, and transform it as it is now.",
        ),
    ),
    notes=(
        "FSDP2 is tested with gloo and one process. Layers that are sharded one by one after `transform` raise "
        "`PlanMismatchError`. An attention of transformers that is not compiled was tried by hand, and was exact.",
        "A write through `.data` that begins after `transform` is not seen: torch does not count such writes. One that "
        "is there at `transform` is refused.",
        "`attnres weights` and `torch.func` refuse models whose stream runs through breaks.",
    ),
)
