"""Which kind of target a text names."""

from __future__ import annotations

from collections.abc import Sequence

from attnres_compile.cli.targets import exported, hf, script
from attnres_compile.cli.targets.target import Target
from attnres_compile.errors import TargetError
from attnres_compile.inputs import make_inputs


def load_target(text: str, specs: Sequence[str] = (), settings: Sequence[str] = (), weights: bool = True) -> Target:
    """The model that ``text`` names, and what to call it with.

    Args:
        text: a script or module (:func:`.script.load_script`; its code runs), ``hf:`` and a model type or a
            folder (:func:`.hf.load_hf`), or a program saved by ``torch.export.save`` as ``name.pt2``
            (:func:`.exported.load_exported`).
        specs: input descriptions (:func:`attnres_compile.inputs.parse_spec`). Without any, ``example_inputs``
            beside the model is taken (a value, or a function of nothing or of the model), then the
            model's own ``dummy_inputs``; a program brings its own, and an ``hf:`` configuration says what they are.
        settings: fields of an ``hf:`` configuration as ``NAME=VALUE``, for other targets none.
        weights: whether numbers are needed. Without, an ``hf:`` model lies on the meta device, where it takes
            no memory.

    Raises:
        TargetError: the text names nothing usable, its code failed, or a description or setting is wrong.
        InputsError: ``example_inputs`` is nothing that a model can be called with.
    """
    made = make_inputs(specs)  # first: a typing mistake should not cost the building of a model
    given = made if specs else None
    if text.startswith(hf.PREFIX):
        return hf.load_hf(text.removeprefix(hf.PREFIX), given, settings, weights)
    if settings:
        raise TargetError(
            f"--set {settings[0]} is for {hf.PREFIX} targets: {text} has no configuration to set",
            remedy="Set it in the script, or name another target",
        )
    if text.endswith(exported.SUFFIX):
        return exported.load_exported(text, given)
    return script.load_script(text, given)
