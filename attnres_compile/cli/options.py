"""What every command takes: a target and its inputs, the configuration, and how to print; and how it ends.

Exit codes: 0 done; 1 the check failed; 2 the request is wrong; 3 the model cannot be converted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from attnres_compile.cli import completion
from attnres_compile.cli.output import Output, show
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, ConfigError, GraphBreakError, NoStreamError
from attnres_compile.report import GraphBreak, TransformReport
from attnres_compile.views import terminal

FAILED, WRONG, IMPOSSIBLE, BUG = 1, 2, 3, 70

TargetText = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        autocompletion=completion.target,
        help="script.py, script.py:NAME or package.module:NAME (importing it runs its code), hf:MODEL_TYPE or "
        "hf:FOLDER (a Hugging Face configuration; nothing is downloaded), or program.pt2 (torch.export). NAME is a "
        "model, a model class without required arguments, or a function that returns a model.",
    ),
]
InputTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        show_default=False,
        help="\\[NAME=]DTYPE\\[DIM,...]\\[<BOUND], as 'int64\\[2,128]<32000'; once per input. Otherwise "
        "example_inputs beside the model (a value or a function), the model's own dummy_inputs, or what an hf: "
        "configuration or a program says.",
    ),
]
SettingTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        show_default=False,
        help="A field of an hf: configuration, as num_hidden_layers=4; once per field.",
    ),
]
Everything = Annotated[bool, typer.Option("--all", "-a", help="Show every sublayer, site and add left alone.")]

_PANEL = "Attention Residuals"
_PRINTING = "Printing"
_DEFAULT = AttnResConfig()


def _option(flag: str, text: str, metavar: str | None = None) -> Any:
    words = completion.among(*metavar.split("|")) if metavar and "|" in metavar else None
    return typer.Option(
        flag, help=text, metavar=metavar, rich_help_panel=_PANEL, show_default=False, autocompletion=words
    )


# One per field, named like it; None is "not said". Values are checked by AttnResConfig alone.
_OPTIONS: dict[str, Any] = {
    "num_blocks": Annotated[
        int | None,
        _option("--num-blocks", f"Blocks per stream; {_DEFAULT.num_blocks} if nothing is said.", "N"),
    ],
    "block_size": Annotated[int | None, _option("--block-size", "Sublayers (not transformer layers) per block.", "S")],
    "full": Annotated[bool, _option("--full", "The full form: each sublayer is a source of its own.")],
    "gain": Annotated[
        str | None,
        _option("--gain", "sum (default): exact at zero queries; mean: the paper's convex mix.", "sum|mean"),
    ],
    "eps": Annotated[float | None, _option("--eps", f"In the key norm; {_DEFAULT.eps:g} if unsaid.", "X")],
    "key_norm_weight": Annotated[bool, _option("--key-norm-weight", "Learn a weight of each key norm.")],
    "value": Annotated[str | None, _option("--value", "What is mixed; raw (default) or normalized.", "raw|normalized")],
    "logit_scale": Annotated[str | None, _option("--logit-scale", "Factor on the logits; 1 if unsaid.", "X|rsqrt_dim")],
    "queries": Annotated[
        str | None,
        _option("--queries", "One query per read state (default) or per module that reads it.", "state|reader"),
    ],
    "calls": Annotated[
        str | None,
        _option("--calls", "Queries of several calls of one network; shared (default) or separate.", "shared|separate"),
    ],
    "min_sublayers": Annotated[
        int | None,
        _option("--min-sublayers", f"Shorter streams are left alone; {_DEFAULT.min_sublayers} if unsaid.", "N"),
    ],
    "depth_loops": Annotated[bool, _option("--depth-loops", "Convert loops over depth that share weights.")],
    "strict": Annotated[bool, _option("--strict", "Fail if any residual stream would be left alone.")],
    "lowering": Annotated[
        str | None,
        _option("--lowering", "How the converted model runs; eager (default here) or inductor.", "inductor|eager"),
    ],
    "two_phase": Annotated[
        str | None,
        _option("--two-phase", "Finished blocks once per block; auto (default): by bytes moved.", "auto|on|off"),
    ],
    "fuse": Annotated[
        str | None,
        _option("--fuse", "Adds and norms beside a site in its kernel; auto (default): on GPUs.", "auto|on|off"),
    ],
}


_PRINTS: dict[str, Any] = {
    "json": Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document and nothing else.", rich_help_panel=_PRINTING),
    ],
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print one line; no progress.", rich_help_panel=_PRINTING)
    ],
    "verbose": Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Also print the passes with their times, and the graph before and after each, to stderr.",
            rich_help_panel=_PRINTING,
        ),
    ],
    "debug": Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error.", rich_help_panel=_PRINTING)
    ],
}


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter ``config`` of a Typer command by one option per field of it."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        said = {name: given.pop(name) for name in _OPTIONS}
        command(**given, config=_config(said))

    return _with_options(wrapper, command, "config", _OPTIONS)


def takes_output(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter ``out`` of a Typer command by its options, and ends errors in one message.

    The outermost decorator under ``app.command``: errors of the other options end in it too.
    """

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        out = Output(**{name: given.pop(name) for name in _PRINTS})
        try:
            command(**given, out=out)
        except AttnResError as error:
            raise typer.Exit(end(out, error)) from error

    return _with_options(wrapper, command, "out", _PRINTS)


def end(out: Output, error: AttnResError) -> int:
    """Shows an error, with the report where the model cannot be converted; returns the exit code."""
    report: TransformReport | None = None
    if isinstance(error, NoStreamError):
        report = error.report
    elif isinstance(error, GraphBreakError):
        report = TransformReport(graph_breaks=(GraphBreak(error.what, error.where),))
    if report is None:
        out.error(error)
        return WRONG
    if not out.json:
        show(terminal.summary(report, "") if out.quiet else terminal.report(report, ""))
    out.error(error, {"report": report.to_dict()})
    return IMPOSSIBLE


def _with_options(
    wrapper: Callable[..., None], command: Callable[..., None], instead_of: str, options: Mapping[str, Any]
) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if "bool" in str(kind.__origin__) else None,
            annotation=kind,
        )
        for name, kind in options.items()
    ]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != instead_of] + added
    # Typer keeps the line breaks of a docstring beside those that it makes.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    wrapper.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    # Typer reads both.
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _config(said: dict[str, Any]) -> AttnResConfig:
    full = said.pop("full")
    values = {name: value for name, value in said.items() if value is not None}
    if full:
        contrary = [f"--{name.replace('_', '-')}" for name in ("num_blocks", "block_size") if name in values]
        if contrary:
            raise ConfigError(f"--full and {' and '.join(contrary)} contradict each other", remedy="Give one")
        values["num_blocks"] = None
    if isinstance(values.get("logit_scale"), str):
        # What is no number is 'rsqrt_dim', or something that AttnResConfig will name.
        with contextlib.suppress(ValueError):
            values["logit_scale"] = float(values["logit_scale"])
    values.setdefault("lowering", "eager")
    return AttnResConfig(**values)
