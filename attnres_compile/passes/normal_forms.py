"""Spellings of a residual step over several operators, put into the form of an add, in a graph's own copy.

Each form computes the same value for every input, and none is about streams: detection goes on to judge the adds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.gradients import unrecorded
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.spellings import summands
from attnres_compile.passes.writes import shared, written

# Key of the checkpointed region of a node (:data:`attnres_compile.passes.checkpoint.REGION`).
_REGION = "attnres_region"


def normalise(graph: fx.Graph) -> None:
    """Rewrite every form below in ``graph``. Nodes keep the place in the user's code of what they stand for."""
    chosen = [node for node in graph.nodes if ops.name_of(node) == "where"]
    joined = [node for node in graph.nodes if ops.name_of(node) in ops.JOINS]
    if chosen:
        choices = _Choices(graph)
        for node in chosen:
            choices.rewrite(node)
    if joined:
        memory, off = Memory(graph), unrecorded(graph)
        for node in joined:
            _cut_and_joined(graph, node, memory, off)


# ------------------------------------------------------------------ where(c, x, x + f)


class _Choices:
    """``where(c, x, x + f)`` is ``x + where(c, 0, f)``, and the other way round: a layer that is left out by a draw."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.memory = Memory(graph)
        # Where gradients or types of operations are switched: an add may not be moved past one.
        self.switches = [at for node, at in self.memory.position.items() if _switches(ops.name_of(node))]
        # New steps, and what they stand for in the graph that ``memory`` knows.
        self.before: dict[fx.Node, fx.Node] = {}

    def rewrite(self, node: fx.Node) -> None:
        """Put ``node`` into normal form if it is one of these choices."""
        arguments = _where_arguments(node)
        if arguments is None or not facts.is_float(node):
            return
        condition, kept, other = arguments
        for skip, add, added_first in ((kept, other, False), (other, kept, True)):
            if not isinstance(skip, fx.Node) or not isinstance(add, fx.Node):
                continue
            branch = self._branch(node, skip, add)
            if branch is not None:
                self._replace(node, add, skip, (condition, branch, 0.0) if added_first else (condition, 0.0, branch))
                return

    def _branch(self, node: fx.Node, skip: fx.Node, add: fx.Node) -> fx.Node | None:
        """What ``add`` adds to ``skip``, if it may as well do so at the place of ``node``, its only reader."""
        total = summands(add)
        if total is None or list(add.users) != [node] or add not in self.memory.position:
            return None
        if total.gated or total.packed is not None or written(add):
            return None
        branches = [term for term in total.terms if term.node is not skip]
        if len(branches) != 1 or branches[0].factor != 1.0 or any(term.product for term in total.terms):
            return None
        branch = branches[0].node
        value, result = facts.tensor(branch), facts.tensor(node)
        if value is None or result is None or value.dtype != result.dtype:
            return None
        if not _alike(skip, node) or not _alike(add, node) or node.meta.get(_REGION) != add.meta.get(_REGION):
            return None
        start, end = self.memory.position[add], self.memory.position[node]
        if any(start < at < end for at in self.switches):
            return None
        for operand in (skip, branch):
            write = self.memory.write_after(self.before.get(operand, operand), start, set())
            if write is not None and self.memory.position[write] < end:
                return None
        return branch

    def _replace(self, node: fx.Node, add: fx.Node, skip: fx.Node, chosen: tuple[Any, Any, Any]) -> None:
        graph = self.graph
        with graph.inserting_before(node):
            if isinstance(node.target, torch._ops.OpOverload):
                where = torch.ops.aten.where
                part = graph.call_function(where.ScalarSelf if chosen[1] == 0.0 else where.ScalarOther, chosen)
                step = graph.call_function(torch.ops.aten.add.Tensor, (skip, part))
            else:
                part = graph.call_function(torch.where, chosen)
                step = graph.call_function(operator.add, (skip, part))
        part.meta, step.meta = dict(node.meta), dict(add.meta)
        condition, branch = (operand for operand in chosen if isinstance(operand, fx.Node))
        value = facts.tensor(node)
        assert value is not None
        part.meta["example_value" if "example_value" in node.meta else "val"] = _where_value(condition, branch, value)
        node.replace_all_uses_with(step)
        self.before[step] = node
        graph.erase_node(node)
        graph.erase_node(add)


def _switches(name: str) -> bool:
    return any(mark in name for mark in ("grad_enabled", "autocast", "inference_mode"))


def _where_arguments(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    arguments: list[Any] = [*node.args]
    for name in ("condition", "input", "self", "other"):
        if name in node.kwargs:
            arguments.append(node.kwargs[name])
    if len(arguments) != 3 or (node.op == "call_method" and node.kwargs):
        return None
    condition, kept, other = arguments
    if node.op == "call_method":
        condition, kept = kept, condition
    return (condition, kept, other) if isinstance(condition, fx.Node) else None


def _where_value(condition: fx.Node, branch: fx.Node, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of ``where(condition, 0, branch)``, which broadcasts into ``like``."""
    chosen, added = facts.tensor(condition), facts.tensor(branch)
    if chosen is None or added is None:
        return like
    if facts.broadcasts_into(chosen.shape, added.shape):
        return added
    return added if facts.same_shape(chosen.shape, added.shape) else like


def _alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = facts.tensor(node), facts.tensor(other)
    return a is not None and b is not None and a.dtype == b.dtype and facts.same_shape(a.shape, b.shape)


# ------------------------------------------------------------------ cat of all pieces of one tensor


def _cut_and_joined(graph: fx.Graph, node: fx.Node, memory: Memory, off: set[fx.Node]) -> None:
    """``cat([x[:, :n], x[:, n:]], 1)`` is ``x``: what one block takes apart, the next one puts together again."""
    pieces = node.args[0] if node.args else node.kwargs.get("tensors")
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    value = facts.tensor(node)
    if not isinstance(pieces, (list, tuple)) or not isinstance(dim, int) or value is None or "out" in node.kwargs:
        return
    dim %= value.dim()
    end: Any = 0
    whole: fx.Node | None = None
    for piece in pieces:
        place = _place(piece, dim) if isinstance(piece, fx.Node) else None
        if place is None or not facts.same_size(place[1], end) or (whole is not None and place[0] is not whole):
            return
        whole, end = place[0], place[2]
    before = facts.tensor(whole) if whole is not None else None
    if whole is None or before is None or not facts.same_size(end, before.shape[dim]):
        return
    # A copy may be laid out in another way, and is memory of its own: nobody may look or write there.
    if not _alike(whole, node) or not before.is_contiguous() or _comes_from_outside(whole) or _goes_outside(node):
        return
    shown = [whole, node, *(piece for piece in pieces if isinstance(piece, fx.Node))]
    if any(memory.write_after(each, -1, set()) is not None for each in shown):
        return
    if whole not in off and not off.isdisjoint(shown):
        return
    node.replace_all_uses_with(whole)
    todo = [node]
    while todo:
        gone = todo.pop()
        if not gone.users and gone is not whole and gone.op in ("call_function", "call_method"):
            inputs = gone.all_input_nodes
            graph.erase_node(gone)
            todo += [i for i in inputs if ops.name_of(i) in ops.SLICES | ops.SPLITS]


def _comes_from_outside(node: fx.Node) -> bool:
    """Whether ``node`` may show memory that the graph is given."""
    seen, todo = {node}, [node]
    while todo:
        behind = todo.pop()
        if behind.op in ("placeholder", "get_attr"):
            return True
        more = [each for each in (*shared(behind), *written(behind)) if each not in seen]
        seen.update(more)
        todo += more
    return False


def _goes_outside(node: fx.Node) -> bool:
    """Whether the graph may return memory that ``node`` shows."""
    seen, todo = {node}, [node]
    while todo:
        behind = todo.pop()
        for user in behind.users:
            if user.op == "output":
                return True
            if user not in seen and (behind in shared(user) or behind in written(user)):
                seen.add(user)
                todo.append(user)
    return False


def _place(piece: fx.Node, dim: int) -> tuple[fx.Node, Any, Any] | None:
    """Which tensor ``piece`` is cut from along ``dim``, and where it begins and ends there."""
    name, value = ops.name_of(piece), facts.tensor(piece)
    if name not in ops.SLICES or value is None or not isinstance(piece.args[0], fx.Node):
        return None
    whole = piece.args[0]
    if ops.name_of(whole) in ops.SPLITS:
        return _split_place(piece, whole, dim)
    before = facts.tensor(whole)
    if before is None or before.dim() != value.dim():
        return None
    for other in range(value.dim()):
        if other != dim and not facts.same_size(before.shape[other], value.shape[other]):
            return None
    size = before.shape[dim]
    start = _SLICED[name](piece, dim, before.dim(), size)
    return None if start is None else (whole, start, start + value.shape[dim])


def _split_place(piece: fx.Node, split: fx.Node, dim: int) -> tuple[fx.Node, Any, Any] | None:
    whole, number = split.args[0], piece.args[1] if len(piece.args) > 1 else None
    values = split.meta.get("example_value", split.meta.get("val"))
    if not isinstance(whole, fx.Node) or not isinstance(number, int) or not isinstance(values, (list, tuple)):
        return None
    over = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", split.kwargs.get("axis", 0))
    if not isinstance(over, int) or over % values[0].dim() != dim or not 0 <= number < len(values):
        return None
    start: Any = 0
    for value in values[:number]:
        start = start + value.shape[dim]
    return whole, start, start + values[number].shape[dim]


def _indexed(piece: fx.Node, dim: int, rank: int, size: Any) -> Any:
    index: Any = piece.args[1] if len(piece.args) > 1 else None
    entries: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [e for e in entries if not isinstance(e, fx.Node)]:
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (rank - len(entries) + 1)
    if len(entries) > rank or not all(isinstance(entry, slice) for entry in entries):
        return None
    entries += [slice(None)] * (rank - len(entries))
    if any(entry.step not in (None, 1) for entry in entries):
        return None
    return _number(entries[dim].start, size)


def _sliced(piece: fx.Node, dim: int, rank: int, size: Any) -> Any:
    over = piece.args[1] if len(piece.args) > 1 else piece.kwargs.get("dim", 0)
    step = piece.args[4] if len(piece.args) > 4 else piece.kwargs.get("step", 1)
    if not isinstance(over, int) or over % rank != dim or step != 1:
        return None
    return _number(piece.args[2] if len(piece.args) > 2 else piece.kwargs.get("start"), size)


def _narrowed(piece: fx.Node, dim: int, rank: int, size: Any) -> Any:
    over = piece.args[1] if len(piece.args) > 1 else piece.kwargs.get("dim")
    if not isinstance(over, int) or over % rank != dim:
        return None
    return _number(piece.args[2] if len(piece.args) > 2 else piece.kwargs.get("start"), size)


def _number(start: Any, size: Any) -> Any:
    """Where a slice begins; ``None`` where that is not a number that the graph knows."""
    if isinstance(start, fx.Node):
        start = start.meta.get("example_value", start.meta.get("val"))
    if start is None:
        return 0
    if isinstance(start, torch.SymInt):
        return start
    if not isinstance(start, int):
        return None
    if start >= 0:
        return start
    return size + start if isinstance(size, int) and size + start >= 0 else None


_SLICED: dict[str, Callable[[fx.Node, int, int, Any], Any]] = {
    "getitem": _indexed,
    "__getitem__": _indexed,
    "slice": _sliced,
    "narrow": _narrowed,
}

__all__ = ["normalise"]
