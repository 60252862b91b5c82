"""Files of a conversion in one folder: written beside their places and moved there when all of them are complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnres_compile.errors import AttnResError, MissingDependencyError
from attnres_compile.parameters import converted
from attnres_compile.recorded import to_header


@dataclass(frozen=True)
class Written:
    """One file that was written.

    Attributes:
        name: of the file in its folder.
        bytes: its size.
    """

    name: str
    bytes: int


@dataclass
class Staging:
    """Where files are written before they are moved to their folder.

    Attributes:
        folder: of what is being written.
        written: the files that were moved to their places; empty until that is done.
    """

    folder: Path
    written: list[Written] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """Where to write the file that will be called ``name``."""
        return self.folder / name

    def text(self, name: str, text: str) -> None:
        """Write text as UTF-8."""
        self.path(name).write_text(text, encoding="utf-8")

    def json(self, name: str, value: dict[str, Any]) -> None:
        """Write one JSON document."""
        self.text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def staged(folder: Path, names: Sequence[str], force: bool = False) -> Iterator[Staging]:
    """Write files into ``folder``: all of them appear when the context closes, and none if it raises.

    The folder and the right to write there are checked before anything is yielded, so that no long work is for
    nothing. What was made on the way is taken away again where the work fails.

    Args:
        folder: made if it does not exist, with its parents.
        names: of all files that will be written.
        force: replace files of these names.

    Raises:
        AttnResError: files of these names exist, or the folder cannot be made or written.
    """
    _refuse_present(folder, names, force)
    with _made(folder):
        with _explained(folder):
            place = Path(tempfile.mkdtemp(prefix=".attnres-", dir=folder))
            probe = place / "probe"
            probe.touch()
            mode = probe.stat().st_mode
            probe.unlink()
        try:
            staging = Staging(place)
            with _explained(folder, place):
                yield staging
            with _explained(folder):
                # Somebody else may have been faster.
                _refuse_present(folder, names, force)
                for entry in sorted(place.iterdir()):
                    # Some writers keep what they write to its owner.
                    entry.chmod(mode)
                    size = entry.stat().st_size
                    os.replace(entry, folder / entry.name)
                    staging.written.append(Written(entry.name, size))
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _refuse_present(folder: Path, names: Sequence[str], force: bool) -> None:
    with _explained(folder):
        if folder.exists() and not folder.is_dir():
            raise AttnResError(f"{folder} is a file, not a folder", remedy="Choose another folder")
        folders = [name for name in names if (folder / name).is_dir()]
        present = [name for name in names if os.path.lexists(folder / name)]
    if folders:
        raise AttnResError(f"{folder / folders[0]} is a folder", remedy="Choose another folder")
    if present and not force:
        raise AttnResError(
            f"{folder} holds {', '.join(present)} already", remedy="Choose another folder, or replace them with --force"
        )


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder exists inside; what had to be made for it goes again if the work fails and left nothing there."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise


@contextlib.contextmanager
def _explained(folder: Path, inside: Path | None = None) -> Iterator[None]:
    """Errors of the disk as errors of ours; with ``inside`` only of files there, and of a disk that is full."""
    try:
        yield
    except OSError as error:
        own = inside is None or str(error.filename or "").startswith(str(inside))
        if not own and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = error.strerror or str(error)
        raise AttnResError(f"{folder} cannot be written: {what}", remedy="Choose another folder") from error


# ------------------------------------------------------------------ weights and programs


def save_weights(model: nn.Module, path: Path) -> None:
    """The whole state_dict of ``model`` as safetensors; weights that are tied are stored once.

    ``safetensors.torch.load_model`` loads the file into a model transformed in the same way. How it was transformed is
    in the file's header, for :func:`attnres_compile.load_queries` and :func:`attnres_compile.saved_config`.

    Raises:
        AttnResError: the model is on the meta device, or its tensors overlap in a way that the format cannot keep.
        MissingDependencyError: safetensors is not installed.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)):
        raise AttnResError("a model on the meta device has no weights to write", remedy="Build it on the CPU")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_model
    except ImportError as error:
        raise MissingDependencyError(
            "weights are written as safetensors, which is not installed", remedy="pip install safetensors"
        ) from error
    try:
        records = {at: queries.record for at, _, queries in converted(model)}
        save_model(model, str(path), metadata={"format": "pt", **(to_header(records) if records else {})})
    except (RuntimeError, SafetensorError) as error:
        raise AttnResError(f"the weights cannot be written as safetensors: {error}") from error


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """The program in a file that ``torch.export.load`` reads, with or without this package.

    It is read back once: what torch writes it cannot always read.

    Raises:
        AttnResError: torch cannot write the program, or not read it.
    """
    doing = "write"
    try:
        torch.export.save(program, path)
        doing = "read back"
        torch.export.load(path)
    except OSError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise AttnResError(
            f"torch cannot {doing} the exported program: {type(error).__name__}: {first}",
            remedy="Export with fixed sizes, or do without the program",
        ) from error


__all__ = ["Staging", "Written", "save_program", "save_weights", "staged"]
