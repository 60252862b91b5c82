"""What is no model, or cannot be copied, or fails for want of memory: said at once, by its name, and nothing hidden."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.errors import is_out_of_memory
from tests.helpers import randomize
from tests.models import build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")

# ------------------------------------------------------------------ what is given for a model


def scripted() -> Any:
    return torch.jit.trace(build(), example())


def holding(module: nn.Module) -> nn.Module:
    return nn.Sequential(build(), module)


CALLS: dict[str, Callable[[Any], Any]] = {
    "transform": lambda model: ac.transform(model, example(), CONFIG),
    "transform and verify": lambda model: ac.transform(model, example(), CONFIG, verify=True),
    "explain": lambda model: ac.explain(model, example(), CONFIG),
    "verify": lambda model: ac.verify(model, example(), CONFIG),
    "rewrite_graph": lambda model: ac.rewrite_graph(model, (example(),), CONFIG),
    "report": ac.report,
    "pseudo_queries": ac.pseudo_queries,
    "revert": ac.revert,
    "depth_weights": lambda model: ac.depth_weights(model, example()),
    "export_program": lambda model: ac.export_program(model, example()),
    "save_queries": lambda model: ac.save_queries(model, "nowhere.safetensors"),
}
STRANGERS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "NoneType"),
    "a function": (lambda: torch.tanh, "builtin_function_or_method"),
    "a method": (lambda: build().forward, "method"),
    "a class": (lambda: nn.Linear, "the class Linear"),
    "a name": (lambda: "gpt2", "str"),
    "a traced module": (scripted, "TopLevelTracedModule"),
    "a scripted function": (lambda: torch.jit.trace(torch.tanh, X), "Script"),
}
X = torch.ones(2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_model(stranger: str, call: str) -> None:
    make, name = STRANGERS[stranger]
    with pytest.raises(ac.ModelError, match=name) as caught:
        CALLS[call](make())
    assert isinstance(caught.value, TypeError)
    assert caught.value.remedy


def test_a_module_is_no_graph() -> None:
    with pytest.raises(ac.ModelError, match=r"no torch\.fx\.GraphModule") as caught:
        ac.rewrite_graph(build(), (example(),), CONFIG)
    assert "transform" in caught.value.remedy


def test_an_exported_program_is_a_graph() -> None:
    program = torch.export.export(build(), (example(),))
    with pytest.raises(ac.ModelError, match="ExportedProgram") as caught:
        ac.transform(program, example(), CONFIG)
    assert "rewrite_graph" in caught.value.remedy


def test_torchscript_inside_a_model_is_looked_past() -> None:
    model = holding(torch.jit.trace(nn.Linear(16, 16).double(), torch.ones(1, 16).double()))
    with pytest.raises(ac.NotTransformedError):
        ac.report(model)
    with pytest.raises(ac.NotTransformedError):
        ac.revert(model)


# ------------------------------------------------------------------ inference mode


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_queries_are_trained_whatever_the_mode_was(mode: Callable[[], Any], verify: bool) -> None:
    model = randomize(build())
    with mode():
        x = example()
        ac.transform(model, x, CONFIG, verify=verify)
    model(example()).sum().backward()
    for query in ac.pseudo_queries(model).values():
        assert query.requires_grad
        assert not query.is_inference()
        assert query.grad is not None


def test_explain_in_inference_mode_says_the_same() -> None:
    model = build()
    with torch.inference_mode():
        found = ac.explain(model, example(), CONFIG)
    assert found == ac.explain(model, example(), CONFIG)


@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_are_inference_tensors(inside: bool) -> None:
    with torch.inference_mode():
        model = build()
    with torch.inference_mode(inside), pytest.raises(ac.ModelError, match="inference tensors") as caught:
        ac.transform(model, example(), CONFIG)
    assert "deepcopy" in caught.value.remedy
    ordinary = copy.deepcopy(model)
    ac.transform(ordinary, example(), CONFIG)
    ordinary(example()).sum().backward()


# ------------------------------------------------------------------ copies of inputs


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Locked:
    """Cannot be copied by itself: a lock."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.seen = [tensor]
        self.lock = threading.Lock()


def computed() -> Tensor:
    return torch.ones(4, requires_grad=True) * 2


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda t: t, lambda h: h),
    "a list": (lambda t: [t], lambda h: h[0]),
    "a dict of tuples": (lambda t: {"a": (1, t)}, lambda h: h["a"][1]),
    "an object": (lambda t: SimpleNamespace(a=SimpleNamespace(b=t)), lambda h: h.a.b),
    "slots": (Slotted, lambda h: h.tensor),
    "beside a lock": (Locked, lambda h: h.tensor),
    "in a list with a lock": (lambda t: [t, threading.Lock()], lambda h: h[0]),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("make", [computed, lambda: torch.ones(4), lambda: torch.ones(4, requires_grad=True)])
def test_a_copy_is_no_original(holder: str, make: Callable[[], Tensor]) -> None:
    hold, get = HOLDERS[holder]
    tensor = make()
    inputs = ac.Inputs((hold(tensor),), {"k": tensor})
    made = inputs.copied()
    copied = get(made.args[0])
    assert copied is made.kwargs["k"]  # one tensor given twice is one tensor still
    assert copied.is_leaf
    assert copied.requires_grad == tensor.requires_grad
    assert torch.equal(copied, tensor)
    before = tensor.detach().clone()
    copied.data.add_(1)
    assert torch.equal(tensor.detach(), before)


def test_views_stay_views_of_one_memory() -> None:
    whole = computed()
    made = ac.Inputs((whole, whole[1:3]), {"again": whole.detach()[2:]}).copied()
    with torch.no_grad():
        made.args[0].data[2] = 7
    assert made.args[1][1] == 7
    assert made.kwargs["again"][0] == 7
    assert made.args[1].untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_what_cannot_be_copied_stays_itself_and_the_rest_is_copied() -> None:
    lock, tensor = threading.Lock(), torch.ones(2)
    deep = {"locks": [[lock, tensor], [tensor]]}
    made = ac.Inputs((deep,)).copied().args[0]
    assert made["locks"][0][0] is lock
    assert made["locks"][0][1] is made["locks"][1][0]
    assert made["locks"][0][1] is not tensor
    assert len(deep["locks"][0]) == 2


def test_a_model_that_writes_its_input_leaves_a_computed_one_alone() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            scale.mul_(2)
            torch._dynamo.graph_break()
            return self.inner(x) * scale

    scale = torch.ones((), dtype=torch.float64, requires_grad=True) * 1
    ac.explain(Writes(), (example(), scale), CONFIG)
    assert scale.item() == 1


# ------------------------------------------------------------------ no memory


OUT_OF_MEMORY: dict[str, Callable[[], Any]] = {
    "python": lambda: (_ for _ in ()).throw(MemoryError("no more")),
    "device": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")),
    "cpu": lambda: torch.empty(2**50, dtype=torch.float64),
}


class Hungry(nn.Module):
    """Breaks the graph, so that it is run and recorded, and then has no memory at its n-th run for real."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__()
        self.inner = build()
        self.kind, self.at, self.runs = kind, at, [0]

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        ran(self)
        return self.inner(x)


RUNS: list[int] = []


@torch._dynamo.disable
def ran(model: Hungry) -> None:
    RUNS.append(1)
    if len(RUNS) >= model.at:
        OUT_OF_MEMORY[model.kind]()


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_want_of_memory_is_said_as_it_is(kind: str, at: int) -> None:
    RUNS.clear()
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        ac.transform(Hungry(kind, at), example(), CONFIG)
    assert not isinstance(caught.value, ac.AttnResError)
    assert is_out_of_memory(caught.value)
    assert len(RUNS) == at  # nothing else was tried


def test_an_interrupt_is_one() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            stop()
            return x

    @torch._dynamo.disable
    def stop() -> None:
        RUNS.append(1)
        if len(RUNS) >= 2:
            raise KeyboardInterrupt

    RUNS.clear()
    with pytest.raises(KeyboardInterrupt):
        ac.transform(nn.Sequential(build(), Interrupted()), example(), CONFIG)


def test_what_failed_while_recording_is_told_with_what_is_raised() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).double()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = x + second(layer(x))
            return x

    @torch._dynamo.disable
    def second(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise LookupError("the real reason")
        return x

    with pytest.raises(ac.AttnResError) as caught:
        ac.transform(Once(), torch.ones(2, 16).double(), CONFIG)
    told: list[BaseException] = []
    error: BaseException | None = caught.value
    while error is not None:
        told.append(error)
        error = error.__cause__
    assert any("the real reason" in str(each) for each in told)


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ac.ModelError("what", remedy="that")))
    assert (error.what, error.remedy) == ("what", "that")


def test_nested_tensors_are_copied_with_what_tells_their_sizes() -> None:
    one = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    made = ac.Inputs((one, {"twice": one * 2})).copied()
    assert torch.equal((made.args[0] + made.args[1]["twice"]).values(), torch.full((8, 4), 3.0))
    made.args[0].values().zero_()
    assert one.values().all()
