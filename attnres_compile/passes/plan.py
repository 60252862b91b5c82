"""Streams + configuration -> which sublayers form a block, what each site sees, and its query's name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.passes import facts
from attnres_compile.passes.calls import first_calls
from attnres_compile.passes.streams import Read, ResidualStream

# File, line and function.
_Frame = tuple[str, int, str]


@dataclass(frozen=True)
class SitePlan:
    """One mix to be inserted.

    Attributes:
        name: unique among all streams of the graph.
        index: number of steps behind the state that is read.
        readers: the nodes that read this site's mix; the rest of the graph's new nodes use the first site.
        blocks: number of complete blocks it sees.
        partial: whether it also sees the sum of the block in progress.
        label: module paths of what reads it.
        shares: name of the site whose query it uses, where another call of the same network has one; else ``None``.
    """

    name: str
    index: int
    readers: tuple[fx.Node, ...]
    blocks: int
    partial: bool
    label: tuple[str, ...]
    shares: str | None = None

    @property
    def query(self) -> str:
        """Name of the query it uses: its own, unless it shares one."""
        return self.shares or self.name

    @property
    def num_sources(self) -> int:
        """Sources of the mix, the root included."""
        return 1 + self.blocks + self.partial

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in depth order."""
        names = ["root", *(f"block {n}" for n in range(1, self.blocks + 1))]
        return tuple(names + ([f"partial {self.blocks + 1}"] if self.partial else []))


@dataclass(frozen=True)
class BlockPlan:
    """How one stream is rewritten.

    Attributes:
        name: unique in the graph.
        stream: the stream.
        blocks: for each block the indices of its steps.
        sites: what is read, in depth order; those with one source are bypasses and need no query.
    """

    name: str
    stream: ResidualStream
    blocks: tuple[range, ...]
    sites: tuple[SitePlan, ...]

    @property
    def queries(self) -> tuple[str, ...]:
        """Names of the sites that need a query of their own, in depth order."""
        return tuple(site.name for site in self.sites if site.num_sources > 1 and site.shares is None)


def block_ranges(sublayers: int, config: AttnResConfig) -> tuple[range, ...]:
    """Consecutive blocks over ``sublayers`` steps; a remainder joins the last block (method.md, block form)."""
    if config.block_size is not None:
        size = config.block_size
        count = max(sublayers // size, 1)
    else:
        count = sublayers if config.num_blocks is None else min(config.num_blocks, sublayers)
        size = sublayers // count
    bounds = [n * size for n in range(count)] + [sublayers]
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def plan(
    streams: tuple[ResidualStream, ...], config: AttnResConfig, prefix: str = "", method: str = "forward"
) -> tuple[BlockPlan, ...]:
    """Lay out blocks and sites for every stream.

    Args:
        streams: from :func:`attnres_compile.passes.detect.detect`.
        config: block layout and whether readers have queries of their own.
        prefix: module path to leave out of names; what lies outside it is called ``output``.
        method: which method of the module at ``prefix`` makes the streams; what reads them outside of its call is
            called ``output``, too, as it is where the method is traced by itself.
    """
    taken: dict[str, int] = {}
    plans: list[BlockPlan] = []
    for number, stream in enumerate(streams):
        blocks = block_ranges(len(stream.steps), config)
        sites: list[SitePlan] = []
        call = _call_of(stream, method)
        done = 0
        for read in stream.reads:
            while done < len(blocks) and blocks[done].stop <= read.index:
                done += 1
            partial = done < len(blocks) and read.index > blocks[done].start
            for label, readers in _groups(read, config, prefix, call):
                name = _unique(label[0], taken)
                sites.append(SitePlan(name, read.index, readers, done, partial, label))
        plans.append(BlockPlan(f"stream{number}", stream, blocks, tuple(sites)))
    if config.calls == "separate":
        return tuple(plans)
    first = first_calls(streams)
    return tuple(
        each if first[number] == number else replace(each, sites=_shared(each, plans[first[number]]))
        for number, each in enumerate(plans)
    )


def _shared(plan: BlockPlan, first: BlockPlan) -> tuple[SitePlan, ...]:
    """The sites of a later call of a network with the queries of its first call: by the states that they read, and
    where a state has several, by what reads it. What only the later call reads has a query of its own.
    """
    free = [site for site in first.sites if site.num_sources > 1]
    sites: list[SitePlan] = []
    for site in plan.sites:
        here = [each for each in free if each.index == site.index]
        alone = sum(each.index == site.index for each in plan.sites) == 1 and len(here) == 1
        same = next((each for each in here if alone or each.label[0] == site.label[0]), None)
        if same is not None:
            free.remove(same)
        sites.append(site if same is None else replace(site, shares=same.name))
    return tuple(sites)


def _groups(
    read: Read, config: AttnResConfig, prefix: str, call: list[_Frame]
) -> list[tuple[tuple[str, ...], tuple[fx.Node, ...]]]:
    """The readers of one state that share a query, each group with the paths of its modules."""
    by_path: dict[str, list[fx.Node]] = {}
    for reader in read.readers:
        path = reader_path(reader, prefix) if _is_made_in(reader, call) else "output"
        by_path.setdefault(path, []).append(reader)
    if config.queries == "reader":
        return [((path,), tuple(nodes)) for path, nodes in by_path.items()]
    # A name inside the prefix, where there is one, is the same in every capture.
    paths = sorted(by_path, key=lambda path: path == "output")
    return [(tuple(paths), read.readers)]


def _call_of(stream: ResidualStream, method: str) -> list[_Frame]:
    """The frames from outside down to the call of the method, the innermost of its name, that makes the stream;
    none where that is the whole forward of a module, whose path says the same.
    """
    if method == "forward":
        return []
    shared = facts.common(facts.frames(step.node) for step in stream.steps)
    last = max((at for at, (_, _, function) in enumerate(shared) if function == method), default=-1)
    return shared[: last + 1]


def _is_made_in(node: fx.Node, call: list[_Frame]) -> bool:
    """Whether ``node`` was made in that call: in any line of the method itself, come to by the same lines."""
    if not call or node.op == "output":
        return True
    made = facts.frames(node)[: len(call)]
    return len(made) == len(call) and made[:-1] == call[:-1] and made[-1][::2] == call[-1][::2]


def reader_path(node: fx.Node, prefix: str = "") -> str:
    """Module path of a reader relative to ``prefix``; ``output`` for what is outside of it."""
    if node.op == "output":
        return "output"
    path = facts.module_path(node)
    if node.op == "call_module" and not node.meta.get("nn_module_stack"):
        path = str(node.target)
    if prefix:
        if path != prefix and not path.startswith(prefix + "."):
            return "output"
        path = path[len(prefix) + 1 :]
    return path or "stream"


def _unique(name: str, taken: dict[str, int]) -> str:
    """``name``, or ``name:2`` and so on where it is taken; ``taken`` counts how often each was asked for."""
    candidate = name
    while candidate in taken:
        taken[name] += 1
        candidate = f"{name}:{taken[name]}"
    taken[candidate] = 1
    return candidate
