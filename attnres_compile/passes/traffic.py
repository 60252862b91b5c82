"""Bytes that the sites over one set of finished blocks move, read by read and in two phases.

Counted per token from the specs of the kernels that would run (:mod:`attnres_compile.kernels.spec`, as
:mod:`attnres_compile.kernels.tuning` plans them): rows of ``dim`` numbers of the sources' dtype, and one number per
token for a log-sum-exp. Queries and norm weights are read once per program and not counted; what does not depend on
the form (the residual adds, the norms) is not either.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnres_compile.kernels.spec import KernelSpec, Kind, row_bytes, statistics_bytes
from attnres_compile.kernels.tuning import plan


@dataclass(frozen=True)
class Sites:
    """What counting needs to know.

    Attributes:
        sources: number N of finished sources (the root and the finished blocks) that all sites read.
        merges: number of sites that read one more source, the sum of the block in progress.
        reads: number of sites that read nothing else.
        dim: features d per token and source.
        itemsize: bytes per element of the sources.
        training: count the backward too.
    """

    sources: int
    merges: int
    reads: int
    dim: int
    itemsize: int
    training: bool

    @property
    def count(self) -> int:
        """S: all sites."""
        return self.merges + self.reads


def direct_bytes(sites: Sites) -> int:
    """Bytes per token where each site reads all of its n sources by itself.

    Forward n + 1 rows. Backward 2n + 2 rows (sources, gradient and mix; the sources' gradients), n more for the
    gradients that are there already and are added to, and the log-sum-exp, stored and read. What is too wide for one
    backward kernel reads the gradient once more for each further group of sources.
    """
    return sites.merges * _cost(sites, "mix", sites.sources + 1) + sites.reads * _cost(sites, "mix", sites.sources)


def two_phase_bytes(sites: Sites) -> int:
    """Bytes per token in two phases (arXiv 2603.15031, Algorithm 1).

    Phase 1 reads the N finished sources once per group of queries that share a kernel, and writes S mixes and S
    log-sum-exps. A site with a partial sum then moves 3 rows (mix, partial sum, result) and a log-sum-exp; one without
    scales its mix, 2 rows. Backward: a merge 6 rows (result's gradient, mix, partial sum; the mix's and the partial
    sum's gradient, and what of that is there already) and 2 numbers, a scaling 2 rows, phase 1 per group of queries
    3N rows (sources, and their gradients read and written) and per query 2 rows (gradient and mix) and 2 numbers.
    """
    scaling = sites.reads * (4 if sites.training else 2) * sites.dim * sites.itemsize
    return _cost(sites, "inter", sites.sources, sites.count) + sites.merges * _cost(sites, "merge", 1) + scaling


def _cost(sites: Sites, kind: Kind, sources: int, queries: int = 1) -> int:
    """Bytes per token of the kernels of one call, forward and, when training, backward."""
    # No kernel takes float64; what one would move is twice what it moves for float32.
    dtype = "bfloat16" if sites.itemsize == 2 else "float32"
    keep = sites.training and kind == "mix"
    specs = [KernelSpec(kind, sources, sites.dim, dtype, queries=queries, keep=keep)]
    if sites.training:
        specs.append(KernelSpec(kind, sources, sites.dim, dtype, True, queries, gradients="a" * sources))
    total = sum(row_bytes(part) + statistics_bytes(part) for spec in specs for part in plan(spec))
    return 2 * total if sites.itemsize == 8 else total
