"""One call of a module whose stream runs through graph breaks: where the stream is, and what it is the sum of.

What crosses a break is an ordinary tensor: the mix of the site that reads the stream there. Its sources wait here,
beside it. A graph that gets the tensor goes on with the sources. The tensor is told by its memory, which is held as
long as it is the stream's, so that no other tensor can be taken for it; whatever else arrives (a copy, a sum, the
tensor after it was written into) is not the stream, and the call ends with an error.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.crossing.route import Route
from attnres_compile.errors import GraphBreakError, PlanMismatchError
from attnres_compile.parameters import DepthQueries

REMEDY = (
    "Between two graphs only what hands the stream on as it is can be followed. Remove what breaks the graph there "
    "(TORCH_LOGS=graph_breaks shows all places), or revert the model and transform it as it runs now"
)
# Nodes of autograd that hand on a gradient as it is; the last one is FSDP2's, whose hooks wait for it.
_IDENTITIES = ("ViewBackward0", "AliasBackward0", "RegisterPostBackwardFunctionBackward")
_LONGEST_CHAIN = 16
_WAITING = "torch.distributed.fsdp."


@dataclass(frozen=True)
class State:
    """The stream where it left a graph.

    Attributes:
        index: number of steps behind it.
        sources: its sources in depth order; memory that nobody else knows.
        value: the tensor that left the graph.
        version: how often its memory had been written then.
        node: where its gradient goes.
    """

    index: int
    sources: tuple[Tensor, ...]
    value: Tensor
    version: int
    node: Any


class Journey:
    """How far the stream of ``owner`` has come in the call that runs now."""

    def __init__(self, owner: nn.Module, route: Route, queries: DepthQueries) -> None:
        self.owner = owner
        self.route = route
        self.config = queries.declaration.config
        self._queries = queries
        self.index = 0
        self.state: State | None = None
        self.made: set[int] = set()
        self._grad = torch.is_grad_enabled()
        self._hooks = _saving()

    # ---------------------------------------------------------------- what may differ between two graphs

    def check_modes(self, where: str) -> None:
        """Raises:
        GraphBreakError: gradients are switched on or off, or activations saved in another way, than where the call
            began: by activation checkpointing, as a rule, which would compute the graph again without its sources.
        """
        if torch.is_grad_enabled() == self._grad and _saving() == self._hooks:
            return
        raise GraphBreakError(
            "activation checkpointing, or switching gradients on or off, around a part of a residual stream that "
            "runs through graph breaks",
            where=where,
            remedy="Turn checkpointing off (transformers: gradient_checkpointing_disable()), or remove what breaks "
            "the graph: checkpointed layers in one graph are converted",
        )

    # ---------------------------------------------------------------- finding the stream

    def find(self, args: Sequence[Any], where: str) -> int | None:
        """Which of ``args`` is the stream.

        Raises:
            GraphBreakError: it is, but was written into, or its gradient goes another way.
        """
        state = self.state
        if state is None:
            return None
        tensors = [(place, value) for place, value in enumerate(args) if isinstance(value, Tensor)]
        found = next((place for place, value in tensors if value is state.value), None)
        if found is None:
            alike = [place for place, value in tensors if _same_memory(value, state.value)]
            faithful = [place for place in alike if _same_gradient(args[place], state.value)]
            if alike and not faithful:
                raise self.lost("the stream comes with another gradient: detached, or through a function", where)
            found = faithful[0] if faithful else None
        if found is None:
            return None
        if state.value._version != state.version:
            raise self.lost("the stream was written in place between two graphs", where)
        if state.value.grad_fn is not state.node:
            raise self.lost("the stream was detached in place between two graphs", where)
        if _changes_gradient(state.value) or _changes_gradient(args[found]):
            raise self.lost("the stream carries a hook on its gradient", where)
        return found

    def lost(self, what: str, where: str) -> GraphBreakError:
        """The error for a stream that does not arrive."""
        last = self.route.lines[self.index - 1] if self.index else "its beginning"
        return GraphBreakError(
            f"a residual stream is lost in a graph break, behind {self.index} of {len(self.route.lines)} steps "
            f"({last}): {what}",
            where=where,
            remedy=REMEDY,
        )

    # ---------------------------------------------------------------- going on

    def queries_of(self, indices: Sequence[int]) -> list[Tensor]:
        """The queries of the states ``indices`` as the module holds them now, each with its key norm's weight."""
        queries, norms = self._queries.queries(), self._queries.key_norms()
        names = [self.route.by_index[index].name for index in indices]
        return [tensor for name in names for tensor in (queries[name], *([norms[name]] if norms else []))]

    def check_lines(self, lines: tuple[str, ...]) -> None:
        """Raises:
        PlanMismatchError: ``lines`` are not those of the next steps.
        """
        expected = self.route.lines[self.index : self.index + len(lines)]
        for number, (got, wanted) in enumerate(zip(lines, (*expected, *[""] * len(lines)), strict=False)):
            if got != wanted:
                raise PlanMismatchError(
                    f"step {self.index + number + 1} of the residual stream is another one than when the model was "
                    f"transformed: then it was at {wanted or 'its end'}",
                    where=got,
                    remedy="A branch was taken the other way, or layers were added. Revert the model and transform "
                    "it in the mode it will run in",
                )

    def advance(self, steps: int, made: Sequence[int], sources: tuple[Tensor, ...], value: Tensor | None) -> None:
        """``steps`` further: ``made`` are the states whose sites ran, ``value`` what leaves the graph, if any does."""
        self.index += steps
        self.made.update(made)
        self.state = None if value is None else State(self.index, sources, value, value._version, value.grad_fn)

    def finish(self) -> None:
        """Raises:
        PlanMismatchError: the call ended before the stream.
        """
        route = self.route
        if self.index == len(route.lines) and self.made == set(route.by_index):
            return
        missing = route.lines[self.index] if self.index < len(route.lines) else route.lines[-1]
        names = [stop.name for index, stop in route.stops if index not in self.made]
        raise PlanMismatchError(
            f"a converted {type(self.owner).__name__} ran {len(self.made)} of its {len(route.stops)} sites: part of "
            f"its residual stream ran outside of the compiled graphs; missing from {names[0] if names else '?'} on",
            where=missing,
            remedy="An add of the stream stands in code that is not compiled (between two graphs, in a function marked "
            "torch.compiler.disable, or under activation checkpointing that breaks). " + REMEDY,
        )


def _saving() -> tuple[int, ...]:
    """What of torch.autograd.graph.saved_tensors_hooks is on top, to be compared with."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return () if found is None else tuple(id(hook) for hook in found)


def _same_memory(value: Tensor, state: Tensor) -> bool:
    if type(value) is not type(state) or value.layout != torch.strided or state.layout != torch.strided:
        return False
    return bool(
        value.dtype == state.dtype
        and value.device == state.device
        and value.shape == state.shape
        and value.stride() == state.stride()
        and value.storage_offset() == state.storage_offset()
        and value.untyped_storage()._cdata == state.untyped_storage()._cdata
    )


def _changes_gradient(value: Tensor) -> bool:
    """Whether a hook may change the gradient of ``value``; those of FSDP2 wait for it, and hand it on as it is."""
    hooks = (value._backward_hooks or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith(_WAITING) for hook in hooks)


def _same_gradient(value: Tensor, state: Tensor) -> bool:
    """Whether the gradient of ``value`` arrives at ``state`` as it is."""
    if not torch.is_grad_enabled():
        return True
    if not state.requires_grad:
        return not value.requires_grad
    node, place = value.grad_fn, value.output_nr
    for _ in range(_LONGEST_CHAIN):
        if node is None:
            return False
        if node is state.grad_fn:
            return place == state.output_nr
        if node.name().rpartition("::")[2] not in _IDENTITIES or place >= len(node.next_functions):
            return False
        node, place = node.next_functions[place]
    return False


_NOW: contextvars.ContextVar[Journey | None] = contextvars.ContextVar("attnres_journey", default=None)


def current() -> Journey | None:
    """The innermost call that runs now."""
    return _NOW.get()


@contextlib.contextmanager
def travelling(journey: Journey) -> Iterator[None]:
    """While open, graphs of ``journey``'s module go on with it; it must have come to its end when this closes."""
    token = _NOW.set(journey)
    try:
        yield
    finally:
        _NOW.reset(token)
    journey.finish()
