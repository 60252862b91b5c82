"""What traces or saves a converted model in a way that would lose its depth attention says so by type; and what one
thread does is no concern of another.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import attnres_compile as ac
from tests.helpers import randomize_queries, relative_error
from tests.models import build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2  # type: ignore[no-any-return]


def converted() -> nn.Module:
    model = ac.transform(build(), example(), CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    return model


def functional(model: nn.Module, mode: str = "real", pre_dispatch: bool = False) -> Any:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    traced = make_fx(
        lambda p, x: torch.func.functional_call(model, p, (x,)), tracing_mode=mode, pre_dispatch=pre_dispatch
    )
    return traced(parameters, example())


TRACERS: dict[str, Callable[[Any], Any]] = {
    "make_fx": lambda model: make_fx(model)(example()),
    "make_fx, fake": lambda model: functional(model, "fake"),
    "make_fx, symbolic": lambda model: functional(model, "symbolic"),
    "make_fx, functional": functional,
    "make_fx, before dispatch": lambda model: functional(model, pre_dispatch=True),
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda model: torch.jit.trace(model, example()),
    "torch.export": lambda model: torch.export.export(model, (example(),), strict=False),
    "torch.export, strict": lambda model: torch.export.export(model, (example(),), strict=True),
    "draft_export": lambda model: torch.export.draft_export(model, (example(),)),
    "torch.onnx, TorchScript": lambda model: torch.onnx.export(model, (example(),), io.BytesIO(), dynamo=False),
}


@pytest.mark.parametrize("around", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_is_refused_by_type(tracer: str, around: bool) -> None:
    model = converted()
    want = model(example())
    with pytest.raises(ac.PlainExecutionError) as caught:
        TRACERS[tracer](Outer(model) if around else model)
    assert "export_program" in caught.value.remedy
    assert torch.equal(model(example()), want)


def test_pipelining_says_why() -> None:
    """It raises an error of its own, with ours as its cause."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    with pytest.raises((RuntimeError, ac.PlainExecutionError)) as caught:
        pipelining.pipeline(converted(), (example(),), split_spec={"head": pipelining.SplitPoint.BEGINNING})
    told: BaseException | None = caught.value
    while told is not None and not isinstance(told, ac.PlainExecutionError):
        told = told.__cause__
    assert told is not None


# ------------------------------------------------------------------ threads


def in_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` gives in another thread."""
    result: list[Any] = []

    def other() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert result, "it waits for what this thread holds"
    return result[0]


def meanwhile(during: Callable[[Callable[[], None]], Any], call: Callable[[], Any]) -> Any:
    """What ``call`` gives in another thread while ``during`` is in the middle of its work here."""
    result: list[Any] = []

    def middle() -> None:
        if not result:
            result.append(in_thread(call))

    during(middle)
    assert result, "the middle was not reached"
    return result[0]


class Pausing(nn.Module):
    def __init__(self, middle: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        self.middle()
        return self.linear(x)  # type: ignore[no-any-return]


def exporting(middle: Callable[[], None]) -> None:
    torch.export.export(Pausing(middle), (example(),), strict=False)


def compiling(middle: Callable[[], None]) -> None:
    def backend(module: Any, inputs: Any) -> Any:
        middle()
        return module.forward

    torch.compile(lambda x: x * 2, backend=backend)(example())


def tracing(middle: Callable[[], None]) -> None:
    make_fx(Pausing(middle))(example())


@pytest.mark.parametrize("during", [exporting, tracing, compiling])
def test_another_thread_runs_what_is_compiled_already(during: Callable[[Callable[[], None]], Any]) -> None:
    model = converted()
    # In a thread, too: dynamo compiles again where a thread's settings are others, and waits for who compiles.
    want = in_thread(lambda: model(example()))
    got = meanwhile(during, lambda: model(example()))
    assert isinstance(got, Tensor), got
    # While one thread exports, torch patches the calls of modules in all of them: not always the same bits.
    assert relative_error(got, want) < 1e-6 if during is exporting else torch.equal(got, want)


@pytest.mark.parametrize("during", [exporting, compiling])
def test_another_thread_refuses_what_it_traces_itself(during: Callable[[Callable[[], None]], Any]) -> None:
    model = converted()
    got = meanwhile(during, lambda: torch.jit.trace(model, example()))
    assert isinstance(got, ac.PlainExecutionError), got
