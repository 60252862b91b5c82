"""Which dimension of a stream holds its features: that over which its readers normalise, scale and contract it.

A stream's states are followed to what reads them, through what only lays them out anew or changes them element by
element. Norms, and learned vectors that scale or shift features, say it best: a mixer contracts over tokens in every
other branch, and normalises over channels in all of them. Where there are none, contractions with weights say it; what
branches make is asked only where no reader says anything. Readers that contradict one another leave it unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.streams import Step, Term

# Where each dimension of the root is in a tensor; ``None`` where it is not whole.
Places = tuple[int | None, ...]

_FURTHER = (
    ops.CASTS | ops.RESHAPES | ops.PERMUTES | ops.SHUFFLES | ops.COPIES | ops.DROPOUTS | ops.ACTIVATIONS | ops.SCALES
    | ops.ADDS | ops.SUBS | frozenset({"pow", "__pow__", "square", "neg", "abs", "detach", "getitem", "slice"})
)  # fmt: skip
_LAYER_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"})
_SPREADS = frozenset({"mean", "var", "std", "var_mean", "norm", "linalg_vector_norm", "vector_norm", "sum"})
_FURTHEST = 10
# What readers do, the most telling first: norms and learned vectors, means of a norm by hand, products with weights.
_LEARNED, _NORMALISED, _CONTRACTED = range(3)


def axes(root: fx.Node, steps: Sequence[Step]) -> tuple[int, ...] | None:
    """The feature dimension of the root and of every state, or ``None`` where that cannot be told."""
    value = facts.tensor(root)
    if value is None:
        return None
    stream = _Stream(root, steps, value.dim())
    for votes in (stream.read(_LEARNED), stream.read(_NORMALISED), stream.read(_CONTRACTED), stream.made()):
        named = set(votes)
        if named:
            if len(named) > 1:
                return None
            chosen = named.pop()
            found = [places[chosen] for places in stream.states]
            return None if None in found else tuple(axis for axis in found if axis is not None)
    return None


class _Stream:
    def __init__(self, root: fx.Node, steps: Sequence[Step], rank: int) -> None:
        self.steps = steps
        self.states: list[Places] = [tuple(range(rank))]
        self.adds = {add for step in steps for add in step.adds}
        self.starts: list[tuple[fx.Node, Places]] = [(root, self.states[0])]
        carriers: set[fx.Node] = set()
        for step in steps:
            before, places = self.starts[-1]
            for node in step.passes:
                places = _moved(places, node, before)
                self.starts.append((node, places))
                carriers.add(node)
                before = node
            self.states.append(places)
            self.starts.append((step.node, places))
        self.stops = self.adds | carriers
        self.votes: list[tuple[int, int]] | None = None

    def read(self, how: int) -> Iterator[int]:
        """Dimensions of the root that readers do ``how`` with."""
        return (axis for each, axis in self._read() if each == how)

    def made(self) -> Iterator[int]:
        """Dimensions of the root that the last contraction or norm of a branch makes."""
        for step, places in zip(self.steps, self.states[1:], strict=True):
            made = next((a for term in step.terms if (a := _made(step, term)) is not None), None)
            if made is not None and made in places:
                yield places.index(made)

    def _read(self) -> list[tuple[int, int]]:
        if self.votes is None:
            self.votes = []
            for node, places in self.starts:
                self._follow(node, places)
        return self.votes

    def _follow(self, start: fx.Node, places: Places) -> None:
        todo = [(start, places, 0)]
        seen = {start}
        while todo:
            node, places, far = todo.pop()
            for reader in node.users:
                if reader in self.stops or reader in seen:
                    continue
                seen.add(reader)
                said = _said(reader, node)
                if said is not None:
                    how, axis = said
                    if axis in places:
                        assert self.votes is not None
                        self.votes.append((how, places.index(axis)))
                    if not _is_vector(reader, node):
                        continue
                if far < _FURTHEST and ops.name_of(reader) in _FURTHER and facts.tensor(reader) is not None:
                    todo.append((reader, _moved(places, reader, node), far + 1))


def _moved(places: Places, node: fx.Node, operand: fx.Node) -> Places:
    return tuple(None if axis is None else facts.map_axis(node, operand, axis) for axis in places)


# ------------------------------------------------------------------ what one reader says


def _said(reader: fx.Node, node: fx.Node) -> tuple[int, int] | None:
    """What ``reader`` does with ``node``, and over which of its dimensions."""
    value = facts.tensor(node)
    if value is None or not value.dim():
        return None
    axis = _normalised(reader, node, value.dim())
    if axis is not None:
        return _NORMALISED if ops.name_of(reader) in _SPREADS else _LEARNED, axis % value.dim()
    axis = _contracted(reader, node, value.dim())
    return None if axis is None else (_CONTRACTED, axis % value.dim())


def _normalised(reader: fx.Node, node: fx.Node, rank: int) -> int | None:
    name = ops.name_of(reader)
    if name in ops.NORMS:
        if _first(reader) is not node:
            return None
        module = ops.module_of(reader)
        shape: Any = getattr(module, "normalized_shape", None)
        if name in _LAYER_NORMS:
            shape = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("normalized_shape")
        if name == "normalize":
            dim = reader.args[2] if len(reader.args) > 2 else reader.kwargs.get("dim", 1)
            return dim if isinstance(dim, int) else None
        if isinstance(shape, (list, tuple)) and len(shape) != 1:
            return None
        return ops.NORMS[name] if rank > ops.NORMS[name] else None
    if name in _SPREADS:
        return _spread_over(reader, name)
    return _vector_axis(reader, node)


def _spread_over(reader: fx.Node, name: str) -> int | None:
    """The one dimension over which a hand-written norm takes its mean."""
    at = 2 if name in ("norm", "linalg_vector_norm", "vector_norm") else 1
    given = reader.kwargs
    over: Any = given.get("dim", given.get("axis", reader.args[at] if len(reader.args) > at else None))
    over = over[0] if isinstance(over, (list, tuple)) and len(over) == 1 else over
    keeps = given.get("keepdim", reader.args[at + 1] if len(reader.args) > at + 1 else False)
    if not isinstance(over, int) or isinstance(over, bool) or (keeps is not True and name not in ("var", "std")):
        return None
    return over if name not in ("mean", "sum") or _is_rooted(reader) else None


def _is_rooted(node: fx.Node) -> bool:
    """Whether a root of ``node`` is taken: of a mean square, with something small added."""
    todo, seen = [(node, 0)], {node}
    while todo:
        current, far = todo.pop()
        for user in current.users:
            if ops.is_root(user):
                return True
            small = ops.ADDS | ops.SCALES | ops.CLAMPS | ops.CASTS | ops.INPLACE_ADDS | frozenset({"maximum", "where"})
            if far < 4 and user not in seen and ops.name_of(user) in small:
                a, b = facts.tensor(node), facts.tensor(user)
                if a is not None and b is not None and facts.same_shape(a.shape, b.shape):
                    seen.add(user)
                    todo.append((user, far + 1))
    return False


def _is_vector(reader: fx.Node, node: fx.Node) -> bool:
    return ops.name_of(reader) not in ops.NORMS and _vector_axis(reader, node) is not None


def _vector_axis(reader: fx.Node, node: fx.Node) -> int | None:
    """The dimension along which a learned vector scales or shifts ``node``."""
    name = ops.name_of(reader)
    value, result = facts.tensor(node), facts.tensor(reader)
    if name not in ops.SCALES | ops.ADDS | ops.SUBS | frozenset({"addcmul"}) or value is None or result is None:
        return None
    if not facts.same_shape(value.shape, result.shape):
        return None
    for operand in reader.all_input_nodes:
        other = facts.tensor(operand)
        if operand is node or other is None or not _is_weight(operand):
            continue
        wide = [i - other.dim() for i, size in enumerate(other.shape) if not (isinstance(size, int) and size == 1)]
        if len(wide) == 1 and -wide[0] <= value.dim():
            return wide[0]
    return None


def _contracted(reader: fx.Node, node: fx.Node, rank: int) -> int | None:
    name = ops.name_of(reader)
    if name.startswith("module:"):
        return ops.CONTRACTION_MODULES.get(name.removeprefix("module:"))
    if name == "einsum":
        return _contracted_by_einsum(reader, node)
    axis = ops.CONTRACTIONS.get(name)
    if axis is None:
        return None
    others = [operand for operand in reader.all_input_nodes if operand is not node]
    if name == "multi_head_attention_forward":
        return axis
    if not any(_is_weight(operand) and (t := facts.tensor(operand)) is not None and t.dim() >= 2 for operand in others):
        return None
    if name in ("addmm", "baddbmm", "addbmm"):
        factors = reader.args[1:3]
        return None if node not in factors else -1 if factors[0] is node else -2
    if name in ("matmul", "__matmul__", "mm", "bmm", "mv", "imatmul"):
        return -1 if _first(reader) is node else -min(2, rank)
    if name in ("tensordot", "dot", "inner", "bilinear"):
        return -1 if name in ("inner", "bilinear") else None
    return axis if _first(reader) is node else None


def _contracted_by_einsum(reader: fx.Node, node: fx.Node) -> int | None:
    equation = reader.args[0] if reader.args else reader.kwargs.get("equation")
    if not isinstance(equation, str) or "->" not in equation:
        return None
    operands = reader.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, right = equation.replace(" ", "").split("->")
    labels = left.split(",")
    if len(labels) != len(operands) or node not in operands:
        return None
    at = operands.index(node)
    weights = [labels[i] for i, other in enumerate(operands) if isinstance(other, fx.Node) and _is_weight(other)]
    summed = [c for c in labels[at] if c.isalpha() and c not in right and any(c in each for each in weights)]
    if len(summed) != 1:
        return None
    before, _, behind = labels[at].partition("...")
    if summed[0] in before:
        return before.index(summed[0])
    return behind.index(summed[0]) - len(behind)


def _first(reader: fx.Node) -> fx.Node | None:
    found = reader.args[0] if reader.args else reader.kwargs.get("input", reader.kwargs.get("self"))
    return found if isinstance(found, fx.Node) else None


def _is_weight(node: fx.Node, far: int = 6) -> bool:
    """Whether ``node`` is a parameter or buffer, or made of such by a few operations."""
    if facts.is_parameter_input(node):
        return True
    if node.op == "placeholder" or not far or not node.all_input_nodes:
        return False
    return all(_is_weight(operand, far - 1) for operand in node.all_input_nodes if not ops.is_metadata(operand))


def _made(step: Step, term: Term) -> int | None:
    state, value = facts.tensor(step.node), facts.tensor(term.node)
    if state is None or value is None:
        return None
    if term.product is not None:
        return state.dim() - 1
    axis = facts.feature_axis(term.node)
    return None if axis is None else axis + state.dim() - value.dim()


__all__ = ["axes"]
