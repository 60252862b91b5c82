"""What the page says in words and tables. Texts are plain: the template escapes them."""

from __future__ import annotations

import contextlib
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attnres_compile.report import Fusion, LeftAlone, Phase, Site, Stream, TransformReport
from attnres_compile.views import collapse
from attnres_compile.views.page.picture import relative, tensor
from attnres_compile.views.paths import short_path

# Longer lines of code are cut: what matters of an add stands at its start.
LONG_LINE = 160
KINDS = {"attention": "attention", "mlp": "MLP", "other": "other", "output": "output"}


def count(number: int, one: str, many: str = "") -> str:
    """``1 site``, ``2 sites``, ``12,345 parameters``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def headline(report: TransformReport) -> str:
    """One sentence: how much is converted."""
    if not report.streams:
        return "No residual stream can be converted."
    queries = sum(site.query is not None for stream in report.streams for site in stream.sites)
    return (
        f"{count(len(report.streams), 'residual stream')} with {count(queries, 'place')} that "
        f"{'attends' if queries == 1 else 'attend'} over depth."
    )


def figures(report: TransformReport) -> list[tuple[str, int]]:
    """The numbers of the summary."""
    sites = [site for stream in report.streams for site in stream.sites]
    return [
        ("residual streams", len(report.streams)),
        ("sublayers", sum(len(stream.sublayers) for stream in report.streams)),
        ("sites", len(sites)),
        ("queries", sum(site.query is not None for site in sites)),
        ("parameters added", report.parameters_added),
        ("adds left alone", len(report.rejections)),
    ]


# --- one stream


@dataclass(frozen=True)
class BlockRow:
    """Equal lines of one block."""

    block: str
    sublayers: str
    module: str
    where: str


def blocks(stream: Stream) -> list[BlockRow]:
    """Which sublayers make which block; equal lines of numbered modules are one row."""
    rows = []
    for number, block in enumerate(stream.blocks, 1):
        by_line: dict[str, list[int]] = {}
        for member in block:
            by_line.setdefault(stream.sublayers[member].where, []).append(member)
        for where, members in by_line.items():
            for module, found in collapse.paths([stream.sublayers[member].module for member in members]):
                numbers = collapse.numbers(members[position] + 1 for position in found)
                rows.append(BlockRow(str(number), numbers, module or "(model)", short_path(where)))
    return rows


@dataclass(frozen=True)
class SiteRow:
    """One site, as text."""

    number: int
    name: str
    kind: str
    sources: str
    query: str
    tensor: str


def sites(stream: Stream) -> list[SiteRow]:
    """The picture as a table."""
    return [
        SiteRow(
            number,
            relative(site.name, stream.owner),
            KINDS.get(site.kind, site.kind),
            source_names(site),
            "yes" if site.query else "none: bypass",
            tensor(site.shape, site.dtype),
        )
        for number, site in enumerate(stream.sites, 1)
    ]


def source_names(site: Site) -> str:
    """``root, block 1, block 2, partial 3`` -> ``root, block 1..2, partial 3``."""
    names = site.sources
    finished = [int(name.removeprefix("block ")) for name in names if name.removeprefix("block ").isdecimal()]
    text = [name for name in names if not name.removeprefix("block ").isdecimal()]
    if finished:
        text.insert(1 if text[:1] == ["root"] else 0, f"block {collapse.numbers(finished)}")
    return ", ".join(text)


@dataclass(frozen=True)
class Traffic:
    """Bytes per token in one direction of running; ``ratios`` are to the plain residual."""

    what: str
    bytes: tuple[int, int, int]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(value / self.bytes[0] if self.bytes[0] else 0.0 for value in self.bytes)


def traffic(stream: Stream) -> list[Traffic]:
    """Plain residual, one phase and two phases: inference and training."""
    cost = stream.cost
    if cost is None:
        return []
    return [
        Traffic("inference (one forward)", (cost.plain_bytes, cost.direct_bytes, cost.two_phase_bytes)),
        Traffic(
            "training (forward and backward)",
            (cost.plain_training_bytes, cost.direct_training_bytes, cost.two_phase_training_bytes),
        ),
    ]


def size(number: float) -> str:
    """Bytes for a person: ``512 B``, ``12.4 KiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(number) >= 1024 and unit != "TiB":
        number, unit = number / 1024, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


# --- how the sites run


@dataclass(frozen=True)
class PhaseRow:
    """Blocks in progress whose sites run in the same way, for the same reason."""

    blocks: str
    sites: int
    how: str
    reason: str
    counted: str
    direct_bytes: int
    two_phase_bytes: int


def phases(report: TransformReport, stream: Stream) -> list[PhaseRow]:
    """How the sites of ``stream`` run, in words."""
    groups: dict[tuple[str, bool, str, bool], list[Phase]] = {}
    for phase in report.phases:
        if phase.stream == stream.name:
            groups.setdefault((phase.chosen, phase.applies, phase.reason, phase.training), []).append(phase)
    rows = []
    for (chosen, applies, reason, training), members in groups.items():
        way = "in two phases" if chosen == "two_phase" else "each site by itself"
        how = way if applies else f"each site by itself; {way} on a GPU"
        numbers = [phase.block for phase in members if phase.block <= len(stream.blocks)]
        parts = [collapse.numbers(dict.fromkeys(numbers))] if numbers else []
        parts += ["after the last"] if any(phase.block > len(stream.blocks) for phase in members) else []
        rows.append(
            PhaseRow(
                ", ".join(parts),
                sum(len(phase.sites) for phase in members),
                how,
                reason,
                "forward and backward" if training else "forward",
                sum(phase.direct_bytes for phase in members),
                sum(phase.two_phase_bytes for phase in members),
            )
        )
    return rows


def fusions(report: TransformReport) -> list[str]:
    """What the sites' kernels do besides, one sentence per kind, the most frequent first."""
    return [f"{text}: {count(number, 'site')}." for text, number in Counter(map(_fusion, report.fusions)).most_common()]


def _fusion(fusion: Fusion) -> str:
    add = "the residual add before it" if fusion.add else ""
    norm = f"the {fusion.norm} after it" if fusion.norm else ""
    text = f"Fused with {' and '.join(part for part in (add, norm) if part)}" if add or norm else "Nothing fused"
    reasons = [
        f"no {what} because {reason}"
        for what, reason in (("add", fusion.add_reason), ("norm", fusion.norm_reason))
        if reason
    ]
    return f"{text} ({'; '.join(reasons)})" if reasons else text


# --- adds left alone


@dataclass(frozen=True)
class Place:
    """Equal adds on one line of numbered modules."""

    module: str
    modules: tuple[str, ...]
    where: str
    code: str
    message: str
    adds: int


@dataclass(frozen=True)
class Reason:
    """Adds left alone for one reason. ``message`` is the most frequent one; a place with another has its own."""

    name: str
    message: str
    adds: int
    places: tuple[Place, ...]


def reasons(rejections: Sequence[LeftAlone]) -> list[Reason]:
    """Adds left alone, by reason, the most frequent first."""
    groups: dict[str, list[LeftAlone]] = {}
    for rejection in rejections:
        groups.setdefault(rejection.reason, []).append(rejection)
    return [_reason(name, members) for name, members in sorted(groups.items(), key=lambda group: -len(group[1]))]


def _reason(name: str, members: Sequence[LeftAlone]) -> Reason:
    ((message, _),) = Counter(member.message for member in members).most_common(1)
    return Reason(name, message, len(members), tuple(_places(members, message)))


def _places(members: Iterable[LeftAlone], usual: str) -> Iterator[Place]:
    lines: dict[tuple[str, str], list[LeftAlone]] = {}
    for member in members:
        lines.setdefault((member.where, member.message), []).append(member)
    for (where, message), adds in lines.items():
        for module, found in collapse.paths([add.module for add in adds]):
            yield Place(
                module or "(model)",
                tuple(dict.fromkeys(adds[position].module for position in found)),
                short_path(where),
                code_line(where),
                "" if message == usual else message,
                len(found),
            )


def code_line(where: str) -> str:
    """The line of Python at ``file:line``, or ``""``.

    A report may come from a file of somebody else: only Python files, and what Python itself has as a source (cells of
    a notebook), are looked into.
    """
    file, _, line = where.rpartition(":")
    if not line.isdecimal() or not (file.endswith(".py") or file in linecache.cache):
        return ""
    text = ""
    with contextlib.suppress(ValueError):  # a name that no file can have, a number beyond all lines
        linecache.checkcache(file)
        text = linecache.getline(file, int(line)).strip()
    return text if len(text) <= LONG_LINE else f"{text[:LONG_LINE]}..."
