"""Models that are alive in this process: whose parameters these are, and whether there are copies."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from attnres_compile.running import wrappers


def owner_of(tensors: Iterable[Tensor]) -> nn.Module | None:
    """The smallest model that holds all of these parameters; ``None`` if there is none, or it is wrapped already.

    Of modules that hold the same parameters the outermost with a ``forward`` of its own is the model.
    """
    wanted = {id(tensor) for tensor in tensors}
    holders: list[tuple[int, nn.Module]] = []
    for module in _modules():
        held = _parameters(module)
        if wanted and wanted <= held:
            holders.append((len(held), module))
    if not holders:
        return None
    least = min(count for count, _ in holders)
    smallest = [module for count, module in holders if count == least]
    if any(wrappers.is_parallel(module) for module in smallest):
        return None
    models = [m for m in smallest if wrappers.inner(m) is m and type(m).forward is not nn.Module.forward]
    parts = {id(part) for model in models for part in model.modules() if part is not model}
    return next((model for model in models if id(model) not in parts), None)


def copies_of(model: nn.Module) -> int:
    """Number of other models of the same class that share no parameter with ``model``."""
    own, parts = _parameters(model), {id(part) for part in model.modules()}
    others = [m for m in _modules() if type(m) is type(model) and id(m) not in parts]
    return sum(bool(held := _parameters(other)) and not held & own for other in others)


def compiled_around(model: nn.Module) -> list[OptimizedModule]:
    """What ``torch.compile`` has put around ``model``."""
    return [m for m in _modules() if isinstance(m, OptimizedModule) and wrappers.inner(m) is model]


def _modules() -> list[nn.Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def _parameters(module: nn.Module) -> set[int]:
    try:
        return {id(parameter) for parameter in module.parameters()}
    except Exception:  # somebody's module whose __init__ is not done, or failed
        return set()
