"""A file of weights -> a converted model, and what of either had no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from attnres_compile.checkpoint_files import Saved, is_query_key, read_file, some
from attnres_compile.errors import CheckpointError
from attnres_compile.loading import WRAPPERS, fit_queries, query_names, refuse_queries


def load_checkpoint(model: nn.Module, file: Path) -> list[str]:
    """Load what ``file`` holds into a converted model.

    Args:
        model: with its pseudo-queries. It is not changed where this raises.
        file: ``.safetensors``, or what ``torch.save`` wrote: a state_dict, or a dict that holds one under one of
            :data:`attnres_compile.checkpoint_files.KEYS`. Nothing in it is run: tensors and plain containers alone
            are read.

    Returns:
        Notes on what did not match, for people.

    Raises:
        CheckpointError: the file cannot be read, holds no tensors, belongs to another model, or lacks some of the
            queries (a model from before the conversion lacks all, which is a note).
    """
    saved = read_file(file)
    queries = fit_queries(saved, model)
    others = {name: value for name, value in saved.tensors.items() if not is_query_key(name)}
    found = {**_fitting(others, model), **queries.tensors}
    own = model.state_dict()
    if not found.keys() & own.keys():
        raise CheckpointError(
            f"{file} holds none of the {len(own)} tensors of the model: it has {some(list(found))}, and the model "
            f"{some(list(own))}",
            remedy="Give the checkpoint of this model",
        )
    wrong = [name for name in found if name in own and found[name].shape != own[name].shape]
    if wrong:
        theirs, ours = (list(values[wrong[0]].shape) for values in (found, own))
        raise CheckpointError(
            f"{len(wrong)} tensors in {file} have other shapes than the model's: {wrong[0]} is {theirs}, not {ours}",
            remedy="Build the model with the sizes that it was trained with",
        )
    notes = _about_queries(model, queries, file)
    shared = {value.data_ptr() for name, value in own.items() if name in found}
    # A tied weight is in the file once.
    missing = [name for name in own if name not in found and own[name].data_ptr() not in shared]
    missing = [name for name in missing if name not in query_names(model)]
    unknown = [name for name in found if name not in own]
    if missing:
        notes.append(f"{file} lacks {len(missing)} tensors, which stay as the model was built: {some(missing)}")
    if unknown:
        notes.append(f"{file} holds {len(unknown)} tensors that the model does not have: {some(unknown)}")
    model.load_state_dict({name: value for name, value in found.items() if name in own}, strict=False)
    return notes


def _fitting(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors by the model's names: without what wrappers put in front of them."""
    named = {_plain(name): value for name, value in found.items()}
    own = {_plain(name): name for name in model.state_dict()}
    heads = {name.partition(".")[0] for name in named}
    if not named.keys() & own.keys() and len(heads) == 1:
        named = {name.partition(".")[2]: value for name, value in named.items()}
    return {own.get(name, name): value for name, value in named.items()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _about_queries(model: nn.Module, queries: Saved, file: Path) -> list[str]:
    """Notes on the queries.

    Raises:
        CheckpointError: the file holds some of the model's, or others: those of another conversion.
    """
    if not queries.tensors:
        return [f"{file} holds no pseudo-queries: it is from before the conversion"]
    try:
        refuse_queries(queries, model)
    except CheckpointError as error:
        raise CheckpointError(
            error.what,
            module=error.module,
            remedy="Give the options that the model was converted with (--num-blocks, --block-size, --full, --queries, "
            "--key-norm-weight, --gain)",
        ) from error
    return []
