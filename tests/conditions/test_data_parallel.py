"""Data-parallel wrappers that were there first: refused, whatever it is that ``transform`` is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import attnres_compile as ac
from tests.helpers import randomize_queries, relative_error
from tests.models import build, example

CONFIG = ac.AttnResConfig(num_blocks=3, lowering="eager")


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def around(model: nn.Module) -> tuple[nn.Module, object]:
    wrapper = DistributedDataParallel(model)
    return wrapper, wrapper


def inside(model: nn.Module) -> tuple[nn.Module, object]:
    wrapper = DistributedDataParallel(model)
    return wrapper.module, wrapper


def further_out(model: nn.Module) -> tuple[nn.Module, object]:
    wrapper = DistributedDataParallel(nn.Sequential(model, nn.Flatten()))
    return model, wrapper


def a_part(model: nn.Module) -> tuple[nn.Module, object]:
    wrapper = DistributedDataParallel(model.get_submodule("encoder"))
    return model, wrapper


def composable(model: nn.Module) -> tuple[nn.Module, object]:
    from torch.distributed._composable.replicate import replicate

    replicate(model)
    model(example())  # It makes its wrapper at the first call.
    return model, None


@pytest.mark.parametrize("wrap", [around, inside, further_out, a_part, composable])
@pytest.mark.parametrize("verify", [False, True])
def test_a_wrapper_that_was_there_first_is_refused(
    wrap: Callable[[nn.Module], tuple[nn.Module, object]], verify: bool
) -> None:
    given, kept = wrap(build())
    keys = list(given.state_dict())
    with pytest.raises(ac.AlreadyDistributedError, match=r"train apart .*transform on the model first"):
        ac.transform(given, example(), CONFIG, verify=verify)
    assert list(given.state_dict()) == keys
    assert ac.explain(kept if kept is given else build(), example(), CONFIG).streams


def test_a_wrapper_of_other_parameters_or_of_the_past_is_no_matter() -> None:
    other, model = DistributedDataParallel(build()), build()
    ac.transform(model, example(), CONFIG)
    past = build()
    wrapper = DistributedDataParallel(past)
    wrapper.myself = wrapper  # What only the garbage collector can free.
    of_something_gone = weakref.proxy(nn.Linear(1, 1))
    del wrapper
    ac.transform(past, example(), CONFIG)
    assert ac.pseudo_queries(model).keys() == ac.pseudo_queries(past).keys()
    del other, of_something_gone
    gc.collect()


def test_transform_first_is_right() -> None:
    """The wrapper averages the queries' gradients with all others: here they are one process's own."""

    def trained(model: nn.Module, call: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        out = call(example())
        out.square().mean().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return out.detach(), found

    model, alone = build(), build()
    for each in (model, alone):
        ac.transform(each, example(), CONFIG)
        randomize_queries(ac.pseudo_queries(each))
    out, gradients = trained(model, DistributedDataParallel(model))
    want, wanted = trained(alone, alone)
    assert gradients.keys() == wanted.keys()
    assert any("attnres" in name for name in gradients)
    assert relative_error(out, want) < 1e-6
    assert all(relative_error(gradients[name], wanted[name]) < 1e-5 for name in wanted)
    torch._dynamo.reset()
