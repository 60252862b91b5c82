"""Depth-attention weights drawn with matplotlib, which is optional: ``pip install 'attnres-compile[plot]'``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres_compile.depth_weights import FORMS, PARTIAL, DepthWeights, StreamWeights
from attnres_compile.errors import AttnResError, MissingDependencyError
from attnres_compile.views.heatmap import labels, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Sequential, even in lightness, and the same without colour vision.
COLORS = "cividis"
# Cells up to this many columns get their number written in.
FEW_COLUMNS = 12
# Inches.
ROW, COLUMN, MARGIN, MIXING = 0.22, 0.42, 0.9, 3.2
_FORMS = {
    "plain": "plain residual",
    "full": "full form, zero queries",
    "block": "block form, zero queries",
    "measured": "measured",
}


def require() -> None:
    """Raise where there is nothing to draw with.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib, which is not installed", remedy="pip install 'attnres-compile[plot]'"
        ) from error


def figure(found: DepthWeights, path: str | Path | None = None) -> Figure:
    """One heat map per stream and kind of reader, its entropies beside it, and the mixing matrices below.

    Args:
        found: what to draw.
        path: where to save it, or ``None``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        AttnResError: the file cannot be written.
    """
    require()
    from matplotlib.figure import Figure

    heights = [_height(stream) for stream in found.streams]
    # Without pyplot: nothing global is chosen or kept, and no display is needed.
    drawn = Figure(figsize=(max(map(_width, found.streams), default=4.0), sum(heights) or 1.0), layout="constrained")
    parts: Any = drawn.subfigures(max(len(found.streams), 1), 1, squeeze=False, height_ratios=heights or None)
    for part, stream in zip(parts[:, 0], found.streams, strict=False):
        _draw(part, stream)
    if path is not None:
        try:
            drawn.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise AttnResError(
                f"the picture cannot be written: {error}", remedy="Give a file ending in .png, .pdf or .svg"
            ) from error
    return drawn


def _height(stream: StreamWeights) -> float:
    return sum(MARGIN + ROW * len(rows) for _, rows in panels(stream)) + MIXING + 0.6


def _width(stream: StreamWeights) -> float:
    widest = 0.08 * max(map(len, labels(stream)))
    return float(min(max(9.0, 3.5 + widest + COLUMN * len(stream.sources)), 16.0))


def _draw(part: SubFigure, stream: StreamWeights) -> None:
    part.suptitle(
        f"{stream.name}: depth-attention weights, mean over {stream.tokens:,} tokens (softmax, without the gain)"
    )
    groups = panels(stream)
    ratios = [MARGIN + ROW * len(rows) for _, rows in groups]
    halves: Any = part.subfigures(2, 1, height_ratios=[sum(ratios), MIXING])
    upper, lower = halves
    axes = upper.subplots(len(groups), 2, squeeze=False, height_ratios=ratios, width_ratios=[4, 1])
    choosing = stream.weights[np.isfinite(stream.weights).sum(1) > 1]
    # A site with one source has nothing to choose: its 1 must not pale all others.
    top = float(np.nanmax(choosing)) if choosing.size else 1.0
    names = labels(stream)
    image: Any = None
    for (title, rows), (left, right) in zip(groups, axes, strict=True):
        image = _heat(left, stream, rows, names, top)
        left.set_title(title, loc="left", fontsize="medium")
        _entropies(right, stream, rows)
    if image is not None:
        upper.colorbar(image, ax=axes[:, 1].tolist(), label="weight", extend="max" if top < 1 else "neither", aspect=40)
    _mixing(lower, stream)


def _heat(axes: Axes, stream: StreamWeights, rows: list[int], names: list[str], top: float) -> Any:
    values = np.ma.masked_invalid(stream.weights[rows])
    image = _image(axes, values, top)
    axes.set_yticks(range(len(rows)), [_plain(names[row]) for row in rows], fontsize="small")
    columns = [_plain("partial sum" if name == PARTIAL else name) for name in stream.sources]
    if len(columns) <= FEW_COLUMNS:
        axes.set_xticks(range(len(columns)), columns, fontsize="small")
        for row, column in np.argwhere(~np.ma.getmaskarray(values)):
            value = float(values[row, column])
            front = "black" if value > 0.3 * top else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="x-small", color=front)
    else:
        axes.set_xlabel("source: the root (0), then the blocks" + (", then the partial sum" * (PARTIAL in columns)))
    axes.set_facecolor("none")
    return image


def _image(axes: Axes, values: Any, top: float) -> Any:
    from matplotlib.colors import PowerNorm

    # By its square root, as in the terminal: one source of fifty is still seen.
    norm = PowerNorm(0.5, vmin=0.0, vmax=top)
    return axes.imshow(values, cmap=COLORS, norm=norm, aspect="auto", interpolation="nearest")


def _entropies(axes: Axes, stream: StreamWeights, rows: list[int]) -> None:
    at = np.arange(len(rows))
    axes.barh(at, stream.entropy[rows], height=0.7, color="#3b5a8c")
    axes.plot(stream.uniform_entropy[rows], at, linestyle="none", marker="|", color="black")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.1 * max(float(stream.uniform_entropy.max()), 1e-3))
    axes.set_yticks([])
    axes.set_xlabel("entropy (nats); |: log n", fontsize="small")
    axes.tick_params(labelsize="small")


def _mixing(part: SubFigure, stream: StreamWeights) -> None:
    part.suptitle("depth mixing: weight of each sublayer's output at each site", fontsize="medium")
    axes = part.subplots(1, len(FORMS), sharex=True, sharey=True)
    image: Any = None
    for each, form in zip(axes, FORMS, strict=True):
        matrix = stream.mixing(form)
        later = np.arange(matrix.shape[1])[None] > np.array(stream.index)[:, None]
        image = _image(each, np.ma.masked_where(later, matrix), 1.0)
        each.set_title(_FORMS[form], fontsize="small")
        each.set_xlabel("root, sublayers", fontsize="small")
        each.tick_params(labelsize="small")
    axes[0].set_ylabel("site", fontsize="small")
    part.colorbar(image, ax=axes.tolist(), label="weight")


def _plain(text: str) -> str:
    """A name as it is: matplotlib reads what stands between dollars as mathematics."""
    return text.replace("$", r"\$")
