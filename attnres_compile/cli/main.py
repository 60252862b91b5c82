"""The ``attnres`` command. Each command loads, computes and shows; all of the work is elsewhere.

Exit codes: 0 done and well; 1 nothing can be converted, or exactness does not hold; 2 a wrong target, input
or option, or a model that rejects its inputs or cannot be traced; 3 an error of this program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from attnres_compile import api
from attnres_compile.cli import output, render
from attnres_compile.cli.blame import blame
from attnres_compile.cli.kernels import kernels
from attnres_compile.cli.options import takes_config
from attnres_compile.cli.target import Target, load_target
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, NoStreamError
from attnres_compile.exactness import verify as compare
from attnres_compile.report import TransformReport
from attnres_compile.reporting import refuse_strict
from attnres_compile.version import __version__


class _Group(TyperGroup):
    """Ends every error of ours in one message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AttnResError as error:
            output.show_error(str(error))
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    help="Attention Residuals for existing PyTorch models.",
    epilog="Exit codes: 0 well; 1 nothing to convert, or not exact; 2 bad target, input or option; 3 a bug.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

TargetText = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="script.py, script.py:NAME or package.module:NAME. NAME is a model, a model class without "
        "required arguments, or a function that returns a model.",
    ),
]
InputTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        show_default=False,
        help="\\[NAME=]DTYPE\\[DIM,...]\\[<BOUND], as 'int64\\[2,128]<32000'; once per input. Otherwise "
        "example_inputs beside the model (a value or a function), or the model's own dummy_inputs.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Everything = Annotated[bool, typer.Option("--all", "-v", help="Show every sublayer, site and add left alone.")]
Graph = Annotated[
    Path | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        show_default=False,
        help="Also write which source each site looks at, as .dot or .graphml, by FILE's suffix.",
    ),
]


@app.command()
@takes_config
def inspect(
    target: TargetText,
    config: AttnResConfig,
    input: InputTexts = None,
    json: Json = False,
    everything: Everything = False,
    graph: Graph = None,
) -> None:
    """Show what would be converted: streams, blocks, sites, and why every other add is left alone.

    Changes nothing. Exit code 1 when no residual stream can be converted, or with --strict when one cannot.
    """
    failure = None
    with output.stdout_to_stderr():
        loaded = load_target(target, input or ())
        with blame(loaded):
            try:
                report = api.explain(loaded.model, loaded.inputs, config)
                if config.strict:
                    refuse_strict(report.rejections, report)
            except NoStreamError as error:
                report, failure = error.report, error
    if graph is not None:
        _write_graph(report, graph)
    if json:
        output.show_json(report.to_dict())
    else:
        output.show(render.report(report, loaded.name, everything, config))
    if failure is not None:
        output.show_error(str(failure))
    raise typer.Exit(0 if report.streams and failure is None else 1)


def _write_graph(report: TransformReport, file: Path) -> None:
    from attnres_compile.depth_graph import write_depth_graph  # networkx takes a moment to load

    try:
        write_depth_graph(report, file)
    except OSError as error:
        raise AttnResError(f"the depth graph cannot be written: {error}") from error


@app.command()
@takes_config
def verify(
    target: TargetText,
    config: AttnResConfig,
    input: InputTexts = None,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="Use the model's own weights; the default randomises a copy's."),
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="Compare in training mode, with equal seeds.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random weights, of dropout and of the loss.")] = 0,
    json: Json = False,
) -> None:
    """Convert a copy and compare it, queries at zero, with the original: outputs and gradients, in numbers.

    Exit code 1 when they differ by more than rounding, or when no residual stream can be converted.
    """
    with output.stdout_to_stderr():
        loaded = load_target(target, input or ())
        with blame(loaded):
            try:
                found = compare(loaded.model, loaded.inputs, config, keep_weights=keep_weights, train=train, seed=seed)
            except NoStreamError as error:
                failure = error
                found = None
    if found is None:
        _nothing_to_verify(loaded, failure, json)
    elif json:
        output.show_json(found.to_dict())
    else:
        output.show(render.exactness(found, loaded.name))
    raise typer.Exit(0 if found is not None and found.holds else 1)


def _nothing_to_verify(loaded: Target, failure: NoStreamError, json: bool) -> None:
    if json:
        output.show_json({"holds": False, "message": str(failure), "report": failure.report.to_dict()})
    else:
        output.show(render.report(failure.report, loaded.name))
    output.show_error(str(failure))


app.command()(kernels)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"attnres {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show versions and exit.")
    ] = False,
) -> None:
    """Attention Residuals for existing PyTorch models."""


def run() -> None:
    """The console script: runs the command and ends the process with its exit code."""
    try:
        app(prog_name="attnres")
    except Exception:
        traceback.print_exc()
        output.show_error("this is an error of attnres itself; please report it with the lines above")
        code = 3
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    with contextlib.suppress(BrokenPipeError, OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        # What foreign code prints when the process ends must not follow our result.
        os.dup2(2, 1)
    sys.exit(code)


if __name__ == "__main__":
    run()
