"""``attnres run``: a training or inference script as it is, with its model converted on the way."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import RenderableType

from attnres_compile.cli.options import IMPOSSIBLE, takes_config, takes_output
from attnres_compile.cli.output import Output, show, show_error, stdout_to_stderr
from attnres_compile.cli.passes import showing_passes
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.inputs import make_inputs
from attnres_compile.recorded import to_header
from attnres_compile.running import Conversion, Outcome, run_script
from attnres_compile.views import running as view

# What follows the script's name is the script's.
SETTINGS = {"allow_interspersed_args": False}


class ScriptEnded(SystemExit):
    """The script is done: the process ends as it would have ended without us.

    Args:
        code: the exit code.
        interrupted: by Ctrl-C, so that the process dies by that signal.
        owns_stdout: whether standard output is the script's, also for what it runs at exit.
    """

    def __init__(self, code: int, interrupted: bool, owns_stdout: bool) -> None:
        super().__init__(code)
        self.interrupted = interrupted
        self.owns_stdout = owns_stdout

    def finish(self) -> NoReturn:
        """End the process; to be called outside of everything that catches exceptions."""
        if self.interrupted:
            # Python then runs what is registered at exit, and sends itself the signal. The traceback was shown.
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None
        raise SystemExit(self.code) from None


@takes_output
@takes_config
def run(
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", show_default=False, help="The script, or with -m a module. Its code is run."),
    ],
    config: AttnResConfig,
    out: Output,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", show_default=False, help="Its own arguments, untouched."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", show_default=False, help="Write the report as an HTML page at the end."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", show_default=False, help="Write the queries at the end, as .safetensors."
        ),
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SPEC",
            show_default=False,
            help="An input that the model takes, \\[NAME=]DTYPE\\[DIM,...]\\[<BOUND], as 'int64\\[2,128]<32000'; once "
            "per input. It is then converted before its optimizer is built.",
        ),
    ] = None,
) -> None:
    """Run a script unchanged, as python would, with the first model that it calls converted just before that call.

    The script's code is run. Its standard output, exit code, exceptions and
    Ctrl-C are what they are without attnres; the report goes to standard error.

    With --input, or where the model has dummy_inputs, the model is converted
    before its optimizer is built; otherwise the queries are added to the
    optimizer, and the report says to which group.

    Exit code 3 when the script ends well and no model was converted.

    Example: attnres run -m attnres_compile.demo --steps 20
    """
    for file in (report, save):
        _writable(file)
    given = make_inputs(input) if input else None
    leads = os.environ.get("RANK", "0") == "0"
    stderr = sys.stderr

    def tell(line: str) -> None:
        if leads:
            with _safely(stderr):
                out.note(line)

    with stdout_to_stderr() if out.json else contextlib.nullcontext():
        outcome = run_script(
            script,
            arguments or (),
            config,
            as_module=module,
            inputs=given,
            keep=report is not None and leads,
            keep_frames=out.debug,
            tell=tell,
            around=lambda: _passes(out, stderr),
        )
        code = outcome.ending.code
        if not outcome.own_process:
            raise ScriptEnded(code, outcome.ending.interrupted, owns_stdout=True)
        if outcome.conversion is None and code & 0xFF == 0:
            code = IMPOSSIBLE
        errors: list[AttnResError] = []
        if leads:
            # A second Ctrl-C ends the reporting, not what is left to do.
            with contextlib.suppress(KeyboardInterrupt), _safely(stderr):
                errors = _finish(outcome, script, config, out, report, save, tell)
    if out.json and leads:
        _show_json(outcome, code, script, errors, out)
    raise ScriptEnded(code, outcome.ending.interrupted, owns_stdout=not out.json)


def _finish(
    outcome: Outcome,
    script: str,
    config: AttnResConfig,
    out: Output,
    report: Path | None,
    save: Path | None,
    tell: Callable[[str], None],
) -> list[AttnResError]:
    """Prints the report and writes the files; returns what went wrong with them."""
    if out.json:
        pass  # all of it is in the document
    elif not out.quiet:
        _show_on_stderr(view.outcome(outcome, script, config))
    elif outcome.conversion is None:
        show_error(f"{script}: no model was converted")
    errors = []
    if outcome.conversion is not None:
        for file, write in ((report, _write_page), (save, _write_queries)):
            if file is not None:
                try:
                    write(outcome.conversion, file, script, tell)
                    tell(f"wrote {file}")
                except (AttnResError, OSError) as error:
                    known = error if isinstance(error, AttnResError) else AttnResError(f"{file}: {error}")
                    errors.append(known)
                    show_error(str(known))
    elif report is not None or save is not None:
        tell("nothing was converted, so no file is written")
    if outcome.ending.error is not None:
        kind = type(outcome.ending.error).__name__
        tell(f"{script} ended with {kind}; its traceback stands above this report")
    return errors


def _write_page(conversion: Conversion, file: Path, script: str, tell: Callable[[str], None]) -> None:
    conversion.report.to_html(file, weights=_weights(conversion, tell), title=f"{conversion.name} in {script}")


def _weights(conversion: Conversion, tell: Callable[[str], None]) -> Any:
    """The depth weights on the first call's inputs, or ``None`` and a word why not."""
    from attnres_compile.depth_weights import depth_weights  # numpy takes a moment to load

    if conversion.model is None or conversion.inputs is None:
        tell("the page has no depth weights: the inputs of the first call cannot be copied")
        return None
    try:
        return depth_weights(conversion.model, conversion.inputs)
    except Exception as error:  # somebody's model, in whatever state the script has left it
        tell(f"the page has no depth weights: {type(error).__name__}: {error}".splitlines()[0])
        return None


def _write_queries(conversion: Conversion, file: Path, script: str, tell: Callable[[str], None]) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.detach().cpu().contiguous() for name, value in conversion.parameters().items()}
    records = {path: store.record for path, store in conversion.stores}
    save_file(tensors, file, metadata={"format": "pt", **to_header(records)})


def _writable(file: Path | None) -> None:
    """Refuse a file that cannot be written, before hours of training.

    Raises:
        AttnResError: it cannot.
    """
    if file is None:
        return
    folder = file.parent
    if not folder.is_dir():
        raise AttnResError(f"{file} cannot be written: there is no folder {folder}")
    if file.is_dir():
        raise AttnResError(f"{file} cannot be written: it is a folder", remedy="Name a file in it")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise AttnResError(f"{file} cannot be written: permission denied")


def _show_json(outcome: Outcome, code: int, script: str, errors: list[AttnResError], out: Output) -> None:
    error = outcome.ending.error
    found: dict[str, Any] = {
        "script": script,
        "exit_code": code,
        "exception": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        "converted": outcome.conversion.to_dict() if outcome.conversion is not None else None,
        "refused": [each.to_dict() for each in outcome.refused],
        "notes": list(outcome.notes),
        "problems": [str(each) for each in errors],
    }
    out.result(found, "", "")


def _show_on_stderr(shown: RenderableType) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        show(shown)


@contextlib.contextmanager
def _passes(out: Output, stderr: TextIO) -> Iterator[None]:
    with contextlib.redirect_stderr(stderr), showing_passes(out):
        yield


@contextlib.contextmanager
def _safely(stderr: TextIO) -> Iterator[None]:
    """Prints where standard error was when we began; a script that closed it must not fail for what we say."""
    with contextlib.suppress(OSError, ValueError), contextlib.redirect_stderr(stderr):
        yield
