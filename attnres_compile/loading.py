"""The pseudo-queries of a checkpoint and those of a model: saved by themselves, found by their prefix, put back.

Libraries that make a model before they load its weights (``from_pretrained``) know nothing of queries and drop them.
So a model is made from its checkpoint, transformed as it was before, and then given the checkpoint's queries::

    model = AutoModelForCausalLM.from_pretrained(folder)
    ac.transform(model, inputs, ac.saved_config(folder))
    ac.load_queries(model, folder)
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.accepting import refuse_strangers
from attnres_compile.api import pseudo_queries
from attnres_compile.checkpoint_files import QUERIES_FILE, Saved, is_query_key, read, some
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import CheckpointError, NotTransformedError
from attnres_compile.parameters import CHILD, DepthQueries, converted
from attnres_compile.recorded import Record, to_header
from attnres_compile.reporting import join
from attnres_compile.writing import staged

# What torch.compile, FSDP and activation checkpointing put into the names of the modules that they wrap.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def save_queries(model: nn.Module, path: str | Path) -> Path:
    """Write the pseudo-queries of a transformed model, and how it was transformed, into one safetensors file.

    Args:
        model: the model, or what wraps it.
        path: a ``.safetensors`` file, or a folder, which gets ``attnres.safetensors``: beside what ``save_pretrained``
            wrote, say. A file that is there is replaced.

    Returns:
        The file.

    Raises:
        NotTransformedError: the model holds no pseudo-queries.
        CheckpointError: they are on the meta device.
        AttnResError: the file cannot be written.
    """
    from safetensors.torch import save_file  # takes a moment to load

    _require(model)
    file = Path(path)
    if file.suffix != ".safetensors":
        file /= QUERIES_FILE
    own = _parameters(model)
    if any(value.is_meta for value in own.values()):
        raise CheckpointError("a model on the meta device has no pseudo-queries to write", remedy="Load weights first")
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in own.items()}
    header = {"format": "pt", **to_header({at: queries.record for at, _, queries in converted(model)})}
    with staged(file.absolute().parent, [file.name], force=True) as staging:
        save_file(tensors, staging.path(file.name), metadata=header)
    return file


def load_queries(model: nn.Module, checkpoint: str | Path | Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Give a transformed model the pseudo-queries of a checkpoint; everything else in it is left alone.

    Args:
        model: transformed as the model of the checkpoint was. It is not changed where this raises.
        checkpoint: a file or folder of :func:`save_queries`; a folder of ``save_pretrained`` or of a trainer, in shards
            or not; a ``.safetensors`` file or one of ``torch.save`` (read with ``weights_only``); or a state_dict. The
            names may begin with what wrappers put in front of them.

    Returns:
        The model's pseudo-queries by site name, each ``[d]``, with their new values.

    Raises:
        NotTransformedError: the model holds no pseudo-queries.
        CheckpointError: the checkpoint cannot be read or holds none; or its queries are those of another conversion:
            there are more or fewer, of other sizes, or it says that blocks, gain or another option were different.

    Warns:
        UserWarning: the checkpoint does not say how its model was transformed, as those of ``save_pretrained`` and
            ``safetensors.torch`` do not. Names and sizes fit, but the blocks may have been others.
    """
    _require(model)
    saved = read(checkpoint, is_query_key)
    if not any(map(is_query_key, saved.tensors)):
        raise CheckpointError(
            f"{saved.name} holds no pseudo-queries",
            remedy="It is from before the conversion, or saves some of the parameters only (adapters): "
            "attnres_compile.save_queries(model, folder) writes them",
        )
    found = fit_queries(saved, model)
    own = _parameters(model)
    meta = [name for name, value in own.items() if value.is_meta]
    if meta:
        raise CheckpointError("the model is on the meta device", remedy="Give its parameters memory first (to_empty)")
    refuse_queries(found, model)
    if not found.records:
        warnings.warn(
            f"{saved.name} does not say how its model was transformed: its pseudo-queries are taken to be those of the "
            "blocks, gain and options that this model has. attnres_compile.save_queries writes a file that says it",
            stacklevel=2,
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found.tensors[name])
    return pseudo_queries(model)


def saved_config(checkpoint: str | Path | Mapping[str, Any]) -> AttnResConfig:
    """The configuration that the model of a checkpoint was transformed with, for :func:`attnres_compile.transform`.

    Choices about running (``lowering``, ``two_phase``, ``fuse``) are at their defaults.

    Args:
        checkpoint: as for :func:`load_queries`.

    Raises:
        CheckpointError: it cannot be read, or does not say.
    """
    saved = read(checkpoint, is_query_key)
    configs = list(dict.fromkeys(record.config for record in saved.records.values()))
    if len(configs) != 1:
        what = (
            "does not say how its model was transformed" if not configs else "is of a model in several configurations"
        )
        raise CheckpointError(
            f"{saved.name} {what}", remedy="attnres_compile.save_queries(model, folder) writes a file that says it"
        )
    return configs[0]


# ------------------------------------------------------------------ whose is what


def query_names(model: nn.Module) -> set[str]:
    """The keys of the state_dict that conversion added."""
    return set(_parameters(model))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        join(join(path, CHILD), name): parameter
        for path, _, queries in converted(model)
        for name, parameter in queries.named_parameters()
    }


def fit_queries(saved: Saved, model: nn.Module) -> Saved:
    """The checkpoint's queries and records under the model's names.

    What wrappers put into names is left out of both, and what all of the names of one side begin with and those of
    the other do not is taken away or added (``module.``, ``base_model.model.``).
    """
    theirs = {_holder(key) for key in saved.tensors if is_query_key(key)}
    ours = {_plain(path): path for path, _, _ in converted(model)}
    change = _change(theirs, set(ours))

    def renamed(path: str) -> str:
        path = change(_plain(path))
        return ours.get(path, path)

    tensors = {
        join(join(renamed(_holder(key)), CHILD), key.rpartition(f"{CHILD}.")[2]): value
        for key, value in saved.tensors.items()
        if is_query_key(key)
    }
    return Saved(saved.name, tensors, {renamed(path): record for path, record in saved.records.items()})


def _holder(key: str) -> str:
    """Path of the converted module in the name of one of its queries, without wrappers."""
    return _plain(key.rpartition(f"{CHILD}.")[0].removesuffix("."))


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


def _change(theirs: set[str], ours: set[str]) -> Callable[[str], str]:
    """What makes the paths ``theirs`` those of ``ours``, if one beginning more or less does; else nothing."""
    if theirs != ours:
        for head in _heads(theirs):
            if {_without(path, head) for path in theirs} == ours:
                return lambda path: _without(path, head)
        for head in _heads(ours):
            if {_under(head, path) for path in theirs} == ours:
                return lambda path: _under(head, path)
    return lambda path: path


def _heads(paths: Iterable[str]) -> list[str]:
    """What all the paths begin with, the shortest first."""
    levels = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(path.split(".") for path in paths), strict=False)
    )
    return list(itertools.accumulate((parts[0] for parts in levels), join))


def _under(head: str, path: str) -> str:
    return f"{head}.{path}" if path else head


def _without(path: str, head: str) -> str:
    return path.removeprefix(head).removeprefix(".")


def refuse_queries(found: Saved, model: nn.Module) -> None:
    """Raise where the queries of a checkpoint, under the model's names, are not those of the model.

    Raises:
        CheckpointError: some are missing, strange, or of another size, or were trained in another conversion.
    """
    own = _parameters(model)
    missing = sorted(own.keys() - found.tensors.keys())
    strange = sorted(found.tensors.keys() - own.keys())
    if missing or strange:
        parts = [f"lacks {some(missing)}"] if missing else []
        parts += [f"holds {some(strange)}"] if strange else []
        raise CheckpointError(
            f"the pseudo-queries in {found.name} are those of another conversion: it {' and '.join(parts)}",
            remedy="Transform the model with the configuration that they were trained with",
        )
    wrong = [name for name in own if own[name].shape != found.tensors[name].shape]
    if wrong:
        theirs, ours = list(found.tensors[wrong[0]].shape), list(own[wrong[0]].shape)
        raise CheckpointError(
            f"{len(wrong)} pseudo-queries in {found.name} have other sizes than the model's: {wrong[0]} is {theirs}, "
            f"not {ours}",
            remedy="Build the model with the sizes that it was trained with",
        )
    records: dict[str, Record] = found.records
    for path, _, queries in converted(model):
        if path in records:
            queries.record.refuse(records[path], found.name, path)


def _require(model: nn.Module) -> None:
    refuse_strangers(model)
    if not any(isinstance(module, DepthQueries) for module in model.modules()):
        raise NotTransformedError(
            f"{type(model).__name__} holds no pseudo-queries",
            remedy="Call attnres_compile.transform(model, example_inputs) first, as for the model that was saved",
        )


__all__ = ["fit_queries", "load_queries", "query_names", "refuse_queries", "save_queries", "saved_config"]
