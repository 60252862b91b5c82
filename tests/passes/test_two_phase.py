"""Sites of one block over its finished blocks at once: what is counted, what is chosen, and that the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from attnres_compile.kernels.tuning import queries_per_kernel
from attnres_compile.passes import sites
from attnres_compile.passes.detect import detect
from attnres_compile.passes.finish import finish
from attnres_compile.passes.plan import plan
from attnres_compile.passes.traffic import Sites, direct_bytes, two_phase_bytes
from attnres_compile.passes.two_phase import two_phase
from tests.evaluate import by_symbolic_trace, evaluate
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.lowering import Net, check_facts, counts, forms, inputs, kernels_everywhere, lowered, on_cuda
from tests.passes.support import Stream, study, tokens

assert kernels_everywhere  # a fixture
MIX = torch.ops.attnres.mix.default


def step(net: Stream, i: int, x: Tensor) -> Tensor:
    return x + net.f(i, x)


# ------------------------------------------------------------------ counting


@pytest.mark.parametrize(
    ("given", "direct", "phases"),
    [
        # 16 merges over 9 sources, bfloat16, d = 1024: 16 * 11 rows. Four queries share a pass of phase 1, so
        # 4 * 9 + 16 + 48 rows and 32 log-sum-exps.
        (Sites(9, 16, 0, 1024, 2, False), 176 * 2048, 100 * 2048 + 32 * 4),
        # The same with one site that reads finished blocks alone: 10 rows less a source; 2 rows instead of 3.
        (Sites(9, 15, 1, 1024, 2, False), 175 * 2048, 99 * 2048 + 31 * 4),
        # d = 8192: two queries share a pass.
        (Sites(9, 16, 0, 8192, 2, False), 176 * 16384, 136 * 16384 + 32 * 4),
        # Training, float32: sites of 3 sources move 4 + 8 + 3 rows and 2 numbers each. In two phases:
        # forward 2 + 2 + 6; merges backward 12; phase 1 backward 6 + 4 rows. Numbers: 4 forward, 4 + 4 backward.
        (Sites(2, 2, 0, 64, 4, True), 30 * 256 + 4 * 4, 32 * 256 + 12 * 4),
        # Training, with a site without partial sum: it moves 3 + 6 + 2 rows; scaled, 2 and 2.
        (Sites(2, 1, 1, 64, 4, True), 26 * 256 + 4 * 4, (2 + 2 + 3 + 2 + 6 + 6 + 4 + 2) * 256 + (3 + 4 + 2) * 4),
        # Eight queries, of which four share a backward pass: the 3 * 8 rows of the sources twice.
        (Sites(8, 8, 0, 64, 4, True), 8 * (10 + 29) * 256 + 16 * 4, (16 + 8 + 24 + 48 + 16 + 48) * 256 + 48 * 4),
        # d = 4096: two share one.
        (
            Sites(8, 4, 0, 4096, 2, True),
            4 * (10 + 29) * 8192 + 8 * 4,
            (8 + 4 + 12 + 48 + 8 + 24) * 8192 + 24 * 4,
        ),
        # float64 numbers are of eight bytes.
        (Sites(2, 2, 0, 64, 8, False), 8 * 512, 10 * 512 + 4 * 8),
    ],
)
def test_bytes_by_hand(given: Sites, direct: int, phases: int) -> None:
    assert direct_bytes(given) == direct
    assert two_phase_bytes(given) == phases


@pytest.mark.parametrize(("sources", "count"), [(8, 4), (2, 4), (33, 3)])
def test_the_papers_figure(sources: int, count: int) -> None:
    """N/S + 5 rows per sublayer (docs/method.md) holds one row for the new partial sum, which both forms write."""
    rows = (two_phase_bytes(Sites(sources, count, 0, 64, 2, False)) - 2 * count * 4) / 128
    assert (rows + count) / count == sources / count + 5


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dim", [64, 4096, 8192])
@pytest.mark.parametrize(("sources", "merges", "reads"), [(2, 3, 0), (5, 4, 1), (8, 15, 1)])
def test_bytes_by_formula(sources: int, merges: int, reads: int, dim: int, training: bool) -> None:
    """The docstrings' rows, with the number of passes that the kernels are planned with."""
    given = Sites(sources, merges, reads, dim, 2, training)
    count, read = merges + reads, (sources + 1) * merges + sources * reads
    rows, numbers = read + count, 0
    if training:
        rows, numbers = rows + 3 * read + 2 * count, 2 * count
    assert direct_bytes(given) == rows * dim * 2 + numbers * 4
    rows = sources * -(-count // queries_per_kernel(dim, False, sources)) + count + 3 * merges + 2 * reads
    numbers = count + merges
    if training:
        rows += 3 * sources * -(-count // queries_per_kernel(dim, True, sources)) + 2 * count + 6 * merges + 2 * reads
        numbers += 2 * count + 2 * merges
    assert two_phase_bytes(given) == rows * dim * 2 + numbers * 4


# ------------------------------------------------------------------ the same numbers


def test_one_phase_1_per_block_and_a_merge_per_site() -> None:
    found = forms(Stream(step, count=6), tokens(), num_blocks=2, trace=by_symbolic_trace)
    assert counts(found["plain"][0]) == {"mix": 6}
    # Block 1: two sites over the root. Block 2: three sites over two sources, the first without a partial sum.
    # Behind it one site alone.
    assert counts(found["two"][0]) == {"inter": 2, "merge": 4, "mix": 1}
    scaled = [n for n in found["two"][0].graph.nodes if n.target is torch.ops.aten.mul.Scalar]
    assert [node.args[1] for node in scaled] == [2.0]
    phases = found["two"][1].phases
    assert [(p.block, p.sources, len(p.sites), p.chosen, p.applies) for p in phases] == [
        (1, 1, 2, "two_phase", True),
        (2, 2, 3, "two_phase", True),
        (3, 3, 1, "direct", True),
    ]
    assert phases[2].reason == "one site alone reads these blocks"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_blocks": 2, "gain": "mean"}, {"inter": 2, "merge": 4, "mix": 1}),
        ({"num_blocks": 2, "value": "normalized"}, {"inter": 2, "merge": 4, "mix": 1}),
        ({"num_blocks": 2, "key_norm_weight": True}, {"inter": 2, "merge": 4, "mix": 1}),
        ({"num_blocks": 2, "logit_scale": "rsqrt_dim", "eps": 1e-3}, {"inter": 2, "merge": 4, "mix": 1}),
        ({"num_blocks": 1}, {"inter": 1, "merge": 5, "mix": 1}),
        ({"num_blocks": None}, {"mix": 6}),
        ({"block_size": 4}, {"inter": 1, "merge": 5, "mix": 1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_option(options: dict[str, Any], expected: dict[str, int], dtype: torch.dtype) -> None:
    found = forms(Net().to(dtype), inputs(dtype), trace=by_symbolic_trace, **options)
    assert counts(found["two"][0]) == expected


def test_against_the_papers_equations() -> None:
    config = ac.AttnResConfig(num_blocks=2, gain="mean", two_phase="on")
    captured = study(Stream(step, count=6), config=config, trace=by_symbolic_trace).captured
    plans = plan(detect(captured.module.graph, config).streams, config)
    module, _ = ac.rewrite_graph(captured.module, captured.args, config)
    assert counts(module)["inter"] == 2
    queries = module.attnres.queries()
    randomize_queries(queries)
    assert relative_error(captured.run(module)[0], evaluate(captured, plans, queries, config)) <= 1e-12


def test_readers_with_queries_of_their_own() -> None:
    def two_readers(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.f(i, x) * torch.sigmoid(net.parts[i](x))

    model = Stream(two_readers, count=4, parts=lambda i: nn.Linear(6, 6))
    found = forms(model, tokens(), num_blocks=2, queries="reader", trace=by_symbolic_trace)
    assert counts(found["plain"][0]) == {"mix": 7}
    # Two queries for each of the states 1 and 3; two at state 2, which is a block's first; one at the end.
    assert counts(found["two"][0]) == {"inter": 2, "merge": 4, "mix": 1}


def test_queries_are_moved_before_phase_1() -> None:
    model = Stream(step, count=6)
    found = forms(model, tokens(), num_blocks=2, key_norm_weight=True, trace=by_symbolic_trace)
    graph = found["two"][0].graph
    for inter in [node for node in graph.nodes if node.target is torch.ops.attnres.inter.default]:
        assert all(query.target is torch.ops.aten.mul.Tensor and query < inter for query in inter.args[0])


def test_zero_queries_stay_exact() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = randomize(Stream(step, count=6)).to(dtype)
        captured = by_symbolic_trace(model, tokens().to(dtype))
        module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=2, two_phase="on"))
        assert counts(module)["merge"] == 4
        got, want = captured.run(module), captured.run()
        assert relative_error(got[0], want[0]) <= tolerance
        assert relative_error(got[1], want[1]) <= 10 * tolerance


# ------------------------------------------------------------------ what stays apart


def test_sources_that_are_made_anew_are_other_sources() -> None:
    """A stream that is laid out anew at each step has new sources at each site."""

    def relaid(net: Stream, i: int, x: Tensor) -> Tensor:
        return (x + net.f(i, x)).transpose(0, 1).contiguous().transpose(0, 1)

    found = forms(Stream(relaid, count=6), tokens(), num_blocks=2)
    assert counts(found["two"][0]) == counts(found["plain"][0]) == {"mix": 6}
    phases = found["two"][1].phases
    assert [len(phase.sites) for phase in phases] == [1] * 6
    # The plan knows it too.
    assert [len(phase.sites) for phase in found["plain"][1].phases] == [1] * 6


def test_a_write_into_a_source_keeps_its_sites_apart() -> None:
    captured = study(Stream(step, count=4), trace=by_symbolic_trace).captured
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=1))
    mixes = [node for node in module.graph.nodes if node.target is MIX]
    for node in mixes:
        node.meta[sites.SITE] = sites.Mark(**{**sites.mark(node).__dict__, "two_phase": "on"})
    with module.graph.inserting_after(mixes[1]):
        view = module.graph.call_method("view", (mixes[0].args[1][0], -1))
    with module.graph.inserting_after(view):
        module.graph.call_method("mul_", (view, 2.0))
    (first, _) = two_phase(module, ac.AttnResConfig())
    assert (first.chosen, first.reason) == ("direct", "mul_ writes into a source between the block's sites")
    assert counts(module) == {"mix": 4}


def test_a_query_that_comes_too_late() -> None:
    captured = study(Stream(step, count=4), trace=by_symbolic_trace).captured
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=1))
    mixes = [node for node in module.graph.nodes if node.target is MIX]
    with module.graph.inserting_before(mixes[1]):
        late = module.graph.call_method("mean", (mixes[0], (0, 1)))
    mixes[1].replace_input_with(mixes[1].args[0], late)
    for node in mixes:
        node.meta[sites.SITE] = sites.Mark(**{**sites.mark(node).__dict__, "two_phase": "on"})
    (first, _) = two_phase(module, ac.AttnResConfig())
    assert first.chosen == "direct" and first.reason.endswith("is not there before the block's first site")


def test_off_and_unmarked_sites_stay() -> None:
    captured = study(Stream(step, count=6), trace=by_symbolic_trace).captured
    module, report = ac.rewrite_graph(
        captured.module, captured.args, ac.AttnResConfig(num_blocks=2, two_phase="off", fuse="on")
    )
    assert [phase.reason for phase in report.phases][:2] == ['two_phase="off"'] * 2
    assert "inter" not in counts(module)
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=2))
    for node in module.graph.nodes:
        node.meta.pop(sites.SITE, None)
    assert two_phase(module, ac.AttnResConfig(two_phase="on")) == ()


class Regions(nn.Module):
    """Eight sublayers in four checkpointed pairs."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.net = Stream(step, count=8)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.embed(x)
        for i in range(0, 8, 2):

            def pair(y: Tensor, i: int = i) -> Tensor:
                return step(self.net, i + 1, step(self.net, i, y))

            x = checkpoint(pair, x, use_reentrant=False) if self.checkpointed else pair(x)
        return self.net.norm(x)


def test_no_phase_1_reaches_out_of_a_checkpointed_region() -> None:
    x = tokens()
    config = ac.AttnResConfig(num_blocks=2, two_phase="on", fuse="on", lowering="eager")
    results = []
    for checkpointed in (False, True):
        model = randomize(Regions(checkpointed)).train()
        ac.transform(model, x, config)
        queries = ac.pseudo_queries(model)
        randomize_queries(queries)
        out = model(x)
        used = [parameter for name, parameter in model.named_parameters() if "head" not in name]
        grads = torch.autograd.grad(out.square().sum(), used)
        results.append((out, grads, ac.report(model).phases))
    plain, regions = results
    assert relative_error(regions[0], plain[0]) <= 1e-12
    assert relative_error(list(regions[1]), list(plain[1])) <= 1e-11
    assert [len(phase.sites) for phase in plain[2]] == [3, 4, 1]
    # Each region holds two sites; the first region's first reads the root alone, and is none. The output is outside.
    assert [len(phase.sites) for phase in regions[2] if phase.sites] == [1, 2, 2, 2, 1]


# ------------------------------------------------------------------ the choice


class Wide(nn.Module):
    """Streams of ``count`` sublayers and 64 features; float32."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        for branch in self.branches:
            x = x + branch(x.tanh())
        return x.cos()


def test_auto_takes_two_phases_for_blocks_with_many_sources(
    kernels_everywhere: list[tuple[torch.dtype, int, str]],
) -> None:
    """Of four blocks of four, the first two have one and two finished sources and are cheaper directly."""
    model = randomize(Wide(16))
    module, choices, captured = lowered(model, torch.randn(3, 64), num_blocks=4, grad=False)
    found = [(p.block, p.sources, p.chosen, p.applies) for p in choices.phases]
    assert found == [
        (1, 1, "direct", True),
        (2, 2, "direct", True),
        (3, 3, "two_phase", True),
        (4, 4, "two_phase", True),
        (5, 5, "direct", True),
    ]
    # 3 + 4 + 1 direct sites, 3 merges in each of two blocks; a block's first site takes phase 1's value.
    assert counts(module) == {"inter_through": 2, "site_through": 14}
    assert set(kernels_everywhere) == {(torch.float32, 64, "cuda")}
    # Rows of 256 bytes. Block 1: three sites of 2 sources; 1 + 3 + 9 in two phases.
    assert (choices.phases[0].direct_bytes, choices.phases[0].two_phase_bytes) == (9 * 256, 13 * 256 + 6 * 4)
    # Block 3: one site of 3 and three of 4 sources; 3 + 4 + 9 + 2 in two phases.
    assert (choices.phases[2].direct_bytes, choices.phases[2].two_phase_bytes) == (19 * 256, 18 * 256 + 7 * 4)
    plain, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=4))
    randomize_queries(plain.attnres.queries())
    assert relative_error(captured.run(module)[0], captured.run(plain)[0]) <= 1e-5


def test_training_is_counted_where_gradients_are_recorded() -> None:
    model = randomize(Wide(16))
    reports = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            reports.append(ac.explain(model, torch.randn(3, 64), ac.AttnResConfig(num_blocks=4)).phases)
    assert [{phase.training for phase in phases} for phases in reports] == [{False}, {True}]
    assert all(a.direct_bytes < b.direct_bytes for a, b in zip(*reports, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_predicts_without_a_gpu_and_says_that_it_does_not_apply(device: str) -> None:
    model = Wide(16).to(device)
    config = ac.AttnResConfig(num_blocks=4)
    phases = ac.explain(model, torch.randn(3, 64, device=device), config).phases
    assert [(p.block, p.chosen, p.applies) for p in phases] == [
        (1, "direct", True),
        (2, "two_phase", False),
        (3, "two_phase", False),
        (4, "two_phase", False),
        (5, "direct", True),
    ]
    assert "here each site runs by itself" in phases[2].reason
    # Training, four sites over three and three times three and one: 15 sources read, 72 rows of 256 bytes.
    assert (phases[2].training, phases[2].direct_bytes) == (True, 72 * 256 + 8 * 4)
    # 18 rows forward; backward 9 rows for all queries at once, 8, 18 and 2.
    assert phases[2].two_phase_bytes == (18 + 37) * 256 + (7 + 14) * 4
    forced = ac.explain(model, torch.randn(3, 64, device=device), ac.AttnResConfig(num_blocks=4, two_phase="on"))
    assert [phase.chosen for phase in forced.phases] == ["two_phase"] * 4 + ["direct"]
    assert all(phase.applies for phase in forced.phases)


@pytest.mark.parametrize("two", ["auto", "on", "off"])
def test_what_was_predicted_is_what_is_done(
    two: str, kernels_everywhere: list[tuple[torch.dtype, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "kernels_for", lambda dtype, dim, device: True)
    captured = by_symbolic_trace(randomize(Wide(16)), torch.randn(3, 64))
    captured.module(*captured.args)
    with torch.no_grad():
        module, report = ac.rewrite_graph(
            captured.module, captured.args, ac.AttnResConfig(num_blocks=4, two_phase=two, fuse="off")
        )
    if two == "auto":
        with torch.no_grad():
            assert two_phase(on_cuda(module), ac.AttnResConfig()) == report.phases
        assert [phase.applies for phase in report.phases] == [True] * 5
    else:
        predicted = ac.explain(randomize(Wide(16)), torch.randn(3, 64), ac.AttnResConfig(num_blocks=4, two_phase=two))
        assert [(p.sites, p.chosen, p.applies) for p in report.phases] == [
            (p.sites, p.chosen, p.applies) for p in predicted.phases
        ]


def test_on_the_cpu_auto_leaves_each_site_to_the_native_kernel() -> None:
    module, choices, _ = lowered(randomize(Wide(16)), torch.randn(3, 64), cuda=False, num_blocks=4)
    assert counts(module) == {"mix_through": 16}
    assert [phase.applies for phase in choices.phases] == [True, False, False, False, True]


def test_eager_lowering_takes_no_kernels_by_itself(
    kernels_everywhere: list[tuple[torch.dtype, int, str]],
) -> None:
    captured = by_symbolic_trace(randomize(Wide(16)), torch.randn(3, 64))
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=4))
    finish(on_cuda(module), ac.AttnResConfig(lowering="eager"))
    check_facts(module)
    assert counts(module) == {"mix": 16}
