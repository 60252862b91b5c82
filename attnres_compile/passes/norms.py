"""RMSNorm and LayerNorm over the features, found by what they compute: one call, a module, or written by hand.

A match starts at the value that is normalised and holds every node up to the normalised value in the value's own
dtype, so that one node can take the place of all. What it computes may differ from the spelling in intermediate
roundings (Hugging Face's Llama rounds before it multiplies by its weight), never in more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from attnres_compile.kernels.plain import compute_dtype
from attnres_compile.passes import facts, ops

Kind = Literal["rmsnorm", "layernorm"]
_CALLS: dict[str, Kind] = {
    "layer_norm": "layernorm",
    "native_layer_norm": "layernorm",
    "rms_norm": "rmsnorm",
    "_fused_rms_norm": "rmsnorm",
}
_MODULES: dict[str, tuple[Kind, Any]] = {
    "module:LayerNorm": ("layernorm", nn.LayerNorm),
    "module:RMSNorm": ("rmsnorm", nn.RMSNorm),
}
_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
_QUOTIENTS = frozenset({"div", "truediv", "true_divide", "divide"})
# What torch.export puts beside casts: holds by itself once the cast is gone.
_ASSERTIONS = frozenset({"_assert_tensor_metadata"})


@dataclass(frozen=True)
class Norm:
    """A norm that nothing but its own nodes takes part in.

    Attributes:
        kind: ``"rmsnorm"`` or ``"layernorm"``.
        eps: added to the mean square or the variance.
        weight, bias: a node of shape ``[d]``, the path of a module's parameter, or ``None``.
        out: the node of the result.
        inside: all nodes between the normalised value and ``out``, ``out`` included, in the graph's order.
    """

    kind: Kind
    eps: float
    weight: fx.Node | str | None
    bias: fx.Node | str | None
    out: fx.Node
    inside: tuple[fx.Node, ...]


def match(node: fx.Node) -> Norm | str:
    """The norm that is the only reader of ``node``, over the last dimension; or why there is none, in words."""
    value = facts.tensor(node)
    if value is None:
        return "its shape is not known"
    matcher = _Matcher(node, value)
    found = matcher.find()
    if isinstance(found, str):
        return found
    inside = {*found.inside}
    for each in (node, *found.inside):
        if each is found.out:
            continue
        for user in each.users:
            if user not in inside and not (each is node and _asks(user)):
                return "something besides the norm reads it"
    out = facts.tensor(found.out)
    if out is None or out.dtype != value.dtype or not facts.same_shape(out.shape, value.shape):
        return "the norm's result has another dtype or shape"
    return found


class _Matcher:
    def __init__(self, node: fx.Node, value: torch.Tensor) -> None:
        self.node = node
        self.dtype = value.dtype
        self.compute = compute_dtype(value.dtype)
        self.rank = value.dim()
        self.size = value.shape[-1]
        # The value itself and what is the same but for its dtype; never a narrower one.
        self.same: dict[fx.Node, None] = {node: None}
        self.others: list[fx.Node] = []
        for each in _growing(self.same):
            for user in each.users:
                if ops.name_of(user) in ops.CASTS and user.all_input_nodes[0] is each:
                    if self._dtype(user) in (self.dtype, self.compute):
                        self.same[user] = None
                    else:
                        self.others.append(user)

    def find(self) -> Norm | str:
        readers = [user for each in self.same for user in each.users if user not in self.same]
        readers = [user for user in dict.fromkeys(readers) if not _asks(user)]
        for reader in readers:
            name = ops.name_of(reader)
            found: Norm | str | None = None
            if name in _CALLS:
                found = self._call(reader, _CALLS[name])
            elif name in _MODULES:
                found = self._module(reader, *_MODULES[name])
            elif self._is_square(reader):
                found = self._by_hand(reader)
            if found is not None:
                return found
        for cast in self.others:
            if any(ops.name_of(user) in {*_CALLS, *_MODULES, "pow", "square"} for user in cast.users):
                return f"the norm computes in {self._dtype(cast)}"
        return "no norm reads it"

    # ---------------------------------------------------------------- one call

    def _call(self, call: fx.Node, kind: Kind) -> Norm | str:
        names = ["input", "normalized_shape", "weight", *(["bias"] if kind == "layernorm" else []), "eps"]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        if given.get("input") not in self.same:
            return "it is not what the norm normalises"
        shape = given.get("normalized_shape")
        shape = (shape,) if isinstance(shape, int) else shape
        if not isinstance(shape, (tuple, list)) or len(shape) != 1:
            return "the norm runs over more than the features"
        weight: Any = given.get("weight")
        bias: Any = given.get("bias")
        eps = given.get("eps")
        if any(vector is not None and not self._is_vector(vector) for vector in (weight, bias)):
            return "the norm's parameters are not one number per feature"
        if eps is None:
            before = self._dtype(given["input"])
            eps = 1e-5 if kind == "layernorm" else default_eps(before or self.dtype)
        if not isinstance(eps, (int, float)):
            return "the norm's eps is not a constant"
        out, nodes = call, [call]
        if ops.name_of(call) in ("native_layer_norm", "_fused_rms_norm"):
            parts = [user for user in call.users if user.users]
            if len(parts) != 1 or ops.name_of(parts[0]) != "getitem" or parts[0].args[1] != 0:
                return "something reads the norm's statistics"
            out = parts[0]
            nodes += list(call.users)
        return self._norm(kind, float(eps), weight, bias, nodes, self._tail(out, weighted=True)[0] or [out])

    def _module(self, call: fx.Node, kind: Kind, known: Any) -> Norm | str:
        module = ops.module_of(call)
        if not isinstance(module, known) or type(module).forward is not known.forward or _hooked(module):
            return "the norm's module does more than its class says"
        if len(module.normalized_shape) != 1:
            return "the norm runs over more than the features"

        def path(name: str) -> str | None:
            return f"{call.target}.{name}" if getattr(module, name, None) is not None else None

        before = self._dtype(call.all_input_nodes[0])
        eps = default_eps(before or self.dtype) if module.eps is None else float(module.eps)
        tail, _ = self._tail(call, weighted=True)
        return self._norm(kind, eps, path("weight"), path("bias"), [call], tail or [call])

    # ---------------------------------------------------------------- an RMSNorm written out

    def _by_hand(self, square: fx.Node) -> Norm | str | None:
        """``x * rsqrt(mean(x^2) + eps)``, whatever way each part is written."""
        if self._dtype(square) != self.compute:
            return f"the norm computes in {self._dtype(square)}"
        mean = _only(square)
        if mean is None or ops.name_of(mean) != "mean" or not self._over_features(mean):
            return None
        if self._dtype(mean) != self.compute:
            return f"the norm computes in {self._dtype(mean)}"
        shifted = _only(mean)
        eps = None if shifted is None else _added_number(shifted, mean)
        if shifted is None or eps is None:
            return None
        nodes = [square, mean, shifted]
        root = _only(shifted)
        if root is None:
            return None
        nodes.append(root)
        scaled: fx.Node | None = None
        inverse: fx.Node | None = root if _is_inverse_root(root) else None
        if ops.name_of(root) == "sqrt" or _is_power(root, 0.5):
            after = _only(root)
            if after is not None and _is_inverse(after, root):
                inverse = after
                nodes.append(after)
                # What one over a root comes to in an exported graph.
                times = _only(after)
                if times is not None and ops.name_of(times) in _PRODUCTS and times.args[1:] == (1.0,):
                    inverse = times
                    nodes.append(times)
            elif after is not None and ops.name_of(after) in _QUOTIENTS and after.args[1:2] == (root,):
                scaled = after if after.args[0] in self.same else None
        if inverse is not None:
            after = _only(inverse)
            if after is not None and ops.name_of(after) in _PRODUCTS:
                others = [operand for operand in after.all_input_nodes if operand is not inverse]
                scaled = after if len(others) == 1 and others[0] in self.same else None
        if scaled is None:
            return None
        if self._dtype(scaled) != self.compute:
            return f"the norm computes in {self._dtype(scaled)}"
        tail, weight = self._tail(scaled, weighted=False)
        return self._norm("rmsnorm", eps, weight, None, nodes, [scaled, *tail])

    def _is_square(self, node: fx.Node) -> bool:
        name = ops.name_of(node)
        if name == "square":
            return True
        if name in _PRODUCTS:
            return len(node.args) == 2 and all(operand in self.same for operand in node.args)
        return _is_power(node, 2) and node.args[0] in self.same

    def _over_features(self, mean: fx.Node) -> bool:
        dim = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
        dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
        keeps = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
        return keeps is True and len(dims) == 1 and isinstance(dims[0], int) and dims[0] % self.rank == self.rank - 1

    # ---------------------------------------------------------------- behind the norm

    def _tail(self, node: fx.Node, weighted: bool) -> tuple[list[fx.Node], fx.Node | None]:
        """Casts and, unless ``weighted``, one product with a vector, up to the last value of the original dtype.

        Returns:
            The nodes, and the vector if the product is among them.
        """
        path: list[fx.Node] = []
        length = 0
        vector: fx.Node | None = None
        weight: fx.Node | None = None
        while (after := _only(node)) is not None:
            if self._dtype(after) not in (self.dtype, self.compute):
                break
            if ops.name_of(after) in ops.CASTS and after.args[0] is node:
                pass
            elif not weighted and (vector := self._vector(after, node)) is not None:
                weighted = True
            else:
                break
            path.append(after)
            node = after
            if self._dtype(node) == self.dtype:
                length, weight = len(path), vector
        return path[:length], weight

    def _vector(self, node: fx.Node, carried: fx.Node) -> fx.Node | None:
        """The vector that ``node`` multiplies ``carried`` with."""
        if ops.name_of(node) not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
            return None
        others = [operand for operand in node.all_input_nodes if operand is not carried]
        return others[0] if len(others) == 1 and self._is_vector(others[0]) else None

    def _norm(
        self,
        kind: Kind,
        eps: float,
        weight: fx.Node | str | None,
        bias: fx.Node | str | None,
        nodes: list[fx.Node],
        last: list[fx.Node],
    ) -> Norm:
        """The match; casts of the value belong to the norm, or are dead."""
        found = {*self.same, *nodes, *last} - {self.node}
        found |= {
            user for each in found if each is not last[-1] for user in each.users if ops.name_of(user) in _ASSERTIONS
        }
        return Norm(kind, eps, weight, bias, last[-1], tuple(sorted(found)))

    def _is_vector(self, node: Any) -> bool:
        value = facts.tensor(node) if isinstance(node, fx.Node) else None
        return value is not None and value.dim() == 1 and facts.same_size(value.shape[0], self.size)

    def _dtype(self, node: Any) -> torch.dtype | None:
        value = facts.tensor(node) if isinstance(node, fx.Node) else None
        return None if value is None else value.dtype


def _growing(found: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """The keys of ``found``, those added meanwhile included."""
    at = 0
    while at < len(found):
        yield list(found)[at]
        at += 1


def _only(node: fx.Node) -> fx.Node | None:
    """The one user of ``node`` that takes its values."""
    users = [user for user in node.users if ops.name_of(user) not in _ASSERTIONS]
    return users[0] if len(users) == 1 else None


def _asks(node: fx.Node) -> bool:
    """Whether ``node`` asks for a shape or a dtype, and takes no values."""
    return ops.is_metadata(node) or ops.name_of(node) in _ASSERTIONS


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_power(node: fx.Node, exponent: float) -> bool:
    return ops.name_of(node) == "pow" and len(node.args) == 2 and _number(node.args[1]) == exponent


def _is_inverse_root(node: fx.Node) -> bool:
    return ops.name_of(node) == "rsqrt" or _is_power(node, -0.5)


def _is_inverse(node: fx.Node, operand: fx.Node) -> bool:
    if ops.name_of(node) == "reciprocal":
        return True
    if ops.name_of(node) not in _QUOTIENTS or len(node.args) != 2:
        return False
    return node.args[1] is operand and isinstance(node.args[0], (int, float)) and node.args[0] == 1


def _added_number(node: fx.Node, operand: fx.Node) -> float | None:
    """The number that ``node`` adds to ``operand``."""
    if ops.name_of(node) not in ops.ADDS or len(node.args) != 2 or node.kwargs:
        return None
    others = [each for each in node.args if each is not operand]
    return _number(others[0]) if len(others) == 1 else None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


@functools.cache
def default_eps(dtype: torch.dtype) -> float:
    """What PyTorch takes for an RMSNorm of ``dtype`` without an eps.

    The documentation says the dtype's own; releases differ on half precisions, so it is measured.
    """
    own, wide = torch.finfo(dtype).eps, torch.finfo(compute_dtype(dtype)).eps
    if own == wide:
        return own
    x = torch.full((8,), 2.0**-12, dtype=dtype)
    found = float(torch.rms_norm(x, (8,))[0])
    return min((own, wide), key=lambda eps: abs(found - float(x[0]) / (float(x[0]) ** 2 + eps) ** 0.5))
