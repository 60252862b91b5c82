"""The independent count on networks of several streams, and on what only looks like a sublayer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import randomize
from tests.zoo.small import MLP, WIDTH, Block, Net, Wrap, counted
from tests.zoo.survey.count import count


def test_embeddings_and_positions_are_no_sublayers() -> None:
    class Tokens(Net):
        def __init__(self) -> None:
            super().__init__(*(Block(lambda x, f, g: x + f) for _ in range(3)))
            self.token, self.position = nn.Embedding(7, WIDTH), nn.Embedding(9, WIDTH)
            self.kind = nn.Parameter(torch.zeros(1, 5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            ids = x[..., 0].abs().long() % 7
            return self.out(self.body(self.token(ids) + self.position(torch.arange(5)) + self.kind))

    assert counted(Tokens()).sizes == (3,)


def test_squeeze_and_excite_in_the_branch_and_on_the_stream() -> None:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.fc(x.mean(1, keepdim=True)))

    branch = [nn.Sequential(MLP(), Squeeze()) for _ in range(4)]
    assert counted(Net(*(Block(lambda x, f, g: x + f, b) for b in branch))).sizes == (4,)
    layers = [Block(lambda x, f, g: x + f) for _ in range(3)]
    assert counted(Net(layers[0], Squeeze(), layers[1], Squeeze(), layers[2], Squeeze())).sizes == ()


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def test_low_rank_adapters_add_no_sublayers() -> None:
    branch = [nn.Sequential(LoRA(), nn.GELU(), LoRA()) for _ in range(4)]
    assert counted(Net(*(Block(lambda x, f, g: x + f, b) for b in branch))).sizes == (4,)
    assert counted(Net(*(LoRA() for _ in range(5)))).sizes == ()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, 3), MLP()
        self.experts = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = torch.softmax(self.router(x), -1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = chosen == i
            where = at.any(-1)
            if where.any():
                out[where] = out[where] + (weight * at).sum(-1)[where][:, None] * expert(x[where])
        return out + self.shared(x)


def test_routed_and_shared_experts_are_one_sublayer() -> None:
    layers = [Block(lambda x, f, g: x + f, Experts()) for _ in range(4)]
    assert counted(Net(*layers)).streams == (tuple(f"layers.{i}.f" for i in range(4)),)


def test_experts_written_out_in_the_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate, self.f, self.g = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1), MLP(), MLP()

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm(x)
            t = torch.sigmoid(self.gate(n))
            return x + t * self.f(n) + (1 - t) * self.g(n)

    assert counted(Net(*(Block() for _ in range(4)))).sizes == (4,)


def test_stages_are_streams_of_their_own() -> None:
    class Stage(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.down = nn.Linear(width // 2, width)
            self.blocks = nn.Sequential(*(Block(lambda x, f, g: x + f, width=width) for _ in range(depth)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.down(x))

    assert counted(Wrap(nn.Sequential(Stage(12, 3), Stage(24, 4)))).sizes == (3, 4)


class Group(nn.Module):
    """Blocks with a convolution and a skip around them, as in restoration networks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(lambda x, f, g: x + f) for _ in range(depth)))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.blocks(x))


def test_nested_streams() -> None:
    result = counted(Net(*(Group(3) for _ in range(4))))
    assert sorted(result.sizes) == [3, 3, 3, 3, 4]
    assert tuple(f"layers.{i}.mix" for i in range(4)) in [tuple(s) for s in result.streams]


def test_additive_u_net() -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = lambda: Block(lambda x, f, g: x + f)  # noqa: E731
            self.top, self.bottom, self.after = (nn.Sequential(*(block() for _ in range(3))) for _ in range(3))
            self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.top(x)
            x = kept + self.up(self.bottom(F.gelu(self.down(kept))))
            return self.after(x)

    # The way down and the way up are one stream, in which all that is below is one sublayer.
    assert sorted(counted(Wrap(UNet())).sizes) == [3, 7]


def test_weightless_branches_count_between_learned_ones() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1) / 5 - x

    def block(branch: nn.Module | None = None) -> Block:
        return Block(lambda x, f, g: x + f, branch)

    assert counted(Net(block(), block(Pool()), block(), block())).sizes == (4,)
    assert counted(Net(block(Pool()), block(), block(), block(), block(Pool()))).sizes == (3,)
    assert counted(Net(block(Pool()), block(Pool()), block(Pool()))).sizes == ()


def test_the_input_is_added_again_and_again() -> None:
    class Again(Net):
        def body(self, x: Tensor) -> Tensor:
            first = x
            for layer in self.layers:
                x = 0.9 * x + 0.1 * first
                x = layer(x)
            return x

    blocks = [Block(lambda x, f, g: x + f) for _ in range(4)]
    # Nothing reads the state before the input is added again: one sublayer each.
    assert counted(Again(*blocks)).sizes == (4,)


def test_lanes_mixed_by_learned_weights_are_none() -> None:
    class Lanes(Net):
        """Hyper-connections: lanes that are mixed by learned weights."""

        def __init__(self) -> None:
            super().__init__(*(Block(lambda x, f, g: f) for _ in range(4)))
            self.mixes = nn.ParameterList(nn.Parameter(torch.ones(3, 3)) for _ in range(4))

        def body(self, x: Tensor) -> Tensor:
            lanes = torch.stack([x, 2 * x, 3 * x])
            for layer, mix in zip(self.layers, self.mixes, strict=True):
                lanes = torch.einsum("ij,jbtd->ibtd", mix, lanes) + layer(lanes[0])
            return lanes.sum(0)

    assert counted(Lanes()).sizes == ()


def test_the_model_stays_as_it_is() -> None:
    model = randomize(Net(*(Block(lambda x, f, g: x + f) for _ in range(3))))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    count(model, {"x": torch.randn(2, 5, WIDTH)})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_sums_in_modules_of_their_own() -> None:
    class Orthogonal(nn.Module):
        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            unit = F.normalize(x, dim=-1)
            return x + f - (f * unit).sum(-1, keepdim=True) * unit

    class Turned(Orthogonal):
        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            return super().forward(f, x)

    class Means(nn.Module):
        """The mean of the state is faded out, whatever is added."""

        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            return x + f - 0.1 * x.mean(1, keepdim=True)

    class Plain(nn.Module):
        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            return x + f

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            return self.scale * (x + self.shift) + f

    class Gate(nn.Module):
        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            return x + torch.sigmoid(f) * (f - x)

    class Summed(nn.Module):
        def __init__(self, add: nn.Module, branch_first: bool = False) -> None:
            super().__init__()
            self.norm, self.f, self.add, self.branch_first = nn.LayerNorm(WIDTH), MLP(), add, branch_first

        def forward(self, x: Tensor) -> Tensor:
            f = self.f(self.norm(x))
            return self.add(f, x) if self.branch_first else self.add(x, f)

    assert counted(Net(*(Summed(Orthogonal()) for _ in range(4)))).sizes == (4,)
    assert counted(Net(*(Summed(Turned(), branch_first=True) for _ in range(4)))).sizes == (4,)
    assert counted(Net(*(Summed(Means()) for _ in range(4)))).sizes == ()
    assert counted(Net(*(Summed(Plain()) for _ in range(4)))).sizes == (4,)
    assert counted(Net(*(Summed(Shifted()) for _ in range(4)))).sizes == (4,)
    assert counted(Net(*(Summed(Gate()) for _ in range(4)))).sizes == ()


def test_a_last_sum_that_nothing_reads_is_no_state() -> None:
    class Quantizer(Net):
        def body(self, x: Tensor) -> Tensor:
            total = 0
            for layer in self.layers:
                f = layer(x)
                total = total + F.silu(f)
                x = x - f
            return total

    assert counted(Quantizer(*(MLP() for _ in range(5)))).sizes == (4,)


def test_frozen_towers_are_counted() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Net(*(Block(lambda x, f, g: x + f) for _ in range(3)))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.tower(x)
            return self.head(features)

    assert counted(Frozen()).sizes == (3,)


class Summary(nn.Module):
    """Tokens of its own read the others, and are all that is left: its table is a start, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(1, 2, WIDTH))
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens.expand(x.shape[0], -1, -1)
        tokens = tokens + (self.query(tokens) @ x.mT).softmax(-1) @ self.value(x)
        return tokens + self.mlp(tokens)


def test_a_module_with_a_table_of_its_own_is_no_box() -> None:
    """A stream goes on behind the module that it begins in: what is put beside the input does not contract it."""
    layers = [Block(lambda x, f, g: x + f) for _ in range(3)]
    assert counted(Net(Summary(), *layers)).sizes == (5,)


class Both(nn.Module):
    """Two states through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.f(self.norm(x) + self.norm(y).mean(1, keepdim=True))
        return x, y + self.f(self.norm(y))


class TwoStates(Net):
    """The second state's last sublayer is in vain where only the first state is read in the end."""

    def __init__(self, both: bool) -> None:
        super().__init__(*(Both() for _ in range(4)))
        self.both = both

    def body(self, x: Tensor) -> Tensor:
        y = x.roll(1, -1).sin()
        for layer in self.layers:
            x, y = layer(x, y)
        return torch.cat([x, self.layers[0].norm(y)], 1) if self.both else x


def test_a_last_sublayer_that_nobody_reads_is_none() -> None:
    assert counted(TwoStates(both=True)).sizes == (4, 4)
    assert counted(TwoStates(both=False)).sizes == (4, 3)
