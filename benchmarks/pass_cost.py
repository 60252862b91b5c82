"""What the pass itself costs: seconds for detect + plan + rewrite as graphs grow, and beside dynamo's own capture.

Prints, for graphs of doubling size, the time and the ratio to half the size (required: at most 2.3 up to 100,000
nodes), for several shapes of residual graph; and for a 24-layer Hugging Face Llama the share of dynamo's capture
time (required: at most 10%). Exits 1 where a requirement is not met.

    python benchmarks/pass_cost.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile import AttnResConfig
from attnres_compile.backend import copy_graph_module
from attnres_compile.kernels import ops as _ops  # registers attnres::mix
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import plan
from attnres_compile.passes.rewrite import QueryNodes, rewrite

GROWTH_LIMIT = 2.3
CAPTURE_LIMIT = 0.10
WIDTH = 16
CONFIG = AttnResConfig(num_blocks=8)


class Builder:
    """Writes a residual graph node by node: building one by tracing would take longer than the pass."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.weight = self.input("weight", nn.Parameter(torch.empty(WIDTH, WIDTH)))
        self.count = 1

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        node.meta["attnres_parameter"] = isinstance(value, nn.Parameter)
        return node

    def call(self, target: Callable[..., torch.Tensor], *arguments: object) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        like = next(a for a in arguments if isinstance(a, fx.Node))
        node.meta["val"] = torch.empty_like(like.meta["val"])
        self.count += 1
        return node

    def branch(self, state: fx.Node) -> fx.Node:
        """A pre-norm branch of eight nodes."""
        x = self.call(nn.functional.layer_norm, state, [WIDTH])
        for _ in range(3):
            x = self.call(torch.relu, self.call(nn.functional.linear, x, self.weight))
        return self.call(torch.mul, x, 0.5)


def plain(builder: Builder, nodes: int) -> fx.Node:
    """x + f(x), again and again."""
    x = builder.input("x", torch.empty(2, 3, WIDTH))
    while builder.count < nodes:
        x = builder.call(torch.add, x, builder.branch(x))
    return x


def injected(builder: Builder, nodes: int) -> fx.Node:
    """The first state is added again after each branch."""
    first = x = builder.input("x", torch.empty(2, 3, WIDTH))
    while builder.count < nodes:
        x = builder.call(torch.add, x, builder.branch(x))
        x = builder.call(torch.add, x, builder.call(torch.mul, first, 0.1))
    return x


def u_net(builder: Builder, nodes: int) -> fx.Node:
    """The second half adds the states of the first half in reverse."""
    x = builder.input("x", torch.empty(2, 3, WIDTH))
    states = []
    while builder.count < nodes / 2:
        x = builder.call(torch.add, x, builder.branch(x))
        states.append(x)
    states.pop()
    while builder.count < nodes and states:
        x = builder.call(torch.add, x, states.pop())
        x = builder.call(torch.add, x, builder.branch(x))
    return x


SHAPES = {"plain": plain, "x0 injected": injected, "additive U-Net": u_net}


def timed_pass(graph: fx.Graph) -> tuple[float, int]:
    """Processor seconds for detect, plan and rewrite, and the number of sites. Making the queries does not count.

    The graphs share one weight on purpose, so loops are allowed.
    """
    config = AttnResConfig(num_blocks=CONFIG.num_blocks, depth_loops=True)
    # The collector's walks over everything else in the process cost the same whatever the size of the graph.
    gc.collect()
    gc.freeze()
    start = time.process_time()
    plans = plan(detect(graph, config).streams, config)
    took = time.process_time() - start
    queries: dict[str, QueryNodes] = {}
    first = next(iter(graph.nodes))
    key, fake = next((k, n.meta[k]) for n in graph.nodes for k in ("example_value", "val") if k in n.meta)
    with graph.inserting_before(first):
        for each in plans:
            for name in each.queries:
                node = graph.placeholder(f"query_{len(queries)}")
                node.meta[key] = fake.fake_mode.from_tensor(torch.empty(each.stream.feature_dim))
                queries[name] = QueryNodes(node)
    start = time.process_time()
    rewrite(graph, plans, queries, config)
    took += time.process_time() - start
    gc.unfreeze()
    return took, len(queries)


def seconds(shape: Callable[[Builder, int], fx.Node], nodes: int, repeats: int) -> tuple[float, int, int]:
    """Median seconds of the pass on fresh graphs, number of nodes and of sites."""
    times: list[float] = []
    sites = count = 0
    for _ in range(repeats):
        builder = Builder()
        builder.graph.output(shape(builder, nodes))
        count = builder.count
        took, sites = timed_pass(builder.graph)
        times.append(took)
    return statistics.median(times), count, sites


def growth(console: Console, largest: int, repeats: int) -> bool:
    """Time each shape of graph at doubling sizes."""
    table = Table("graph", "nodes", "sites", "seconds", "us/node", f"ratio to half (<= {GROWTH_LIMIT})")
    holds = True
    sizes = [largest // 8, largest // 4, largest // 2, largest]
    for name, shape in SHAPES.items():
        seconds(shape, sizes[0], 1)  # warm
        before = None
        for size in sizes:
            took, count, sites = seconds(shape, size, repeats)
            ratio = took / before if before else None
            holds &= ratio is None or ratio <= GROWTH_LIMIT
            table.add_row(
                name, f"{count:,}", f"{sites:,}", f"{took:.2f}", f"{took / count * 1e6:.1f}",
                f"{ratio:.2f}" if ratio else "",
            )  # fmt: skip
            before = took
    console.print(table)
    return holds


def capture_share(console: Console, layers: int, repeats: int) -> bool:
    """The pass beside dynamo's capture of a Hugging Face Llama."""
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4
        )
    )
    tokens = torch.zeros(1, 16, dtype=torch.long)
    captures: list[float] = []
    passes: list[float] = []
    for _ in range(repeats + 1):
        torch._dynamo.reset()
        kept: list[fx.GraphModule] = []

        def keep(module: fx.GraphModule, inputs: list[object], kept: list[fx.GraphModule] = kept) -> object:
            kept.append(copy_graph_module(module))
            return module.forward

        with torch.no_grad():
            start = time.process_time()
            compiled = torch.compile(model, backend=keep, fullgraph=True)
            compiled(input_ids=tokens, use_cache=False)
            captures.append(time.process_time() - start)
        took, sites = timed_pass(kept[0].graph)
        assert sites == 2 * layers, f"{sites} sites found"
        passes.append(took)
    capture, own = statistics.median(captures[1:]), statistics.median(passes[1:])
    table = Table("model", "dynamo capture s", "pass s", f"share (<= {CAPTURE_LIMIT:.0%})")
    table.add_row(f"Llama, {layers} layers", f"{capture:.2f}", f"{own:.3f}", f"{own / capture:.1%}")
    console.print(table)
    return own / capture <= CAPTURE_LIMIT


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000, help="size of the largest graph")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    console = Console(width=100)
    console.print(f"torch {torch.__version__}, processor seconds, medians of {options.repeats}")
    linear = growth(console, options.nodes, options.repeats)
    cheap = capture_share(console, options.layers, options.repeats)
    console.print(f"linear growth: {'PASS' if linear else 'FAIL'}    share of capture: {'PASS' if cheap else 'FAIL'}")
    return 0 if linear and cheap else 1


assert _ops

if __name__ == "__main__":
    sys.exit(main())
