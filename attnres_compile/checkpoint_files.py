"""Checkpoints as people have them - a state_dict, a file, a folder - as tensors by name. Nothing in them is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_compile.errors import CheckpointError
from attnres_compile.parameters import CHILD
from attnres_compile.recorded import RECORD, Record, from_header

# The file that save_queries writes into a folder.
QUERIES_FILE = "attnres.safetensors"
# Under which training scripts keep the state_dict beside the optimizer's.
KEYS = ("model", "state_dict", "model_state_dict", "module")
# What holds weights in a folder; the first that is there counts. Beside them lie optimizers, arguments, random states.
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "model*.pt", "model*.pth", "*.ckpt")

Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Attributes:
        name: what to call it.
        tensors: by their names in it.
        records: what it says of the conversion, by path of the converted module; empty where it says nothing.
    """

    name: str
    tensors: dict[str, Tensor]
    records: dict[str, Record] = field(default_factory=dict)


def is_query_key(name: object) -> bool:
    """Whether a key of a state_dict is one of those that a conversion added."""
    return isinstance(name, str) and CHILD in name.split(".")[:-1]


def everything(name: str) -> bool:
    """Wants every tensor."""
    return True


def read(source: str | Path | Mapping[str, Any], wanted: Wanted = everything) -> Saved:
    """Read a checkpoint.

    Args:
        source: a state_dict, or a dict that holds one under one of :data:`KEYS`; or a file: ``.safetensors``, or what
            ``torch.save`` wrote of such a dict; or a folder of such files, whole or in shards with an index.
        wanted: says for a name whether to read it.

    Raises:
        CheckpointError: it is not there, cannot be read, or holds no tensors.
    """
    if isinstance(source, Mapping):
        return _state_dict(source, "the state_dict", wanted)
    path = Path(source)
    return _folder(path, wanted) if path.is_dir() else read_file(path, wanted)


def read_file(file: Path, wanted: Wanted = everything) -> Saved:
    """Read one file; see :func:`read`."""
    if not file.is_file():
        what = "is a folder: give the file in it" if file.is_dir() else "does not exist"
        raise CheckpointError(f"the checkpoint {file} {what}")
    try:
        if file.suffix == ".safetensors":
            return _safetensors(file, wanted)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {file} cannot be read: {_why(error)}",
            remedy="Give a .safetensors file, or one that torch.save(model.state_dict(), file) wrote",
        ) from error
    return _state_dict(loaded, f"the checkpoint {file}", wanted)


def _why(error: Exception) -> str:
    # torch's own words advise to switch the safety off.
    if isinstance(error, pickle.UnpicklingError):
        return "it is no file of torch.save, or holds objects beside tensors, which could run code when they are loaded"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _safetensors(file: Path, wanted: Wanted) -> Saved:
    from safetensors import safe_open  # takes a moment to load

    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118 - no dict
        return Saved(f"the checkpoint {file}", tensors, from_header(opened.metadata()))


def _state_dict(loaded: Any, name: str, wanted: Wanted) -> Saved:
    """The state_dict in what a file held."""
    held = [loaded.get(key) for key in KEYS] if isinstance(loaded, Mapping) else []
    for candidate in (*held, loaded):
        if isinstance(candidate, Mapping):
            tensors = {str(key): value for key, value in candidate.items() if isinstance(value, Tensor)}
            if tensors:
                kept = {key: value for key, value in tensors.items() if wanted(key)}
                return Saved(name, kept, _records(candidate))
    inside = some(list(map(str, loaded))) if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise CheckpointError(
        f"{name} holds no state_dict: it has {inside}",
        remedy=f"It may be the whole file, or stand under one of {', '.join(KEYS)}",
    )


def _records(state_dict: Mapping[str, Any]) -> dict[str, Record]:
    metadata = getattr(state_dict, "_metadata", None) or {}
    return {
        path.removesuffix(CHILD).removesuffix("."): Record.from_dict(entry[RECORD])
        for path, entry in metadata.items()
        if isinstance(entry, Mapping) and RECORD in entry
    }


# ------------------------------------------------------------------ folders


def _folder(folder: Path, wanted: Wanted) -> Saved:
    whole = _weights(folder, wanted)
    if not (folder / QUERIES_FILE).is_file():
        if whole is None:
            raise CheckpointError(
                f"the folder {folder} holds no weights: no safetensors file, and none of torch.save under a usual name",
                remedy="Give the file",
            )
        return whole
    own = read_file(folder / QUERIES_FILE, wanted)
    if whole is None:
        return own
    both = [key for key in own.tensors if key in whole.tensors]
    if any(not torch.equal(own.tensors[key], whole.tensors[key].to(own.tensors[key].dtype)) for key in both):
        raise CheckpointError(
            f"{folder} holds pseudo-queries twice, in {QUERIES_FILE} and among the weights, and they differ",
            remedy=f"One of them is from another save: delete it, or give the file that is meant ({QUERIES_FILE} is "
            "written by attnres_compile.save_queries)",
        )
    others = {key: value for key, value in whole.tensors.items() if not is_query_key(key)}
    return Saved(f"the checkpoint {folder}", {**others, **own.tensors}, own.records)


def _weights(folder: Path, wanted: Wanted) -> Saved | None:
    """The weights in a folder, from an index of shards or from files of usual names; ``None`` if there are none."""
    for pattern in _INDEXES:
        indexes = sorted(folder.glob(pattern))
        if indexes:
            return _joined(folder, _shards(indexes[0], wanted), wanted)
    for pattern in _FILES:
        files = [file for file in sorted(folder.glob(pattern)) if file.name != QUERIES_FILE]
        if files:
            return _joined(folder, files, wanted)
    return None


def _shards(index: Path, wanted: Wanted) -> list[Path]:
    """The files of an index in which something wanted lies."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(file) for key, file in places.items() if wanted(str(key))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the index {index} cannot be read: {_why(error)}") from error
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:
        raise CheckpointError(f"the index {index} names files outside of its folder: {some(outside)}")
    return [index.parent / name for name in sorted(names)]


def _joined(folder: Path, files: Sequence[Path], wanted: Wanted) -> Saved:
    tensors: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    for file in files:
        part = read_file(file, wanted)
        tensors.update(part.tensors)
        records.update(part.records)
    return Saved(f"the checkpoint {folder}", tensors, records)


def some(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"


__all__ = ["KEYS", "QUERIES_FILE", "Saved", "everything", "is_query_key", "read", "read_file", "some"]
