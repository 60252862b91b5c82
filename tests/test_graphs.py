"""``rewrite_graph`` on graphs of every origin: what comes out is an ordinary module with the right numbers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp

import attnres_compile as ac
from tests.evaluate import Captured, by_dynamo
from tests.helpers import randomize, randomize_queries, relative_error, seeded

WIDTH, LAYERS = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Ids in, logits out; two sublayers per block. Importable, so that its graphs can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.register_buffer("positions", torch.zeros(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


IDS = torch.randint(0, 11, (2, 4), generator=seeded(1))
CONFIG = ac.AttnResConfig(num_blocks=2)


def model() -> Model:
    built = Model().eval()
    randomize(built)
    return built


def _shaped(module: fx.GraphModule) -> fx.GraphModule:
    ShapeProp(module).propagate(IDS)
    return module


def _export(net: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(net, (IDS,))


# Each gives a graph of a model and the inputs that it is run on.
ORIGINS: dict[str, Callable[[nn.Module], tuple[Any, list[Any]]]] = {
    "symbolic_trace": lambda net: (fx.symbolic_trace(net), [IDS]),
    "symbolic_trace, ShapeProp": lambda net: (_shaped(fx.symbolic_trace(net)), [IDS]),
    "dynamo": lambda net: (lambda c: (c.module, c.args))(by_dynamo(net, IDS)),
    # The module's own guards hold functions that cannot be pickled.
    "export, module()": lambda net: (_export(net).module(check_guards=False), [IDS]),
    "export, decomposed": lambda net: (_export(net).run_decompositions().module(check_guards=False), [IDS]),
    "make_fx": lambda net: (make_fx(net)(IDS), [IDS]),
    "make_fx, fake": lambda net: (make_fx(net, tracing_mode="fake", _allow_non_fake_inputs=True)(IDS), [IDS]),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_numbers(origin: str) -> None:
    graph, args = ORIGINS[origin](model())
    captured = Captured(graph, args)
    text = str(graph.graph)
    wanted = captured.run()
    rewritten, report = ac.rewrite_graph(graph, args, CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == [2 * LAYERS]
    found = captured.run(rewritten)
    assert relative_error(found[0], wanted[0]) <= 1e-12
    size = max(float(g.abs().max()) for g in wanted[1]) if wanted[1] else 1.0
    assert all(float((a - b).abs().max()) <= 1e-12 * size for a, b in zip(found[1], wanted[1], strict=True))
    # The user's graph is what it was, and computes what it did.
    assert str(graph.graph) == text
    assert relative_error(captured.run()[0], wanted[0]) == 0.0
    queries = rewritten.attnres.queries()
    assert list(queries) == [site.query for site in report.streams[0].sites if site.query]
    assert {id(p) for p in queries.values()} <= {id(p) for p in rewritten.parameters()}
    assert all(p.requires_grad and p.shape == (WIDTH,) and p.dtype == torch.float64 for p in queries.values())
    randomize_queries(queries)
    assert relative_error(captured.run(rewritten)[0], wanted[0]) > 1e-3
    loss = sum(out.square().sum() for out in captured.run_raw(rewritten))
    assert all(float(g.abs().max()) > 0.0 for g in torch.autograd.grad(loss, list(queries.values())))


@pytest.mark.parametrize("decompose", [False, True])
def test_exported_program(decompose: bool) -> None:
    """An ExportedProgram lifts its parameters: the rewritten graph takes them as inputs, as the program's does."""
    net = model()
    program = _export(net)
    program = program.run_decompositions() if decompose else program
    rewritten, report = ac.rewrite_graph(program, None, CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == [2 * LAYERS]
    signature = program.graph_signature
    values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    args = [
        values[lifted[node.name]] if node.name in lifted else IDS
        for node in program.graph.nodes
        if node.op == "placeholder"
    ]
    (found,) = rewritten(*args)
    assert relative_error(found, net(IDS)) <= 1e-12


@pytest.mark.parametrize("origin", [name for name in ORIGINS if "dynamo" not in name])
class TestAnOrdinaryModule:
    """The result can be printed, pickled, traced and compiled like any other graph module."""

    def rewritten(self, origin: str) -> fx.GraphModule:
        graph, args = ORIGINS[origin](model())
        module, _ = ac.rewrite_graph(graph, args, CONFIG)
        randomize_queries(module.attnres.queries())
        return module

    def test_printed(self, origin: str) -> None:
        module = self.rewritten(origin)
        assert "attnres" in module.code and "attnres" in str(module.graph)
        assert module.print_readable(print_output=False)
        module.graph.lint()

    def test_pickled(self, origin: str) -> None:
        module = self.rewritten(origin)
        again = pickle.loads(pickle.dumps(module))
        assert torch.equal(again(IDS), module(IDS))
        assert again.state_dict().keys() == module.state_dict().keys()

    def test_traced_again(self, origin: str) -> None:
        module = self.rewritten(origin)
        for traced in (fx.symbolic_trace(module), make_fx(module)(IDS)):
            assert relative_error(traced(IDS), module(IDS)) <= 1e-12

    def test_compiled(self, origin: str) -> None:
        module = self.rewritten(origin)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        assert relative_error(compiled(IDS), module(IDS)) <= 1e-12

    def test_saved_weights(self, origin: str) -> None:
        module, other = self.rewritten(origin), self.rewritten(origin)
        randomize_queries(other.attnres.queries(), seed=9)
        wanted = module(IDS)
        assert not torch.allclose(other(IDS), wanted)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(IDS), wanted)


def test_parameters_are_shared_with_the_graph_that_was_given() -> None:
    graph = fx.symbolic_trace(model())
    module, _ = ac.rewrite_graph(graph, [IDS], CONFIG)
    own = dict(module.named_parameters())
    assert all(own[name] is parameter for name, parameter in graph.named_parameters())


def test_missing_shapes_need_inputs() -> None:
    with pytest.raises(ac.AttnResError, match="example_inputs") as raised:
        ac.rewrite_graph(fx.symbolic_trace(model()))
    assert type(raised.value).__name__ == "CaptureError"


def test_too_many_inputs() -> None:
    with pytest.raises(ac.AttnResError, match="1 inputs; 2"):
        ac.rewrite_graph(fx.symbolic_trace(model()), [IDS, IDS])


def test_a_single_tensor_is_an_input() -> None:
    _, report = ac.rewrite_graph(fx.symbolic_trace(model()), IDS)
    assert len(report.streams) == 1


def test_no_stream_carries_the_report() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    with pytest.raises(ac.NoStreamError, match="adds no two tensors") as raised:
        ac.rewrite_graph(fx.symbolic_trace(net), [torch.randn(2, WIDTH)])
    assert raised.value.report.streams == () and raised.value.report.rejections == ()


def test_no_stream_says_why() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x)
            return x + self.b(x)

    with pytest.raises(ac.NoStreamError, match="2 too_few_sublayers") as raised:
        ac.rewrite_graph(fx.symbolic_trace(Two()), [torch.randn(2, WIDTH)])
    assert [r.reason for r in raised.value.report.rejections] == ["too_few_sublayers"] * 2


def test_a_module_of_the_same_name_is_left_alone() -> None:
    net = model()
    net.attnres = nn.Identity()
    net.norm = nn.Sequential(net.norm, net.attnres)
    module, _ = ac.rewrite_graph(fx.symbolic_trace(net), [IDS], CONFIG)
    assert relative_error(module(IDS), net(IDS)) <= 1e-12


def test_key_norm_weights_are_parameters() -> None:
    graph = fx.symbolic_trace(model())
    module, report = ac.rewrite_graph(graph, [IDS], ac.AttnResConfig(num_blocks=2, key_norm_weight=True))
    sites = sum(site.query is not None for site in report.streams[0].sites)
    assert report.parameters_added == 2 * sites * WIDTH
    assert relative_error(module(IDS), graph(IDS)) <= 1e-12


def test_guards_of_an_exported_module_stay() -> None:
    net = model()
    module, _ = ac.rewrite_graph(_export(net).module(), [IDS], CONFIG)
    assert relative_error(module(IDS), net(IDS)) <= 1e-12


def test_packed_inputs_and_results_stay() -> None:
    """torch.export keeps keywords and nested results; so does what is made of its module."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
            logits = self.model(batch["ids"])
            return {"logits": logits * scale, "parts": (logits, [batch["ids"]])}

    net = Packed()
    scale = torch.tensor(2.0, dtype=torch.float64)
    graph = torch.export.export(net, ({"ids": IDS},), {"scale": scale}).module()
    module, _ = ac.rewrite_graph(graph, None, CONFIG)
    found, wanted = module({"ids": IDS}, scale=scale), net({"ids": IDS}, scale=scale)
    assert found.keys() == wanted.keys() and type(found["parts"]) is tuple and type(found["parts"][1]) is list
    assert relative_error(found, wanted) <= 1e-12
