"""A file of weights -> a converted model, and what of either had no counterpart."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.errors import AttnResError
from attnres_compile.parameters import CHILD, DepthQueries
from attnres_compile.reporting import join

# Under which training scripts keep the state_dict beside the optimizer's.
KEYS = ("model", "state_dict", "model_state_dict", "module")
# What torch.compile puts into the names of the modules that it wraps.
_WRAPPED = "_orig_mod."


def load_checkpoint(model: nn.Module, file: Path) -> list[str]:
    """Load what ``file`` holds into a converted model.

    Args:
        model: with its pseudo-queries. It is not changed where this raises.
        file: ``.safetensors``, or what ``torch.save`` wrote: a state_dict, or a dict that holds one under one of
            :data:`KEYS`. Nothing in it is run: tensors and plain containers alone are read.

    Returns:
        Notes on what did not match, for people.

    Raises:
        AttnResError: the file cannot be read, holds no tensors, belongs to another model, or lacks some of the
            queries (a model from before the conversion lacks all, which is a note).
    """
    found = _fitting(_tensors(file), model)
    own = model.state_dict()
    if not found.keys() & own.keys():
        raise AttnResError(
            f"{file} holds none of the {len(own)} tensors of the model: it has {_some(list(found))}, and the model "
            f"{_some(list(own))}",
            remedy="Give the checkpoint of this model",
        )
    wrong = [name for name in found if name in own and found[name].shape != own[name].shape]
    if wrong:
        theirs, ours = (list(values[wrong[0]].shape) for values in (found, own))
        raise AttnResError(
            f"{len(wrong)} tensors in {file} have other shapes than the model's: {wrong[0]} is {theirs}, not {ours}",
            remedy="Build the model with the sizes that it was trained with",
        )
    notes = _about_queries(model, found, file)
    shared = {value.data_ptr() for name, value in own.items() if name in found}
    # A tied weight is in the file once.
    missing = [name for name in own if name not in found and own[name].data_ptr() not in shared]
    missing = [name for name in missing if name not in _query_names(model)]
    unknown = [name for name in found if name not in own]
    if missing:
        notes.append(f"{file} lacks {len(missing)} tensors, which stay as the model was built: {_some(missing)}")
    if unknown:
        notes.append(f"{file} holds {len(unknown)} tensors that the model does not have: {_some(unknown)}")
    model.load_state_dict({name: value for name, value in found.items() if name in own}, strict=False)
    return notes


def _tensors(file: Path) -> dict[str, Tensor]:
    """The state_dict in ``file``."""
    if not file.is_file():
        what = "is a folder: give the file in it" if file.is_dir() else "does not exist"
        raise AttnResError(f"the checkpoint {file} {what}")
    try:
        loaded = _read(file)
    except Exception as error:
        raise AttnResError(
            f"the checkpoint {file} cannot be read: {_why(error)}",
            remedy="Give a .safetensors file, or one that torch.save(model.state_dict(), file) wrote",
        ) from error
    held = [loaded.get(key) for key in KEYS] if isinstance(loaded, Mapping) else []
    for candidate in (*held, loaded):
        if isinstance(candidate, Mapping):
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    inside = _some(list(map(str, loaded))) if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise AttnResError(
        f"the checkpoint {file} holds no state_dict: it has {inside}",
        remedy=f"It may be the whole file, or stand under one of {', '.join(KEYS)}",
    )


def _why(error: Exception) -> str:
    # torch's own words advise to switch the safety off.
    if isinstance(error, pickle.UnpicklingError):
        return "it is no file of torch.save, or holds objects beside tensors, which could run code when they are loaded"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def _fitting(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors by the model's names: without what wrappers put in front of them."""
    named = {name.replace(_WRAPPED, ""): value for name, value in found.items()}
    own = {name.replace(_WRAPPED, ""): name for name in model.state_dict()}
    heads = {name.partition(".")[0] for name in named}
    if not named.keys() & own.keys() and len(heads) == 1:
        named = {name.partition(".")[2]: value for name, value in named.items()}
    return {own.get(name, name): value for name, value in named.items()}


def _query_names(model: nn.Module) -> set[str]:
    return {
        join(path, name)
        for path, module in model.named_modules()
        if isinstance(module, DepthQueries)
        for name, _ in module.named_parameters()
    }


def _about_queries(model: nn.Module, found: Mapping[str, Tensor], file: Path) -> list[str]:
    """Notes on the queries.

    Raises:
        AttnResError: the file holds some of the model's, or others: those of another conversion.
    """
    wanted = _query_names(model)
    missing = sorted(wanted - found.keys())
    strange = [name for name in found if name not in wanted and CHILD in name.split(".")[:-1]]
    if len(missing) == len(wanted) and not strange:
        return [f"{file} holds no pseudo-queries: it is from before the conversion"]
    if missing or strange:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"holds {_some(strange)}"] if strange else []
        raise AttnResError(
            f"the pseudo-queries in {file} are those of another conversion: it {' and '.join(parts)}",
            remedy="Give the options that the model was converted with (--num-blocks, --block-size, --full, --queries, "
            "--key-norm-weight)",
        )
    return []


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"
