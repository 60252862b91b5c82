"""Models that a data-parallel wrapper knows already, before there are pseudo-queries.

``DistributedDataParallel`` writes down the parameters whose gradients it averages when it is built, and tells nobody:
queries that come later would train apart on every process.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attnres_compile.errors import AlreadyDistributedError

_CARED_FOR: contextvars.ContextVar[bool] = contextvars.ContextVar("attnres_gradients_cared_for", default=False)


@contextlib.contextmanager
def gradients_cared_for() -> Iterator[None]:
    """While open, :func:`refuse` lets models pass: the caller has the queries' gradients averaged."""
    token = _CARED_FOR.set(True)
    try:
        yield
    finally:
        _CARED_FOR.reset(token)


def refuse(model: nn.Module) -> None:
    """Raise where a wrapper that is alive averages gradients of parameters of ``model``.

    It may be ``model`` itself, a part of it, or something around it that ``model`` does not know of.

    Raises:
        AlreadyDistributedError: there is one.
    """
    if _CARED_FOR.get() or not dist.is_available() or not dist.is_initialized():
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not _shares(own):
        return
    gc.collect()  # One that nobody holds may still be there.
    if _shares(own):
        raise AlreadyDistributedError(
            f"the parameters of {type(model).__name__} are in a DistributedDataParallel already, which would never "
            "average the gradients of pseudo-queries that are added now: they would train apart on every process",
            remedy="Call attnres_compile.transform on the model first and wrap the result, on every process alike",
        )


def _shares(parameters: set[int]) -> bool:
    # By parameters and not by modules: composable replicate() wraps a list of them.
    return any(
        id(parameter) in parameters
        for wrapper in gc.get_objects()
        # By its type: a proxy of something that is gone raises when it is asked what it is.
        if issubclass(type(wrapper), DistributedDataParallel)
        for parameter in wrapper.parameters()
    )


__all__ = ["gradients_cared_for", "refuse"]
