"""Depth attention written by hand, for models that are written by hand a second time: no graph, no package code.

A :class:`DepthStream` stands where the original has its running sum. Its sources are the root and one sum per block;
what the original does to the sum between two adds is done to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-6


class DepthStream:
    """A residual stream of the paper.

    Args:
        root: what the stream starts from, ``[.., d]``.
        sizes: number of branches of each block.
        queries: one per read that has more than one source, in depth order, each ``[d]``.
        gain: ``"sum"`` or ``"mean"``.
    """

    def __init__(self, root: Tensor, sizes: Sequence[int], queries: Sequence[Tensor], gain: str = "sum") -> None:
        self.sources = [root]
        self.left = list(queries)
        self.gain = gain
        self.sizes = list(sizes)
        self.inside = 0  # branches in the block in progress
        self._read: Tensor | None = None

    def read(self) -> Tensor:
        """What a reader of the sum gets; all readers of one sum get the same."""
        if self._read is None:
            self._read = self.sources[0] if len(self.sources) == 1 else self._mix(self.left.pop(0))
        return self._read

    def read_alone(self) -> Tensor:
        """What a reader with a query of its own gets."""
        return self.sources[0] if len(self.sources) == 1 else self._mix(self.left.pop(0))

    def _mix(self, query: Tensor) -> Tensor:
        values = torch.stack(self.sources)  # [n, .., d]
        keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + EPS)
        weights = torch.softmax((keys * query).sum(-1), 0)
        mixed = (weights[..., None] * values).sum(0)
        return mixed * len(self.sources) if self.gain == "sum" else mixed

    def add(self, branch: Tensor, coefficient: Tensor | float = 1.0) -> None:
        """``coefficient`` times the sum, plus a branch."""
        self.sources = [coefficient * source for source in self.sources]
        if self.inside == 0:
            self.sources.append(branch.expand_as(self.sources[0]))
        else:
            self.sources[-1] = self.sources[-1] + branch
        self.inside += 1
        if self.inside == self.sizes[0]:
            self.inside = 0
            self.sizes.pop(0)
        self._read = None
