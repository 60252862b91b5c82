"""What a converted module's ``forward`` is: the declaration of its queries, then the original forward.

Where all adds of a stream stand under another method that ``forward`` calls (timm's ``forward_features``), it is that
method, so that all who call it run the same.

The object stands in the module's instance ``__dict__``, so the class, its methods and its keys stay what they
were. It is a plain picklable object that knows its module: a deep copy or an unpickled module has a working
one of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from attnres_compile import backend, calls, capture, function_transforms, hooks, symbolic, tracers
from attnres_compile.crossing import journey
from attnres_compile.crossing.piece import compiled_in_pieces
from attnres_compile.crossing.regions import Regions
from attnres_compile.crossing.route import Route
from attnres_compile.dynamo_graphs import CompiledCall, own_code
from attnres_compile.errors import AttnResError, GraphBreakError, PlanMismatchError
from attnres_compile.guarding import without_fast_path
from attnres_compile.inputs import Inputs
from attnres_compile.parameters import DepthQueries, queries_in
from attnres_compile.passes.facts import OWNER
from attnres_compile.tally import counting


class ConvertedForward:
    """The ``forward`` of a converted module, or another method of it.

    Called eagerly it runs the compiled, rewritten module. Traced by an outer ``torch.compile`` it leaves its
    declaration in the graph, for the backend (ours, or Inductor through our pre-grad pass) to rewrite. Traced by
    anything that would lose the rewriting it raises.

    Args:
        owner: the module.
        route: of its stream, where that runs through graph breaks. Then an outer compiler does not trace into it, nor
            where it holds recurrent layers of torch.
        regions: paths, relative to it, of modules that the user compiled on their own. Then nothing else is compiled.
        name: of the method.

    Attributes:
        key: by which modules inside know a call of this one; copies have the same.
    """

    def __init__(
        self, owner: nn.Module, route: Route | None = None, regions: tuple[str, ...] = (), name: str = "forward"
    ) -> None:
        setattr(self, OWNER, owner)
        self.route = route
        self.regions = regions
        self.name = name
        self.key = uuid.uuid4().hex
        self.previous = owner.__dict__.get(name)
        # Whether dynamo wants to be told to trace what is inside. An outer compiler was not told.
        self.recurrent = any(isinstance(module, nn.RNNBase) for module in owner.modules())
        self._compiled: Callable[..., Any] | None = None
        # The same for the transforms of torch.func.
        self._compiled_apart: Callable[..., Any] | None = None
        # Whether the module reads numbers from tensors, which tracing must be told. It takes time at each call.
        self.reads_numbers = False
        # The hooks of all modules that there are. A text: dynamo takes numbers that change for sizes.
        self.hooked = ""
        _serve_inductor()

    @property
    def owner(self) -> nn.Module:
        """The converted module."""
        module: nn.Module = getattr(self, OWNER)
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        """The original method's signature: libraries look at it to choose arguments."""
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The method without depth attention."""
        own = self.previous if self.previous is not None else getattr(type(self.owner), self.name).__get__(self.owner)
        method: Callable[..., Any] = own
        return method

    @property
    def __code__(self) -> types.CodeType:
        """The original method's code: dynamo (of a graph module) and exporters look at it before they call."""
        code: types.CodeType = inspect.unwrap(self.original).__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and calls.is_plain(self.key):
            return self.original(*args, **kwargs)
        # Not is_compiling(): that is true in every thread while any thread compiles.
        if torch.compiler.is_dynamo_compiling():
            tracers.refuse_strict_export()
            whole = self.route is None and not self.recurrent
            return self.traced(*args, **kwargs) if whole else self.apart(*args, **kwargs)
        if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            raise symbolic.refusal()
        tracers.refuse()
        with capture.recurrent_layers() if self.recurrent else contextlib.nullcontext():
            return self.run(*args, **kwargs)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """The code that is traced: the declaring op, then the original forward."""
        owner = self._attnres_owner  # type: ignore[attr-defined]
        calls.entered()
        if self.hooked == "none":
            pass  # Read, so that what is compiled holds for these hooks alone.
        queries = owner.attnres
        torch.ops.attnres.declare.default(queries.token, queries.tensors(), queries.text)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(owner), self.name)(owner, *args, **kwargs)

    def broken(self, *args: Any, **kwargs: Any) -> Any:
        """The code that is traced in pieces: the original forward. What it lacks, its graphs bring."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        owner = self._attnres_owner  # type: ignore[attr-defined]
        return getattr(type(owner), self.name)(owner, *args, **kwargs)

    @torch._compile._disable_dynamo
    def apart(self, *args: Any, **kwargs: Any) -> Any:
        """Run outside of the graph that an outer compiler makes."""
        with capture.recurrent_layers() if self.recurrent else contextlib.nullcontext():
            return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten module, compiling it at the first call."""
        with calls.running(self.key):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        queries = queries_in(self.owner)
        assert queries is not None
        query = next(queries.parameters(), queries.token)
        if queries.token.device != query.device:
            # Loaded with ``assign=True`` into a model made on the meta device: the token is in no state_dict.
            queries.token = torch.zeros_like(queries.token, device=query.device)
        self._look_at_hooks()
        if function_transforms.active():
            return self._transformed(queries, args, kwargs)
        instead = _INSTEAD.get()
        if self.route is not None:
            return self._travel(self.route, queries, args, kwargs)
        if instead is not None:
            compiled = instead.compiled(self)
        else:
            if self._compiled is None:
                lowering = queries.declaration.config.lowering
                self._compiled = self._compile(backend.ConvertedBackend(self.owner, lowering))
            compiled = self._compiled
        with counting() as tally:
            try:
                with capture.numbers_from_data() if self.reads_numbers else contextlib.nullcontext():
                    result = _unwrapped(compiled, args, kwargs)
            except PlanMismatchError as error:
                result = self._once_more(compiled, error, args, kwargs)
        self._all_ran(tally.sites, len(queries.declaration.sites))
        return result

    def _look_at_hooks(self) -> None:
        hooked = hooks.of_all_modules()
        if hooked == self.hooked:
            return
        if self.route is not None and self._compiled is not None:
            raise PlanMismatchError(
                "hooks of all modules (register_module_forward_hook and the like) were registered or removed after "
                f"the first call of a converted {type(self.owner).__name__} whose stream runs through graph breaks",
                remedy="Register them before the first call; or revert the model, register them, and transform it",
            )
        self.hooked = hooked

    def _travel(self, route: Route, queries: DepthQueries, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run in pieces, with the stream's sources beside them."""
        if _INSTEAD.get() is not None:
            raise GraphBreakError(
                "the sites of a residual stream that runs through graph breaks cannot be observed",
                remedy="Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)",
            )
        if self._compiled is None and self.regions:
            self._compiled = self.broken
            Regions(self.owner, self.regions, route)
        if self._compiled is None:
            self._compiled = compiled_in_pieces(_own_code(self, ConvertedForward.broken), route)
        with journey.travelling(journey.Journey(self.owner, route, queries)):
            return _unwrapped(self._compiled, args, kwargs)

    def _transformed(self, queries: DepthQueries, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run under the transforms of ``torch.func`` that are at work."""
        if self.route is not None:
            function_transforms.refuse(self.owner)

        compiled = self._compiled_apart
        if compiled is None:
            # Whatever else it is lowered to, transforms want the graph op by op.
            compiler = function_transforms.backend(backend.ConvertedBackend(self.owner, "eager"))
            compiled = self._compiled_apart = self._compile(compiler)
        with counting() as tally:
            result = _unwrapped(lambda *a, **k: function_transforms.run(self.owner, compiled, a, k), args, kwargs)
        self._all_ran(tally.sites, len(queries.declaration.sites))
        return result

    def _all_ran(self, ran: int, expected: int) -> None:
        if ran < expected:
            raise PlanMismatchError(
                f"a converted {type(self.owner).__name__} ran {ran} of its {expected} sites: part of its "
                "residual stream ran outside the compiled graph",
                remedy="Look for a graph break (TORCH_LOGS=graph_breaks) or a function marked torch._dynamo.disable",
            )

    def _compile(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        return CompiledCall(_own_code(self), compiler)

    def _once_more(
        self, compiled: Callable[..., Any], error: PlanMismatchError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a second try, where what broke the graph can be mended.

        Some modules set something up at their first call of a kind (transformers registers hooks, under a lock): a
        run of the original, thrown away, does that. Others read numbers from tensors.
        """
        explained = self._explained(error, args, kwargs)
        whole = explained is error  # as one graph it can be traced
        if whole and self.reads_numbers:
            raise error from None
        if not whole:
            capture.set_up(self.owner, self.broken, Inputs(args, kwargs))
        try:
            with capture.numbers_from_data() if whole else contextlib.nullcontext():
                result = _unwrapped(compiled, args, kwargs)
        except PlanMismatchError:
            raise explained from None
        self.reads_numbers = self.reads_numbers or whole
        return result

    def _explained(self, error: PlanMismatchError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanMismatchError:
        """The error with the place of the graph break that caused it, if one did."""
        found = capture.first_break(self.owner, Inputs(args, kwargs), self.name)
        if found is None:
            return error
        return PlanMismatchError(
            f"{error.what}. Tracing stops: {found.reason}", where=found.where, remedy="Remove what breaks the graph"
        )

    def __getstate__(self) -> dict[str, Any]:
        tracers.refuse_pickled_graph(self.owner)
        return {**self.__dict__, "_compiled": None, "_compiled_apart": None}

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
    symbolic.install()


def methods_of(module: nn.Module) -> list[ConvertedForward]:
    """The converted methods of a module."""
    return [value for value in module.__dict__.values() if isinstance(value, ConvertedForward)]


def _own_code(forward: ConvertedForward, function: Any = ConvertedForward.traced) -> Callable[..., Any]:
    """The method ``function`` of ``forward`` with a code object of its own."""
    return types.MethodType(own_code(function, type(forward.owner).__name__), forward)


def _unwrapped(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call, and raise an error of ours as itself instead of inside dynamo's."""
    with without_fast_path(), hooks.guarded():
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, AttnResError):
                raise error.inner_exception from None
            raise
