"""What the rewritten graph holds, and what the surgery leaves behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.errors import LoweringError
from attnres_compile.passes import scan as scan_pass
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import plan
from attnres_compile.passes.rewrite import rewrite
from tests.evaluate import by_symbolic_trace, evaluate
from tests.helpers import randomize_queries, relative_error
from tests.passes.support import TOKENS, WIDTH, Outcome, Stream, check_exact, converted, study, tokens

MIX = torch.ops.attnres.mix.default


def mixes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is MIX]


def stream(count: int = 6, **options: object) -> Outcome:
    return converted(
        Stream(lambda net, i, x: x + net.f(i, x), count=count),
        sublayers=count,
        config=ac.AttnResConfig(**options),
        trace=by_symbolic_trace,
    )


def test_one_mix_per_site_in_the_place_of_the_adds() -> None:
    outcome = stream(num_blocks=2)
    assert outcome.module is not None
    found = mixes(outcome.module)
    assert [len(node.args[1]) for node in found] == [2, 2, 2, 3, 3, 3]
    assert not [n for n in outcome.module.graph.nodes if n.name in {"add", "add_1", "add_2", "add_3", "add_4", "add_5"}]
    # Six branches in two blocks: two sums of three.
    sums = [n for n in outcome.module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert len(sums) == 4


def test_full_form_needs_no_sum() -> None:
    outcome = stream(num_blocks=None)
    assert outcome.module is not None
    assert not [n for n in outcome.module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert [len(node.args[1]) for node in mixes(outcome.module)] == [2, 3, 4, 5, 6, 7]


def test_options_reach_the_op() -> None:
    config = ac.AttnResConfig(gain="mean", eps=1e-3, logit_scale="rsqrt_dim", value="normalized", num_blocks=None)
    captured = study(Stream(lambda net, i, x: x + net.f(i, x), count=3), trace=by_symbolic_trace).captured
    module, _ = ac.rewrite_graph(captured.module, captured.args, config)
    for node in mixes(module):
        query, sources, dim, eps, gain, scale, normalized = node.args
        assert (dim, eps, gain, normalized) == (2, 1e-3, 1.0, True)
        assert scale == pytest.approx(WIDTH**-0.5)
        assert query.op == "get_attr" and len(sources) >= 2
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=None))
    assert [node.args[4] for node in mixes(module)] == [2.0, 3.0, 4.0]


def test_key_norm_weight_multiplies_the_query() -> None:
    config = ac.AttnResConfig(key_norm_weight=True, num_blocks=2)
    outcome = converted(Stream(lambda net, i, x: x + net.f(i, x)), config=config, trace=by_symbolic_trace)
    assert outcome.module is not None
    assert all(node.args[0].target is torch.ops.aten.mul.Tensor for node in mixes(outcome.module))


def test_every_new_node_has_a_tensor_of_its_own() -> None:
    """One fake tensor at two nodes would be taken for one value."""
    outcome = study(
        Stream(lambda net, i, x: (x + net.f(i, x)).transpose(0, 1).transpose(0, 1) * 0.5), trace=by_symbolic_trace
    )
    assert outcome.module is not None
    values = [node.meta.get("val", node.meta.get("example_value")) for node in outcome.module.graph.nodes]
    identities = Counter(id(value) for value in values if isinstance(value, Tensor))
    assert max(identities.values()) == 1


def test_facts_of_new_nodes_are_right() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return (x + net.f(i, x.double()).mean(1, keepdim=True)).flatten(0, 1).view(-1, TOKENS, WIDTH).float()

    outcome = study(Stream(lambda net, i, x: step(net, i, x).double()), trace=by_symbolic_trace)
    assert outcome.module is not None
    claimed = {n.name: n.meta.get("val") for n in outcome.module.graph.nodes}

    class Check(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            value = super().run_node(node)
            if isinstance(claimed[node.name], Tensor) and isinstance(value, Tensor):
                assert claimed[node.name].shape == value.shape and claimed[node.name].dtype == value.dtype, node
            return value

    Check(outcome.module).run(*outcome.captured.args)


def test_a_reader_behind_a_carrier_gets_the_mix_of_its_own_query() -> None:
    """queries="reader": one module reads the state, another one a view of it that also leads to the next add."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gate = torch.sigmoid(net.parts[i](x)).flatten(0, 1)
        return (flat + net.f(i, flat) * gate).view(-1, TOKENS, WIDTH)

    config = ac.AttnResConfig(queries="reader", num_blocks=2, gain="mean")
    captured = study(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH)), config=config).captured
    plans = plan(detect(captured.module.graph, config).streams, config)
    module, _ = ac.rewrite_graph(captured.module, captured.args, config)
    queries = module.attnres.queries()
    randomize_queries(queries)
    assert relative_error(captured.run(module)[0], evaluate(captured, plans, queries, config)) <= 1e-12
    loss = captured.run_raw(module)[0].square().sum()
    assert all(g is not None and float(g.abs().max()) > 0 for g in torch.autograd.grad(loss, list(queries.values())))


def test_an_old_state_is_read_by_the_query_of_its_own_reader() -> None:
    """queries="reader": an add that takes an older state is one of its readers."""

    class Skip(nn.Module):
        def forward(self, x: Tensor, old: Tensor, f: Tensor) -> Tensor:
            return x + f + old

    def whole(net: Stream, x: Tensor) -> Tensor:
        states = [x]
        for i in range(net.count):
            f = net.f(i, x)
            x = net.skip(x, states[1], f) if i == 3 else x + f
            states.append(x)
        return net.head(net.norm(x))

    model = Stream(lambda net, i, x: x, whole=whole, count=5)
    model.skip = Skip()
    config = ac.AttnResConfig(queries="reader", num_blocks=None, gain="mean")
    captured = study(model, config=config).captured
    plans = plan(detect(captured.module.graph, config).streams, config)
    module, _ = ac.rewrite_graph(captured.module, captured.args, config)
    queries = module.attnres.queries()
    assert "skip" in queries
    randomize_queries(queries)
    assert relative_error(captured.run(module)[0], evaluate(captured, plans, queries, config)) <= 1e-12
    loss = captured.run_raw(module)[0].square().sum()
    assert all(g is not None and float(g.abs().max()) > 0 for g in torch.autograd.grad(loss, list(queries.values())))


def test_shape_questions_about_states_keep_their_answers() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f = net.f(i, x)
        y = x.transpose(0, 1)
        f = f.transpose(0, 1) * (y.shape[0] + y.size(1)) / x.dim()
        return (y + f.to(y.dtype)).transpose(0, 1)

    outcome = converted(Stream(step), trace=by_symbolic_trace)
    assert outcome.module is not None


def test_dead_state_whose_shape_is_asked_for() -> None:
    """No value of the middle state is read, but the size of a view of it is."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        y = x + net.f(i, x)
        flat = y.flatten(0, 1)
        return (flat + net.head(x).flatten(0, 1) * flat.size(0)).view(-1, TOKENS, WIDTH)

    outcome = study(Stream(step), trace=by_symbolic_trace)
    check_exact(outcome)


def test_an_add_that_is_still_used_is_an_error() -> None:
    """Should a plan miss a reader, nothing is handed out half rewritten."""
    captured = study(Stream(lambda net, i, x: x + net.f(i, x)), trace=by_symbolic_trace).captured
    graph = captured.module.graph
    plans = plan(detect(graph).streams, ac.AttnResConfig())
    # A reader that came after the plan was made, of an add inside a step.
    first, second = plans[0].stream.steps[:2]
    joined = replace(first, adds=(first.node, second.node))
    late = replace(plans[0], stream=replace(plans[0].stream, steps=(replace(joined, node=second.node),)), sites=())
    with pytest.raises(LoweringError, match=f"{first.node.name} is still used"):
        rewrite(graph, (late,), {}, ac.AttnResConfig())


# ------------------------------------------------------------------ cost, counted and not timed


def _adds(count: int, form: str) -> fx.GraphModule:
    """``count`` steps with one branch each, in a form that tempts a search to go back far."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    states = [x]
    for i in range(count):
        f = graph.call_function(torch.nn.functional.linear, (states[-1], weight))
        new = graph.call_function(torch.add, (states[-1], graph.call_function(torch.tanh, (f,))))
        if form == "root" and i:
            new = graph.call_function(torch.add, (new, x))
        if form == "long skips" and i > count // 2:
            new = graph.call_function(torch.add, (new, states[count - i]))
        states.append(new)
    graph.output(states[-1])
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, 2))
    return graphs.with_shapes(fx.GraphModule(module, graph), [torch.ones(1, 2)])


class _Counted(dict):  # type: ignore[type-arg]
    """A dictionary that counts its look-ups."""

    touched = 0

    def get(self, key: object, default: object = None) -> object:
        _Counted.touched += 1
        return super().get(key, default)


def _work(module: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> int:
    """Look-ups of a scan."""
    original = scan_pass.Scanner.__init__

    def counting(self: scan_pass.Scanner, *arguments: object) -> None:
        original(self, *arguments)
        self.reach, self.anchored = _Counted(), _Counted()

    monkeypatch.setattr(scan_pass.Scanner, "__init__", counting)
    _Counted.touched = 0
    detection = detect(module.graph, ac.AttnResConfig(depth_loops=True))
    monkeypatch.undo()
    assert len(detection.streams) == 1
    return _Counted.touched


@pytest.mark.parametrize("form", ["plain", "root", "long skips"])
def test_scanning_grows_with_the_graph(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the graph, twice the look-ups, however far back an add reaches."""
    small, large = (_work(_adds(n, form), monkeypatch) for n in (100, 200))
    assert large <= 2.1 * small


def test_new_nodes_grow_with_sublayers_and_blocks_alone() -> None:
    sizes = []
    for count in (16, 32):
        module = _adds(count, "plain")
        rewritten, _ = ac.rewrite_graph(module, [torch.ones(1, 2)], ac.AttnResConfig(num_blocks=4, depth_loops=True))
        sizes.append(len(rewritten.graph.nodes))
    assert sizes[1] <= 2.1 * sizes[0]


def test_tokens_are_not_all_alike() -> None:
    """The inputs of these tests tell tokens, rows and features apart."""
    x = tokens()
    assert len(set(x.flatten().tolist())) == x.numel()
