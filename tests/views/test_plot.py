"""The same with matplotlib: what is drawn, and nothing left behind."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnres_compile as ac
from tests.made_weights import found, make

pytest.importorskip("matplotlib")


def images(figure: Any) -> list[Any]:
    """Heat maps and matrices; the colour bars' own pictures are no images of axes with rows."""
    return [image for axes in figure.findobj(lambda o: hasattr(o, "get_images")) for image in axes.get_images()]


def test_one_image_per_kind_of_reader_and_four_matrices_per_stream() -> None:
    streams = make(3), make(2, None, prefix="second.")
    figure = found(*streams).plot()
    assert len(images(figure)) == sum(3 + 4 for _ in streams)


def test_the_images_hold_the_weights() -> None:
    stream = make(3)
    arrays = [image.get_array() for image in images(found(stream).plot())]
    attention, mlp, output, *mixing = arrays
    for drawn, rows in ((attention, [0, 2, 4]), (mlp, [1, 3, 5]), (output, [6])):
        assert np.array_equal(np.ma.filled(drawn, np.nan), stream.weights[rows], equal_nan=True)
    for drawn, form in zip(mixing, ("plain", "full", "block", "measured"), strict=True):
        assert np.array_equal(np.ma.filled(drawn, 0.0), stream.mixing(form))
        # What comes later is no zero weight: it is blank.
        assert np.ma.getmaskarray(drawn)[0].tolist() == [False] + [True] * 6


def test_small_maps_have_their_numbers_written_in() -> None:
    figure = found(make(3)).plot()
    written = [t.get_text() for axes in figure.findobj(lambda o: hasattr(o, "get_images")) for t in axes.texts]
    assert written.count("1.00") == 1 and len(written) == int(np.isfinite(make(3).weights).sum())
    many = found(make(16, None)).plot()
    assert not [t for axes in many.findobj(lambda o: hasattr(o, "get_images")) for t in axes.texts]


def test_entropies_are_drawn_beside() -> None:
    stream = make(2)
    figure = found(stream).plot()
    bars = [axes for axes in figure.findobj(lambda o: hasattr(o, "get_images")) if axes.patches and not axes.images]
    drawn = [[bar.get_width() for bar in axes.patches] for axes in bars if "entropy" in axes.get_xlabel()]
    assert np.allclose([width for each in drawn for width in each], stream.entropy[[0, 2, 1, 3, 4]])


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_it_is_saved(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"weights.{suffix}"
    found(make(1, prefix="$a_b$.")).plot(file)
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ac.AttnResError, match="cannot be written"):
        found().plot(tmp_path / "missing" / "weights.png")
    with pytest.raises(ac.AttnResError, match=r"\.png, \.pdf or \.svg"):
        found().plot(tmp_path / "weights.strange")


def test_nothing_global_is_touched() -> None:
    code = (
        "import sys, matplotlib; from tests.made_weights import found; found().plot()\n"
        "assert 'matplotlib.pyplot' not in sys.modules and matplotlib.get_backend(auto_select=False) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ac.MissingDependencyError, match=r"pip install 'attnres-compile\[plot\]'") as raised:
        found().plot()
    assert isinstance(raised.value, ImportError)


def test_no_streams_is_an_empty_figure() -> None:
    assert images(ac.DepthWeights(()).plot()) == []
