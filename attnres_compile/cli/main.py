"""The ``attnres`` command. Each command loads, computes and shows, in a file of its own; all of the work is elsewhere.

Exit codes: 0 done; 1 the check failed; 2 the request is wrong (a target, an input, an option); 3 the model cannot be
converted, and the report says why; 70 an error of this program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Annotated

import torch
import typer

from attnres_compile.cli import output
from attnres_compile.cli.commands.bench import bench
from attnres_compile.cli.commands.diff import diff
from attnres_compile.cli.commands.inspect import inspect
from attnres_compile.cli.commands.run import SETTINGS as RUN_SETTINGS
from attnres_compile.cli.commands.run import ScriptEnded
from attnres_compile.cli.commands.run import run as run_command
from attnres_compile.cli.commands.transform import transform
from attnres_compile.cli.commands.verify import verify
from attnres_compile.cli.commands.weights import weights
from attnres_compile.cli.kernels.command import kernels
from attnres_compile.cli.options import BUG
from attnres_compile.version import __version__

app = typer.Typer(
    help="Attention Residuals for existing PyTorch models.",
    epilog="Exit codes: 0 done; 1 the check failed; 2 the request is wrong; 3 the model cannot be converted; 70 a bug.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (inspect, transform, verify, diff, weights, bench, kernels):
    app.command()(command)
app.command("run", context_settings=RUN_SETTINGS)(run_command)


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
    script: ScriptEnded | None = None
    try:
        app(prog_name="attnres")
    except ScriptEnded as ended:
        script, code = ended, 0
    except BrokenPipeError:  # Who reads us has seen enough.
        code = 1
    except Exception:
        traceback.print_exc()
        output.show_error("this is an error of attnres itself; please report it with the lines above")
        code = BUG
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if script is not None and script.owns_stdout:
        script.finish()
    with contextlib.suppress(BrokenPipeError, OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        # What foreign code prints when the process ends must not follow our result.
        os.dup2(2, 1)
    if script is not None:
        script.finish()
    sys.exit(code)


if __name__ == "__main__":
    run()
