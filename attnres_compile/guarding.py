"""A model that is only looked at: whatever a run of it changes is put back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.comparison import same_randomness
from attnres_compile.errors import AttnResError


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Out of the caller's ``inference_mode``, where no tensor can be made that is trained.

    Gradients are recorded if they were: ``torch.inference_mode(False)`` by itself turns them on.
    """
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Guard]:
    """Puts back what runs of ``model`` inside this context change, and turns gradients off.

    Buffers, attributes of modules (counters, caches, lists) and random state are put back. Parameters are not copied:
    what is about to write into one hands it to :meth:`Guard.keep` first.

    Raises:
        AttnResError: a parameter was written into that nobody kept.
    """
    guard = Guard(model)
    with same_randomness(), torch.inference_mode(False), torch.no_grad():
        try:
            yield guard
        finally:
            guard.put_back()
    guard.check()


class Guard:
    """What a model was before it ran."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(dict.fromkeys(model.modules()))
        self._namespaces = [(module, dict(module.__dict__)) for module in modules]
        values = [value for _, namespace in self._namespaces for value in namespace.values()]
        # Parameters, buffers and children stand in dicts of the module, so these are held too.
        sharded = {id(module._parameters) for module in _sharded(modules)}
        self._containers = [
            (value, _shallow(value))
            for value in values
            if isinstance(value, (dict, list, set)) and id(value) not in sharded
        ]
        tensors = {id(value): value for value in self._tensors(values)}
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        parameters = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_inference()]
        self._parameters = [(name, parameter, parameter._version) for name, parameter in parameters]
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def _tensors(self, values: list[Any]) -> Iterator[Tensor]:
        inside = [item for value, kept in self._containers for item in (kept.values() if _is_dict(value) else kept)]
        for value in (*values, *inside):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
                yield value

    def keep(self, parameter: Tensor) -> None:
        """Copy a parameter that is about to be written into."""
        if id(parameter) not in self._written:
            self._written[id(parameter)] = parameter, parameter.detach().clone()

    def put_back(self) -> None:
        """Everything that was held, where it changed."""
        for module, namespace in self._namespaces:
            now = module.__dict__
            for name in [name for name in now if name not in namespace]:
                del now[name]
            for name, value in namespace.items():
                if now.get(name) is not value:
                    now[name] = value
        for value, kept in self._containers:
            if not _same(value, kept):
                value.clear()
                value.extend(kept) if isinstance(value, list) else value.update(kept)
        for tensor, kept in self._kept:
            # Not by the version: batch norm writes its statistics without a new one. And through ``data``, so that
            # there is none from here, which an open autograd graph would stumble over.
            if tensor.shape != kept.shape:
                tensor.data = kept
            elif not torch.equal(tensor, kept):
                tensor.data.copy_(kept)
        for parameter, kept in self._written.values():
            parameter.data.copy_(kept)

    def check(self) -> None:
        """Raises:
        AttnResError: see :func:`untouched`.
        """
        changed = [
            name for name, p, version in self._parameters if p._version != version and id(p) not in self._written
        ]
        if changed:
            raise AttnResError(
                f"the model writes into its own parameter {changed[0]!r} while it runs, outside of its residual "
                "streams, and that cannot be undone",
                remedy="Call model.eval() if it does so in training mode alone, or give copy.deepcopy(model)",
            )


def _sharded(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules whose parameters FSDP2 exchanges for others while they run. It knows which stand there by a record of
    its own, so only it may put them back.
    """
    for module in modules:
        # By name: a build of torch need not have it.
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            yield from module.modules()


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _same(value: Any, kept: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == list(kept) and all(value[key] is kept[key] for key in kept)
    if isinstance(value, set):
        return value == set(kept)
    return len(value) == len(kept) and all(a is b for a, b in zip(value, kept, strict=True))


# ------------------------------------------------------------------ torch.nn's fused layer

_FAST_PATH = threading.Lock()
_RUNNING = 0
_WANTED = False


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Keep torch.nn from its fused encoder layer, which computes both residual adds inside one op.

    The switch is one for all threads: the first that comes here turns it, and the last that leaves turns it back.
    """
    global _RUNNING, _WANTED
    with _FAST_PATH:
        if _RUNNING == 0:
            _WANTED = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _RUNNING += 1
    try:
        yield
    finally:
        with _FAST_PATH:
            _RUNNING -= 1
            if _RUNNING == 0:
                torch.backends.mha.set_fastpath_enabled(_WANTED)
