"""``hf:model_type`` or ``hf:folder``: a model of the transformers library, from its configuration alone.

Nothing is downloaded, and no code that lies in a folder is run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from attnres_compile.cli.targets.hf_config import configuration
from attnres_compile.cli.targets.hf_inputs import inputs_of
from attnres_compile.cli.targets.hf_model import HfModel
from attnres_compile.cli.targets.inputs import beside
from attnres_compile.cli.targets.target import Target
from attnres_compile.cli.targets.user_code import own_words
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import CaptureError, TargetError
from attnres_compile.inputs import Inputs
from attnres_compile.report import TransformReport

PREFIX = "hf:"

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class MetaTarget(Target):
    """A target on the meta device. Where the model's code cannot be traced there, it is built in other ways.

    Attributes:
        pretended: makes the same target of tensors that say they are on the CPU, and hold nothing.
        real: makes it with weights on the CPU.
    """

    pretended: Callable[[], Target]
    real: Callable[[], Target]

    def explain(self, config: AttnResConfig) -> TransformReport:
        """As :meth:`Target.explain`."""
        return self._first(super().explain, lambda other: other.explain(config), config)

    def converted(self, config: AttnResConfig) -> nn.Module:
        """As :meth:`Target.converted`; the copy is on the meta device, too, if the model can be traced there."""
        return self._first(super().converted, lambda other: other.converted(config), config)

    def _first(
        self, here: Callable[[AttnResConfig], _Answer], there: Callable[[Target], _Answer], config: AttnResConfig
    ) -> _Answer:
        try:
            return here(config)
        except (TargetError, CaptureError) as error:
            # Inputs that do not fit fail everywhere; that is no reason to fill the memory with weights.
            if isinstance(error, TargetError) and "meta" not in str(error.__cause__):
                raise
            with contextlib.suppress(Exception):
                return there(self.pretended())
            if isinstance(error, CaptureError):
                raise
        return there(self.real())


def hf_model_types() -> list[str]:
    """Every model type that ``hf:`` takes, sorted; empty where transformers is not installed."""
    _stay_offline()
    try:
        from transformers.models.auto import configuration_auto as auto
    except ImportError:
        return []
    return sorted(vars(auto)["CONFIG_MAPPING_NAMES"])


def load_hf(place: str, given: Inputs | None, settings: Sequence[str], weights: bool) -> Target:
    """A model of transformers in evaluation mode, without a key-value cache, and inputs that it takes.

    Args:
        place: a model type (``llama``: its configuration class with its defaults) or a folder with ``config.json``.
        given: what ``--input`` describes, or ``None``.
        settings: fields of the configuration as ``NAME=VALUE``.
        weights: whether numbers are needed: the folder's, or random ones (always the same) where it has none.
            Without, the model lies on the meta device, and so do the inputs.

    Raises:
        TargetError: transformers is missing or refuses; there is no such type or folder; a setting is wrong; the
            weights do not fit into memory; or nobody says what the model is called with.
    """
    _stay_offline()
    try:
        import transformers  # noqa: F401  (a second or two that only these targets cost)
    except ImportError as error:
        raise TargetError(
            f"{PREFIX}{place} needs the transformers library: {own_words(error)}",
            remedy="pip install 'transformers>=5.0'",
        ) from error
    name = PREFIX + place
    with _alone():
        config, folder = configuration(place, settings)
        origin = HfModel(name, config, folder)
        model = None if weights else origin.on_meta()
        if model is None:
            return _target(name, origin.with_numbers(), config, given)
        found = _target(name, model, config, given)

    def pretended() -> Target:
        with _alone():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                other = origin.random()
            made = _target(name, other, config, given)
            args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (made.inputs.args, made.inputs.kwargs))
            return Target(name, made.model, Inputs(args, kwargs), made.inputs_from)

    def real() -> Target:
        with _alone():
            return _target(name, origin.with_numbers(), config, given)

    return MetaTarget(found.name, found.model, found.inputs, found.inputs_from, pretended, real)


def _target(name: str, model: nn.Module, config: Any, given: Inputs | None) -> Target:
    model.eval()
    if given is not None:
        return Target(name, model, beside(given, model), "--input")
    return Target(name, model, beside(inputs_of(model, config), model), f"the configuration of {name}")


def _stay_offline() -> None:
    """Both libraries read these when they are imported, and again when they load."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """The same random numbers each time, and without transformers' advice, bars and logs: what is wrong is raised."""
    from transformers.utils import logging as library_logging

    its_logging: Any = library_logging
    level, bars = its_logging.get_verbosity(), its_logging.is_progress_bar_enabled()
    its_logging.set_verbosity(logging.CRITICAL)
    its_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        its_logging.set_verbosity(level)
        if bars:
            its_logging.enable_progress_bar()
