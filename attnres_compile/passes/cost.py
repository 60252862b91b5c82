"""What depth attention will cost in one stream, counted from its plan before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from attnres_compile.config import AttnResConfig
from attnres_compile.passes import facts
from attnres_compile.passes.plan import BlockPlan
from attnres_compile.passes.traffic import Sites, direct_bytes, two_phase_bytes
from attnres_compile.report import Cost

# Rows that a residual add moves: two read, one written (arXiv 2603.15031, Table 1). Its backward adds two gradients.
ADD_ROWS = 3
# Bytes per token that a site keeps for its backward beside tensors: the log-sum-exp, float32.
STATISTIC = 4


def predict_cost(plan: BlockPlan, config: AttnResConfig) -> Cost | None:
    """The cost of one stream per token; ``None`` where the root's dtype is not known."""
    root = facts.tensor(plan.stream.root)
    if root is None:
        return None
    row = plan.stream.feature_dim * root.itemsize
    sublayers = len(plan.stream.steps)
    # Inside a block the terms are still added up; a block's first term is its sum so far.
    adds = (sublayers - len(plan.blocks)) * ADD_ROWS * row
    finished = max((site.num_sources for site in plan.sites), default=1)
    partials = len({site.index for site in plan.sites if site.partial})
    queries = len(plan.queries)
    direct, both = {}, {}
    for training in (False, True):
        groups = list(_groups(plan, root.itemsize, training))
        direct[training] = adds + sum(map(direct_bytes, groups))
        both[training] = adds + sum(min(direct_bytes(g), two_phase_bytes(g)) for g in groups)
    return Cost(
        parameters=queries * plan.stream.feature_dim * (2 if config.key_norm_weight else 1),
        itemsize=root.itemsize,
        plain_bytes=ADD_ROWS * sublayers * row,
        direct_bytes=direct[False],
        two_phase_bytes=both[False],
        plain_training_bytes=2 * ADD_ROWS * sublayers * row,
        direct_training_bytes=direct[True],
        two_phase_training_bytes=both[True],
        activation_bytes=(finished - 1) * row,
        training_activation_bytes=(len(plan.blocks) + partials) * row + STATISTIC * queries,
    )


def _groups(plan: BlockPlan, itemsize: int, training: bool) -> Iterator[Sites]:
    """The sites over the same finished blocks; bypasses move nothing."""
    for blocks in dict.fromkeys(site.blocks for site in plan.sites):
        members = [site for site in plan.sites if site.blocks == blocks and site.num_sources > 1]
        partials = sum(site.partial for site in members)
        if members:
            rest = len(members) - partials
            yield Sites(blocks + 1, partials, rest, plan.stream.feature_dim, itemsize, training)
