"""What kind of value each node makes: a constant of the model, something learned, the data's own.

A write changes what its target holds for everybody who reads that memory later, so kinds are kept per node and, for
memory that is written, per group of nodes that share it.
"""

from __future__ import annotations

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.writes import is_known

# Make a tensor of the shape, dtype or device of their first operand, whose values do not enter.
_LIKE = frozenset(
    {
        "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
        "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor",
    }
)  # fmt: skip
# Take the shape, dtype or device of another tensor, behind their first operand.
_BY_EXAMPLE = frozenset({"type_as", "to", "view_as", "reshape_as", "expand_as"})


def entering(node: fx.Node) -> list[fx.Node]:
    """The operands of ``node`` whose values enter what it makes."""
    name = ops.name_of(node)
    inputs = node.all_input_nodes
    if name in _LIKE and inputs:
        example = _first(node)
        values = [*node.args[1:], *(value for key, value in node.kwargs.items() if key not in _SELF)]
        return [i for i in inputs if i is not example or any(value is i for value in values)]
    if name in _BY_EXAMPLE and len(inputs) > 1 and (kept := _first(node)) is not None:
        return [kept]
    return inputs


# Make tensors of numbers that stand in the code.
_NUMBERS = frozenset({"tensor", "as_tensor", "scalar_tensor", "arange", "ones", "zeros", "full", "linspace", "eye"})
_SELF = ("self", "input")


def _first(node: fx.Node) -> fx.Node | None:
    given = node.args[0] if node.args else next((node.kwargs[key] for key in _SELF if key in node.kwargs), None)
    return given if isinstance(given, fx.Node) else None


class Values:
    """Kinds of values, filled node by node in graph order.

    Attributes:
        constant: whether a node is computed from parameters, buffers and nothing else, when it is made.
        learned: whether something learned was done to the data that a node is computed from, when it is made.
        rank: for constants the most dimensions of any parameter that they are computed from.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.constant: dict[fx.Node, bool] = {}
        self.learned: dict[fx.Node, bool] = {}
        self.rank: dict[fx.Node, int] = {}
        # Made of nothing: the tensors of numbers that stand in the model's code.
        self._fixed: set[fx.Node] = set()
        # Written memory that holds data, and that holds something learned from data, by now.
        self._data: set[fx.Node] = set()
        self._learned_data: set[fx.Node] = set()

    def rewind(self) -> None:
        """Begin a second walk: nothing is written yet."""
        self._data.clear()
        self._learned_data.clear()

    def see(self, node: fx.Node, learns: bool) -> None:
        """Note what ``node`` makes; ``learns`` says whether it does something learned itself."""
        inputs = entering(node)
        if not inputs and node.op == "call_function" and ops.name_of(node) in _NUMBERS:
            self._fixed.add(node)
        constant = [self.is_constant(operand) for operand in inputs]
        self.constant[node] = any(constant) and all(map(self._holds_no_data, inputs))
        self.rank[node] = max((self.rank[i] for i in inputs), default=0) if self.constant[node] else 0
        self.learned[node] = learns or any(map(self.is_learned, inputs))

    def see_source(self, node: fx.Node, rank: int) -> None:
        """Note that ``node`` is a parameter, a buffer, or a question of shape (``rank`` 0)."""
        self.constant[node], self.learned[node], self.rank[node] = True, False, rank

    def write(self, node: fx.Node, learns: bool) -> None:
        """Note what the write ``node`` leaves in the memory that it writes into.

        What is not known to be written stays what it is: a weight that is handed to somebody's function is a weight.
        """
        if not is_known(node):
            return
        inputs = entering(node)
        for target in self.memory.targets(node):
            group = self.memory.group(target)
            if group is None:
                continue
            if not all(self._holds_no_data(i) for i in inputs if i is not target and facts.tensor(i) is not None):
                self._data.add(group)
            if learns or any(map(self.is_learned, inputs)):
                self._learned_data.add(group)

    def is_constant(self, node: fx.Node) -> bool:
        """Whether no data has entered ``node`` by now."""
        return self.constant[node] and self.memory.group(node) not in self._data

    def _holds_no_data(self, node: fx.Node) -> bool:
        return (self.constant[node] or node in self._fixed) and self.memory.group(node) not in self._data

    def weight_rank(self, node: fx.Node) -> int:
        """The most dimensions of any parameter that the constant ``node`` is made of; 0 for what is none."""
        return self.rank.get(node, 0) if node in self.constant and self.is_constant(node) else 0

    def is_matrix(self, node: fx.Node) -> bool:
        """Whether ``node`` is a constant of which a parameter of two or more dimensions is part."""
        return self.weight_rank(node) >= 2

    def is_learned(self, node: fx.Node) -> bool:
        """Whether something learned from the data has entered ``node`` by now."""
        return self.learned[node] or self.memory.group(node) in self._learned_data
