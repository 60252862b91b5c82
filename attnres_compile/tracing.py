"""Models that compute something else as soon as ``torch.compile`` traces them, before anything is converted.

Code that asks ``torch.compiler.is_compiling()`` may take another way there. A converted model is compiled, so it is as
far from the eager original as the original that is compiled without this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attnres_compile.capture import recurrent_layers
from attnres_compile.comparison import Run, compare, run
from attnres_compile.dynamo_graphs import own_code
from attnres_compile.inputs import Inputs


def traced_run(model: nn.Module, inputs: Inputs, seed: int) -> Run:
    """What the original gives when dynamo traces it and what it traced runs as it is, eagerly.

    Args:
        model: a copy that nobody else uses.
        inputs: what to call it with.
        seed: of the loss and of the model's own random numbers.
    """
    # A code object of its own: the model's may have reached dynamo's limit of variants, and would run untraced.
    traced = torch.compile(own_code(_call, type(model).__name__), backend="eager")
    inner = model.forward
    model.forward = lambda *args, **kwargs: traced(inner, args, kwargs)
    with torch.compiler.set_stance("default"), recurrent_layers():
        return run(model, inputs, seed)


def _call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def changes(original: Run, model: nn.Module, inputs: Inputs, seed: int, tolerance: float) -> str:
    """What tracing alone changes about a model, in words; empty if nothing, or if the traced one fails by itself.

    Args:
        original: the eager run.
        model: a copy of the same model that nobody else uses.
        inputs, seed: of the eager run.
        tolerance: the largest relative error of an output that is rounding.
    """
    try:
        traced = traced_run(model, inputs, seed)
    except Exception:  # It is asked for the cause of a difference, which its caller reports in any case.
        return ""
    outputs = compare(original.outputs, traced.outputs, floor=0.0)
    if outputs.equal and (outputs.error is None or outputs.error <= tolerance):
        return ""
    off = "" if outputs.error is None else f": output {outputs.worst!r} is off by {outputs.error:.1e}, relative"
    return f"the original itself computes something else when torch.compile traces it, before any conversion{off}"


__all__ = ["changes", "traced_run"]
