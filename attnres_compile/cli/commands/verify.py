"""``attnres verify``: is the conversion right? A table of numbers."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import typer
from torch import nn

from attnres_compile.cli.options import FAILED, InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.comparison import run, same_randomness
from attnres_compile.config import AttnResConfig, Lowering
from attnres_compile.exactness import is_exported, private_copy
from attnres_compile.inputs import Inputs
from attnres_compile.rounding import tolerance_for
from attnres_compile.tracing import changes
from attnres_compile.verification import EXACT, check
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
    with random queries, eager, compiled, one-phase and two-phase must give the same, and so must the original, operator
    by operator, with the equations put in. --lowering, --two-phase and --fuse are for exactness alone. Exit code 1 when
    something differs by more than rounding.

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
            if any(row.name == EXACT and row.holds is False for row in found.checks) and not is_exported(loaded.model):
                says("running the original under torch.compile")
                told = _of_the_original(loaded.model, loaded.inputs, train, None if keep_weights else seed, seed)
                found = dataclasses.replace(found, notes=(*found.notes, told) if told else found.notes)
    shown = verification.table(found, loaded.name)
    out.result(found.to_dict(), shown, verification.verdict(found, loaded.name))
    raise typer.Exit(0 if found.holds else FAILED)


def _of_the_original(model: nn.Module, inputs: Inputs, train: bool, weights: int | None, seed: int) -> str:
    """What ``torch.compile`` alone changes about the model; empty if nothing."""
    with same_randomness(), torch.inference_mode(False), torch.enable_grad():
        plain, traced = (private_copy(model, train, weights) for _ in range(2))
        dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32)
        return changes(run(plain, inputs, seed), traced, inputs, seed, tolerance_for(dtype, 1))
