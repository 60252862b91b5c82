"""docs/cli.md, made from the commands themselves: ``python -m attnres_compile.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from attnres_compile.cli.main import app

# Sections of options that commands share, which are listed once: by the panel of the help, or by their names.
TARGET, CONFIGURATION, PRINTING = "The target", "How to convert", "How to print"
_BY_PANEL = {"Attention Residuals": CONFIGURATION, "Printing": PRINTING}
_BY_NAME = dict.fromkeys(("target", "input", "set_"), TARGET)
_INTRODUCTION = """# The command line

Made from the commands by `python -m attnres_compile.cli.reference`; `attnres COMMAND --help` says the same.
`attnres --install-completion` lets the shell complete commands, options and targets.

Results go to standard output, everything else - progress, notes, errors, what the model prints - to standard error.
Colours and a spinner are for terminals alone, and `NO_COLOR` is honoured. With `--json` standard output holds one
document, described by [attnres.schema.json](attnres.schema.json); where a command fails it has an entry `error`.

| exit code | meaning |
| --- | --- |
| 0 | done, and what was checked holds |
| 1 | the check failed |
| 2 | the request is wrong: a target, an input, an option; or the model rejects its inputs |
| 3 | the model cannot be converted; the report says why |
| 70 | an error of this program |

`attnres run` ends as the script does.
"""


def reference() -> str:
    """The reference of all commands, as Markdown."""
    # Typer has no public types for what it makes of the functions.
    group: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION]
    shared: dict[str, dict[str, Any]] = {title: {} for title in (TARGET, CONFIGURATION, PRINTING)}
    for name, command in group.commands.items():
        own = []
        for parameter in command.params:
            panel = getattr(parameter, "rich_help_panel", None)
            title = _BY_PANEL.get(panel or "") or _BY_NAME.get(parameter.name)
            if title is not None and shared[title].setdefault(parameter.name, parameter).help == parameter.help:
                continue
            if parameter.name != "help":
                own.append(parameter)
        parts.append("\n".join(_command(name, command, own)))
    for title, parameters in shared.items():
        parts.append(f"## {title}\n\nThe same for every command that takes it.\n\n{_table(parameters.values())}")
    return "\n".join(parts)


def _command(name: str, command: Any, parameters: list[Any]) -> Iterator[str]:
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    arguments = [parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"]
    yield f"## `attnres {name} {' '.join(arguments)} [OPTIONS]`\n"
    for paragraph in paragraphs:
        if paragraph.startswith("Example: "):
            yield f"```sh\n{paragraph.removeprefix('Example: ')}\n```\n"
        else:
            yield f"{_plain(paragraph)}\n"
    if parameters:
        yield _table(parameters)


def _table(parameters: Iterable[Any]) -> str:
    rows = ["| option | meaning |", "| --- | --- |"]
    for parameter in parameters:
        is_argument = parameter.param_type_name == "argument"
        names = [parameter.metavar] if is_argument else [*parameter.opts, *parameter.secondary_opts]
        value = "" if is_argument or getattr(parameter, "is_flag", False) else f" {parameter.metavar or 'VALUE'}"
        shown = ", ".join(f"`{option}{value}`" for option in names).replace("|", "\\|")
        rows.append(f"| {shown} | {_plain(parameter.help or '')} |")
    return "\n".join(rows) + "\n"


def _plain(text: str) -> str:
    """Rich's escapes out, Markdown's own characters kept from meaning anything."""
    text = " ".join(re.sub(r"\\\[", "[", text).split())
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")
