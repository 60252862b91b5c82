"""Graphs as code for people: one short statement per node, or a whole graph as Python."""

from __future__ import annotations

import linecache
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from attnres_compile.passes import facts, sites
from attnres_compile.rewriting import Rewriting
from attnres_compile.views.paths import short_path

aten = torch.ops.aten
_INFIX: dict[Any, str] = {
    operator.add: "+", operator.iadd: "+", aten.add.Tensor: "+", torch.add: "+",
    operator.sub: "-", aten.sub.Tensor: "-",
    operator.mul: "*", operator.imul: "*", aten.mul.Tensor: "*", aten.mul.Scalar: "*",
    operator.truediv: "/", operator.matmul: "@", operator.pow: "**",
}  # fmt: skip


def statement(node: fx.Node) -> str:
    """``name = expression`` for one node, short: parameters by their paths, functions by their last names.

    It is meant for reading: sources of depth attention are keywords (``mix(query, root=x, block_1=y)``), and what is
    the same at every site is left out.
    """
    if node.op == "placeholder":
        return f"{node.name} = input"
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    return f"{node.name} = {_expression(node)}"


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return str(node.target)
    if node.op == "call_method":
        return f"{_value(node.args[0])}.{node.target}({_arguments(node.args[1:], node.kwargs)})"
    if node.op == "call_module":
        return f"{node.target}({_arguments(node.args, node.kwargs)})"
    if node.target in _INFIX and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
        return f"{_value(left)} {_INFIX[node.target]} {_value(right)}"
    if node.target is operator.getitem:
        return f"{_value(node.args[0])}[{_index(node.args[1])}]"
    mark = node.meta.get(sites.SITE)
    if sites.operator_name(node) == "attnres::mix":
        return _mix(node, mark if isinstance(mark, sites.Mark) else None)
    return f"{_short(node.target)}({_arguments(node.args, node.kwargs)})"


def _mix(node: fx.Node, mark: sites.Mark | None) -> str:
    given = sites.arguments(node)
    count = len(given["sources"])
    names = [f"source_{n}" for n in range(count)]
    if mark is not None and count == 1 + mark.blocks + mark.partial:
        names = ["root", *(f"block_{n}" for n in range(1, mark.blocks + 1))]
        names += [f"partial_{mark.blocks + 1}"] if mark.partial else []
    # A source that is called what it is needs no keyword.
    parts = [
        _value(source) if _value(source) == name else f"{name}={_value(source)}"
        for name, source in zip(names, given["sources"], strict=True)
    ]
    return f"mix({_value(given['query'])}; {', '.join(parts)})"


def _short(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(_value, args), *(f"{name}={_value(value)}" for name, value in kwargs.items())])


def _index(value: Any) -> str:
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step][: 2 if value.step is None else 3]
        return ":".join("" if part is None else _value(part) for part in parts)
    if isinstance(value, tuple):
        return ", ".join(map(_index, value))
    return "..." if value is Ellipsis else _value(value)


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, (list, immutable_list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, (dict, immutable_dict)):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"[{_index(value)}]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, torch.device) else repr(value)


# ------------------------------------------------------------------ a whole graph

_FREED = re.compile(r";  (?:\w+ = )+None$")
_ASSIGNED = re.compile(r"^\s*(\w+)(?: : [^=]+)? = ")


def source_text(rewritings: Sequence[Rewriting], title: str) -> str:
    """The rewritten graphs as one Python file: a class each, with shapes and the user's lines in comments.

    Args:
        rewritings: what to show.
        title: of what, for the first line.
    """
    lines = [
        "# " + _one_line(title) + ", rewritten by attnres_compile: for reading.",
        "# attributes of self are the converted model's, attnres among them;",
        "# torch.ops.attnres.mix(query, sources, dim, eps, gain, scale, normalized)",
        "",
        "import torch",
        "from torch import device, inf, nan",
    ]
    for number, each in enumerate(rewritings):
        name = "Rewritten" if len(rewritings) == 1 else f"Rewritten{number + 1}"
        lines += ["", "", f"class {name}(torch.nn.Module):  # {_one_line(each.path) or 'the whole model'}"]
        lines += [f"    {line}".rstrip() for line in _body(each.after)]
    return "\n".join([*lines, ""])


def _body(module: fx.GraphModule) -> list[str]:
    nodes = {node.name: node for node in module.graph.nodes}
    lines: list[str] = []
    place = ""
    for line in module.graph.python_code("self").src.splitlines():
        match = _ASSIGNED.match(line)
        node = nodes.get(match[1]) if match else None
        line = _FREED.sub("", line)
        if node is not None:
            here = _place(node)
            if here and here != place:
                place = here
                lines.append(f"    # {here}")
            what = _tensor(node)
            line = f"{line}  # {what}" if what else line
        if line.strip():
            lines.append(line)
    return lines


def _place(node: fx.Node) -> str:
    """The user's line that made a node, with its text; nothing for what only brings a parameter."""
    where = facts.source_line(node)
    if node.op == "get_attr" or not where:
        return ""
    file, _, number = where.rpartition(":")
    text = linecache.getline(file, int(number)) if number.isdigit() else ""
    return _one_line(": ".join(part for part in (short_path(where), text.strip()) if part))


def _tensor(node: fx.Node) -> str:
    value = facts.tensor(node)
    if not isinstance(value, Tensor):
        return ""
    shape = ", ".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()


__all__ = ["source_text", "statement"]
