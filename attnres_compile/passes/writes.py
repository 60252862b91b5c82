"""What a node may do to the memory that it is given: which inputs it may write, and which its result may share.

Both questions are answered from schemas, of every overload of an operator that is called as a packet, from the
signatures of torch's own Python functions, and from the bodies of higher-order operators. What cannot be answered so
(somebody's Python function, an operator without a body to look into) may write all tensors that it is given, and its
result may share memory with each of them.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from attnres_compile.passes import facts, ops

# Write no number, though their names or schemas say so.
_NOT_WRITES = frozenset({"requires_grad_", "rename_", "share_memory_", "retain_grad", "record_stream"})
# Names that write without ending in one.
_WRITES = ops.INPLACE_NAMES | frozenset(
    {
        "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
        "__imatmul__", "__delitem__", "__set__", "__delete__", "__setstate__", "ilshift", "irshift", "iconcat",
        "delitem", "resize", "resize_as", "module_load",
    }
)  # fmt: skip
# Views, and functions that may hand on what they are given, where no schema says so.
_HAND_ON = frozenset(
    {
        "dropout", "type_as", "cpu", "cuda", "numpy", "from_numpy", "asarray", "as_tensor", "atleast_1d", "atleast_2d",
        "atleast_3d", "broadcast_tensors", "meshgrid", "cartesian_prod", "H", "data", "__get__", "grad", "unflatten",
        "to_dlpack", "from_dlpack", "as_subclass", "module:Identity", "module:Flatten", "module:Unflatten", "identity",
        "set_", "requires_grad_", "rename_", "share_memory_", "tensor_split", "hsplit", "vsplit", "dsplit", "storage",
        "untyped_storage", "__iter__", "iter", "next", "_get_data_attr",
    }
)  # fmt: skip
_PLAIN_HOMES = ("_operator", "operator", "builtins", "math")
# Python functions of torch that compute and write nothing but what their names or arguments say.
_TORCH_HOMES = (
    "torch", "torch.nn.functional", "torch.functional", "torch._tensor", "torch._jit_internal", "torch._linalg_utils",
    "torch._lobpcg", "torch._lowrank", "torch.fft", "torch.linalg", "torch.special", "torch.nested", "torch.signal",
    "torch.nn.init", "torch.overrides", "torch._functorch.predispatch", "torch._functorch.vmap", "torch._C._functorch",
    "torch.utils.dlpack",
)  # fmt: skip
# Functions of torch written in C++ without a schema.
_BUILTINS = frozenset(
    {"_get_data_attr", "asarray", "from_numpy", "frombuffer", "to_dlpack", "hsmm", "dsmm", "saddmm", "spmm"}
)
# Higher-order operators that write nothing that they are given: they copy, or only look.
_FUNCTIONAL = frozenset(
    {
        "triton_kernel_wrapper_functional", "auto_functionalized", "auto_functionalized_v2", "out_dtype", "print",
        "_export_tracepoint", "inline_asm_elementwise",
    }
)  # fmt: skip
# Those whose last operands are, one by one, the inputs of their body.
_WRAPPERS = frozenset(
    {
        "wrap", "tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled",
        "wrap_with_autocast", "strict_mode", "invoke_subgraph",
    }
)  # fmt: skip


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs of ``node`` into whose memory it may write."""
    if node.op == "call_method":
        found = _written_by_name(node, str(node.target), node.args)
    elif node.op == "call_module":
        found = _written_by_module(node)
    elif node.op == "call_function":
        found = _written_by_function(node)
    else:
        return ()
    return tuple(dict.fromkeys(found))


def is_known(node: fx.Node) -> bool:
    """Whether more can be said of what ``node`` writes than that it may be all that it is given."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    return not tensors(node) or len(written(node)) < len(tensors(node))


def shared(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs of ``node`` with whose memory its result may share some; what it writes is not named again."""
    if node.op not in ("call_function", "call_method", "call_module") or not _may_hold_tensors(node):
        return ()
    return tuple(dict.fromkeys(_shared(node)))


def tensors(node: fx.Node) -> list[fx.Node]:
    """The inputs of ``node`` that are, or may hold, tensors."""
    return [operand for operand in node.all_input_nodes if _may_hold_tensors(operand)]


# ------------------------------------------------------------------ what is written


def _written_by_function(node: fx.Node) -> Iterable[fx.Node]:
    target: Any = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        found = [*_written_by_schema(node, target), *_running_statistics(node, _schemas(target))]
        name = ops.name_of(node)
        return found if name != "set_" else [*found, *nodes_in(node.args[:1])]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_by_higher_order(node)
    name = ops.name_of(node)
    home = _home(target)
    if home in _PLAIN_HOMES:
        if name in ("setattr", "delattr"):
            return tensors(node)
        return nodes_in(node.args[:1]) if name in _WRITES else ()
    if _is_method(target):
        return _written_by_name(node, _method_name(target), node.args)
    if isinstance(target, (types.BuiltinFunctionType, types.BuiltinMethodType)):
        if _aten(name) is not None or name in _BUILTINS or home.startswith("torch._C._functorch"):
            return _written_by_name(node, name, node.args)
        return tensors(node)
    if home in _TORCH_HOMES and isinstance(target, types.FunctionType):
        return _written_by_signature(node, target)
    return tensors(node)


def _written_by_name(node: fx.Node, name: str, args: tuple[Any, ...]) -> Iterable[fx.Node]:
    """For methods of tensors, and for functions of torch that take the same arguments."""
    if node.op == "call_method" and not hasattr(torch.Tensor, name):
        return tensors(node)
    found: list[fx.Node] = nodes_in(node.kwargs.get("out"))
    inplace = name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES
    if inplace or name in _WRITES or name == "__set__":
        found += nodes_in(args[:1]) or nodes_in(_named(node, "self")) or tensors(node)
    packet = _aten(name)
    if packet is not None:
        found += _written_by_schema(node, packet)
        found += _running_statistics(node, _schemas(packet))
    return found


def _written_by_signature(node: fx.Node, function: Callable[..., Any]) -> Iterable[fx.Node]:
    """For torch's own Python functions: ``inplace=``, ``out=``, statistics in training, ``max_norm``."""
    name = ops.name_of(node)
    given = _bound(function, node)
    if given is None:
        return tensors(node)
    first = next(iter(given.values()), None)
    found = nodes_in(given.get("out"))
    inplace = name.endswith("_") and not name.startswith("_")
    if inplace or _may_be_true(given.get("inplace", False)):
        found += nodes_in(first) or tensors(node)
    if _may_be_true(given.get("training", given.get("use_input_stats", False))):
        found += nodes_in([given.get("running_mean"), given.get("running_var")])
    if given.get("max_norm") is not None:
        found += nodes_in(given.get("weight"))
    return found


def _bound(function: Callable[..., Any], node: fx.Node) -> dict[str, Any] | None:
    """The arguments of ``node`` by the names that ``function`` has for them, defaults included; ``None`` if unknown."""
    signature = _signature(function)
    if signature is None:
        return None
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    values = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(values.pop(parameter.name, {}))
    return values


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _may_be_true(value: Any) -> bool:
    return isinstance(value, fx.Node) or bool(value)


# ------------------------------------------------------------------ schemas


@dataclass(frozen=True)
class _Place:
    """A tensor argument: where it stands, or only its name where it is given by that alone."""

    position: int | None
    name: str
    several: bool = False

    def of(self, node: fx.Node) -> list[fx.Node]:
        here = self.position is not None and self.position < len(node.args)
        value = node.args[self.position] if here else _named(node, self.name)  # type: ignore[index]
        # TorchScript's operators on lists share names with those on tensors (``sort``).
        one = isinstance(value, fx.Node) and facts.tensor(value) is not None
        return [] if one and self.several else nodes_in(value)


@dataclass(frozen=True)
class _Schema:
    """What a schema says: how many arguments it takes, what they are called, which are written, which returned."""

    positional: int
    names: frozenset[str]
    written: tuple[_Place, ...]
    returned: tuple[_Place, ...]
    statistics: tuple[_Place, ...]
    training: _Place | None

    def takes(self, node: fx.Node) -> bool:
        names = {"self" if name == "input" and "input" not in self.names else name for name in node.kwargs}
        return len(node.args) <= self.positional and names <= self.names


def _written_by_schema(node: fx.Node, target: Any) -> list[fx.Node]:
    schemas = _schemas(target)
    if not any(schema.written for schema in schemas) or ops.name_of(node) in _NOT_WRITES:
        return []
    fitting = [schema for schema in schemas if schema.takes(node)] or schemas
    return [each for schema in fitting for place in schema.written for each in place.of(node)]


def _running_statistics(node: fx.Node, schemas: tuple[_Schema, ...]) -> list[fx.Node]:
    """Batch norms write their statistics in training, which their schemas keep to themselves."""
    found: list[fx.Node] = []
    for schema in schemas:
        if not schema.statistics or schema.training is None:
            continue
        at = schema.training
        assert at.position is not None
        value = node.args[at.position] if len(node.args) > at.position else node.kwargs.get(at.name, True)
        if _may_be_true(value):
            found += [each for place in schema.statistics for each in place.of(node)]
    return found


@functools.cache
def _schemas(target: Any) -> tuple[_Schema, ...]:
    """Of an overload, or of every overload of a packet."""
    if isinstance(target, torch._ops.OpOverload):
        return (_read(target._schema),)
    return tuple(_read(getattr(target, name)._schema) for name in target.overloads())


def _read(schema: Any) -> _Schema:
    returned = {name for value in schema.returns if value.alias_info for name in _sets(value.alias_info)}
    places, written_, shared_ = {}, [], []
    positional = 0
    for position, argument in enumerate(schema.arguments):
        if not argument.kwarg_only:
            positional += 1
        several = isinstance(argument.type, torch.ListType)
        place = _Place(None if argument.kwarg_only else position, argument.name, several)
        places[argument.name] = place
        if argument.alias_info is None or "Tensor" not in str(argument.type):
            continue
        if argument.alias_info.is_write:
            written_.append(place)
        elif returned & _sets(argument.alias_info) or "*" in returned:
            shared_.append(place)
    statistics = tuple(places[name] for name in ("running_mean", "running_var") if name in places)
    training = next((places[name] for name in ("training", "train", "use_input_stats") if name in places), None)
    return _Schema(positional, frozenset(places), tuple(written_), tuple(shared_), statistics, training)


def _sets(alias_info: Any) -> set[str]:
    return set(alias_info.before_set) | set(alias_info.after_set)


@functools.cache
def _aten(name: str) -> Any:
    """The ATen operator of a method of tensors or a function of torch, or ``None``."""
    if not name or name.startswith("__"):
        return None
    found = getattr(torch.ops.aten, name, None)
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None


def _named(node: fx.Node, name: str) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    # Python calls the first operand ``input`` where the schema says ``self``.
    return node.kwargs.get("input", node.kwargs.get("tensor")) if name == "self" else None


# ------------------------------------------------------------------ modules


def _written_by_module(node: fx.Node) -> Iterable[fx.Node]:
    module = ops.module_of(node)
    if isinstance(module, fx.GraphModule):
        return _through(node, [module], _written_inputs, aligned=True)
    if module is None or not _is_plain(module):
        return tensors(node)
    if any(getattr(inner, "inplace", False) for inner in module.modules()):
        return nodes_in(node.args[:1]) or tensors(node)
    return ()


def _is_plain(module: nn.Module) -> bool:
    """Whether a module and all in it are torch's own."""
    return all(type(inner).__module__.startswith(("torch.nn.", "torch.ao.")) for inner in module.modules())


# ------------------------------------------------------------------ higher-order operators


def _written_by_higher_order(node: fx.Node) -> Iterable[fx.Node]:
    name = ops.name_of(node)
    if name in _FUNCTIONAL:
        return ()
    if name == "triton_kernel_wrapper_mutation":
        return _written_by_triton(node)
    if name == "with_effects" and len(node.args) > 1 and isinstance(node.args[1], torch._ops.OpOverload):
        schema = _schemas(node.args[1])[0]
        behind = node.args[2:]
        places = [p.position for p in schema.written if p.position is not None and p.position < len(behind)]
        return [each for position in places for each in nodes_in(behind[position])]
    bodies = _bodies(node)
    return tensors(node) if bodies is None else _through(node, bodies, _written_inputs, name in _WRAPPERS)


def _written_by_triton(node: fx.Node) -> list[fx.Node]:
    given: Any = node.kwargs.get("kwargs", {})
    everything = [each for each in nodes_in(given) if _may_hold_tensors(each)]
    try:
        from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

        values = {key: _value(value) if isinstance(value, fx.Node) else value for key, value in given.items()}
        names = get_mutated_tensors(
            node.kwargs["kernel_idx"],  # type: ignore[arg-type]
            node.kwargs["constant_args_idx"],  # type: ignore[arg-type]
            values,
            node.kwargs.get("tma_descriptor_metadata", {}),  # type: ignore[arg-type]
        )
        found = nodes_in([given[name] for name in names])
    except Exception:  # Triton, or what torch reads its kernels with, is not here or has changed.
        return everything
    # A kernel that writes nothing at all was not understood.
    return found or everything


def _bodies(node: fx.Node) -> list[fx.GraphModule] | None:
    """The graphs that a higher-order operator runs; ``None`` where it has none, or runs something else."""
    owner = node.graph.owning_module
    bodies: list[fx.GraphModule] = []
    unknown = False

    def look(value: Any) -> None:
        nonlocal unknown
        if isinstance(value, fx.Node) and value.op == "get_attr" and owner is not None:
            try:
                value = operator.attrgetter(str(value.target))(owner)
            except AttributeError:
                unknown = True
                return
            if not isinstance(value, nn.Module):
                return
        if isinstance(value, fx.GraphModule):
            bodies.append(value)
        elif callable(value) and not isinstance(value, (fx.Node, torch.Tensor, type, torch.dtype)):
            unknown = True

    for value in pytree.tree_leaves((node.args, dict(node.kwargs))):
        look(value)
    return None if unknown or not bodies else bodies


def _through(
    node: fx.Node,
    bodies: list[fx.GraphModule],
    question: Callable[[fx.GraphModule], list[int]],
    aligned: bool,
) -> list[fx.Node]:
    """The operands of ``node`` that become inputs of its bodies of which ``question`` is true."""
    found: list[fx.Node] = []
    for body in bodies:
        inputs = question(body)
        if not inputs:
            continue
        count = sum(inner.op == "placeholder" for inner in body.graph.nodes)
        if not aligned or (node.kwargs and node.op == "call_module") or count > len(node.args):
            return tensors(node)
        operands = node.args[len(node.args) - count :]
        found += [each for index in inputs for each in nodes_in(operands[index])]
    return found


def _written_inputs(body: fx.GraphModule) -> list[int]:
    return _reached(body, (target for node in body.graph.nodes for target in written(node)))


def _returned_inputs(body: fx.GraphModule) -> list[int]:
    return _reached(
        body, (result for node in body.graph.nodes if node.op == "output" for result in nodes_in(node.args))
    )


def _reached(body: fx.GraphModule, ends: Iterator[fx.Node]) -> list[int]:
    """Which inputs of a body may share memory with one of ``ends``, by their number."""
    todo = list(ends)
    seen = set(todo)
    while todo:
        node = todo.pop()
        for behind in (*shared(node), *written(node)):
            if behind not in seen:
                seen.add(behind)
                todo.append(behind)
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(inputs) if node in seen]


# ------------------------------------------------------------------ what is shared


def _shared(node: fx.Node) -> Iterator[fx.Node]:
    target: Any = node.target
    name = ops.name_of(node)
    if _is_copying_cast(node, name):
        return
    if node.op == "call_module":
        module = ops.module_of(node)
        if isinstance(module, fx.GraphModule):
            yield from _through(node, [module], _returned_inputs, aligned=True)
        else:
            whole = module is None or not _is_plain(module) or next(module.children(), None) is not None
            idle = name in _HAND_ON or (name in ops.DROPOUTS and ops.dropout_is_identity(node))
            yield from tensors(node) if whole or idle else ()
        return
    if isinstance(target, torch._ops.HigherOrderOperator):
        bodies = _bodies(node)
        if name in _FUNCTIONAL or name == "triton_kernel_wrapper_mutation":
            return
        yield from tensors(node) if bodies is None else _through(node, bodies, _returned_inputs, name in _WRAPPERS)
        return
    home = "" if node.op == "call_method" else _home(target)
    overload = isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    packet = target if overload else _aten(_method_name(target) if _is_method(target) else name)
    if packet is not None and home not in _PLAIN_HOMES:
        schemas = [schema for schema in _schemas(packet) if schema.returned]
        yield from (each for schema in schemas for place in schema.returned for each in place.of(node))
    if name in ops.DROPOUTS:
        yield from tensors(node)[:1] if ops.dropout_is_identity(node) else ()
    elif name in ("meshgrid", "broadcast_tensors", "set_"):
        yield from tensors(node)
    elif name == "einsum":
        # Of one tensor it may be a view.
        yield from tensors(node) if len(tensors(node)) == 1 else ()
    elif name == "getattr":
        yield from () if ops.is_metadata(node) else tensors(node)[:1]
    elif name == "getitem" and (several := _several(node)) is not None:
        # One of several results shares what all of them may; those of an unknown function may share with each other.
        yield from (several,) if not is_known(several) else (*shared(several), *written(several))
    elif name in ops.VIEWS or name in _HAND_ON:
        yield from tensors(node)[:1]
    elif packet is None and not _computes(node, target, home):
        yield from tensors(node)


def _several(node: fx.Node) -> fx.Node | None:
    """The operator of whose several results ``node`` picks one, or ``None``."""
    whole, index = (*node.args, None, None)[:2]
    one = isinstance(whole, fx.Node) and isinstance(index, int) and isinstance(_value(whole), (tuple, list))
    return whole if one and isinstance(whole, fx.Node) else None


def _computes(node: fx.Node, target: Any, home: str) -> bool:
    """Whether a function without a schema is known to make a tensor of its own."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(target))
    if isinstance(target, (types.BuiltinFunctionType, types.BuiltinMethodType)):
        return home in _PLAIN_HOMES or is_known(node)
    return home in _PLAIN_HOMES or home in _TORCH_HOMES or _is_method(target)


def _is_copying_cast(node: fx.Node, name: str) -> bool:
    if name not in ops.CASTS or not node.all_input_nodes:
        return False
    before, after = facts.tensor(node.all_input_nodes[0]), facts.tensor(node)
    return before is not None and after is not None and before.dtype != after.dtype


# ------------------------------------------------------------------ values


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in an argument: itself, or those in a list, tuple, dict or slice, however deep."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


_NUMBERS = (int, float, complex, bool, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.Generator)


def _may_hold_tensors(node: fx.Node) -> bool:
    value = _value(node)
    if value is not None:
        return not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    if node.op == "get_attr" and node.graph.owning_module is not None:
        try:
            held = operator.attrgetter(str(node.target))(node.graph.owning_module)
        except AttributeError:
            return True
        return not isinstance(held, (nn.Module, *_NUMBERS))
    # A node that makes nothing (a write by a custom operator) has no fact either.
    return not ops.is_metadata(node)


def _home(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "torch")


def _is_method(target: Any) -> bool:
    """Whether a function is a method of tensors, called as one."""
    if isinstance(target, types.MethodWrapperType):
        return True
    owner = getattr(target, "__objclass__", None)
    if isinstance(owner, type):
        return issubclass(torch.Tensor, owner)
    return getattr(target, "__qualname__", "").startswith(("Tensor.", "TensorBase."))


def _method_name(target: Any) -> str:
    return str(getattr(target, "__name__", ""))


__all__ = ["is_known", "nodes_in", "shared", "tensors", "written"]
