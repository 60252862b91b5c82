"""Graphs as dynamo hands them over, and code as it takes it; knows its internals, as :mod:`backend` does."""

from __future__ import annotations

import contextvars
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import reset_code

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

    The variants go with the function. dynamo maps each one to the code that it was made of, and that code holds it:
    without ``torch._dynamo.reset()`` neither would ever be freed.
    """
    original = cast(types.FunctionType, function)
    code = original.__code__.replace(co_name=f"{name}_{next(_NUMBERS)}")
    made = types.FunctionType(code, original.__globals__, code.co_name, original.__defaults__, original.__closure__)
    weakref.finalize(made, reset_code, code).atexit = False
    return made


class _Backend:
    """What dynamo is given for a backend. It keeps every one for good, over ``torch._dynamo.reset()`` too in some
    versions, and in the compiled variants of the user's code: so this knows no model, and asks who calls.
    """

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        serving = _SERVING.get()
        assert serving is not None and serving.backend is self, "compiled outside of the call that it is for"
        return serving.compiler(module, example_inputs)


class CompiledCall:
    """``function``, compiled by dynamo with ``compiler`` as the backend, both of which live as long as this does.

    Two of these never share a graph, not even of code that both call.

    Args:
        function: what to compile, with a code object of its own: see :func:`own_code`.
        compiler: makes a callable of a graph and its example inputs. What it makes must not hold a model: it is kept
            with the code, where no garbage collector looks.
        options: further ones of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], compiler: Callable[..., Any], **options: Any) -> None:
        self.compiler = compiler
        self.backend = _Backend()
        self._call: Callable[..., Any] = torch.compile(function, backend=self.backend, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _SERVING.set(self)
        try:
            return self._call(*args, **kwargs)
        finally:
            _SERVING.reset(token)


# Whose code runs, in each thread. dynamo compiles in the thread that calls.
_SERVING: contextvars.ContextVar[CompiledCall | None] = contextvars.ContextVar("attnres_serving", default=None)


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
