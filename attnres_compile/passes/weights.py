"""Which weight a contraction contracts with: the same parameter, or the same part of it, however it is spelt.

Layers whose weights are slices of one parameter have weights of their own. A loop contracts with one weight again
and again, cast or scaled anew each time perhaps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from attnres_compile.passes import facts, ops


class Weights:
    """One representative node for all constants that are one weight.

    A view is told by the memory that it shows: ``w[2]``, ``w.select(0, 2)`` and ``w.unbind()[2]`` are one weight, and
    ``w[3]`` is another. A cast, a copy, or a product with factors of one long dimension at most (scalars, a scale per
    channel) is still the weight that it is made from; what is made of several matrices is a weight of its own, the
    same wherever it is made of the same ones.
    """

    def __init__(self) -> None:
        self._weight: dict[fx.Node, fx.Node] = {}
        self._known: dict[Hashable, fx.Node] = {}
        # The weight of the first node that shows a piece of memory.
        self._whole: dict[int, tuple[fx.Node, int]] = {}
        self._modules: dict[int, fx.Node] = {}

    def source(self, node: fx.Node) -> None:
        """Note a parameter or a buffer."""
        key = ("attribute", str(node.target)) if node.op == "get_attr" else node
        self._note(node, self._known.setdefault(key, node))

    def made(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """Note what is computed from constants alone, ``inputs`` among them."""
        shown = _memory(node)
        if shown is not None and shown[0] in self._whole:
            whole, size = self._whole[shown[0]]
            part = (whole, *shown[1:])
            self._weight[node] = whole if shown[2] == size else self._known.setdefault(part, node)
            return
        parts = [i for i in inputs if i in self._weight]
        if not parts:
            return
        if ops.name_of(node) in ops.PICKS | ops.SLICES | ops.SPLITS:
            key: Hashable = ("part", self._weight[parts[0]], _written_out(node, self._weight))
        else:
            matrices = [i for i in parts if _long_dims(i) > 1] or parts
            made_of = frozenset(self._weight[i] for i in matrices)
            if len(made_of) == 1:
                self._note(node, next(iter(made_of)))
                return
            key = ("made", made_of)
        self._note(node, self._known.setdefault(key, node))

    def of(self, node: fx.Node) -> fx.Node:
        """The representative of the weight ``node``; that of a module is its first call."""
        module = ops.module_of(node)
        if module is not None:
            return self._modules.setdefault(id(module), node)
        return self._weight.get(node, node)

    def is_one(self, node: fx.Node) -> bool:
        """Whether ``node`` is a weight, or computed from some."""
        return node in self._weight

    def _note(self, node: fx.Node, weight: fx.Node) -> None:
        self._weight[node] = weight
        shown = _memory(node)
        if shown is not None:
            self._whole.setdefault(shown[0], (weight, shown[2]))


def _memory(node: fx.Node) -> tuple[int, str, int] | None:
    """The storage that ``node`` shows, where its part begins, and how many elements that has; ``None`` if unknown."""
    value = facts.tensor(node)
    if value is None or value.layout != torch.strided:
        return None
    try:
        size = value.numel()
        return value.untyped_storage()._cdata, str(value.storage_offset()), size if isinstance(size, int) else -1
    except (RuntimeError, NotImplementedError):
        return None


def _long_dims(node: fx.Node) -> int:
    value = facts.tensor(node)
    return sum(not isinstance(size, int) or size > 1 for size in value.shape) if value is not None else 2


def _written_out(node: fx.Node, weight: dict[fx.Node, fx.Node]) -> str:
    def name(each: fx.Node) -> Any:
        # Numbers that stand in the code are what they say.
        return weight.get(each, each).name if each.all_input_nodes or each in weight else _written_out(each, weight)

    arguments: Any = fx.node.map_arg((node.args, node.kwargs), name)
    return f"{ops.name_of(node)}{arguments}"
