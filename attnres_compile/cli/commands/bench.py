"""``attnres bench``: what the conversion costs on this machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from attnres_compile.cli.options import InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig
from attnres_compile.measuring import compare
from attnres_compile.views import measuring


@takes_output
@takes_config
def bench(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    input: InputTexts = None,
    set_: SettingTexts = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Most pairs of timed turns.")] = 30,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.001, metavar="S", help="No further pair after this time, per quantity."),
    ] = 60.0,
    training: Annotated[
        bool, typer.Option("--training/--no-training", help="Measure a training step too, or inference alone.")
    ] = True,
    eager: Annotated[bool, typer.Option("--eager", help="Compile neither model, which starts at once.")] = False,
) -> None:
    """Measure original and converted model side by side: latency, training step, peak memory.

    Both are compiled by Inductor and take turns; the figures are medians, and the ratio is that of neighbouring
    turns, with its quartiles. Compiling takes most of the time. Needs no --lowering: --eager is its place here.

    Example: attnres bench attnres_compile.demo --eager --rounds 10
    """
    config = dataclasses.replace(config, lowering="eager" if eager else "inductor")
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or ())
        says("converting a copy")
        with showing_passes(out):
            converted = loaded.converted(config)
            with blame(loaded):
                found = compare(
                    loaded.model,
                    converted,
                    loaded.inputs,
                    rounds=rounds,
                    seconds=seconds,
                    train=training,
                    compiled=not eager,
                    progress=says,
                )
    out.result(found.to_dict(), measuring.table(found, loaded.name), measuring.verdict(found, loaded.name))
