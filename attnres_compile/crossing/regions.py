"""Modules that the user compiled on their own, inside a module whose stream runs through them.

In a call of that module they are compiled by this package instead, all through one code object, so that layers of one
kind share their graphs; called in any other way they run what the user made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from attnres_compile.crossing.journey import current
from attnres_compile.crossing.piece import compiled_in_pieces
from attnres_compile.crossing.route import Route
from attnres_compile.dynamo_graphs import own_code


def compiled(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules of ``model`` that are compiled on their own, the outermost of each nest."""
    found: list[str] = []
    for path, module in model.named_modules():
        own = _is_wrapper(module) or module._compiled_call_impl is not None
        if own and not any(is_inside(path, other) for other in found):
            found.append(path)
    return tuple(found)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def is_inside(path: str, other: str) -> bool:
    """Whether the module at ``path`` is a part of the one at ``other``."""
    return path != other and (not other or path.startswith(other + "."))


class Regions:
    """The compiled calls of one module's regions, while that module's converted forward runs."""

    def __init__(self, owner: nn.Module, paths: Iterable[str], route: Route) -> None:
        own = own_code(_call, f"{type(owner).__name__}_region")
        self.call = compiled_in_pieces(own, route)
        for path in paths:
            region = owner.get_submodule(path)
            if _is_wrapper(region):
                _wrap(region, "forward", region.get_submodule("_orig_mod"), self)
            else:
                _wrap(region, "_compiled_call_impl", region, self)


class RegionCall:
    """What stands in the place of a region's own compiled call."""

    def __init__(self, region: nn.Module, previous: Callable[..., Any] | None, regions: Regions) -> None:
        self.region = region
        self.previous = previous
        self.regions = regions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or current() is None:
            call = self.previous if self.previous is not None else self.region._call_impl
            return call(*args, **kwargs)
        return self.regions.call(self.region, args, kwargs)


def unwrap(owner: nn.Module, paths: Iterable[str]) -> None:
    """Give the regions of ``owner`` their own compiled calls back."""
    for path in paths:
        region = owner.get_submodule(path)
        for name in ("forward", "_compiled_call_impl"):
            call = region.__dict__.get(name)
            if isinstance(call, RegionCall):
                region.__dict__[name] = call.previous


def _wrap(holder: nn.Module, name: str, region: nn.Module, regions: Regions) -> None:
    previous = holder.__dict__.get(name)
    if isinstance(previous, RegionCall):
        previous = previous.previous
    holder.__dict__[name] = RegionCall(region, previous, regions)


def _call(region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return region._call_impl(*args, **kwargs)
