"""``attnres verify``: is the conversion right? A table of numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from attnres_compile.cli.options import FAILED, InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig, Lowering
from attnres_compile.verification import check
from attnres_compile.views import verification


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
    seed: Annotated[int, typer.Option(help="Of random weights and queries, of dropout and of the loss.")] = 0,
    inductor: Annotated[
        bool,
        typer.Option(
            "--inductor/--no-inductor", help="Compile as well, which takes most of the time; or leave that out."
        ),
    ] = True,
) -> None:
    """Compare a converted copy with the original and with itself, outputs and gradients, in numbers.

    Exactness: with all queries at zero it must give what the original gives, in float64 and in float32. Agreement:
    with random queries, eager, compiled, one-phase and two-phase must give the same. --lowering, --two-phase and
    --fuse are for exactness alone. Exit code 1 when something differs by more than rounding.

    Example: attnres verify attnres_compile.demo --num-blocks 4 --no-inductor
    """
    lowerings: tuple[Lowering, ...] = ("eager", "inductor") if inductor else ("eager",)
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or ())
        with showing_passes(out), blame(loaded):
            found = check(
                loaded.model,
                loaded.inputs,
                config,
                keep_weights=keep_weights,
                train=train,
                seed=seed,
                lowerings=lowerings,
                progress=says,
            )
    shown = verification.table(found, loaded.name)
    out.result(found.to_dict(), shown, verification.verdict(found, loaded.name))
    raise typer.Exit(0 if found.holds else FAILED)
