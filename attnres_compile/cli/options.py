"""The options that stand for :class:`~attnres_compile.config.AttnResConfig`, shared by every command."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import ConfigError

_PANEL = "Attention Residuals"
_DEFAULT = AttnResConfig()


def _option(flag: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, help=text, metavar=metavar, rich_help_panel=_PANEL, show_default=False)


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


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter ``config`` of a Typer command by one option per field of it."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        said = {name: given.pop(name) for name in _OPTIONS}
        command(**given, config=_config(said))

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if "bool" in str(kind.__origin__) else None,
            annotation=kind,
        )
        for name, kind in _OPTIONS.items()
    ]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "config"] + added
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
