"""What every kind of target becomes: a model, a call of it, and how to explain and to convert it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from attnres_compile import api
from attnres_compile.cli.targets.blame import blame
from attnres_compile.cli.targets.user_code import own_words
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.inputs import Inputs
from attnres_compile.report import TransformReport


@dataclass(frozen=True)
class Target:
    """A model and a call of it.

    Attributes:
        name: what was asked for and where the model was found, as ``script.py:model`` or ``hf:llama``.
        model: the model itself, not a copy.
        inputs: what to call it with, on the device of the model where nobody placed them on purpose.
        inputs_from: where the inputs came from, for messages.
    """

    name: str
    model: nn.Module
    inputs: Inputs
    inputs_from: str

    def explain(self, config: AttnResConfig) -> TransformReport:
        """What would be converted, see :func:`attnres_compile.explain`.

        Raises:
            TargetError: the model's own code fails on the inputs.
        """
        with blame(self):
            return api.explain(self.model, self.inputs, config)

    def converted(self, config: AttnResConfig) -> nn.Module:
        """A converted copy of the model, its queries at zero; the model itself is not changed.

        Memory: the model's parameters and buffers once more.

        Raises:
            AttnResError: the model cannot be copied, or one of the errors of :func:`attnres_compile.transform`.
            TargetError: the model's own code fails on the inputs.
        """
        twin = self._copy()
        with blame(self):
            return api.transform(twin, self.inputs, config)

    def _copy(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise AttnResError(
                f"{self.name} cannot be copied: {own_words(error)}",
                remedy="A copy is converted so that the model itself stays as it is; name a function that builds it",
            ) from error
