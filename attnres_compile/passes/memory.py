"""Which nodes share memory, and what is written when.

A graph from dynamo or ``symbolic_trace`` may write in place. Detection treats ``x += f`` as ``x + f`` only
where nobody can tell the difference, and lets no tensor that is written later serve as a source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set

import torch
from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.writes import shared, written


class Memory:
    """Groups of nodes that may share memory, and the writes into each group, in graph order.

    Attributes:
        position: place of each node in the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position: dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []
        self._targets: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._group: dict[fx.Node, fx.Node] = {}
        storages: dict[int, fx.Node] = {}
        items: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in graph.nodes:
            self._join_storages(node, storages)
            if targets := written(node):
                self._targets[node] = targets
            for target in targets:
                self._writes.append((node, target))
                if facts.tensor(node) is not None:
                    self._join(node, target)
            for operand in shared(node):
                self._join(node, operand)
            if ops.name_of(node) == "getitem" and len(node.args) == 2 and isinstance(node.args[1], int):
                whole, index = node.args
                assert isinstance(whole, fx.Node) and isinstance(index, int)
                if facts.tensor(whole) is None:
                    # The same one of several results, picked again.
                    self._join(node, items.setdefault((whole, index), node))
        self._by_group: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        if self._writes:
            for node, target in self._writes:
                self._by_group[self._find(target)].append(node)
            for node in graph.nodes:
                root = self._find(node)
                if root in self._by_group:
                    self._members[root].append(node)
                    self._group[node] = root

    def _join_storages(self, node: fx.Node, storages: dict[int, fx.Node]) -> None:
        value = node.meta.get("example_value", node.meta.get("val"))
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
                continue
            try:
                key = item.untyped_storage()._cdata
            except (RuntimeError, NotImplementedError):
                continue
            self._join(node, storages.setdefault(key, node))

    def _find(self, node: fx.Node) -> fx.Node:
        root = node
        while (parent := self._parent.get(root)) is not None:
            root = parent
        while (parent := self._parent.get(node)) is not None:
            self._parent[node] = root
            node = parent
        return root

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self._find(a), self._find(b)
        if a is not b:
            self._parent[a] = b

    def targets(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The tensors that ``node`` writes into."""
        return self._targets.get(node, ())

    def group(self, node: fx.Node) -> fx.Node | None:
        """One node for all that share memory with ``node``, where something is written into that; else ``None``."""
        return self._group.get(node)

    def origins(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that made the memory into which ``node`` writes."""
        return tuple(self._members[self._find(target)][0] for target in self.targets(node))

    def is_functional(self, write: fx.Node) -> bool:
        """Whether the in-place op ``write`` could be its functional twin without anyone noticing.

        That is so when the memory was made in this graph and nothing that saw it before looks at it afterwards.
        """
        targets = written(write)
        if not targets:
            return True
        at = self.position[write]
        for target in targets:
            for member in self._members[self._find(target)]:
                if member.op in ("placeholder", "get_attr"):
                    return False
                if self.position[member] < at and any(self.position[user] > at for user in member.users):
                    return False
        return True

    def write_after(self, node: fx.Node, position: int, gone: Set[fx.Node]) -> fx.Node | None:
        """The first write into the memory of ``node`` behind ``position`` that is not among ``gone``."""
        for write in self._by_group.get(self._find(node), ()):
            if self.position[write] > position and write not in gone:
                return write
        return None

    def written_inputs(self) -> list[fx.Node]:
        """What comes into the graph and may be written in it."""
        inputs = [node for node in self.position if node.op in ("placeholder", "get_attr")]
        return [node for node in inputs if self._find(node) in self._by_group]

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """Take note that ``new``, which the graph did not hold, stands where ``old`` stood."""
        self._join(new, old)

    def written_between(self, first: fx.Node, last: fx.Node, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """A node from ``first`` on and before ``last`` that writes into what one of ``nodes`` may share memory with.

        Asks the graph as it is now; what it got since this was made is known by :meth:`replaced`.
        """
        groups: set[fx.Node] | None = None
        node = first
        while node is not last and node.op != "root":
            for target in written(node):
                groups = {self._find(each) for each in nodes} if groups is None else groups
                if self._find(target) in groups:
                    return node
            node = node.next
        return None
