"""Random specs. Each draw takes one entry of a table, simplest first: cheap, and it shrinks to something small."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.properties import doing
from tests.properties.machine import LAYOUTS
from tests.properties.spec import Branch, Do, Instruction, Loop, Region, Spec, Step

Draw = Callable[..., Any]


def _table(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(values))


def _after(*names: str) -> list[tuple[str, ...]]:
    return [(), (), *((name,) for name in names), *itertools.permutations(names, 2)]


# All orders and trees of adding x and one, two or three branches.
_ARRANGEMENTS = {
    count: _table(
        [
            (order, joins)
            for order in itertools.permutations(range(count + 1))
            for joins in itertools.product(*(range(n) for n in range(count, 0, -1)))
        ]
    )
    for count in (1, 2, 3)
}
_COUNTS = _table((1, 1, 1, 2, 2, 3))
_ADDS = _table(("+", "+", "+", "torch", "method", "alpha", "sub", "sum", "iadd", "add_", "stack", "addcmul"))
_PLAIN_ADDS = _table(("+", "torch", "method", "sum", "stack"))
_SCALES = _table(("", "", "", "", "", "", "two", "scalar", "vector"))

_BRANCHES = _table(
    [
        Branch(reads, norm, body, after)
        for after in _after("layerscale", "half", "learned", "dropout")
        for body in ("linear", "linear", "linear", "mlp", "pool", "identity", "shared")
        for norm in ("layer", "rms", "half", "none")
        for reads in ("x", "x", "x", "x", "x", "x0", "saved", "saved", "y", "input")
    ]
)
_PLAIN_BRANCHES = _table(
    [
        Branch("x", norm, body, after)
        for after in _after("layerscale", "half", "learned", "dropout")
        for body in ("linear", "mlp")
        for norm in ("layer", "rms", "half")
    ]
)
# Inside a checkpointed region nothing is drawn: what is recomputed would have to be drawn again.
_STILL_BRANCHES = _PLAIN_BRANCHES.filter(lambda branch: "dropout" not in branch.after)


@st.composite
def _steps(draw: Draw, branch: st.SearchStrategy[Branch], add: st.SearchStrategy[str], depth: int = 0) -> Step:
    branches = [draw(branch) for _ in range(draw(_COUNTS))]
    if depth and draw(_NESTED):
        last = branches[-1]
        branches[-1] = Branch(last.reads, last.norm, "program", last.after, draw(_INNER))
    order, joins = draw(_ARRANGEMENTS[len(branches)])
    return Step(tuple(branches), order, joins, tuple(draw(add) for _ in branches), draw(_SCALES))


def _programs(instruction: st.SearchStrategy[Instruction], least: int, most: int) -> st.SearchStrategy[Any]:
    return st.lists(instruction, min_size=least, max_size=most).map(tuple)


def _mostly_steps(step: st.SearchStrategy[Step], *whats: Sequence[str]) -> st.SearchStrategy[Instruction]:
    """Three steps for each thing done, which is of one of the kinds ``whats``."""
    return _often(step, *(_table([Do(what) for what in kind]) for kind in whats))


@st.composite
def _often(draw: Draw, often: st.SearchStrategy[Any], *seldom: st.SearchStrategy[Any], of: int = 4) -> Any:
    """All but one ``of`` so many draws are of ``often``. (``one_of`` drops what is given to it twice.)"""
    return draw(often if draw(_TURNS[of]) < of - 1 else seldom[draw(_TURNS[len(seldom)])])


_TURNS = {count: st.integers(0, count - 1) for count in range(1, 10)}


def _with_loops(instruction: st.SearchStrategy[Instruction]) -> st.SearchStrategy[Instruction]:
    body = _programs(instruction, 1, 2)
    loop = st.builds(Loop, body, _table((2, 3)), st.booleans())
    return _often(instruction, loop, of=8)


_NESTED = _table((False, False, False, True))
_ANY = (doing.QUIET, doing.QUIET, doing.QUIET, doing.AFFINE, doing.CASTS, doing.HAZARDS, doing.WRITES)
_INNER = _programs(_mostly_steps(_steps(_BRANCHES, _ADDS), *_ANY), 2, 3)
_CARRIERS = (
    "tap",
    "return",
    "save",
    "roll",
    "contiguous",
    "clone",
    "eval_dropout",
    "two",
    "scalar",
    "vector",
    *LAYOUTS,
)
_OFTEN = _table((True, True, True, False))


def _specs(program: st.SearchStrategy[Any], training: st.SearchStrategy[bool] = _OFTEN) -> st.SearchStrategy[Spec]:
    return st.builds(Spec, program, _OFTEN, training, _OFTEN)


def networks() -> st.SearchStrategy[Spec]:
    """Anything, nested streams and all."""
    return _specs(_programs(_with_loops(_mostly_steps(_steps(_BRANCHES, _ADDS, 1), *_ANY)), 3, 7))


def plain_networks() -> st.SearchStrategy[Spec]:
    """Networks of one stream that must be converted whole: each :class:`Step` is a sublayer."""
    step = _steps(_PLAIN_BRANCHES, _PLAIN_ADDS)
    return _specs(_programs(_with_loops(_mostly_steps(step, _CARRIERS)), 2, 6))


def cut_networks() -> st.SearchStrategy[Spec]:
    """The same with casts, writes and hazards on the stream, so that parts of it may have to be left alone."""
    step = _steps(_PLAIN_BRANCHES, _ADDS)
    item = _mostly_steps(step, _CARRIERS, doing.CASTS, doing.HAZARDS, doing.WRITES, doing.WRITES)
    return _specs(_programs(_with_loops(item), 3, 6))


def region_networks() -> st.SearchStrategy[Spec]:
    """Networks of which parts are checkpointed; nothing is random in them."""
    step = _steps(_STILL_BRANCHES, _PLAIN_ADDS)
    inside = _mostly_steps(step, ("roll", "clone", "two", "scalar", "vector"))
    region = st.builds(Region, _programs(inside, 1, 2), st.booleans())
    outside = _mostly_steps(step, ("tap", "save", "return", "two", "vector", "long"))
    return _specs(_programs(_often(region, outside, of=2), 2, 4), st.just(True))


def broken_networks() -> st.SearchStrategy[Spec]:
    """Networks that break dynamo's graphs, some of them while a state is written into or kept."""
    step = _steps(_STILL_BRANCHES, _PLAIN_ADDS)
    quiet = ("tap", "save", "two", "long", "alias", "alias_write", "post_norm", "return")
    return _specs(_programs(_mostly_steps(step, doing.BREAKS, doing.BREAKS, quiet), 3, 6))
