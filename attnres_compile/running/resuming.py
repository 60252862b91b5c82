"""Checkpoints of an earlier run, loaded by the script before its model is converted.

They hold queries that the model does not have yet. What belongs to them is kept until it has.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from attnres_compile.checkpoint_files import is_query_key
from attnres_compile.running.patch import Patch


class Checkpoints:
    """Watches ``load_state_dict`` of modules and optimizers while no model is converted."""

    def __init__(self) -> None:
        self._models: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self._optimizers: list[tuple[weakref.ref[Optimizer], int, dict[str, Any]]] = []
        self._module_load = Patch(nn.Module, "load_state_dict", self._watched_module)
        self._optimizer_load = Patch(Optimizer, "load_state_dict", self._watched_optimizer)

    def start(self) -> None:
        """Begin to watch."""
        self._module_load.start()
        self._optimizer_load.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._module_load.stop()
        self._optimizer_load.stop()

    def places(self) -> dict[Optimizer, int]:
        """Optimizers whose checkpoints held queries, and in which group."""
        return {optimizer: index for ref, index, _ in self._optimizers if (optimizer := ref()) is not None}

    def restore_model(self) -> tuple[int, int]:
        """Load what was kept, now that the model is converted: tensors loaded, and tensors that found no place.

        Raises:
            CheckpointError: they are those of another conversion.
        """
        self._module_load.stop()
        loaded = left = 0
        for ref, kept in self._models:
            module = ref()
            own = set() if module is None else set(module.state_dict())
            fits = _like(kept, {key: value for key, value in kept.items() if key in own})
            if module is not None and fits:
                module.load_state_dict(fits, strict=False)
            loaded, left = loaded + len(fits), left + len(kept) - len(fits)
        self._models.clear()
        return loaded, left

    def restore_optimizers(self) -> None:
        """Load the optimizers' states again, with those of the queries, which they hold by now."""
        self._optimizer_load.stop()
        for ref, index, state in self._optimizers:
            optimizer = ref()
            if optimizer is None or len(state["param_groups"][index]["params"]) != len(
                optimizer.param_groups[index]["params"]
            ):
                continue
            # What the script has set since then stays.
            set_since = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, values in zip(optimizer.param_groups, set_since, strict=True):
                group.update(values)
        self._optimizers.clear()

    # ------------------------------------------------------------------ how

    def _watched_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            if self._module_load.active and isinstance(state_dict, Mapping):
                state_dict = self._without_queries(module, state_dict)
            return original(module, state_dict, *args, **kwargs)

        return load_state_dict

    def _without_queries(self, module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        ours = [key for key in state_dict if is_query_key(key)]
        if not ours:
            return state_dict
        own = set(module.state_dict())
        kept = _like(state_dict, {key: state_dict[key] for key in ours if key not in own})
        if not kept:
            return state_dict
        self._models = [(ref, old) for ref, old in self._models if ref() is not module]
        self._models.append((weakref.ref(module), kept))
        return _like(state_dict, {key: value for key, value in state_dict.items() if key not in kept})

    def _watched_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(optimizer: Optimizer, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            if self._optimizer_load.active and isinstance(state_dict, Mapping):
                state_dict = self._without_their_state(optimizer, state_dict)
            return original(optimizer, state_dict, *args, **kwargs)

        return load_state_dict

    def _without_their_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state without what lies at the end of one group beyond what the optimizer holds: the queries' number."""
        saved, own = state_dict.get("param_groups"), optimizer.param_groups
        if not isinstance(saved, list) or len(saved) != len(own):
            return state_dict
        more = [len(old["params"]) - len(new["params"]) for old, new in zip(saved, own, strict=True)]
        longer = [index for index, count in enumerate(more) if count > 0]
        known = {len(kept) for _, kept in self._models}
        if len(longer) != 1 or sum(map(abs, more)) not in known:
            return state_dict
        index = longer[0]
        self._optimizers = [entry for entry in self._optimizers if entry[0]() is not optimizer]
        self._optimizers.append((weakref.ref(optimizer), index, {**state_dict}))
        members = saved[index]["params"]
        beyond = set(members[len(members) - more[index] :])
        groups = [dict(group) for group in saved]
        groups[index]["params"] = members[: len(members) - more[index]]
        if "param_names" in groups[index]:
            groups[index]["param_names"] = groups[index]["param_names"][: len(groups[index]["params"])]
        state = {key: value for key, value in state_dict["state"].items() if key not in beyond}
        return {**state_dict, "param_groups": groups, "state": state}


def _like(state_dict: Mapping[str, Any], items: dict[str, Any]) -> OrderedDict[str, Any]:
    """Some items of a state_dict, with what it says of the modules."""
    part = OrderedDict(items)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        part._metadata = metadata  # type: ignore[attr-defined]
    return part


__all__ = ["Checkpoints"]
