"""``attnres verify``: does the converted model compute what the original computes?"""

from __future__ import annotations

from typing import Annotated

import typer

from attnres_compile.cli.options import FAILED, InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import verify as compare
from attnres_compile.views import terminal


@takes_output
@takes_config
def verify(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    input: InputTexts = None,
    set_: SettingTexts = None,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="Use the model's own weights; the default randomises a copy's."),
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="Compare in training mode, with equal seeds.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random weights, of dropout and of the loss.")] = 0,
) -> None:
    """Convert a copy and compare it, queries at zero, with the original: outputs and gradients, in numbers.

    Exit code 1 when they differ by more than rounding.
    """
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or ())
        says("comparing with the original")
        with showing_passes(out), blame(loaded):
            found = compare(loaded.model, loaded.inputs, config, keep_weights=keep_weights, train=train, seed=seed)
    shown = terminal.exactness(found, loaded.name)
    out.result(found.to_dict(), shown, terminal.verdict(found.holds, loaded.name))
    raise typer.Exit(0 if found.holds else FAILED)
