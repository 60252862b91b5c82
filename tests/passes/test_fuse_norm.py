"""The add before a site and the norm after it: what counts as one, what is left alone and why, and equal numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.exactness import tolerance_for
from attnres_compile.passes import norms, sites
from attnres_compile.passes.fuse_norm import fuse_norm
from tests.evaluate import Captured, by_dynamo, by_symbolic_trace
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.lowering import WIDTH, Gemma, Handwritten, Net, check_facts, counts, forms, inputs, true_facts
from tests.passes.support import BATCH, TOKENS, Stream, tokens

SITE = torch.ops.attnres.site.default


class Norm(nn.Module):
    """A norm written as a function of value, weight and bias."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.how = how
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.weight, self.bias)


def written(how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[int], nn.Module]:
    return lambda width: Norm(how, width)


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


RMS: dict[str, Callable[[int], nn.Module]] = {
    "module": nn.RMSNorm,
    "module, eps": lambda width: nn.RMSNorm(width, eps=1e-3),
    "module without weight": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "function": written(lambda x, w, b: F.rms_norm(x, (WIDTH,), w, 1e-3)),
    "function, keywords": written(lambda x, w, b: F.rms_norm(input=x, normalized_shape=[WIDTH], weight=w)),
    "torch": written(lambda x, w, b: torch.rms_norm(x, [WIDTH], w, 1e-3)),
    "fused op": written(lambda x, w, b: torch.ops.aten._fused_rms_norm.default(x, [WIDTH], w, 1e-3)[0]),
    "Llama": Handwritten,
    "Gemma": Gemma,
    "square": written(lambda x, w, b: x * torch.rsqrt(torch.square(x).mean(dim=-1, keepdim=True) + 1e-3) * w),
    "product": written(lambda x, w, b: w * (torch.rsqrt((x * x).mean([-1], True) + 1e-3) * x)),
    "power": written(lambda x, w, b: x * torch.pow(mean_square(x) + 1e-3, -0.5) * w),
    "one over sqrt": written(lambda x, w, b: x * (1.0 / torch.sqrt(mean_square(x) + 1e-3)) * w),
    "reciprocal": written(lambda x, w, b: w * (x * (1e-3 + mean_square(x)).sqrt().reciprocal())),
    "over sqrt": written(lambda x, w, b: (x / (mean_square(x) + 1e-3).sqrt()) * w),
    "half a power": written(lambda x, w, b: x / ((x**2).mean(-1, keepdim=True) + 1e-3) ** 0.5 * w),
    "no weight": written(lambda x, w, b: x * torch.rsqrt(mean_square(x) + 1e-3)),
}
LAYER: dict[str, Callable[[int], nn.Module]] = {
    "module": nn.LayerNorm,
    "module, eps": lambda width: nn.LayerNorm(width, eps=1e-2),
    "module without bias": lambda width: nn.LayerNorm(width, bias=False),
    "module without parameters": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "function": written(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b, 1e-3)),
    "function, keywords": written(lambda x, w, b: F.layer_norm(x, [WIDTH], bias=b, weight=w)),
    "torch": written(lambda x, w, b: torch.layer_norm(x, [WIDTH], w, b, 1e-3)),
    "native op": written(lambda x, w, b: torch.ops.aten.native_layer_norm.default(x, [WIDTH], w, b, 1e-3)[0]),
    "in float32": written(lambda x, w, b: F.layer_norm(x.float(), (WIDTH,), w.float(), b.float(), 1e-3).type_as(x)),
}
SPELLINGS = [("rmsnorm", name, norm) for name, norm in RMS.items()]
SPELLINGS += [("layernorm", name, norm) for name, norm in LAYER.items()]


def by_export(model: nn.Module, *args: Any) -> Captured:
    return Captured(torch.export.export(model, args).module(), list(args))


def by_core_export(model: nn.Module, *args: Any) -> Captured:
    """Decomposed as far as the core operators."""
    return Captured(torch.export.export(model, args).run_decompositions().module(), list(args))


# ------------------------------------------------------------------ spellings


@pytest.mark.parametrize(("kind", "name", "norm"), SPELLINGS, ids=[f"{kind}, {name}" for kind, name, _ in SPELLINGS])
@pytest.mark.parametrize("trace", [by_dynamo, by_symbolic_trace, by_export])
def test_every_spelling(kind: str, name: str, norm: Any, trace: Callable[..., Captured]) -> None:
    model = Net(norm)
    found = forms(model, inputs(), trace=trace, num_blocks=2)
    assert counts(found["fused"][0]) == {"site": 6}
    fusions = found["fused"][1].fusions
    assert [fusion.norm for fusion in fusions] == [kind] * 6
    # The blocks' first sums are branches alone; of two sums of three branches each, two adds remain to be fused.
    assert [fusion.add for fusion in fusions] == [False, True, True, False, True, True]
    # The first norm is left, which reads the root alone, and no add of two tensors of the stream.
    nodes = list(found["fused"][0].graph.nodes)
    whole = [n for n in nodes if sites.ops.name_of(n) in {*norms._CALLS, *norms._MODULES}]
    roots = [n for n in nodes if sites.ops.name_of(n) in {"rsqrt", "sqrt"} or norms._is_power(n, 0.5)]
    roots += [n for n in nodes if norms._is_power(n, -0.5)]
    assert len(whole) + len(roots) == 1
    assert not [n for n in nodes if sites.ops.name_of(n) == "add" and len(n.all_input_nodes) == 2]
    # The first site of the second block takes its value from phase 1: its norm stays, and so does the block's last add.
    assert counts(found["both"][0]) == {"inter": 2, "site": 5}


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, Handwritten, Gemma])
def test_core_operators(norm: Any) -> None:
    """RMSNorm is opened up into its parts there, and found by them; LayerNorm stays an operator."""
    found = forms(Net(norm), inputs(), trace=by_core_export, num_blocks=2)
    assert counts(found["fused"][0]) == {"site": 6}
    assert {fusion.norm for fusion in found["fused"][1].fusions} == {"layernorm" if norm is nn.LayerNorm else "rmsnorm"}
    # What is a cast to the same dtype carries the stream of an exported graph; its sources are the same all the same.
    assert counts(found["both"][0]) == {"inter": 2, "site": 5}
    assert [len(phase.sites) for phase in found["plain"][1].phases] == [2, 3, 1]


def test_float64() -> None:
    found = forms(Net().double(), inputs(torch.float64), num_blocks=2)
    assert counts(found["fused"][0]) == {"site": 6}
    assert counts(found["both"][0]) == {"inter": 2, "site": 5}


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, Handwritten, Gemma])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(norm: Any, dtype: torch.dtype) -> None:
    """Both forms are within what a stream of so many sublayers rounds, measured against float64."""
    reference = _outputs(norm, torch.float64, "off")
    for fuse in ("off", "on"):
        assert relative_error(_outputs(norm, dtype, fuse), reference) <= tolerance_for(dtype, 6)


def _outputs(norm: Any, dtype: torch.dtype, fuse: str) -> list[Tensor]:
    model = randomize(Net(norm)).to(dtype)
    captured = by_dynamo(model, inputs(dtype))
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=2, fuse=fuse))
    assert counts(module) == ({"site": 6} if fuse == "on" else {"mix": 6})
    randomize_queries(module.attnres.queries())
    return captured.run(module, grad=False)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_rms_norm_without_eps_has_pytorchs(dtype: torch.dtype) -> None:
    x = torch.full((1, 64), 2.0**-11, dtype=dtype)
    eps = norms.default_eps(dtype)
    want = float(F.rms_norm(x, (64,))[0, 0])
    assert 2.0**-11 / (2.0**-22 + eps) ** 0.5 == pytest.approx(want, rel=float(torch.finfo(dtype).eps))


# ------------------------------------------------------------------ networks


@pytest.mark.parametrize(
    "options",
    [
        {"gain": "mean"},
        {"value": "normalized"},
        {"key_norm_weight": True},
        {"logit_scale": "rsqrt_dim", "eps": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_option(options: dict[str, Any], dtype: torch.dtype) -> None:
    found = forms(Net().to(dtype), inputs(dtype), num_blocks=2, **options)
    assert [counts(found[name][0]) for name in ("plain", "two", "fused", "both")] == [
        {"mix": 6},
        {"inter": 2, "merge": 4, "mix": 1},
        {"site": 6},
        {"inter": 2, "site": 5},
    ]


@pytest.mark.parametrize(
    ("blocks", "two", "adds"),
    [
        # One block: the first sum of two branches is the second site's.
        (1, {"inter": 1, "site": 6}, 5),
        # The full form: no partial sums, so no adds, and no two sites with the same sources.
        (None, {"site": 6}, 0),
    ],
)
def test_one_block_and_the_full_form(blocks: int | None, two: dict[str, int], adds: int) -> None:
    found = forms(Net(nn.RMSNorm), inputs(), num_blocks=blocks)
    assert counts(found["fused"][0]) == {"site": 6}
    assert sum(fusion.add for fusion in found["fused"][1].fusions) == adds
    assert counts(found["both"][0]) == two


def test_a_float32_stream_beside_bfloat16_branches() -> None:
    """The branches' casts disappear into the sites, as do the norms, whose results are cast afterwards."""
    model = Net(Handwritten, cast=torch.bfloat16)
    found = forms(model, inputs(), num_blocks=2, tolerance=2e-2)
    fused = found["fused"][0]
    assert counts(fused) == {"site": 6}
    branches = [sites.arguments(node)["branch"] for node in fused.graph.nodes if node.target is SITE]
    dtypes = [branch.meta.get("example_value").dtype for branch in branches if branch is not None]
    assert dtypes == [torch.bfloat16] * 4
    # Two first branches of a block are cast to be sources; no other is.
    assert sum(node.target is torch.ops.aten.to.dtype for node in fused.graph.nodes) == 2
    assert sum(node.target is torch.ops.aten.to.dtype for node in found["plain"][0].graph.nodes) == 6


def test_readers_with_queries_of_their_own() -> None:
    """Of two sites over one new sum the first adds; a norm is fused where it is its site's only reader."""

    def two_norms(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.f(i, x) * net.parts[i](x).sigmoid()

    model = Stream(two_norms, count=4, parts=lambda i: nn.LayerNorm(6))
    found = forms(model, tokens(), num_blocks=2, queries="reader", trace=by_symbolic_trace)
    assert counts(found["fused"][0]) == {"site": 7}
    fusions = found["fused"][1].fusions
    assert [fusion.norm for fusion in fusions] == ["layernorm"] * 7
    assert [fusion.add for fusion in fusions] == [False, False, True, False, False, False, True]
    reasons = Counter(fusion.add_reason for fusion in fusions)
    assert reasons == {"": 2, "its last source is no sum": 5}
    assert counts(found["both"][0]) == {"inter": 2, "site": 5}


def test_one_norm_module_for_all_sites() -> None:
    for trace in (by_dynamo, by_symbolic_trace):
        found = forms(Net(shared=True), inputs(), num_blocks=2, trace=trace)
        assert counts(found["fused"][0]) == {"site": 6}


def test_each_form_runs_twice() -> None:
    model = randomize(Net())
    captured = by_dynamo(model, inputs())
    for two, fuse in (("on", "on"), ("off", "on"), ("on", "off")):
        config = ac.AttnResConfig(num_blocks=2, two_phase=two, fuse=fuse)
        module, _ = ac.rewrite_graph(captured.module, captured.args, config)
        randomize_queries(module.attnres.queries())
        first, second = captured.run(module), captured.run(module)
        assert relative_error(first[0], second[0]) == 0.0
        assert relative_error(first[1], second[1]) == 0.0


def test_zero_queries_stay_exact() -> None:
    for norm in (nn.LayerNorm, nn.RMSNorm):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            model = randomize(Net(norm)).to(dtype)
            captured = by_dynamo(model, inputs(dtype))
            config = ac.AttnResConfig(num_blocks=2, two_phase="on", fuse="on")
            module, _ = ac.rewrite_graph(captured.module, captured.args, config)
            assert counts(module) == {"inter": 2, "site": 5}
            got, want = captured.run(module), captured.run()
            assert relative_error(got[0], want[0]) <= tolerance
            size = max(float(gradient.abs().max()) for gradient in want[1])
            assert all(float((a - b).abs().max()) <= tolerance * size for a, b in zip(got[1], want[1], strict=True))


# ------------------------------------------------------------------ what is left alone


def reasons(norm: Any, dtype: torch.dtype = torch.float32, trace: Any = by_dynamo, **net: Any) -> Counter[str]:
    """Why the norms of a network's sites were left alone. The numbers hold all the same."""
    model = Net(norm, **net).to(dtype)
    tolerance = 5e-2 if dtype == torch.bfloat16 else None
    found = forms(model, inputs(dtype), num_blocks=2, trace=trace, tolerance=tolerance)
    return Counter(fusion.norm_reason for fusion in found["fused"][1].fusions)


def late(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), torch.sin(w), 1e-3)


def overwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    square = mean_square(x)
    scale = w.detach().clone()
    scale.mul_(2.0)
    return x * torch.rsqrt(square + 1e-3) * scale


UNLIKE: dict[str, tuple[Any, torch.dtype, str]] = {
    "float32 inside float64": (Handwritten, torch.float64, "the norm computes in torch.float32"),
    "bfloat16 throughout": (
        written(lambda x, w, b: x * torch.rsqrt(mean_square(x) + 1e-3) * w),
        torch.bfloat16,
        "the norm computes in torch.bfloat16",
    ),
    "a wider result": (
        written(
            lambda x, w, b: ((x.float() * torch.rsqrt(mean_square(x.float()) + 1e-3)).double() * w.double()).to(x.dtype)
        ),
        torch.bfloat16,
        "the norm's result has another dtype or shape",
    ),
    "a square in bfloat16, summed in float32": (
        written(lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, True, dtype=torch.float32) + 1e-3).to(x.dtype) * w),
        torch.bfloat16,
        "the norm computes in torch.bfloat16",
    ),
    "a wider weight": (
        written(
            lambda x, w, b: (
                x.to(torch.float32) * torch.rsqrt(mean_square(x.to(torch.float32)) + 1e-3) * w.double()
            ).to(x.dtype)
        ),
        torch.bfloat16,
        "the norm's result has another dtype or shape",
    ),
    "over tokens": (
        written(lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-3) * w),
        torch.float32,
        "no norm reads it",
    ),
    "over more": (
        written(lambda x, w, b: F.layer_norm(x, (3, WIDTH)) * w + b),
        torch.float32,
        "the norm runs over more than the features",
    ),
    "no power of two": (
        written(lambda x, w, b: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3) * w),
        torch.float32,
        "no norm reads it",
    ),
    "an eps that is learned": (
        written(lambda x, w, b: x * torch.rsqrt(mean_square(x) + b[0] ** 2) * w),
        torch.float32,
        "no norm reads it",
    ),
    "a weight that comes too late": (written(late), torch.float32, "the norm's parameters are computed after the site"),
    "an intermediate value that is read": (
        written(lambda x, w, b: (s := mean_square(x), x * torch.rsqrt(s + 1e-3) * w + s)[1]),
        torch.float32,
        "no norm reads it",
    ),
    "statistics that are read": (
        written(
            lambda x, w, b: (n := torch.ops.aten.native_layer_norm.default(x, [WIDTH], w, b, 1e-3), n[0] + n[1])[1]
        ),
        torch.float32,
        "something reads the norm's statistics",
    ),
}


@pytest.mark.parametrize(("norm", "dtype", "reason"), UNLIKE.values(), ids=UNLIKE)
def test_what_is_another_function_is_left_alone(norm: Any, dtype: torch.dtype, reason: str) -> None:
    assert reasons(norm, dtype) == {reason: 6}


def test_a_site_that_something_else_reads() -> None:
    found = reasons(nn.LayerNorm, read=torch.sigmoid)
    # The final norm's site has no other reader.
    assert found == {"something besides the norm reads it": 5, "": 1}


def test_a_modules_hooks_are_not_lost() -> None:
    model = Net()
    model.norms[2].register_forward_hook(lambda module, args, output: output * 2.0)
    randomize(model)
    captured = by_symbolic_trace(model, inputs())
    module, report = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=2, fuse="on"))
    assert Counter(f.norm_reason for f in report.fusions) == {
        "": 5,
        "the norm's module does more than its class says": 1,
    }
    assert relative_error(captured.run(module)[0], captured.run()[0]) <= 1e-5


def test_a_weight_written_between() -> None:
    """The vector is a copy of the weight, written after the site and before the norm uses it."""
    found = reasons(written(overwritten))
    assert found == {"the norm's parameters are computed after the site": 6}


def test_a_vector_written_before_the_norm_uses_it() -> None:
    def how(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        scale = w * 1.0
        root = torch.rsqrt(mean_square(x) + 1e-3)
        scale.mul_(2.0)
        return x * root * scale

    found = reasons(written(how))
    assert found.total() == 6 and all(re.fullmatch(r"mul_\w* writes into what the norm reads", r) for r in found)


def test_a_parameter_written_before_its_expression_would_be_moved() -> None:
    graph = fx.Graph()
    q, a, b, w = (graph.placeholder(name) for name in "qabw")
    mixed = graph.call_function(torch.ops.attnres.mix.default, (q, [a, b], 2, 1e-6, 2.0, 1.0, False))
    graph.call_method("mul_", (graph.call_method("view", (w, -1)), 2.0))
    weight = graph.call_function(torch.mul, (w, 3.0))
    graph.output(graph.call_function(F.layer_norm, (mixed, (WIDTH,), weight)))
    args = [torch.randn(WIDTH), *(torch.randn(BATCH, TOKENS, WIDTH) for _ in range(2)), torch.randn(WIDTH)]
    module = graphs.with_shapes(fx.GraphModule(nn.Module(), graph), args)
    want = module(*[a.clone() for a in args])
    next(n for n in module.graph.nodes if "mix" in n.name).meta[sites.SITE] = sites.Mark("s", fuse="on")
    (found,) = fuse_norm(module, ac.AttnResConfig())
    assert found.norm_reason == "the norm's parameters are computed after the site"
    assert relative_error(module(*[a.clone() for a in args]), want) == 0.0


def test_features_that_are_not_last() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for conv in self.convs:
                x = x + conv(x.relu())
            return x.relu()

    found = forms(Channels().double(), torch.randn(2, 8, 3, 3, dtype=torch.float64), num_blocks=2)
    assert counts(found["fused"][0]) == counts(found["plain"][0])
    fusions = found["fused"][1].fusions
    assert (
        {f.norm_reason for f in fusions}
        == {f.add_reason for f in fusions}
        == {"the features are not in the last dimension"}
    )


def test_off_and_auto_on_the_cpu() -> None:
    captured = by_dynamo(randomize(Net()), inputs())
    for fuse, reason in (("off", 'fuse="off"'), ("auto", "no generated kernel runs this site")):
        module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=2))
        for node in module.graph.nodes:
            if sites.SITE in node.meta:
                node.meta[sites.SITE] = sites.Mark(**{**sites.mark(node).__dict__, "fuse": fuse})
        before = str(module.graph)
        assert {f.norm_reason for f in fuse_norm(module, ac.AttnResConfig())} == {reason}
        assert str(module.graph) == before


# ------------------------------------------------------------------ adds, in graphs written by hand


def one_site(build: Callable[..., fx.Node], *also: Callable[..., fx.Node]) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of one site over ``c`` and what ``build`` makes of ``a`` and ``b``; ``also`` reads that before it."""
    graph = fx.Graph()
    q, a, b, c = (graph.placeholder(name) for name in "qabc")
    last = build(graph, a, b)
    seen = [each(graph, last) for each in also]
    mixed = graph.call_function(torch.ops.attnres.mix.default, (q, [c, last], 2, 1e-6, 2.0, 1.0, False))
    normed = graph.call_function(F.layer_norm, (mixed, (WIDTH,)))
    graph.output((normed, graph.call_function(torch.exp, (last,)), *seen))
    args = [torch.randn(WIDTH), *(torch.randn(BATCH, TOKENS, WIDTH) for _ in range(3))]
    return graphs.with_shapes(fx.GraphModule(nn.Module(), graph), args), args


def fused_add(*parts: Callable[..., fx.Node]) -> str:
    module, args = one_site(*parts)
    want = module(*[a.clone() for a in args])
    (site,) = [n for n in module.graph.nodes if sites.operator_name(n) == "attnres::mix"]
    site.meta[sites.SITE] = sites.Mark("s", fuse="on")
    (found,) = fuse_norm(module, ac.AttnResConfig())
    check_facts(module)
    true_facts(module, [a.clone() for a in args])
    assert relative_error(module(*[a.clone() for a in args]), want) <= 1e-5
    assert found.norm == "layernorm" and found.add == (not found.add_reason)
    return found.add_reason


def add(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.add.Tensor, (a, b))


def test_later_readers_take_the_sites_sum() -> None:
    assert fused_add(add) == ""
    module, _ = one_site(add)
    next(n for n in module.graph.nodes if sites.operator_name(n) == "attnres::mix").meta[sites.SITE] = sites.Mark(
        "s", fuse="on"
    )
    fuse_norm(module, ac.AttnResConfig())
    (exp,) = [n for n in module.graph.nodes if n.target is torch.exp]
    assert exp.args[0].args[0].target is SITE and exp.args[0].args[1] == 1
    assert not [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((add, lambda g, p: g.call_function(torch.tanh, (p,))), "something reads the sum before the site does"),
        ((lambda g, a, b: g.call_function(torch.add, (a, b), {"alpha": 2}),), "its last source is no sum"),
        ((lambda g, a, b: g.call_function(torch.add, (a, 1.0)),), "its last source is no sum of two tensors"),
        ((lambda g, a, b: add(g, a, a),), "its last source is no sum of two tensors"),
        (
            (lambda g, a, b: add(g, a, g.call_function(torch.narrow, (b, 0, 0, 1))),),
            "the sum broadcasts",
        ),
        (
            (lambda g, a, b: add(g, a, g.call_method("expand_as", (g.call_function(torch.narrow, (b, 0, 0, 1)), a))),),
            "the sum broadcasts",
        ),
        (
            (lambda g, a, b: add(g, a, g.call_method("half", (b,))),),
            "the sum changes the dtype",
        ),
        ((lambda g, a, b: g.call_function(torch.mul, (a, b)),), "its last source is no sum"),
    ],
    ids=["read before", "alpha", "a number", "twice the same", "narrow", "expanded", "two dtypes", "a product"],
)
def test_sums_that_are_left_alone(parts: Any, reason: str) -> None:
    assert fused_add(*parts) == reason


def test_an_operand_written_between() -> None:
    def write(graph: fx.Graph, p: fx.Node) -> fx.Node:
        return graph.call_method("mul_", (p.args[1], 2.0))

    assert fused_add(add, write) == "mul_ writes into what the sum reads"


def test_a_cast_is_absorbed_where_nothing_else_reads_it() -> None:
    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        half = graph.call_method("bfloat16", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))

    assert fused_add(cast) == ""


def test_a_cast_that_something_else_reads_stays() -> None:
    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        half = graph.call_method("bfloat16", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))

    def read(graph: fx.Graph, p: fx.Node) -> fx.Node:
        return graph.call_function(torch.tanh, (p.args[1],))

    assert fused_add(cast, read) == ""


def test_a_cast_that_loses_more_than_the_sum_does_stays() -> None:
    """float64 to float32 before the add: the kernel's own precision is float32, and it takes no float64."""

    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        wide = graph.call_method("double", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (wide, torch.float32)))

    assert fused_add(cast) == ""
    module, _ = one_site(cast)
    next(n for n in module.graph.nodes if "mix" in n.name).meta[sites.SITE] = sites.Mark("s", fuse="on")
    fuse_norm(module, ac.AttnResConfig())
    (site,) = [n for n in module.graph.nodes if n.target is SITE]
    assert sites.arguments(site)["branch"].target is torch.ops.aten.to.dtype


def test_checkpointed_regions_keep_their_adds() -> None:
    """A sum is made in one region and read in the next: the site is recomputed with the reader, the sum is not."""
    from torch.utils.checkpoint import checkpoint

    class Regions(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for norm, branch in zip(self.norms, self.branches, strict=True):
                x = checkpoint(lambda y, n=norm, b=branch: y + b(n(y)).tanh(), x, use_reentrant=False)
            return self.norm(x)

    x = inputs(torch.float64)
    results = []
    for kind in (Net, Regions):
        model = randomize(kind().double()).train()
        ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager", two_phase="on", fuse="on"))
        randomize_queries(ac.pseudo_queries(model))
        for _ in range(2):  # once more: nothing is left of the first time
            out = model(x)
            grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        results.append((out, grads, ac.report(model).fusions))
    assert relative_error(results[1][0], results[0][0]) <= 1e-12
    assert relative_error(list(results[1][1]), list(results[0][1])) <= 1e-11
    # The sums that end the blocks: one is read by phase 1, one by the last site.
    assert sum(fusion.add for fusion in results[0][2]) == 3
    assert [fusion.norm for fusion in results[1][2]] == ["layernorm"] * 6
    # Only what is made where it is read is fused: here nothing but the sums that the root graph makes.
    assert sum(fusion.add for fusion in results[1][2]) == 0
