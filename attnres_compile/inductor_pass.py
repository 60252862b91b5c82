"""Our rewriting as a pre-grad pass of Inductor, so that plain ``torch.compile(model)`` computes what it should.

Imported when a model is converted, not with the package: Inductor takes its time to import.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from attnres_compile import backend
from attnres_compile.version import __version__


class InductorPass(CustomGraphPass):
    """Rewrites graphs that hold a declaration, and leaves all others as they are.

    Args:
        inner: the pass (or passes) configured before, or ``None``; they run first.
    """

    def __init__(self, inner: Any = None) -> None:
        passes = inner if isinstance(inner, (list, tuple)) else [inner]
        self.inner = [each for each in passes if each is not None]

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.inner:
            each(graph)
        backend.rewrite_for_inductor(graph)

    def uuid(self) -> Any:
        """What Inductor's cache needs to know; ``None`` (no caching) if an inner pass has no identity."""
        known = [each.uuid() if hasattr(each, "uuid") else None for each in self.inner]
        return None if None in known else ("attnres", _identity(), *known)


def install() -> None:
    """Let Inductor rewrite transformed models from now on; a user's own pass still runs."""
    current = config.pre_grad_custom_pass
    passes = current if isinstance(current, (list, tuple)) else [current]
    if not any(isinstance(each, InductorPass) for each in passes):
        config.pre_grad_custom_pass = InductorPass(current)


@functools.cache
def _identity() -> str:
    """A digest of this package's code; the configurations of conversions are in the graphs."""
    digest = hashlib.sha256(__version__.encode())
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".cpp"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
