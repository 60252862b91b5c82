"""What rewriting changes around each site of a graph, as lines of code before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from attnres_compile.passes import facts
from attnres_compile.readable import statement
from attnres_compile.rewriting import Rewriting, SiteNodes


@dataclass(frozen=True)
class Line:
    """One node as code.

    Attributes:
        name: of the node.
        code: the node as a short statement.
        where: ``file:line`` of the user's code that it comes from, or ``""``.
    """

    name: str
    code: str
    where: str


@dataclass(frozen=True)
class SiteDiff:
    """One site before and after.

    Attributes:
        site: its name.
        stream: name of its stream.
        readers: paths of the modules that read it.
        sources: what it attends over; one source means that nothing changes there.
        where: ``file:line`` of the add that makes the value that is read, or ``""`` for the root.
        before: the residual adds that make the value (for the root, what makes it) and the nodes that read it.
        after: the sums that take the adds' place, the mix, and the nodes that read it.
    """

    site: str
    stream: str
    readers: tuple[str, ...]
    sources: tuple[str, ...]
    where: str
    before: tuple[Line, ...]
    after: tuple[Line, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def site_diffs(rewriting: Rewriting) -> tuple[SiteDiff, ...]:
    """The differences at every site of ``rewriting``, in its order."""
    old = {node.name: node for node in rewriting.before.graph.nodes}
    new = {node.name: node for node in rewriting.after.graph.nodes}
    shown: set[str] = set()
    return tuple(_diff(each, old, new, shown) for each in rewriting.sites)


def _diff(each: SiteNodes, old: dict[str, fx.Node], new: dict[str, fx.Node], shown: set[str]) -> SiteDiff:
    made = each.adds or (each.state,)
    mixed = new.get(each.mixed)
    made_now: list[str] = []
    if mixed is not None:
        made_now = [*_sums(mixed, old, shown), mixed.name]
    before = _lines(old, [*made, *each.readers])
    # A reader that is an add of the stream itself has gone.
    after = _lines(new, [*made_now, *each.readers])
    return SiteDiff(each.site.name, each.stream, each.site.readers, each.site.sources, each.where, before, after)


def _sums(mixed: fx.Node, old: dict[str, fx.Node], shown: set[str]) -> list[str]:
    """Names of the new nodes that ``mixed`` is made of and that no earlier site has shown, in order."""
    found: list[str] = []
    waiting = list(mixed.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node.name in old or node.name in shown or node.op in ("get_attr", "placeholder"):
            continue
        shown.add(node.name)
        found.append(node.name)
        waiting += node.all_input_nodes
    shown.add(mixed.name)
    return found[::-1]


def _lines(nodes: dict[str, fx.Node], names: Iterable[str]) -> tuple[Line, ...]:
    ordered: Sequence[str] = list(dict.fromkeys(name for name in names if name in nodes))
    return tuple(Line(name, statement(nodes[name]), facts.source_line(nodes[name])) for name in ordered)


__all__ = ["Line", "SiteDiff", "site_diffs"]
