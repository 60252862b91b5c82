"""Runs a script with the first model that it calls converted: what is watched, when, and what is remembered."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from attnres_compile import api
from attnres_compile.config import AttnResConfig
from attnres_compile.data_parallel import gradients_cared_for
from attnres_compile.errors import AttnResError
from attnres_compile.guarding import outside_inference_mode
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.parameters import converted
from attnres_compile.report import TransformReport
from attnres_compile.running import models, script, wrappers
from attnres_compile.running.optimizers import OptimizerWatch, tensors_of
from attnres_compile.running.outcome import Conversion, HeldQueries, Outcome, Refused
from attnres_compile.running.resuming import Checkpoints
from attnres_compile.running.watch import ModuleWatch, Seen

# A module whose first call fails is tried again at the next ones: perhaps it was not ready.
TRIES = 3
# So many modules are tried: a script that makes a new one for each step must not be slow for it.
MOST_MODULES = 64


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    config: AttnResConfig | None = None,
    *,
    as_module: bool = False,
    inputs: Inputs | None = None,
    keep: bool = False,
    keep_frames: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Outcome:
    """Run a script as ``python`` would, and convert the first model with a residual stream just before its first call.

    With ``inputs``, or where the model has ``dummy_inputs``, it is converted when the first optimizer of its
    parameters is about to be built, so that the queries are among them. Otherwise, or where that fails, they are added
    to the optimizers that hold the model's parameters, to a group that is there. An uncaught exception of the script
    is shown, not raised.

    Args:
        path: the script, or with ``as_module`` the name of a module.
        arguments: its own.
        config: how to convert; default :class:`attnres_compile.AttnResConfig`.
        as_module: run a module, as ``python -m``.
        inputs: what the model will be called with.
        keep: keep the model and copies of its first inputs until the end, for a picture of its depth weights.
        keep_frames: leave our own frames in the traceback of an error.
        tell: called with a line about each thing that happens.
        around: a context for each tracing of a model.

    Returns:
        How the script ended and what was converted.

    Raises:
        TargetError: there is no such script or module.
    """
    if not as_module:
        script.check(path)
    session = _Session(config or AttnResConfig(), inputs, keep, tell, around)
    with session:
        ending = script.execute(path, arguments, as_module, keep_frames)
    return session.outcome(ending)


class _Session:
    def __init__(
        self,
        config: AttnResConfig,
        given: Inputs | None,
        keep: bool,
        tell: Callable[[str], None],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._config, self._given, self._keep, self._tell, self._around = config, given, keep, tell, around
        self._pid = os.getpid()
        self._conversion: Conversion | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._refused: list[Refused] = []
        self._notes: list[str] = []
        self._tries: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._unfit: weakref.WeakKeyDictionary[nn.Module, Refused] = weakref.WeakKeyDictionary()
        self._parallel: list[DistributedDataParallel] = []
        self._settling = False
        self._watch = ModuleWatch(self._seen, self._compiled)
        self._optimizers = OptimizerWatch(self._building, self._held)
        self._checkpoints = Checkpoints()

    def __enter__(self) -> _Session:
        self._watch.start()
        self._optimizers.start()
        self._checkpoints.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        self._optimizers.stop()
        self._checkpoints.stop()

    def outcome(self, ending: script.Ending) -> Outcome:
        """What came of it; the model's queries as they are now."""
        found = self._conversion
        model = self._model() if self._model is not None else None
        if found is not None and model is not None:
            # load_state_dict(assign=True) puts other parameters in the place of those that we know.
            found.stores = tuple((path, store) for path, _, store in converted(model)) or found.stores
        own = os.getpid() == self._pid
        return Outcome(ending, found, tuple(self._refused), tuple(self._notes), own)

    # ------------------------------------------------------------------ a model is called

    def _seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
        if wrappers.is_parallel(module):
            # It moves inputs to its device before it calls the model, which is seen then.
            if isinstance(module, DistributedDataParallel) and module not in self._parallel:
                self._parallel.append(module)
            self._try_sharded(module)
            return Seen.INSIDE
        model = wrappers.inner(module)
        if not self._may_try(model):
            return Seen.WHOLE
        inputs = Inputs(args, dict(kwargs))
        kept = _copied(inputs) if self._keep else None
        if self._try(model, inputs, "first call", "call"):
            assert self._conversion is not None
            self._conversion.inputs = kept
            self._settle(module, model)
        return Seen.WHOLE

    def _compiled(self, wrapper: OptimizedModule) -> None:
        """The converted model is inside a compiled module: see that it runs as it is."""
        model = self._model() if self._model is not None else None
        if model is not None and wrappers.inner(wrapper) is model:
            for name in wrappers.bypassed(wrapper, model):
                self._left_out(name)

    def _left_out(self, backend: str) -> None:
        assert self._conversion is not None
        self._note(
            f"torch.compile(backend={backend!r}) cannot carry the depth attention: the converted "
            f"{self._conversion.name} runs without it (lowering {self._config.lowering})"
        )

    def _may_try(self, model: nn.Module) -> bool:
        if self._conversion is not None or len(self._refused) >= MOST_MODULES:
            return False
        if self._tries.get(model, 0) >= TRIES:
            return False
        return next(model.parameters(), None) is not None

    def _try_sharded(self, module: nn.Module) -> None:
        try:
            wrappers.refuse_sharded(module)
        except AttnResError as error:
            self._refuse(wrappers.inner(module), error)

    def _try(self, model: nn.Module, inputs: Inputs, when: str, inputs_from: str) -> bool:
        """Convert ``model``; if that is not possible, remember why."""
        self._watch.pause()
        try:
            wrappers.refuse_sharded(model)
            with (
                _ordinary_tensors(inputs) as ready,
                wrappers.uncompiled(model) as left_out,
                _failures_untold(),
                self._around(),
                # _settle() shares them with the wrapper's processes.
                gradients_cared_for(),
            ):
                api.transform(model, ready, self._config)
        except Exception as error:
            if when == "first call":
                self._refuse(model, error)
            elif inputs_from == "given":
                self._unfit[model] = Refused.because(model, error)
            self._watch.resume()
            return False
        except BaseException:
            self._watch.resume()
            raise
        self._watch.stop()
        report = api.report(model)
        stores = tuple((path, store) for path, _, store in converted(model))
        kept = model if self._keep else None
        self._model = weakref.ref(model)
        self._conversion = Conversion(
            type(model).__name__, model.training, when, inputs_from, report, stores, model=kept
        )
        for name in left_out:
            self._left_out(name)
        for wrapper in models.compiled_around(model):
            self._compiled(wrapper)
        return True

    def _settle(self, module: nn.Module, model: nn.Module) -> None:
        """What has to be done once a model is converted: its checkpoint, its optimizers, its processes, a word."""
        assert self._conversion is not None
        found = self._conversion
        loaded, left = self._checkpoints.restore_model()
        self._optimizers.places.update(self._checkpoints.places())
        queries = found.parameters()
        self._settling = True
        self._optimizers.converted(model, queries)
        self._settling = False
        self._checkpoints.restore_optimizers()
        self._tell(_converted_line(found))
        if model in self._unfit:
            self._note(f"the given inputs did not do before its optimizer was built: {self._unfit[model].reason}")
        if loaded:
            self._note(f"{loaded} of the added parameters come from the checkpoint that the script loaded")
        if left:
            self._note(f"the checkpoint that the script loaded holds {left} queries that this model has no place for")
        for wrapper in {id(each): each for each in [*self._parallel, *wrappers.wrapped_by(module)]}.values():
            if wrappers.inner(wrapper) is model:
                wrappers.share_gradients(wrapper, queries.values())
                self._note("DistributedDataParallel was there first: the queries' gradients are averaged beside it")
        others = models.copies_of(model)
        if others:
            self._note(
                f"{others} other {'model' if others == 1 else 'models'} of class {found.name} from before the "
                f"conversion {'stays' if others == 1 else 'stay'} plain; one that averages this model's weights (EMA, "
                "SWA) lacks the queries"
            )

    def _refuse(self, model: nn.Module, error: Exception) -> None:
        own = not isinstance(error, AttnResError)
        tries = self._tries.get(model, 0) + 1 if own else TRIES
        first = model not in self._tries
        for each in model.modules() if not own else [model]:
            # What the whole has not, its parts have not.
            self._tries[each] = tries
        refused = Refused.because(model, error)
        if first:
            self._refused.append(refused)
        report = refused.report or TransformReport()
        if first and (own or report.rejections or report.graph_breaks or refused.kind != "NoStreamError"):
            self._tell(f"{refused.module} stays as it is: {refused.reason}")

    # ------------------------------------------------------------------ an optimizer is built

    def _building(self, params: Any) -> Any:
        if self._conversion is not None or os.getpid() != self._pid:
            return params
        if isinstance(params, GeneratorType):
            params = list(params)
        if not isinstance(params, (list, tuple)):
            return params
        tensors = tensors_of(params)
        model = models.owner_of(tensors) if tensors else None
        if model is None or not self._may_try(model):
            return params
        inputs, source = self._known_inputs(model)
        if inputs is None:
            return params
        plain, named = list(model.parameters()), list(model.named_parameters())
        if not self._try(model, inputs, "optimizer", source):
            return params
        assert self._conversion is not None
        self._conversion.inputs = _copied(inputs) if self._keep else None
        self._settle(model, model)
        # The same list with the queries where they are in the model.
        if _same(params, plain):
            return list(model.parameters())
        if _same_pairs(params, named):
            return list(model.named_parameters())
        return params

    def _known_inputs(self, model: nn.Module) -> tuple[Inputs | None, str]:
        if self._given is not None:
            return _beside(self._given, model), "given"
        try:
            dummy = getattr(model, "dummy_inputs", None)
            return (None, "") if dummy is None else (_beside(as_inputs(dummy), model), "dummy_inputs")
        except Exception:  # a property that fails
            return None, ""

    def _held(self, held: HeldQueries) -> None:
        assert self._conversion is not None
        self._conversion.held.append(held)
        if not self._settling:
            how = "has the queries among its parameters" if held.how == "own" else "was given the queries"
            self._tell(f"{held} {how}")

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._tell(f"note: {text}")


# ------------------------------------------------------------------ words


def _converted_line(found: Conversion) -> str:
    report = found.report
    sublayers = sum(len(stream.sublayers) for stream in report.streams)
    moment = "at its first call" if found.when == "first call" else "before its optimizer is built"
    source = {"given": "given inputs, ", "dummy_inputs": "its dummy_inputs, "}.get(found.inputs_from, "")
    mode = "training" if found.training else "evaluation"
    if found.held:
        optimizer = "; added to " + " and ".join(map(str, found.held))
    else:
        optimizer = "; no optimizer holds its parameters yet" if found.when == "first call" else ""
    return (
        f"converted {found.name} {moment} ({source}{mode} mode): {sublayers} sublayers, "
        f"{len(found.queries())} queries, {report.parameters_added} parameters{optimizer}"
    )


# ------------------------------------------------------------------ tracing


@contextlib.contextmanager
def _failures_untold() -> Iterator[None]:
    """A call that fails while it is traced is no news: the script makes it too, and has its own error then."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# ------------------------------------------------------------------ inputs


@contextlib.contextmanager
def _ordinary_tensors(inputs: Inputs) -> Iterator[Inputs]:
    """Out of inference mode: parameters that are made in it can never be trained."""
    with outside_inference_mode():

        def ordinary(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.is_inference() else tensor

        yield Inputs(*pytree.tree_map_only(Tensor, ordinary, (inputs.args, inputs.kwargs)))


def _copied(inputs: Inputs) -> Inputs | None:
    """Copies without histories, or ``None`` where something cannot be copied."""
    with torch.inference_mode(False), torch.no_grad():

        def copied(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

        try:
            return Inputs(*pytree.tree_map(copied, (inputs.args, inputs.kwargs)))
        except Exception:  # somebody's class
            return None


def _beside(inputs: Inputs, model: nn.Module) -> Inputs:
    """``inputs`` on the device of the model."""
    device = next(model.parameters()).device
    return Inputs(*pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs.args, inputs.kwargs)))


def _same(params: Sequence[Any], plain: list[nn.Parameter]) -> bool:
    return len(params) == len(plain) and all(a is b for a, b in zip(params, plain, strict=True))


def _same_pairs(params: Sequence[Any], named: list[tuple[str, nn.Parameter]]) -> bool:
    return len(params) == len(named) and all(
        isinstance(a, tuple) and len(a) == 2 and a[0] == name and a[1] is b
        for a, (name, b) in zip(params, named, strict=True)
    )
