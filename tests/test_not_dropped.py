"""Whatever is done with a transformed model: it computes its depth attention, or it raises. Never plain.

Every test gives the queries random values first, so that a plain run would show in the output.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize_queries, relative_error
from tests.models import build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


@pytest.fixture
def model() -> nn.Module:
    model = build()
    ac.transform(model, example(), config=CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    return model


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """The transformed model's output by its own forward, checked not to be the plain one."""
    plain = build()(x)
    out = model(x).detach()
    assert relative_error(out, plain) > 1e-2
    return out


def test_deepcopy_runs(model: nn.Module) -> None:
    want = reference(model, example())
    assert relative_error(copy.deepcopy(model)(example()), want) < 1e-6


def test_pickle_and_torch_save_run(model: nn.Module) -> None:
    want = reference(model, example())
    assert relative_error(pickle.loads(pickle.dumps(model))(example()), want) < 1e-6
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert relative_error(torch.load(buffer, weights_only=False)(example()), want) < 1e-6


def test_a_copy_made_before_the_first_call_runs(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    assert relative_error(twin(example()), reference(model, example())) < 1e-6


def test_the_owner_called_by_itself_runs(model: Any) -> None:
    x = model.embed(example())
    plain = build().encoder(x)
    assert relative_error(model.encoder(x), plain) > 1e-2
    assert relative_error(model.encoder.forward(x), plain) > 1e-2


def test_functional_call_runs(model: nn.Module) -> None:
    want = reference(model, example())
    state = {name: value.clone() for name, value in model.named_parameters()}
    assert relative_error(torch.func.functional_call(model, state, (example(),)), want) < 1e-6
    zeroed = {name: torch.zeros_like(value) if ".attnres." in name else value for name, value in state.items()}
    assert relative_error(torch.func.functional_call(model, zeroed, (example(),)), build()(example())) < 1e-5


def test_our_backend_around_it_runs(model: nn.Module) -> None:
    want = reference(model, example())
    compiled = torch.compile(model, backend="attnres", options={"lowering": "eager"})
    assert relative_error(compiled(example()), want) < 1e-6
    assert compiled(example()).requires_grad


def test_a_function_compiled_around_it_with_our_backend_runs(model: nn.Module) -> None:
    want = reference(model, example())

    @torch.compile(backend="attnres", options={"lowering": "eager"}, fullgraph=True)
    def call(x: Tensor) -> Tensor:
        return model(x).sin()

    assert relative_error(call(example()), want.sin()) < 1e-6


def test_a_wrapper_calling_it_twice_runs(model: nn.Module) -> None:
    class Siamese(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.inner(a) - self.inner(b)

    a, b = example(seed=1), example(seed=2)
    want = reference(model, a) - reference(model, b)
    wrapper = Siamese(model)
    assert relative_error(wrapper(a, b), want) < 1e-5
    compiled = torch.compile(wrapper, backend="attnres", options={"lowering": "eager"}, fullgraph=True)
    assert relative_error(compiled(a, b), want) < 1e-5


def test_inference_mode_and_checkpoint_run(model: nn.Module) -> None:
    want = reference(model, example())
    with torch.inference_mode():
        assert relative_error(model(example()), want) < 1e-6
    x = example().requires_grad_()
    for reentrant in (True, False):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        assert relative_error(out, want) < 1e-6
        (ours,) = torch.autograd.grad(out.sum(), x) if not reentrant else (None,)
        (theirs,) = torch.autograd.grad(model(x).sum(), x)
        assert ours is None or relative_error(ours, theirs) < 1e-5


def test_function_transforms_run_or_raise(model: nn.Module) -> None:
    want = reference(model, example())
    state = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (example(),)).sum()

    try:
        gradients = torch.func.grad(loss)(state)
    except (ac.AttnResError, RuntimeError):
        gradients = None
    if gradients is not None:
        loss(state).backward()
        assert max(relative_error(gradients[n], p.grad) for n, p in state.items()) < 1e-5
    try:
        mapped = torch.func.vmap(model)(example()[None])[0]
    except (ac.AttnResError, RuntimeError):
        return
    assert relative_error(mapped, want) < 1e-6


@pytest.mark.inductor
def test_plain_torch_compile_runs_and_keeps_a_users_own_pass(model: nn.Module) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from attnres_compile.inductor_pass import InductorPass

    class Users(CustomGraphPass):
        seen = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            Users.seen += 1

        def uuid(self) -> str:
            return "users"

    want = reference(model, example())
    with config.patch(pre_grad_custom_pass=InductorPass(Users())):
        assert relative_error(torch.compile(model)(example()), want) < 1e-5
    assert Users.seen >= 1


def test_installing_the_pass_wraps_what_was_there() -> None:
    from torch._inductor import config

    from attnres_compile.inductor_pass import InductorPass, install

    calls: list[str] = []
    with config.patch(pre_grad_custom_pass=lambda graph: calls.append("users")):
        install()
        first = config.pre_grad_custom_pass
        install()
        assert config.pre_grad_custom_pass is first
        assert isinstance(first, InductorPass)
        first(torch.fx.symbolic_trace(nn.Linear(2, 2)).graph)
        assert first.uuid() is None  # a pass without an identity is never cached
    assert calls == ["users"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_foreign_backend_raises(model: nn.Module, backend: str) -> None:
    with pytest.raises(ac.PlainExecutionError, match="revert"):
        torch.compile(model, backend=backend)(example())


@pytest.mark.parametrize("grad", [True, False])
def test_a_function_compiled_around_it_with_a_foreign_backend_raises(model: nn.Module, grad: bool) -> None:
    @torch.compile(backend="aot_eager")
    def call(x: Tensor) -> Tensor:
        return model(x) * 2

    with torch.set_grad_enabled(grad), pytest.raises(ac.PlainExecutionError):
        call(example())


@pytest.mark.parametrize("strict", [True, False])
def test_export_raises(model: nn.Module, strict: bool) -> None:
    with pytest.raises(Exception, match="cannot carry the depth attention") as caught:
        torch.export.export(model, (example(),), strict=strict)
    assert "rewrite_graph" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_raises(model: nn.Module) -> None:
    with pytest.raises(ac.PlainExecutionError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, (example(),))


@pytest.mark.filterwarnings("ignore")
def test_jit_script_raises(model: nn.Module) -> None:
    with pytest.raises((RuntimeError, ValueError, torch.jit.frontend.NotSupportedError)):
        torch.jit.script(model)


def test_symbolic_trace_raises(model: nn.Module) -> None:
    with pytest.raises(Exception, match="symbolically trace"):
        torch.fx.symbolic_trace(model)


def test_force_eager_raises(model: nn.Module) -> None:
    reference(model, example())
    with torch.compiler.set_stance("force_eager"), pytest.raises(ac.PlainExecutionError, match="force_eager"):
        model(example())
    reference(model, example())


def test_dynamos_recompile_limit_raises(model: nn.Module) -> None:
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        for length in (3, 4):
            reference(model, example(length=length))
        with pytest.raises(ac.PlainExecutionError, match="recompile_limit"):
            model(example(length=5))


def test_converted_modules_do_not_share_one_recompile_limit() -> None:
    models = [build() for _ in range(4)]
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        for model in models:
            ac.transform(model, example(), config=CONFIG)
            randomize_queries(ac.pseudo_queries(model))
            for length in (3, 4):
                reference(model, example(length=length))


def test_suppressed_errors_still_run_it(model: nn.Module) -> None:
    """Where a backend fails dynamo then runs plain Python, in which a converted module compiles itself."""
    want = reference(model, example())

    def failing(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no")

    with torch._dynamo.config.patch(suppress_errors=True):
        assert relative_error(torch.compile(model, backend=failing)(example()), want) < 1e-6


def _disabled(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def test_a_break_inside_the_stream_that_came_later_raises(model: Any) -> None:
    reference(model, example())
    model.encoder.between = _disabled
    with pytest.raises(ac.PlanMismatchError, match=r"Tracing stops") as caught:
        model(example())
    assert "test_not_dropped.py" in caught.value.where


def test_a_layer_taken_out_of_dynamos_sight_raises(model: Any) -> None:
    layer = model.encoder.layers[1]
    layer.forward = torch._dynamo.disable(layer.forward)
    with pytest.raises(ac.PlanMismatchError):
        model(example())


def test_layers_skipped_at_run_time_raise(model: Any) -> None:
    model.encoder.layers = model.encoder.layers[:2]
    with pytest.raises(ac.PlanMismatchError, match="4 of the 6 sites"):
        model(example())


def test_a_model_that_changes_with_its_mode_is_refused_in_the_other_mode() -> None:
    """Dropout on the stream itself: in training mode the sources no longer add up to the state."""
    dropout = nn.Dropout(0.5)
    model = build(between=dropout).eval()
    ac.transform(model, example(), config=CONFIG)
    reference_out = model(example())
    assert torch.isfinite(reference_out).all()
    model.train()
    with pytest.raises(ac.PlanMismatchError, match=r"dropout_on_stream.*train/eval"):
        model(example())
