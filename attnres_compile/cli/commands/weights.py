"""``attnres weights``: which depth a converted model attends to, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from attnres_compile import api
from attnres_compile.cli.checkpoints import load_checkpoint
from attnres_compile.cli.options import (
    Everything,
    InputTexts,
    SettingTexts,
    TargetText,
    takes_config,
    takes_output,
)
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import Target, load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig
from attnres_compile.depth_weights import DepthWeights, depth_weights
from attnres_compile.errors import AttnResError, NotTransformedError
from attnres_compile.views import heatmap


@takes_output
@takes_config
def weights(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    input: InputTexts = None,
    set_: SettingTexts = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="FILE",
            show_default=False,
            help="Weights and queries of the converted model: .safetensors, or a state_dict that torch.save wrote "
            "(alone, or under 'model' or 'state_dict'). No code in it is run.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", show_default=False, help="Also draw it into a file (needs matplotlib)."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", show_default=False, help="Also write the report as a page, with it."),
    ] = None,
    everything: Everything = False,
) -> None:
    """Show how much of each source every site takes: mean over the tokens of the inputs, and entropy.

    A copy of the model is converted and run once, in eval mode; a model that its script has transformed is used as it
    is. Without a trained checkpoint the queries are zero and all weights equal. The layout is not in a checkpoint:
    give the options that the model was converted with.

    Example: attnres weights attnres_compile.demo --num-blocks 4
    """
    for file in (png, html):
        if file is not None and not file.absolute().parent.is_dir():
            raise AttnResError(f"there is no folder for {file}", remedy="Make it first, or give another file")
    if png is not None:
        from attnres_compile.views import plot

        plot.require()
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or ())
        loaded.model.eval()
        says("converting")
        with showing_passes(out):
            model, notes = _converted(loaded, config)
            if checkpoint is not None:
                says("loading the checkpoint")
                notes += load_checkpoint(model, checkpoint)
            says("running the model")
            with blame(loaded):
                found = depth_weights(model, loaded.inputs)
        if not any(bool(query.detach().any()) for query in api.pseudo_queries(model).values()):
            notes.append("all pseudo-queries are zero, so the weights are uniform; --checkpoint loads trained ones")
        says("drawing")
        _write(model, found, loaded.name, png, html)
    for note in notes:
        out.note(note)
    out.result(
        {**found.to_dict(), "notes": notes},
        heatmap.weights(found, loaded.name, everything),
        heatmap.summary(found, loaded.name),
    )


def _converted(loaded: Target, config: AttnResConfig) -> tuple[nn.Module, list[str]]:
    """The target's own model if it is transformed already, or a converted copy; and notes."""
    try:
        api.report(loaded.model)
    except NotTransformedError:
        return loaded.converted(config), []
    return loaded.model, [f"{loaded.name} is transformed already: options about the conversion are not used"]


def _write(model: nn.Module, found: DepthWeights, name: str, png: Path | None, html: Path | None) -> None:
    if png is not None:
        found.plot(png)
    if html is not None:
        api.report(model).to_html(html, weights=found, title=f"{name}: depth weights")
