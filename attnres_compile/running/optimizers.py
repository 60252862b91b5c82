"""The optimizers of a running script: which of them should train the queries, and in which group."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attnres_compile.running.outcome import HeldQueries
from attnres_compile.running.patch import Patch


class OptimizerWatch:
    """Remembers the optimizers that are built, and gives the queries to those that hold the model's parameters.

    Args:
        building: called with the parameters that an optimizer is about to be built from; returns those to take.
        held: called when an optimizer got the queries, or had them.
    """

    def __init__(self, building: Callable[[Any], Any], held: Callable[[HeldQueries], None]) -> None:
        self._building = building
        self._held = held
        self._seen: list[weakref.ref[Optimizer]] = []
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._init = Patch(Optimizer, "__init__", self._watched)
        self._hook: Any = None
        self._model: set[int] = set()
        self._queries: dict[str, nn.Parameter] = {}
        # Where a checkpoint had the queries, by optimizer.
        self.places: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Begin to watch."""
        self._init.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._init.stop()
        self._unhook()

    def converted(self, model: nn.Module, queries: Mapping[str, nn.Parameter]) -> None:
        """From now on, see that one optimizer of ``model`` trains ``queries`` (parameter name -> parameter)."""
        self._queries = dict(queries)
        added = {id(query) for query in queries.values()}
        self._model = {id(parameter) for parameter in model.parameters()} - added
        self._settle()
        self._wait()

    # ------------------------------------------------------------------ how

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
            if not self._init.active:
                original(optimizer, params, *args, **kwargs)
                return
            original(optimizer, self._building(params), *args, **kwargs)
            self._seen.append(weakref.ref(optimizer))
            if self._queries and self._model <= _ids(optimizer):
                self._settle()
            elif self._queries:
                self._wait()

        return __init__

    def _wait(self) -> None:
        # Which optimizers divide up the model's parameters is known when the first of them steps, not before.
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._settle()
        self._unhook()

    def _settle(self) -> None:
        """Give the queries to each optimizer of the model, unless one that holds its other parameters has them."""
        live = [optimizer for ref in self._seen if (optimizer := ref()) is not None]
        chosen = [optimizer for optimizer in live if self._has(optimizer)]
        for optimizer in chosen:
            self._tell(optimizer, "own")
        candidates = self._of_model(live) or (self._of_model(_alive()) if not chosen else [])
        for optimizer in sorted(candidates, key=_fitness):
            if self._has(optimizer) or _for_matrices(optimizer):
                continue
            share = _ids(optimizer) & self._model
            # Optimizers of the same parameters take turns, each needs the queries; those that divide them up step
            # together, and one of them must not move what another has moved.
            if all(share & _ids(other) for other in chosen):
                self._add(optimizer)
                chosen.append(optimizer)

    def _of_model(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        return [optimizer for optimizer in optimizers if _ids(optimizer) & self._model]

    def _has(self, optimizer: Optimizer) -> bool:
        return any(id(query) in _ids(optimizer) for query in self._queries.values())

    def _add(self, optimizer: Optimizer) -> None:
        # Into a group that is there: a scheduler has counted the groups already.
        index = self.places.get(optimizer, best_group(optimizer))
        group = optimizer.param_groups[index]
        group["params"].extend(self._queries.values())
        if "param_names" in group:
            group["param_names"].extend(self._queries)
        self._tell(optimizer, "added")

    def _tell(self, optimizer: Optimizer, how: str) -> None:
        if optimizer in self._told:
            return
        self._told.add(optimizer)
        wanted = {id(query) for query in self._queries.values()}
        groups = optimizer.param_groups
        index = next(i for i, group in enumerate(groups) if any(id(p) in wanted for p in group["params"]))
        lr = groups[index].get("initial_lr", groups[index].get("lr"))
        decay = groups[index].get("weight_decay")
        self._held(HeldQueries(type(optimizer).__name__, how, index, len(groups), _number(lr), _number(decay)))


def best_group(optimizer: Optimizer) -> int:
    """Index of the parameter group that treats its parameters most like a pseudo-query wants to be treated.

    One that holds vectors (norm weights, biases) without weight decay, else one that holds vectors, else the first.
    """
    return min(range(len(optimizer.param_groups)), key=lambda i: (*_fit(optimizer.param_groups[i]), i))


def _fit(group: Mapping[str, Any]) -> tuple[bool, bool]:
    vectors = any(parameter.dim() <= 1 for parameter in group["params"])
    decays = bool(group.get("weight_decay"))
    return not vectors, vectors and decays


def _fitness(optimizer: Optimizer) -> tuple[bool, bool]:
    return _fit(optimizer.param_groups[best_group(optimizer)])


def _for_matrices(optimizer: Optimizer) -> bool:
    # Muon and its kin orthogonalise updates, and fail on vectors.
    return "muon" in type(optimizer).__name__.lower()


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _alive() -> list[Optimizer]:
    """Optimizers that were not built by their own ``__init__``: copies, and unpickled ones."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [each for each in found if isinstance(each.__dict__.get("param_groups"), list)]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def tensors_of(params: Sequence[Any]) -> list[torch.Tensor]:
    """The parameters in what an optimizer is built from: tensors, (name, tensor) pairs, or groups of them."""
    found: list[torch.Tensor] = []
    for each in params:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            inside = each.get("params", ())
            found += tensors_of([inside] if isinstance(inside, torch.Tensor) else list(inside))
        elif isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], torch.Tensor):
            found.append(each[1])
    return found
