"""Whose error it is: a model that fails without us too has rejected its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from attnres_compile.cli.targets.inputs import arguments_of
from attnres_compile.cli.targets.user_code import user_code
from attnres_compile.errors import AttnResError, CaptureError

if TYPE_CHECKING:
    from attnres_compile.cli.targets.target import Target


@contextlib.contextmanager
def blame(loaded: Target) -> Iterator[None]:
    """Finds out whose error it is: a model that fails without us too has rejected its inputs.

    Raises:
        TargetError: the model's own code fails on the target's inputs.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AttnResError) and not isinstance(error, CaptureError):
            raise
        remedy = f"The inputs came from {loaded.inputs_from}; forward takes {arguments_of(loaded.model)}"
        with user_code(f"{loaded.name} called with its inputs", remedy), torch.no_grad():
            loaded.model(*loaded.inputs.args, **loaded.inputs.kwargs)
        raise
