"""``attnres inspect``: what would be converted, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnres_compile.cli.options import (
    IMPOSSIBLE,
    Everything,
    InputTexts,
    SettingTexts,
    TargetText,
    takes_config,
    takes_output,
)
from attnres_compile.cli.output import Output, show_error
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, RejectedStreamError
from attnres_compile.report import TransformReport
from attnres_compile.reporting import refuse_strict
from attnres_compile.views import terminal


@takes_output
@takes_config
def inspect(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    input: InputTexts = None,
    set_: SettingTexts = None,
    everything: Everything = False,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            metavar="FILE",
            show_default=False,
            help="Also write which source each site looks at, as .dot or .graphml, by FILE's suffix.",
        ),
    ] = None,
) -> None:
    """Show what would be converted: streams, blocks, sites, and why every other add is left alone.

    Changes nothing. Exit code 3 when no residual stream can be converted, or with --strict when one cannot.

    Example: attnres inspect attnres_compile.demo --num-blocks 4
    """
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or (), weights=False)
        says("tracing the model")
        with showing_passes(out):
            report = loaded.explain(config)
    if graph is not None:
        _write_graph(report, graph)
    out.result(
        report.to_dict(),
        terminal.report(report, loaded.name, everything, config),
        terminal.summary(report, loaded.name),
    )
    if config.strict:
        try:
            refuse_strict(report.rejections, report)
        except RejectedStreamError as error:
            show_error(str(error))
            raise typer.Exit(IMPOSSIBLE) from error
    raise typer.Exit(0 if report.streams else IMPOSSIBLE)


def _write_graph(report: TransformReport, file: Path) -> None:
    from attnres_compile.depth_graph import write_depth_graph  # networkx takes a moment to load

    try:
        write_depth_graph(report, file)
    except OSError as error:
        raise AttnResError(f"the depth graph cannot be written: {error}") from error
