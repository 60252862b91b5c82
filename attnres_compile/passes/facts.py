"""Questions about one node: its tensor, the module it came from, the user's line, its feature axis."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnres_compile.passes import ops

Shape = Sequence[int | torch.SymInt]
T = TypeVar("T")


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The (fake) tensor that ``node`` makes, or ``None`` where it makes none or it is not known."""
    for key in ("example_value", "val"):
        value = node.meta.get(key)
        if isinstance(value, torch.Tensor):
            return value
    return None


def is_float(node: fx.Node) -> bool:
    """Whether ``node`` makes a real floating-point tensor."""
    value = tensor(node)
    return value is not None and value.is_floating_point()


def is_index(node: fx.Node) -> bool:
    """Whether ``node`` makes indices, which no gradient passes. Quantised numbers are of smaller types."""
    value = tensor(node)
    return value is not None and value.dtype == torch.int64


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every input that the graph admits (no guard is added)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def same_shape(a: Shape, b: Shape) -> bool:
    """Whether two shapes are equal for every input that the graph admits."""
    return len(a) == len(b) and all(map(same_size, a, b))


def broadcasts_into(small: Shape, large: Shape) -> bool:
    """Whether a tensor of shape ``small`` broadcasts to exactly ``large``."""
    if len(small) > len(large):
        return False
    pairs = zip(reversed(small), reversed(large), strict=False)
    return all(same_size(a, b) or (isinstance(a, int) and a == 1) for a, b in pairs)


def _size_product(sizes: Iterable[int | torch.SymInt]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


# ------------------------------------------------------------------ where a node came from

# Attribute by which wrappers of ours hold the module they call; no user's module has this name.
OWNER = "_attnres_owner"
_LOCAL = re.compile(r"^L\[(['\"])\w+\1\](\[\d+\])?")
_ITEM = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose code made ``node``; ``""`` for the outermost one."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return clean_path(next(reversed(stack.values()))[0])


def clean_path(path: str) -> str:
    """``L['self']._modules['layers'][0]`` and its kin as ``layers.0``."""
    path = _LOCAL.sub("", path)
    path = _ITEM.sub(lambda m: "." + (m[1] or m[2] or m[3] or ""), path)
    parts: list[str] = []
    for part in path.split("."):
        if part == OWNER:
            # ``a.forward._attnres_owner`` is ``a`` itself, and so is that of another method.
            if parts:
                parts.pop()
        elif part not in ("", "_modules", "_orig_mod", "__dict__"):
            parts.append(part)
    return ".".join(parts)


def owner_path(model: torch.nn.Module, nodes: Iterable[fx.Node]) -> str:
    """Path of the lowest module of ``model`` whose one call made all of ``nodes``; ``""`` is ``model``."""
    common: list[tuple[str, str]] | None = None
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or {}
        entries = [(key, clean_path(value[0])) for key, value in stack.items()]
        if common is None:
            common = entries
        else:
            length = next((i for i, (a, b) in enumerate(zip(common, entries, strict=False)) if a != b), None)
            common = common[: min(len(common), len(entries)) if length is None else length]
    for _, path in reversed(common or []):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        # A Sequential would take what is added to it for one more layer; whoever calls it will do.
        if not isinstance(module, torch.nn.Sequential):
            return path
    return ""


_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
TORCH = os.path.dirname(torch.__file__)
# This package's, and files whose frames are nobody's code: torch's, and ours that stand between a user's modules.
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
NOT_THE_USERS = (TORCH, OURS + "steps.py", OURS + "conversion.py")


def frames(node: fx.Node) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that made ``node``, from the outermost one inwards."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    return [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace)]


def common(lists: Iterable[list[T]]) -> list[T]:
    """What all lists begin with."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False))
    return [column[0] for column in columns]


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch that made ``node``, or ``""``."""
    found = frames(node)
    for file, line, _ in reversed(found):
        if not file.startswith(NOT_THE_USERS):
            return f"{file}:{line}"
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""


# ------------------------------------------------------------------ parameters


def is_parameter_input(node: fx.Node) -> bool:
    """Whether ``node`` brings a parameter or a buffer into the graph."""
    if node.op == "get_attr":
        return True
    if node.op != "placeholder":
        return False
    known = node.meta.get("attnres_parameter")
    if known is not None:
        return bool(known)
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.nn.Parameter):
        return True
    source = getattr(node, "_dynamo_source", None)
    if source is not None:
        name = source.name if isinstance(source.name, str) else source.name()
        return "_parameters" in name or "_buffers" in name
    # torch.export names what it lifts: p_ parameters, b_ buffers, c_ constants.
    return value is not None and "example_value" not in node.meta and bool(re.match(r"(p|b|c)_", str(node.target)))


def is_computed_constant(node: fx.Node) -> bool:
    """Whether operations made ``node``, of parameters and of no value that the model is given."""
    if node.op in ("placeholder", "get_attr"):
        return False
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if ops.is_metadata(current) or is_parameter_input(current):
            continue
        if current.op == "placeholder":
            return False
        fresh = [operand for operand in current.all_input_nodes if operand not in seen]
        seen.update(fresh)
        waiting += fresh
    return True


# ------------------------------------------------------------------ the feature axis


def map_axis(node: fx.Node, operand: fx.Node, axis: int) -> int | None:
    """Where dimension ``axis`` (>= 0) of ``operand`` is in the result of ``node``; ``None`` if it is not whole."""
    before, after = tensor(operand), tensor(node)
    if before is None or after is None or not 0 <= axis < before.dim():
        return None
    name = ops.name_of(node)
    if name in ops.PERMUTES:
        return _permuted(node, name, axis, before.dim())
    if same_shape(before.shape, after.shape):
        return axis
    if name in ops.RESHAPES:
        inner = _size_product(before.shape[axis + 1 :])
        for candidate in range(after.dim()):
            rest = _size_product(after.shape[candidate + 1 :])
            if same_size(after.shape[candidate], before.shape[axis]) and same_size(rest, inner):
                return candidate
        return None
    if broadcasts_into(before.shape, after.shape):
        return axis + after.dim() - before.dim()
    return None


def _permuted(node: fx.Node, name: str, axis: int, rank: int) -> int | None:
    arguments: list[Any] = [*node.args[1:], *node.kwargs.values()]
    order = list(range(rank))
    try:
        if name == "permute":
            flat = arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments
            order = [int(d) % rank for d in flat]
        elif name in ("t", "mT"):
            order[-1], order[-2] = order[-2], order[-1]
        elif name in ("movedim", "moveaxis"):
            source, target = arguments[0], arguments[1]
            marker = torch.empty(tuple(range(2, 2 + rank)), device="meta").movedim(source, target)
            order = [size - 2 for size in marker.shape]
        else:
            a, b = int(arguments[0]) % rank, int(arguments[1]) % rank
            order[a], order[b] = order[b], order[a]
    except (TypeError, IndexError, ValueError):
        return None
    return order.index(axis) if axis in order else None


def feature_axis(branch: fx.Node, limit: int = 64) -> int | None:
    """The dimension of ``branch`` that holds features, judged by the contraction or norm that made it.

    Walks back over ops that keep every element's place, then follows the axis forward again. ``None`` where
    something unknown stands between.
    """
    path: list[tuple[fx.Node, fx.Node]] = []
    node = branch
    for _ in range(limit):
        name = ops.name_of(node)
        value = tensor(node)
        if name == "getitem" and value is not None and isinstance(node.args[0], fx.Node):
            # One of several results (native_layer_norm): the same axis as the op's own.
            axis = _made_axis(node.args[0], value.dim())
        else:
            axis = _made_axis(node, value.dim()) if value is not None else None
        if axis is not None:
            for step, operand in reversed(path):
                mapped = axis if _keeps_axes(step, operand) else map_axis(step, operand, axis)
                if mapped is None:
                    return None
                axis = mapped
            return axis
        carrier = _carrier(node)
        if carrier is None:
            return None
        path.append((node, carrier))
        node = carrier
    return None


def _made_axis(node: fx.Node, rank: int) -> int | None:
    name = ops.name_of(node)
    axis = ops.CONTRACTIONS.get(name, ops.NORMS.get(name))
    if axis is None and name.startswith("module:"):
        axis = ops.CONTRACTION_MODULES.get(name.removeprefix("module:"))
    return None if axis is None else axis % rank if rank else None


def _keeps_axes(node: fx.Node, operand: fx.Node) -> bool:
    """Whether ``node`` joins tensors like ``operand`` or is a part of it, with all dimensions where they were."""
    before, after = tensor(operand), tensor(node)
    if before is None or after is None or before.dim() != after.dim():
        return False
    name = ops.name_of(node)
    if name in ("getitem", "__getitem__"):
        index = node.args[1] if len(node.args) > 1 else None
        # Numbers and None move the dimensions behind them.
        return isinstance(index, int) or all(
            isinstance(i, slice) or i is Ellipsis for i in (index if isinstance(index, tuple) else (index,))
        )
    return name in ops.JOINS or name in ops.SLICES


def _carrier(node: fx.Node) -> fx.Node | None:
    """The operand that gives ``node`` its shape: its own tensor re-laid or changed element by element."""
    value = tensor(node)
    if value is None:
        return None
    if ops.name_of(node) in ops.SLICES and isinstance(whole := node.args[0], fx.Node):
        if ops.name_of(whole) in ops.SPLITS and isinstance(whole.args[0], fx.Node):
            # One of the pieces that a tensor was split into.
            whole = whole.args[0]
        return whole if _keeps_axes(node, whole) else None
    if ops.name_of(node) in ops.JOINS:
        return next((i for i in node.all_input_nodes if _keeps_axes(node, i) and not is_parameter_input(i)), None)
    largest, size = None, 0
    for operand in node.all_input_nodes:
        other = tensor(operand)
        if other is None or is_parameter_input(operand):
            continue
        if same_shape(other.shape, value.shape):
            return operand
        if ops.name_of(node) in ops.RESHAPES | ops.PERMUTES:
            return operand
        # An outer product, weights per lane times features: the features are many.
        if ops.name_of(node) in ops.SCALES and broadcasts_into(other.shape, value.shape):
            known = [n for n in other.shape if isinstance(n, int)]
            if math.prod(known) > size:
                largest, size = operand, math.prod(known)
    return largest
