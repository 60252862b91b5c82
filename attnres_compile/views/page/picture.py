"""Streams as the page's scripts want them: numbered columns, and per site what it attends over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnres_compile.report import Site, Stream
from attnres_compile.views.paths import short_path


def picture(stream: Stream) -> dict[str, Any]:
    """What is drawn of one stream, as JSON values.

    Returns:
        ``columns`` are the sources: the root, one per block, and any others by name. Each site has ``sources``, the
        numbers of its columns, ``partial``, the one of them that is a partial sum (or null), ``block``, the number
        of the block in progress (one more than there are behind the last), and ``behind``, the number of sublayers
        behind its value, null where the report does not know it.
    """
    columns = {"root": 0} | {f"block {number}": number for number in range(1, len(stream.blocks) + 1)}
    sites = [_site(site, columns, stream) for site in stream.sites]
    return {
        "name": stream.name,
        "owner": stream.owner,
        "features": stream.feature_dim,
        "columns": list(columns),
        "blocks": [list(block) for block in stream.blocks],
        "sublayers": [
            {"module": sub.module, "where": short_path(sub.where), "tensor": tensor(sub.shape, sub.dtype)}
            for sub in stream.sublayers
        ],
        "sites": sites,
    }


def _site(site: Site, columns: dict[str, int], stream: Stream) -> dict[str, Any]:
    sources, partial = [], None
    for name in site.sources:
        number = name.removeprefix("partial ")
        if number != name and f"block {number}" in columns:
            partial = columns[f"block {number}"]
            sources.append(partial)
        else:
            sources.append(columns.setdefault(name, len(columns)))
    finished = [column for column in sources if column != partial and column <= len(stream.blocks)]
    return {
        "name": site.name,
        "label": relative(site.name, stream.owner),
        "kind": site.kind,
        "readers": list(site.readers),
        "tensor": tensor(site.shape, site.dtype),
        "query": site.query is not None,
        "sources": sources,
        "partial": partial,
        "block": partial if partial is not None else max(finished, default=0) + 1,
        "behind": site.index if indices_known(stream.sites) else None,
    }


def indices_known(sites: Sequence[Site]) -> bool:
    """Whether the report says how many sublayers lie behind each site: those of version 0.1 do not."""
    return len(sites) < 2 or any(site.index for site in sites)


def relative(name: str, owner: str) -> str:
    """``name`` as seen from the module ``owner``."""
    return name.removeprefix(f"{owner}.") if owner else name


def tensor(shape: Sequence[int | str], dtype: str) -> str:
    """``float32[2, 16, 64]``, or what is known of it."""
    return dtype + (f"[{', '.join(map(str, shape))}]" if shape else "")
