"""Graphs as dynamo hands them over; knows its internals, as :mod:`backend` does."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any, cast

from torch import fx, nn

from attnres_compile.passes import facts


def copy_graph_module(module: fx.GraphModule, model: nn.Module | None = None) -> fx.GraphModule:
    """A graph module with a graph of its own over the same parameters; dynamo goes on reading the original's.

    Args:
        module: the graph module.
        model: where given, nodes name the modules they come from by their paths in it. dynamo names a module by the
            way it got there, which wrappers and closures change.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, values)
    if output is not None:
        end = graph.output(output)
        end.meta = dict(module.graph.output_node().meta)
    for old, new in values.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    if model is not None:
        _name_modules(graph, model)
    return copied


_NUMBERS = itertools.count()


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` with a code object of its own.

    dynamo keeps its compiled variants, their limit and what it knows of changing sizes by code object: everything that
    is compiled through one function would share them.
    """
    original = cast(types.FunctionType, function)
    code = original.__code__.replace(co_name=f"{name}_{next(_NUMBERS)}")
    return types.FunctionType(code, original.__globals__, code.co_name, original.__defaults__, original.__closure__)


def _name_modules(graph: fx.Graph, model: nn.Module) -> None:
    # dynamo keys the module stack by the module's id, with a suffix from the second call on - but none where one
    # module is called under several names, which are all that tells such calls apart.
    paths = {str(id(module)): path for path, module in reversed(list(model.named_modules()))}
    renamed: dict[int, dict[str, Any]] = {}
    names: dict[str, set[str]] = {}
    for node in graph.nodes:
        for key, entry in (node.meta.get("nn_module_stack") or {}).items():
            names.setdefault(key, set()).add(entry[0])
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        if id(stack) not in renamed:
            renamed[id(stack)] = {
                key if len(names[key]) == 1 else f"{key}@{entry[0]}": (
                    paths.get(key.partition("@")[0], facts.clean_path(entry[0])),
                    *entry[1:],
                )
                for key, entry in stack.items()
            }
        node.meta["nn_module_stack"] = renamed[id(stack)]
