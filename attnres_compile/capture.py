"""Model + example inputs -> an FX graph with shapes, without running the model.

dynamo traces with fake tensors and hands the graph to a backend that keeps a copy and stops. Nothing runs, so
random state, buffers, gradients and caches stay as they were, and a model on the meta device will do.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from attnres_compile.comparison import same_randomness
from attnres_compile.dynamo_graphs import CompiledCall, copy_graph_module, own_code
from attnres_compile.errors import AttnResError, CaptureError, GraphBreakError, is_out_of_memory
from attnres_compile.guarding import Guard
from attnres_compile.inputs import Inputs
from attnres_compile.passes import facts
from attnres_compile.passes.record import making
from attnres_compile.report import GraphBreak


@dataclass(frozen=True)
class Capture:
    """What was traced.

    Attributes:
        graph: the whole model's graph, or ``None`` where tracing broke.
        breaks: where and why it broke.
    """

    graph: fx.GraphModule | None
    breaks: tuple[GraphBreak, ...] = ()


def _stopped() -> tuple[type[Exception], ...]:
    """What stops the tracing of one graph where several could be made: a break, control flow that data decides, or a
    failure of dynamo's own, which it may have with all that is computed from one number of the data.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    exc = torch._dynamo.exc
    return exc.Unsupported, exc.UserError, exc.InternalTorchDynamoError, GuardOnDataDependentSymNode


class _Stop(Exception):
    """Raised by the capturing backend to end the call before anything runs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        super().__init__("captured")


class _Call:
    """Calls the module through an attribute whose name paths are cleaned of, as converted modules are."""

    def __init__(self, model: nn.Module, method: str = "forward") -> None:
        setattr(self, facts.OWNER, model)
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "forward":
            return self._attnres_owner(*args, **kwargs)  # type: ignore[attr-defined]
        return getattr(self._attnres_owner, self.method)(*args, **kwargs)  # type: ignore[attr-defined]


def capture(model: nn.Module, inputs: Inputs) -> Capture:
    """Trace ``model`` on ``inputs``.

    Raises:
        CaptureError: dynamo cannot trace the model, for another reason than a graph break.
        Exception: the model's own error, where it rejects the inputs.
    """
    try:
        return Capture(_whole(model, inputs))
    except _stopped() as error:
        if is_out_of_memory(error):
            raise
        broken = GraphBreak(*_break(error))
        # Inputs that the model rejects can look like a graph break: let the model speak first.
        if _Guarded(model, inputs).eagerly():
            raise CaptureError(
                f"tracing {type(model).__name__} stops, and what it does there needs gradients, without which a model "
                f"is run to follow it: {broken.reason}",
                where=broken.where,
                remedy="Take it out of forward: retain_grad() and hooks on tensors work on what a forward returns",
            ) from error
        try:
            # What broke it may have been a set-up that the model needs once.
            return Capture(_whole(model, inputs))
        except _stopped():
            return Capture(None, (broken,))
    except CaptureError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        _Guarded(model, inputs).eagerly()
        raise _untraceable(model, error) from error


def capture_pieces(model: nn.Module, inputs: Inputs) -> tuple[fx.GraphModule, ...]:
    """The graphs that dynamo makes of ``model`` where tracing it breaks. The model runs for it, and is put back.

    Raises:
        CaptureError: dynamo fails in a piece.
    """
    try:
        return tuple(_Guarded(model, inputs).in_pieces())
    except Exception as error:  # The model itself runs: its caller has seen to that.
        if is_out_of_memory(error):
            raise
        raise _untraceable(model, error) from error


def _untraceable(model: nn.Module, error: Exception) -> CaptureError:
    return CaptureError(
        f"dynamo could not trace {type(model).__name__}: {_first_line(error)}",
        remedy="The model runs eagerly; TORCH_LOGS=dynamo shows where tracing stops",
    )


def set_up(model: nn.Module, original: Callable[..., Any], inputs: Inputs) -> None:
    """Run ``original``, the plain forward of ``model``, for what it does at its first call; nothing else stays."""
    _Guarded(model, inputs).by(original)


def first_break(model: nn.Module, inputs: Inputs, method: str = "forward") -> GraphBreak | None:
    """Where tracing a method of ``model`` as one graph stops, or ``None`` where it does not (or fails otherwise)."""
    try:
        _whole(model, inputs, method=method)
    except _stopped() as error:
        return GraphBreak(*_break(error))
    except Exception:  # The caller has an error to raise already; this one would hide it.
        return None
    return None


def capture_owners(model: nn.Module, inputs: Inputs, paths: Iterable[str]) -> dict[str, fx.GraphModule]:
    """Trace some modules of ``model`` as wholes, with the arguments that they get when the model runs.

    The model runs once for it, or once per level of modules in one another; random state, buffers and inputs are put
    back.

    Args:
        paths: paths of the modules.

    Raises:
        GraphBreakError: tracing stops inside one of them.
    """
    graphs: dict[str, fx.GraphModule] = {}
    for level in _levels(paths):
        with contextlib.ExitStack() as traps:
            for path in level:
                traps.enter_context(_trap(model, path, graphs))
            _Guarded(model, inputs).eagerly()
    return graphs


def _levels(paths: Iterable[str]) -> list[list[str]]:
    """The paths, none of one list inside another one of it: what is traced must not run into a trap."""
    levels: list[list[str]] = []
    for path in sorted(paths):
        around = sum(any(not above or path.startswith(above + ".") for above in level) for level in levels)
        levels += [[]] if around == len(levels) else []
        levels[around].append(path)
    return levels


@contextlib.contextmanager
def _trap(model: nn.Module, path: str, graphs: dict[str, fx.GraphModule]) -> Iterator[None]:
    """While open, the first call of the module at ``path`` is traced before it runs."""
    owner = model.get_submodule(path)
    missing = object()
    saved = owner.__dict__.get("forward", missing)
    original = owner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if path not in graphs:
            owner.__dict__.pop("forward", None)
            if saved is not missing:
                owner.__dict__["forward"] = saved
            try:
                # Copies: a view made without gradients may not be written in a graph that has them.
                given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
                graphs[path] = _whole(owner, Inputs(*given), model)
            except AttnResError:
                raise
            except Exception as error:  # A break, or a failure of dynamo: the model itself ran.
                if is_out_of_memory(error):
                    raise
                reason, where = _break(error)
                raise GraphBreakError(
                    f"a graph break inside a residual stream: {reason}",
                    module=path,
                    where=where,
                    remedy="Remove what breaks the graph, or move it out of the module that owns the stream",
                ) from error
        return original(*args, **kwargs)

    owner.__dict__["forward"] = forward
    try:
        yield
    finally:
        owner.__dict__.pop("forward", None)
        if saved is not missing:
            owner.__dict__["forward"] = saved


def _whole(model: nn.Module, inputs: Inputs, root: nn.Module | None = None, method: str = "forward") -> fx.GraphModule:
    """One graph of ``model``; its nodes name modules by their paths in ``root`` (``model`` itself if not given)."""

    def stop(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise _Stop(copy_graph_module(graph, root or model))

    with making("capture") as made:
        try:
            _traced(_Call(model, method), stop, inputs, fullgraph=True)
        except Exception as error:
            found = _stop_inside(error)
            if found is None:
                raise
            made(found.graph)
            return found.graph
    raise CaptureError(
        "the model computes nothing that dynamo could trace",
        remedy="Check that example_inputs reach tensor operations",
    )


def numbers_from_data() -> contextlib.AbstractContextManager[Any]:
    """While open, dynamo traces what is read from tensors - numbers, or sizes (``nonzero``) - instead of breaking.

    ``fullgraph=True`` does that by itself, so what runs must do it, too, to see the graph that was captured.
    """
    return torch._dynamo.config.patch(  # type: ignore[no-any-return]
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )


def recurrent_layers() -> contextlib.AbstractContextManager[Any]:
    """While open, dynamo traces torch's LSTM, GRU and RNN as one operator each instead of leaving the code around them.

    What runs must do as what was captured did; the setting is this thread's own.
    """
    return torch._dynamo.config.patch(allow_rnn=True)  # type: ignore[no-any-return]


def _traced(call: _Call, backend: Callable[..., Any], inputs: Inputs, fullgraph: bool) -> None:
    own = types.MethodType(own_code(_Call.__call__, "traced"), call)
    with (
        torch._dynamo.config.patch(suppress_errors=False),
        recurrent_layers(),
        torch.compiler.set_stance("default"),
        torch.enable_grad(),
    ):
        CompiledCall(own, backend, fullgraph=fullgraph)(*inputs.args, **inputs.kwargs)


def _stop_inside(error: BaseException | None) -> _Stop | None:
    while error is not None:
        if isinstance(error, _Stop):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _break(error: Any) -> tuple[str, str]:
    frames = [f for f in getattr(error, "real_stack", None) or () if not f.filename.startswith(facts.NOT_THE_USERS)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = getattr(error, "gb_type", None) or _first_line(error)
    return str(text), where


class _Guarded:
    """Runs a model for real and puts back whatever that changed."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs

    def eagerly(self) -> bool:
        """Run, so that the model's own error is raised if it has one. Returns whether it only runs with gradients."""
        try:
            self._run(lambda args, kwargs: self.model(*args, **kwargs))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # What it keeps of this run would hold a history.
            guard = Guard(self.model)
            try:
                self._run(lambda args, kwargs: self.model(*args, **kwargs), gradients=True)
            finally:
                guard.put_back()
            return True
        return False

    def by(self, call: Callable[..., Any]) -> None:
        """Run ``call`` in the model's place."""
        self._run(lambda args, kwargs: call(*args, **kwargs))

    def in_pieces(self) -> list[fx.GraphModule]:
        """Run through dynamo with graph breaks allowed, and keep the pieces."""
        pieces: list[fx.GraphModule] = []

        def keep(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
            pieces.append(copy_graph_module(graph, self.model))
            return graph.forward

        call = _Call(self.model)
        self._run(lambda args, kwargs: _traced(call, keep, Inputs(args, kwargs), fullgraph=False))
        return pieces

    def _run(self, body: Callable[[tuple[Any, ...], dict[str, Any]], Any], gradients: bool = False) -> None:
        # The tensors themselves: a table that was too short is replaced by a longer one.
        buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        given = self.inputs.copied()
        with same_randomness(), torch.set_grad_enabled(gradients):
            try:
                body(given.args, given.kwargs)
            finally:
                with torch.no_grad():
                    for home, name, buffer, numbers in buffers:
                        home[name] = buffer
                        buffer.copy_(numbers)
