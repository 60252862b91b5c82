"""A report as one HTML page that needs nothing else, and as a fragment for notebooks (docs/html-report.md).

What comes from a model or a script reaches the page as escaped text or as JSON that the page's scripts show as text.
A Content-Security-Policy names the hash of each script and of the style and forbids everything else, so that text
which got in some other way could neither run nor load.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import platform
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnres_compile.errors import AttnResError
from attnres_compile.report import TransformReport
from attnres_compile.version import __version__
from attnres_compile.views.page import tables
from attnres_compile.views.page.drawing import drawing
from attnres_compile.views.page.picture import picture
from attnres_compile.views.paths import short_path

# Run in this order; each file adds to the one name `attnres`.
SCRIPTS = (
    "vendor/d3.min.js",
    "base.js",
    "tip.js",
    "matrix.js",
    "keys.js",
    "words.js",
    "stream.js",
    "colour.js",
    "heatmap.js",
    "mixing.js",
    "weights.js",
    "main.js",
)


class Weights(Protocol):
    """What the page needs of :class:`attnres_compile.depth_weights.DepthWeights`."""

    def to_dict(self) -> dict[str, Any]: ...


def page(report: TransformReport, weights: Weights | None = None, title: str = "") -> str:
    """The report as a whole HTML page, with its style, its scripts and D3 inside.

    Args:
        report: what to show.
        weights: depth-attention weights to draw as heat maps.
        title: of the page; the default says what it is.
    """
    style, scripts = _file("page.css"), [_file(name) for name in SCRIPTS]
    left = tables.reasons(report.rejections)
    data = {
        "streams": [picture(stream) for stream in report.streams],
        "left": [list(place.modules) for reason in left for place in reason.places],
        "weights": weights and {"streams": [_drawn(stream) for stream in weights.to_dict()["streams"]]},
    }
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title or "Attention Residuals",
            policy=policy,
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            data=Markup(_script_json(data)),
            report=report,
            left=left,
            weights=data["weights"],
            licence=_file("vendor/d3.LICENSE.txt"),
            versions=f"attnres_compile {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}",
        )
    )


def write_page(report: TransformReport, path: str | Path, weights: Weights | None = None, title: str = "") -> None:
    """Write :func:`page` to the file ``path``, in UTF-8.

    Raises:
        AttnResError: the file cannot be written.
    """
    # A file's name may hold bytes that are no text; they are shown as question marks.
    content = page(report, weights, title).encode("utf-8", "replace")
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise AttnResError(
            f"the report cannot be written to {str(path)!r}: {error.strerror or error}",
            remedy="Choose a file in a folder that exists and can be written to",
        ) from error


def fragment(report: TransformReport) -> str:
    """The report as HTML for a notebook: no scripts, and a small picture of each stream."""
    return (
        _environment()
        .get_template("fragment.html.j2")
        .render(
            report=report,
            left=tables.reasons(report.rejections),
            drawings=[(stream, drawing(stream)) for stream in report.streams],
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("attnres_compile.views", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["tables"] = tables
    environment.filters |= {"size": tables.size, "short_path": short_path}
    return environment


@functools.cache
def _file(name: str) -> str:
    """A file of the page, its lines ending as the browser will see them when it computes the hash."""
    return resources.files("attnres_compile.views.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _script_json(values: object) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)  # ASCII, so no U+2028 either
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _drawn(stream: dict[str, Any]) -> dict[str, Any]:
    """What is drawn of a stream's weights; matrices that are only colours have no zeros at the ends of rows."""
    keys = ("name", "sites", "kinds", "sources", "weights", "std", "entropy", "tokens")
    mixing = {
        form: [_short(_trimmed(row), digits=3) for row in matrix] for form, matrix in stream.get("mixing", {}).items()
    }
    return {key: _short(stream[key]) for key in keys if key in stream} | {"mixing": mixing}


def _trimmed(row: list[float]) -> list[float]:
    length = len(row)
    while length and not row[length - 1]:
        length -= 1
    return row[:length]


def _short(value: Any, digits: int = 4) -> Any:
    """JSON values with few digits per number, as many as can be seen; what is no number becomes null."""
    if isinstance(value, dict):
        return {str(key): _short(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item, digits) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() else short
    return value
