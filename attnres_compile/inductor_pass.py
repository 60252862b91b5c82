"""Our rewriting as a pre-grad pass of Inductor, so that plain ``torch.compile(model)`` computes what it should."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from attnres_compile import backend


class InductorPass(CustomGraphPass):
    """Rewrites graphs that hold a declaration, and leaves all others as they are.

    Args:
        inner: the pass that was configured before, or ``None``; it runs first.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(self, graph: fx.Graph) -> None:
        inner = self.inner if isinstance(self.inner, (list, tuple)) else [self.inner]
        for each in inner:
            if each is not None:
                each(graph)
        backend.rewrite_for_inductor(graph)

    def uuid(self) -> Any:
        """What Inductor's cache needs to know; ``None`` (no caching) if the inner pass has no identity."""
        inner = self.inner if isinstance(self.inner, (list, tuple)) else [self.inner]
        known: list[Any] = []
        for each in inner:
            if each is None:
                continue
            identity = each.uuid() if hasattr(each, "uuid") else None
            if identity is None:
                return None
            known.append(identity)
        return ("attnres", backend.pass_identity(), *known)
