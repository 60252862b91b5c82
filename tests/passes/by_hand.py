"""A stream's depth attention written by hand, for models whose steps are spelt in any way that adds a branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import gradient_error, outputs_and_gradients, randomize, randomize_queries, relative_error
from tests.passes.support import WIDTH, Stream, tokens

# Network, number of the step, what it reads -> what it adds.
Branch = Callable[[Stream, int, Tensor], Tensor]


def mixed(query: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """One read: ``n * sum_i softmax_i(<query, v_i / rms(v_i)>) * v_i``."""
    logits = torch.stack([(v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)) @ query for v in sources])
    weights = torch.softmax(logits, 0).unsqueeze(-1)
    return len(sources) * (weights * torch.stack(list(sources))).sum(0)


class ByHand(nn.Module):
    """``net`` with blocks of ``size`` sublayers, each of them ``branch``, and one query per read value."""

    def __init__(self, net: Stream, branch: Branch, queries: Sequence[Tensor], size: int) -> None:
        super().__init__()
        self.net, self.branch, self.size = net, branch, size
        self.queries = nn.ParameterList(queries)

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        done, partial = [net.embed(x)], []
        for i in range(net.count):
            read = mixed(self.queries[i - 1], done + partial) if i else done[0]
            added = self.branch(net, i, read)
            partial = [partial[0] + added] if partial else [added]
            if (i + 1) % self.size == 0 or i + 1 == net.count:
                done, partial = done + partial, []
        return net.head(net.norm(mixed(self.queries[-1], done)))


def agrees(net: Stream, branch: Branch, *, train: bool = False, x: Tensor | None = None, size: int = 2) -> None:
    """``net`` converted computes what is written by hand at random queries: output, and all gradients."""
    randomize(net).train(train)
    x = tokens() if x is None else x
    blocks = -(-net.count // size)
    by_hand = ByHand(net, branch, [torch.empty(WIDTH, dtype=torch.float64) for _ in range(net.count)], size)
    randomize_queries(dict(enumerate(by_hand.queries)))
    want = outputs_and_gradients(by_hand, dict(by_hand.named_parameters()), [x])
    torch._dynamo.reset()
    ac.transform(net, x, ac.AttnResConfig(num_blocks=blocks, lowering="eager"))
    (stream,) = ac.report(net).streams
    assert len(stream.sublayers) == net.count, ac.report(net)
    queries = list(ac.pseudo_queries(net).values())
    with torch.no_grad():
        for query, wanted in zip(queries, by_hand.queries, strict=True):
            query.copy_(wanted)
    named = {f"net.{name}": p for name, p in net.named_parameters() if not name.startswith("attnres")}
    named |= {f"queries.{i}": query for i, query in enumerate(queries)}
    got = outputs_and_gradients(net, named, [x])
    assert relative_error(got.outputs, want.outputs) <= 1e-12
    assert gradient_error(got.gradients, want.gradients) <= 1e-12
