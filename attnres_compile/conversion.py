"""What a converted module's ``forward`` is: the declaration of its queries, then the original forward.

The object stands in the module's instance ``__dict__``, so the class, its methods and its keys stay what they
were. It is a plain picklable object that knows its module: a deep copy or an unpickled module has a working
one of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from attnres_compile import backend, capture
from attnres_compile.errors import AttnResError, PlainExecutionError, PlanMismatchError
from attnres_compile.inputs import Inputs
from attnres_compile.parameters import CHILD, DepthQueries
from attnres_compile.passes.facts import OWNER


class ConvertedForward:
    """The ``forward`` of a converted module.

    Called eagerly it runs the compiled, rewritten module. Traced by an outer ``torch.compile`` it leaves its
    declaration in the graph, for the backend (ours, or Inductor through our pre-grad pass) to rewrite. Traced by
    anything that would lose the rewriting it raises.
    """

    def __init__(self, owner: nn.Module) -> None:
        setattr(self, OWNER, owner)
        self.previous = owner.__dict__.get("forward")
        self._compiled: Callable[..., Any] | None = None
        _serve_inductor()

    @property
    def owner(self) -> nn.Module:
        """The converted module."""
        module: nn.Module = getattr(self, OWNER)
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        """The original forward's signature: libraries look at it to choose arguments."""
        original = self.previous if self.previous is not None else type(self.owner).forward.__get__(self.owner)
        return inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _exporting():
            if torch.compiler.is_dynamo_compiling():
                # dynamo can raise what it can build, and builds no exception with a constructor of its own.
                raise RuntimeError(_NO_EXPORT)
            _refuse("torch.export")
        if torch.compiler.is_compiling():
            return self.traced(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            _refuse("torch.jit.trace")
        return self.run(*args, **kwargs)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """The code that is traced: the declaring op, then the original forward."""
        owner = self._attnres_owner  # type: ignore[attr-defined]
        queries = owner.attnres
        torch.ops.attnres.declare.default(queries.token, queries.tensors(), queries.text)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(owner).forward(owner, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten module, compiling it at the first call."""
        queries = self.owner._modules[CHILD]
        assert isinstance(queries, DepthQueries)
        query = next(queries.parameters(), queries.token)
        if queries.token.device != query.device:
            # Loaded with ``assign=True`` into a model made on the meta device: the token is in no state_dict.
            queries.token = torch.zeros_like(queries.token, device=query.device)
        instead = _INSTEAD.get()
        if instead is not None:
            compiled = instead.compiled(self)
        else:
            if self._compiled is None:
                lowering = queries.declaration.config.lowering
                self._compiled = self._compile(backend.ConvertedBackend(self.owner, lowering))
            compiled = self._compiled
        with backend.counting() as tally:
            try:
                result = _unwrapped(compiled, args, kwargs)
            except PlanMismatchError as error:
                raise self._explained(error, args, kwargs) from None
        expected = len(queries.declaration.sites)
        if tally.sites < expected:
            raise PlanMismatchError(
                f"a converted {type(self.owner).__name__} ran {tally.sites} of its {expected} sites: part of its "
                "residual stream ran outside the compiled graph",
                remedy="Look for a graph break (TORCH_LOGS=graph_breaks) or a function marked torch._dynamo.disable",
            )
        return result

    def _compile(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(_own_code(self), backend=compiler)
        return compiled

    def _explained(self, error: PlanMismatchError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanMismatchError:
        """The error with the place of the graph break that caused it, if one did."""
        found = capture.first_break(self.owner, Inputs(args, kwargs))
        if found is None:
            return error
        return PlanMismatchError(
            f"{error.what}. Tracing stops: {found.reason}", where=found.where, remedy="Remove what breaks the graph"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _serve_inductor()


# ------------------------------------------------------------------ other compilers for a while


class _Instead:
    """What converted modules run in the place of their own compiled code."""

    def __init__(self, compiler: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self.compiler = compiler
        self.calls: dict[ConvertedForward, Callable[..., Any]] = {}

    def compiled(self, forward: ConvertedForward) -> Callable[..., Any]:
        if forward not in self.calls:
            self.calls[forward] = forward._compile(self.compiler(forward.owner))
        return self.calls[forward]


_INSTEAD: contextvars.ContextVar[_Instead | None] = contextvars.ContextVar("attnres_instead", default=None)


@contextlib.contextmanager
def compiled_by(compiler: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """While open, converted modules that are called run what ``compiler(module)`` makes of their graphs.

    What they are compiled into otherwise is neither run nor changed.
    """
    token = _INSTEAD.set(_Instead(compiler))
    try:
        yield
    finally:
        _INSTEAD.reset(token)


# ------------------------------------------------------------------ how


def _serve_inductor() -> None:
    from attnres_compile.inductor_pass import install

    install()


def _exporting() -> bool:
    # torch 2.11 answers is_exporting() with True in every graph that dynamo traces; the flag behind it is right.
    if hasattr(torch.compiler, "_is_exporting_flag"):
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()


_NUMBERS = itertools.count()


def _own_code(forward: ConvertedForward) -> Callable[..., Any]:
    """``forward.traced`` with a code object of its own.

    dynamo keeps its compiled variants, their limit and what it knows of changing sizes by code object, and all
    converted modules would share one.
    """
    function = ConvertedForward.traced
    code = function.__code__.replace(co_name=f"{type(forward.owner).__name__}_{next(_NUMBERS)}")
    twin = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return types.MethodType(twin, forward)


def _unwrapped(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call, and raise an error of ours as itself instead of inside dynamo's."""
    # The fused encoder layer of torch.nn computes both residual adds inside one op.
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        if fast:
            torch.backends.mha.set_fastpath_enabled(False)
        return call(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, AttnResError):
            raise error.inner_exception from None
        raise
    finally:
        if fast:
            torch.backends.mha.set_fastpath_enabled(True)


_REMEDY = (
    "Use attnres_compile.export_program(model, example_inputs); or revert it, export, and use "
    "attnres_compile.rewrite_graph"
)
_NO_EXPORT = f"torch.export cannot carry the depth attention of a transformed model. {_REMEDY}"


def _refuse(what: str) -> None:
    raise PlainExecutionError(f"{what} cannot carry the depth attention of a transformed model", remedy=_REMEDY)
