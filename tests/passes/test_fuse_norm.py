"""The norm after a site and the add before it: what counts as one, and equal numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.passes import norms, sites
from attnres_compile.rounding import tolerance_for
from tests.evaluate import Captured, by_dynamo, by_symbolic_trace
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.lowering import WIDTH, Gemma, Handwritten, Net, counts, forms, inputs
from tests.passes.norms import SITE, mean_square, written
from tests.passes.support import Stream, tokens

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
