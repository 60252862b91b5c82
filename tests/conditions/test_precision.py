"""Autocast, narrow and wide dtypes, and adds of two dtypes: results keep their dtypes, and are as good as they were.

The truth is the model in float64. A converted model may be off by what the original itself is off by in the same
precision, with room for rounding in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import (
    Run,
    floats,
    gradient_error,
    outputs_and_gradients,
    randomize,
    randomize_queries,
    relative_error,
)
from tests.models import WIDTH, build, example
from tests.zoo.families import BY_NAME
from tests.zoo.support import prepare

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
Context = Callable[[], AbstractContextManager[object]]


class Mixed(nn.Module):
    """Pre-norm layers whose stream and branches differ in dtype.

    Args:
        stream: the root's dtype.
        branch: what each branch computes in; ``x + f`` then follows PyTorch's promotion.
        back: cast each branch to the stream's dtype before its add.
        down: cast the state to the branch's dtype before each norm, as ``autocast`` models do.
    """

    def __init__(self, stream: torch.dtype, branch: torch.dtype, back: bool, down: bool) -> None:
        super().__init__()
        self.stream, self.branch, self.back, self.down = stream, branch, back, down
        self.root = nn.Linear(5, WIDTH).to(stream)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)).to(branch)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.root(x.to(self.stream))
        for norm, branch in zip(self.norms, self.branches, strict=True):
            read = x.to(self.branch) if self.down else x
            weight, bias = norm.weight.to(read.dtype), norm.bias.to(read.dtype)
            read = nn.functional.layer_norm(read, (WIDTH,), weight, bias)
            out = torch.tanh(branch(read.to(self.branch)))
            x = x + (out.to(x.dtype) if self.back else out)
        last = self.last
        return nn.functional.layer_norm(x.to(last.weight.dtype), (WIDTH,), last.weight, last.bias), x


def measured(model: nn.Module, x: Tensor, names: dict[str, Tensor] | None = None) -> Run:
    return outputs_and_gradients(model, names or dict(model.named_parameters()), (x,))


def errors(make: Callable[[], nn.Module], x: Tensor, context: Context) -> tuple[float, float]:
    """How far the original and the converted model are from the original in float64, gradients included.

    Dtypes of all outputs and gradients are compared.
    """
    wide = make().double()
    for module in wide.modules():
        if isinstance(module, Mixed):
            module.stream = module.branch = torch.float64
    truth = measured(wide, x.double())
    with context():
        want = measured(make(), x)
        model = make()
        names = dict(model.named_parameters())
        ac.transform(model, x, config=CONFIG)
        got = measured(model, x, names)
    assert [out.dtype for out in got.outputs] == [out.dtype for out in want.outputs]
    assert [value.dtype for value in got.gradients.values()] == [value.dtype for value in want.gradients.values()]
    theirs, ours = (
        max(relative_error(run.outputs, truth.outputs), gradient_error(run.gradients, truth.gradients))
        for run in (want, got)
    )
    return theirs, ours


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_a_model_of_one_dtype(dtype: torch.dtype) -> None:
    theirs, ours = errors(lambda: build().to(dtype), example().to(dtype), nullcontext)
    assert ours <= 2 * theirs + 16 * STEP[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Converted inside the context, and outside of it and then called inside: the queries are the same ones."""

    def cast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    theirs, ours = errors(build, example(), cast)
    assert theirs > 2.0**-14, "autocast did nothing"
    assert ours <= 2 * theirs + 16 * STEP[dtype]
    models = []
    for context in (nullcontext, cast):
        model = build()
        with context():
            ac.transform(model, example(), config=CONFIG)
        randomize_queries(ac.pseudo_queries(model))
        models.append(model)
    one, other = models
    assert list(ac.pseudo_queries(one)) == list(ac.pseudo_queries(other))
    with cast():
        assert relative_error(one(example()), other(example())) == 0.0
    assert relative_error(one(example()), other(example())) == 0.0
    assert all(query.dtype == torch.float32 for query in ac.pseudo_queries(other).values())


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast_of_a_library_s_model(name: str) -> None:
    family = BY_NAME[name]
    inputs = family.inputs(2, 7, 0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = floats(prepare(family)(**inputs))
        model = prepare(family)
        ac.transform(model, inputs, config=CONFIG)
        got = floats(model(**inputs))
    truth = floats(prepare(family, torch.float64)(**family.inputs(2, 7, 0)))
    assert [out.dtype for out in got] == [out.dtype for out in want]
    assert relative_error(got, truth) <= 2 * relative_error(want, truth) + 4 * STEP[torch.bfloat16]


NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("stream", "branch", "back", "down"),
    [
        (WIDE, NARROW, False, True),  # a float32 residual, read in bfloat16; PyTorch promotes the add
        (WIDE, NARROW, True, True),
        (WIDE, torch.float16, False, True),
        (WIDE, torch.float16, False, False),
        (NARROW, WIDE, True, False),  # a narrow residual with float32 branches, rounded at each add
        (torch.float64, WIDE, False, True),
        (NARROW, WIDE, False, False),  # float32 from its first add on
    ],
    ids=str,
)
def test_streams_and_branches_of_two_dtypes(stream: torch.dtype, branch: torch.dtype, back: bool, down: bool) -> None:
    def make() -> nn.Module:
        return randomize(Mixed(stream, branch, back, down))

    theirs, ours = errors(make, example(), nullcontext)
    assert ours <= 2 * theirs + 4 * STEP[min(stream, branch, key=lambda each: -STEP[each])]
    model = make()
    ac.transform(model, example(), config=CONFIG)
    assert [len(found.sublayers) for found in ac.report(model).streams] == [6]
