"""Graphs that call modules, whose mode may change after they were rewritten.

Dropout on a residual stream lets everything through in evaluation mode, and so may stand at each source. In training
mode it would draw one mask per source where the original draws one for their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from attnres_compile.errors import PlanMismatchError
from attnres_compile.passes import ops


class EvaluatedDropout(nn.Module):
    """Dropout at the sources of a stream, which was in evaluation mode when the stream was rewritten.

    Args:
        dropout: the model's own module, whose mode is looked at in each call.
        path: of it, for the message.
    """

    def __init__(self, dropout: nn.Module, path: str) -> None:
        super().__init__()
        self.dropout = dropout
        self.path = path

    def forward(self, value: Any) -> Any:
        """``value`` itself.

        Raises:
            PlanMismatchError: the module drops values now.
        """
        if self.dropout.training and getattr(self.dropout, "p", None) != 0:
            raise PlanMismatchError(
                "dropout on a residual stream was in evaluation mode when its graph was rewritten, and is in training "
                "mode now, where it would draw another mask for each source",
                module=self.path,
                remedy="Call eval() on the rewritten graph module, or rewrite the graph in training mode",
            )
        return value


def fix_modes(module: fx.GraphModule, before: Iterable[fx.Node]) -> None:
    """Let the dropouts that rewriting put at sources say when they are no longer what they were.

    Args:
        module: its graph was rewritten.
        before: the nodes that it had before.
    """
    old = set(before)
    for node in module.graph.nodes:
        if node in old or node.op != "call_module" or ops.name_of(node) not in ops.DROPOUTS:
            continue
        path = str(node.target)
        name = path.replace(".", "_") + "_on_stream"
        while hasattr(module, name) and not _is_for(getattr(module, name), path):
            name += "_"
        if not hasattr(module, name):
            module.add_submodule(name, EvaluatedDropout(module.get_submodule(path), path))
        node.target = name


def _is_for(value: Any, path: str) -> bool:
    return isinstance(value, EvaluatedDropout) and value.path == path


__all__ = ["EvaluatedDropout", "fix_modes"]
