"""The passes behind rewriting, in their order: phases, neighbours, then what runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.lower import LoweringReport, lower
from attnres_compile.passes.two_phase import two_phase
from attnres_compile.report import Fusion, Phase


@dataclass(frozen=True)
class Choices:
    """What the passes behind rewriting chose for one graph.

    Attributes:
        phases: how the sites over the same finished blocks are computed.
        fusions: what is fused into each site.
        lowering: how many sites run which way.
    """

    phases: tuple[Phase, ...]
    fusions: tuple[Fusion, ...]
    lowering: LoweringReport


def finish(module: fx.GraphModule, config: AttnResConfig) -> Choices:
    """Take a rewritten graph to what a compiler, or nobody, compiles; edits it in place.

    Args:
        module: the graph, as :func:`attnres_compile.passes.rewrite.rewrite` left it.
        config: its ``lowering``; two phases and fusion are in the sites' marks.

    Raises:
        LoweringError: an operator of this package is left that the lowering does not serve.
    """
    choices = Choices(two_phase(module, config), fuse_norm(module, config), lower(module, config))
    module.recompile()
    return choices
