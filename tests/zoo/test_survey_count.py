"""The independent count, against families and small networks whose sublayers were counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.families import CONVERTED, REFUSED, Family
from tests.zoo.small import MLP, WIDTH, Block, Net, counted
from tests.zoo.support import example, prepare
from tests.zoo.survey.count import count


@pytest.mark.parametrize("family", [*CONVERTED, *REFUSED], ids=str)
def test_families(family: Family) -> None:
    assert count(prepare(family), example(family)).sizes == family.sublayers


@pytest.mark.parametrize(
    ("add", "sizes"),
    [
        (lambda x, f, g: x + f, (4,)),
        (lambda x, f, g: x - f, (4,)),
        (lambda x, f, g: x.add(f, alpha=0.3), (4,)),
        (lambda x, f, g: sum([x, f]), (4,)),
        (lambda x, f, g: torch.stack([x, f]).sum(0), (4,)),
        (lambda x, f, g: torch.addcmul(x, g, f), (4,)),
        (lambda x, f, g: x + g * f, (4,)),
        (lambda x, f, g: 0.9 * x + f, (4,)),
        (lambda x, f, g: (x + f) * 0.7071, (4,)),
        (lambda x, f, g: g * x + f, (4,)),
        (lambda x, f, g: F.dropout(x + f, 0.5, training=False), (4,)),
        (lambda x, f, g: (x.transpose(1, 2) + f.transpose(1, 2)).transpose(1, 2), (4,)),
        (lambda x, f, g: (x + f).roll(1, 1), (4,)),
        (lambda x, f, g: x + f.mean(1, keepdim=True), (4,)),
        # Some tokens are updated: x plus a branch that is zero elsewhere.
        (lambda x, f, g: torch.cat([x[:, :2], x[:, 2:] + f[:, 2:]], 1), (4,)),
        (lambda x, f, g: f, ()),
        (lambda x, f, g: F.layer_norm(x + f, (WIDTH,)), ()),
        (lambda x, f, g: F.relu(x + f), ()),
        (lambda x, f, g: x + torch.sigmoid(x) * (f - x), ()),
        (lambda x, f, g: x * torch.sigmoid(f), ()),
        (lambda x, f, g: x + 0.044715 * x**3, ()),
    ],
)  # fmt: skip
def test_spellings_of_one_add(add: Callable[..., Tensor], sizes: tuple[int, ...]) -> None:
    assert counted(Net(*(Block(add) for _ in range(4)))).sizes == sizes


def test_in_place_adds() -> None:
    def add(x: Tensor, f: Tensor, gamma: Tensor) -> Tensor:
        x += f
        return x

    assert counted(Net(*(Block(add) for _ in range(4)))).sizes == (4,)


def test_names_are_the_outermost_modules() -> None:
    result = counted(Net(*(Block(lambda x, f, g: x + f) for _ in range(3))))
    assert result.streams == (("layers.0.f", "layers.1.f", "layers.2.f"),)
    assert result.notes == ()


def test_adds_in_the_root_s_own_forward() -> None:
    class Root(Net):
        def __init__(self) -> None:
            super().__init__(*(nn.ModuleDict({"n": nn.LayerNorm(WIDTH), "f": MLP()}) for _ in range(4)))

        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer["f"](layer["n"](x))
            return x

    assert counted(Root()).streams == (tuple(f"layers.{i}.f" for i in range(4)),)


def test_norms_without_modules_and_a_mean_at_the_end() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fs = nn.ModuleList(MLP() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for f in self.fs:
                x = x + f(F.layer_norm(x, (WIDTH,)))
            return x.mean(1)

    assert counted(Functional()).sizes == (5,)


def test_a_branch_of_raw_parameters() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.norm(x) @ self.w)

    assert counted(Net(*(Raw() for _ in range(4)))).sizes == (4,)


def test_blocks_without_any_modules() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.ones(WIDTH, 9)), nn.Parameter(torch.ones(9, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ self.v) @ self.w

    result = counted(Net(*(Bare() for _ in range(4))))
    assert result.sizes == (4,)
    assert len(result.notes) == 4


def test_modules_that_add_a_constant_stay_open() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(1, 5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    layers = (nn.Sequential(Block(lambda x, f, g: x + f), Positions()) for _ in range(4))
    assert counted(Net(*layers)).sizes == (4,)


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.attention(n, n, n)[0]


def test_branches_that_return_tuples() -> None:
    assert counted(Net(*(Tuples() for _ in range(4)))).streams == (tuple(f"layers.{i}.attention" for i in range(4)),)


def test_rezero_around_a_module_with_weights_of_its_own() -> None:
    class ReZero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.alpha = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.alpha * self.attention(x, x, x)[0]

    assert counted(Net(*(ReZero() for _ in range(4)))).sizes == (4,)


class Parallel(nn.Module):
    def __init__(self, order: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), MLP(), MLP()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        a, b = self.a(n), self.b(n)
        return [(x + a) + b, x + (a + b), a + b + x][self.order]


@pytest.mark.parametrize("order", range(3))
def test_parallel_branches_are_one_sublayer(order: int) -> None:
    streams = counted(Net(*(Parallel(order) for _ in range(4)))).streams
    assert streams == (tuple(f"layers.{i}.a + layers.{i}.b" for i in range(4)),)


def test_sandwich_norms() -> None:
    branch = [nn.Sequential(MLP(), nn.LayerNorm(WIDTH)) for _ in range(4)]
    assert counted(Net(*(Block(lambda x, f, g: x + f, b) for b in branch))).sizes == (4,)


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_scales_in_modules() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f, self.of_x, self.of_f = nn.LayerNorm(WIDTH), MLP(), Scale(WIDTH), Scale(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.of_x(x) + self.of_f(self.f(self.norm(x)))

    assert counted(Net(*(Scaled() for _ in range(4)))).sizes == (4,)


def test_a_module_called_twice_appears_twice() -> None:
    block = Block(lambda x, f, g: x + f)
    assert counted(Net(block, block, block)).streams == (("layers.0.f",) * 3,)


def test_streams_that_start_from_zeros_or_from_a_parameter() -> None:
    class Queries(Net):
        def __init__(self) -> None:
            super().__init__(*(Block(lambda x, f, g: x + f) for _ in range(3)))
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    class Zeros(Queries):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(torch.zeros_like(x)))

    class Tokens(Queries):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(self.token.expand(2, 5, WIDTH)))

    assert counted(Zeros()).sizes == (3,)
    assert counted(Tokens()).sizes == (3,)


def test_a_token_that_joins_in_mid_stream_cuts_it() -> None:
    class Joined(Net):
        def __init__(self) -> None:
            super().__init__(*(Block(lambda x, f, g: x + f) for _ in range(6)))
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

        def body(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(torch.cat([self.token.expand(2, 1, WIDTH), x], 1) if i == 3 else x)
            return x

    assert counted(Joined()).sizes == (3, 3)


def test_post_norm_in_modules() -> None:
    class PostNorm(nn.Module):
        def __init__(self, adds: int) -> None:
            super().__init__()
            self.fs, self.norm = nn.ModuleList(MLP() for _ in range(adds)), nn.LayerNorm(WIDTH)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(adds))

        def forward(self, x: Tensor) -> Tensor:
            for norm, f in zip(self.norms, self.fs, strict=True):
                x = x + f(norm(x))
            return self.norm(x)

    assert counted(Net(*(PostNorm(1) for _ in range(4)))).sizes == ()
    # As in a conformer: several adds, then a norm on the stream.
    assert counted(Net(*(PostNorm(4) for _ in range(3)))).sizes == ()
    # A final norm is none of these.
    assert counted(Net(PostNorm(4))).sizes == (4,)


def test_post_activation_in_modules() -> None:
    class PostActivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.act = MLP(), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x + self.f(x))

    assert counted(Net(*(PostActivation() for _ in range(4)))).sizes == ()


def test_batch_norm_on_the_stream_is_a_norm() -> None:
    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.f(F.relu(x)))

    net = Net(*(Post() for _ in range(4)))
    assert counted(net, 2, 4, WIDTH).sizes == ()


def test_a_scale_and_a_shift_on_the_stream_are_a_norm() -> None:
    class Fixed(nn.Module):
        """A norm without statistics."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.bias

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.norm = MLP(), Fixed()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.f(x))

    assert counted(Net(*(Post() for _ in range(4)))).sizes == ()


def test_batch_norms_that_call_other_modules_are_norms() -> None:
    class NormAct(nn.BatchNorm1d):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.act = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.norm = nn.Conv1d(4, 4, 3, padding=1), NormAct(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.f(F.relu(x)))

    assert counted(Net(*(Post() for _ in range(4))), 2, 4, WIDTH).sizes == ()


def test_lanes_that_are_only_added_to() -> None:
    class Weigh(nn.Module):
        """How much of the branch each lane gets, computed from the lanes with a matrix of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fn = (
                nn.LayerNorm(2 * WIDTH, elementwise_affine=False),
                nn.Parameter(torch.ones(2 * WIDTH, 2)),
            )

        def forward(self, lanes: Tensor) -> tuple[Tensor, Tensor]:
            flat = lanes.flatten(2)
            weight = torch.sigmoid((flat @ self.fn) * self.norm(flat).mean(-1, keepdim=True))
            return weight, (weight[..., None] * lanes).sum(2)

    class Lanes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weigh, self.f = Weigh(), nn.Sequential(nn.LayerNorm(WIDTH), MLP())

        def forward(self, lanes: Tensor) -> Tensor:
            weight, x = self.weigh(lanes)
            return weight[..., None] * self.f(x)[..., None, :] + lanes

    class Model(Net):
        def body(self, x: Tensor) -> Tensor:
            return super().body(x[..., None, :].expand(2, 5, 2, WIDTH)).sum(2)

    assert counted(Model(*(Lanes() for _ in range(4)))).sizes == (4,)
