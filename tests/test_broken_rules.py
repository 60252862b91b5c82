"""Each rule of detection and rewriting, broken in turn: some small network must notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

import attnres_compile as ac
from attnres_compile import study
from attnres_compile.passes import detect as detect_pass
from attnres_compile.passes import facts, features, memory, ops, refusal, scan, sides, spellings
from attnres_compile.passes import rewrite as rewrite_pass
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.scan import Scanner
from attnres_compile.passes.streams import Step, Term
from tests.evaluate import by_symbolic_trace
from tests.properties.judge import judge, uncompiled
from tests.properties.network import inputs
from tests.properties.rules import CASES, Case, Net, regions

CONFIG = ac.AttnResConfig(num_blocks=2, min_sublayers=2, lowering="eager")


def prove(case: Case) -> None:
    """Raises where a network does not come out as its rule says."""
    with uncompiled():
        captured = by_symbolic_trace(Net(case.body), *inputs())
    report = judge(captured, replace(CONFIG, **dict(case.options)), 2e-6 if case is CASES["casts"] else 1e-11)
    reasons = {str(rejection.reason) for rejection in report.rejections}
    assert (tuple(len(stream.sublayers) for stream in report.streams), reasons) == (case.sublayers, case.reasons)
    if case.sites is not None:
        assert sum(len(stream.sites) for stream in report.streams) == case.sites, "sites"


@pytest.mark.parametrize("rule", CASES)
def test_rules(rule: str) -> None:
    prove(CASES[rule])


# ------------------------------------------------------------------ breaks


def _swapped(self: Any, left: Any, right: Any, choose: Any = Scanner._choose) -> Any:
    return choose(self, left, right)[::-1]


def _one_term(**fields: Any) -> Step:
    return Step(**{**fields, "terms": fields["terms"][:1]})


def _without_factor(node: fx.Node, factor: float = 1.0, product: Any = None) -> Term:
    return Term(node, 1.0, product)


def _scaled_by_anything(self: Any, node: fx.Node, name: str) -> Any:
    return node.args[0] if isinstance(node.args[0], fx.Node) else node.args[1]


def _any_rank(self: Any, node: fx.Node, plain: Any = Scanner.anchor_weight) -> Any:
    if ops.name_of(node) in ops.CONTRACTIONS:
        return next((i for i in node.all_input_nodes if self.values.is_constant(i)), None)
    return plain(self, node)


def _anywhere(self: Any, record: Any, branch: Any) -> bool:
    return bool(self.out.contractions)


def _untrimmed(chain: Any) -> Any:
    return chain


def _first_child(records: Any, below: Any) -> Any:
    return records[0]


def _one_reader(state: fx.Node, following: Any, plain: Any = detect_pass._readers) -> Any:
    return plain(state, following)[:1]


def _no_output(state: fx.Node, following: Any, plain: Any = detect_pass._readers) -> Any:
    return [reader for reader in plain(state, following) if reader.op != "output"]


def _least_one(chains: Any, found: Any, memory: Any, config: Any, plain: Any = detect_pass._refusals) -> Any:
    return plain(chains, found, memory, replace(config, min_sublayers=1))


def _no_loops(chains: Any, found: Any, memory: Any, config: Any, plain: Any = detect_pass._refusals) -> Any:
    return plain(chains, found, memory, replace(config, depth_loops=False))


def _made_backwards(self: Any, source: Any, plain: Any = rewrite_pass._Surgery._made) -> Any:
    source.pending.reverse()
    return plain(self, source)


def _one_source_less(self: Any, stream: Any, site: Any, sources: Any, axis: Any, step: Any, plain: Any = None) -> Any:
    return _MIX(self, stream, site, sources[1:], axis, step)


_MIX = rewrite_pass._Surgery._mix


def _never(*_: Any, **__: Any) -> Any:
    return None


def _nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _same(self: Any, node: Any, *_: Any) -> Any:
    return node


NONE: frozenset[str] = frozenset()
Change = tuple[object, str, object]

# What is broken, where, and the network that notices.
BREAKS: dict[str, tuple[str, tuple[Change, ...]]] = {
    # spellings
    "alpha is dropped": ("alpha", ((spellings, "Term", _without_factor),)),
    "minus is dropped": ("minus", ((spellings, "Term", _without_factor),)),
    "subtractions are not seen": ("minus", ((ops, "SUBS", NONE),)),
    "in-place adds are not seen": ("in place", ((ops, "INPLACE_ADDS", NONE),)),
    "stacks are not seen": ("stacked", ((spellings, "_stacked", _never),)),
    "the zero of sum is not seen": ("builtin sum", ((ops, "adds_zero", _never),)),
    "fused products are not seen": ("fused product", ((ops, "FUSED_PRODUCTS", {}),)),
    "opaque adds go unsaid": ("opaque", ((scan, "is_opaque_add", _no),)),
    "interpolations go unsaid": ("lerp", ((ops, "INTERPOLATIONS", NONE),)),
    # steps
    "the skip is taken for the branch": ("plain", ((Scanner, "_choose", _swapped),)),
    "a branch of two is dropped": ("two branches", ((detect_pass, "Step", _one_term),)),
    "the skip may broadcast": ("broadcast skip", ((facts, "same_shape", _yes),)),
    "the branch may not broadcast": ("broadcast branch", ((facts, "broadcasts_into", lambda a, b: a == b),)),
    "everything is computed from everything": ("unrelated", ((sides.Side, "reaches", _yes),)),
    "parameters are not known": ("bias", ((facts, "is_parameter_input", _no),)),
    # anchors
    "no anchor is needed": ("polynomial", ((detect_pass, "_trim", _untrimmed),)),
    "any parameter anchors": ("token shift", ((Scanner, "_is_anchored", _yes),)),
    "weights of one dimension anchor": ("one dimension", ((Scanner, "anchor_weight", _any_rank),)),
    "a contraction off the path anchors": ("not on the path", ((Scanner, "_is_anchored", _anywhere),)),
    "weightless steps are no sources": (
        "between anchors",
        (
            (
                Scanner,
                "_enter",
                lambda self, record, branch, plain=Scanner._enter: (
                    plain(self, record, branch) if self._is_anchored(record, branch) else None
                ),
            ),
        ),
    ),
    "ends are not cut off": ("cut ends", ((detect_pass, "_trim", _untrimmed),)),
    # streams
    "the first step continues": ("enclosed", ((detect_pass, "_continuation", _first_child),)),
    "outer skips are not named": ("outer skip", ((detect_pass, "_name_outer_skips", _never),)),
    "older states are not handed their mix": ("long skips", ((rewrite_pass._Surgery, "name_reads", _never),)),
    "short streams are taken": ("too short", ((detect_pass, "_refusals", _least_one),)),
    "loops are taken": ("loop", ((detect_pass, "_shares_weights", _no),)),
    "loops over depth are refused": ("loop over depth", ((detect_pass, "_refusals", _no_loops),)),
    # what a state goes through
    "passes are ignored": ("numbers", ((detect_pass, "_passes", _nothing),)),
    "casts are left out": ("mixed dtypes", ((rewrite_pass._Surgery, "_cast", _same),)),
    "casts end a stream": ("casts", ((ops, "CASTS", NONE),)),
    "reshapes end a stream": ("reshapes", ((ops, "RESHAPES", NONE),)),
    "permutations end a stream": ("permutes", ((ops, "PERMUTES", NONE),)),
    "rolls end a stream": ("rolls", ((ops, "SHUFFLES", NONE),)),
    "copies end a stream": ("copies", ((ops, "COPIES", NONE),)),
    "scales end a stream": ("learned scales", ((ops, "SCALES", NONE),)),
    "passes are replayed backwards": ("in order", ((rewrite_pass._Surgery, "_made", _made_backwards),)),
    "coefficients get lost": ("first state again", ((detect_pass, "_passes", _nothing),)),
    "idle dropout ends a stream": ("idle dropout", ((ops, "dropout_is_identity", _no),)),
    "dropout is taken for nothing": ("dropout", ((ops, "dropout_is_identity", _yes),)),
    "a scale may depend on the stream": ("masks of the stream", ((Scanner, "_scaled_operand", _scaled_by_anything),)),
    # readers
    "one reader is enough": ("a query per reader", ((detect_pass, "_readers", _one_reader),)),
    "readers share one query": (
        "a query per reader",
        (
            (
                rewrite_pass._Surgery,
                "_hand_over",
                lambda self, state, following, mixes, fallback, plain=rewrite_pass._Surgery._hand_over: plain(
                    self, state, following, dict(list(mixes.items())[:1]), fallback
                ),
            ),
        ),
    ),
    "returned states are not read": ("returned states", ((detect_pass, "_readers", _no_output),)),
    "questions of shape are reads": ("shapes are not read", ((ops, "is_metadata", _no),)),
    "a source is forgotten": ("plain", ((rewrite_pass._Surgery, "_mix", _one_source_less),)),
    # writes
    "late writes are not seen": ("written later", ((Memory, "write_after", _never),)),
    "in-place adds are always functional": ("read after a write", ((Memory, "is_functional", _yes),)),
    "no op writes": (
        "a part written",
        (
            (memory, "written", _nothing),
            (scan, "written", _nothing),
        ),
    ),
    "views do not alias": (
        "written later",
        ((Memory, "_join_storages", _never), (ops, "VIEWS", NONE), (memory, "shared", _nothing)),
    ),
    # features
    "features are last": (
        "features first",
        ((features, "axes", lambda root, steps: (len(facts.tensor(root).shape) - 1,) * (len(steps) + 1)),),
    ),
    "dimensions stay where they are": ("features first", ((facts, "map_axis", lambda node, operand, axis: axis),)),
    # refusals
    "a rejection is forgotten": ("post-norm", ((Scanner, "_reject", _never), (detect_pass, "_reject", _never))),
    "norms are not known": ("post-norm", ((ops, "NORMS", {}), (ops, "NORM_MARKS", NONE))),
    "activations are not known": ("post-activation", ((ops, "ACTIVATIONS", NONE),)),
    "clamps are not known": ("clamp", ((ops, "CLAMPS", NONE),)),
    "joins are not known": ("parts", ((ops, "JOINS", NONE),)),
    "nothing links chains": ("dropout", ((refusal, "link", _never),)),
    "gates are not seen": ("gate", ((refusal, "is_gated", _no),)),
    "highways are not seen": ("highway", ((refusal, "in_a_row", lambda *_: []),)),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_rule_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, changes = BREAKS[what]
    for holder, name, broken in changes:
        monkeypatch.setattr(holder, name, broken)
    with pytest.raises((AssertionError, RuntimeError, ac.AttnResError, TypeError, ValueError, KeyError)):
        prove(CASES[rule])


@pytest.mark.parametrize("broken", [False, True])
def test_regions_are_opened(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        monkeypatch.setattr(study, "open_regions", lambda module: [])
    report = ac.explain(Net(regions), inputs(), CONFIG)
    assert bool(report.streams) is not broken
    assert {str(rejection.reason) for rejection in report.rejections} == ({"checkpointed"} if broken else set())
