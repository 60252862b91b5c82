"""FSDP2: hooks on every layer that gather and free its weights, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attnres_compile as ac
from tests.helpers import randomize_queries, relative_error
from tests.models import SITES, Model, build, example

CONFIG = ac.AttnResConfig(num_blocks=3, lowering="eager")


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def layers(model: Model, mesh: object) -> None:
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)


def layers_and_root(model: Model, mesh: object) -> None:
    layers(model, mesh)
    fully_shard(model, mesh=mesh)


def compiled_layers(model: Model, mesh: object) -> None:
    for index, layer in enumerate(model.encoder.layers):
        model.encoder.layers[index] = torch.compile(layer, backend="eager")
    layers_and_root(model, mesh)


def layers_compiled_in_place(model: Model, mesh: object) -> None:
    for layer in model.encoder.layers:
        layer.compile(backend="eager")
    layers_and_root(model, mesh)


def trained(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients, whole and not sharded."""
    out = model(x)
    out.square().mean().backward()
    whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in _named(model)}
    return out.detach(), whole


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("shard", [layers, layers_and_root, compiled_layers, layers_compiled_in_place])
def test_sharded_layers_are_converted(shard: Callable[[Model, object], None], mesh: object) -> None:
    """Zero queries change nothing, and random ones compute what they do in the model that is not sharded."""
    x = example()
    plain, whole = build(), ac.transform(build(), x, CONFIG)
    want = trained(plain, x)
    model = build()
    shard(model, mesh)
    ac.transform(model, x, CONFIG)
    assert len(ac.pseudo_queries(model)) == SITES
    out, gradients = trained(model, x)
    assert relative_error(out, want[0]) < 1e-6
    assert max(relative_error(gradients[name], gradient) for name, gradient in want[1].items()) < 1e-5
    model.zero_grad()
    randomize_queries(ac.pseudo_queries(model))
    randomize_queries(ac.pseudo_queries(whole))
    out, gradients = trained(model, x)
    mixed = trained(whole, x)
    assert relative_error(mixed[0], want[0]) > 1e-2
    assert relative_error(out, mixed[0]) < 1e-6
    assert set(gradients) == set(mixed[1])
    assert max(relative_error(gradients[name], gradient) for name, gradient in mixed[1].items()) < 1e-5
