"""What is taken for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from attnres_compile.errors import ModelError


def refuse_strangers(model: Any) -> None:
    """Raise where ``model`` is nothing that holds Python modules.

    Raises:
        ModelError: it is no module, or one of TorchScript.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"the model is TorchScript ({type(model).__name__}), whose code cannot be looked into",
            remedy="Give the module that torch.jit was called with",
        )
    if isinstance(model, torch.export.ExportedProgram):
        raise ModelError(
            "the model is an ExportedProgram, not a torch.nn.Module",
            remedy="Use attnres_compile.rewrite_graph(program), or give program.module()",
        )
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise ModelError(
            f"the model must be a torch.nn.Module; this is {what}",
            remedy="Give the module itself: of a function, the module whose parameters it uses",
        )


def refuse_no_graph(graph: Any) -> None:
    """Raise where ``graph`` is neither a graph module nor a program of ``torch.export``.

    Raises:
        ModelError: it is something else.
    """
    if isinstance(graph, (fx.GraphModule, torch.export.ExportedProgram)):
        return
    refuse_strangers(graph)
    raise ModelError(
        f"a {type(graph).__name__} is no torch.fx.GraphModule and no torch.export.ExportedProgram",
        remedy="Use attnres_compile.transform(model, example_inputs), or give a graph of the model "
        "(torch.fx.symbolic_trace, torch.export.export)",
    )
