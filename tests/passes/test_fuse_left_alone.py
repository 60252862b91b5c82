"""What looks like a norm after a site and is none, or may not be moved: left alone, with the reason."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.passes import sites
from attnres_compile.passes.fuse_norm import fuse_norm
from tests.evaluate import by_dynamo, by_symbolic_trace
from tests.helpers import randomize, relative_error
from tests.passes.lowering import WIDTH, Handwritten, Net, counts, forms, inputs
from tests.passes.norms import mean_square, written
from tests.passes.support import BATCH, TOKENS


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
