"""``attnres transform``: the converted model as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from attnres_compile import api
from attnres_compile.cli.options import InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import Target, load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.exporting import export
from attnres_compile.readable import source_text
from attnres_compile.report import TransformReport
from attnres_compile.rewriting import rewritings
from attnres_compile.views import terminal
from attnres_compile.writing import Staging, save_program, save_weights, staged

PROGRAM = "model.pt2"
FILES = {
    "report.json": "what was found and done, see docs/report.md",
    "report.html": "the same as a page",
    "config.json": "the configuration",
    "graph.py": "the rewritten graph, for reading",
    "depth.dot": "which source each site looks at",
    "depth.graphml": "the same",
    "weights.safetensors": "all weights, the queries among them",
    PROGRAM: "the program, for torch.export.load",
}


@takes_output
@takes_config
def transform(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    folder: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", show_default=False, help="Folder of the files; made if missing."),
    ],
    input: InputTexts = None,
    set_: SettingTexts = None,
    exported: Annotated[
        bool,
        typer.Option("--export", help=f"Also write {PROGRAM}, a torch.export program that runs without this package."),
    ] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Let the program's inputs vary in every size that the model lets vary.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace files that are there already.")] = False,
) -> None:
    """Convert a copy of the model and write it: report, graph, weights, and with --export a program.

    Files: report.json, report.html, config.json, graph.py, depth.dot, depth.graphml, weights.safetensors, model.pt2.
    They appear when all of them are complete. The queries are zero.

    Example: attnres transform attnres_compile.demo --out converted --export
    """
    if dynamic and not exported:
        raise AttnResError("--dynamic is about the exported program", remedy="Give --export too")
    names = [name for name in FILES if exported or name != PROGRAM]
    with staged(folder, names, force) as staging, out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or ())
        with showing_passes(out):
            report = _write(loaded, config, staging, exported, dynamic, says)
    notes = _notes(loaded, folder, names)
    for note in notes:
        out.note(note)
    out.result(
        {
            "folder": str(folder),
            "files": [{"name": file.name, "bytes": file.bytes} for file in staging.written],
            "notes": notes,
            "report": report.to_dict(),
        },
        _shown(report, loaded.name, folder, staging),
        Text(f"{loaded.name}: {len(staging.written)} files in {folder}"),
    )


def _write(
    loaded: Target,
    config: AttnResConfig,
    staging: Staging,
    exported: bool,
    dynamic: bool,
    says: Callable[[str], None],
) -> TransformReport:
    says("converting a copy")
    converted = loaded.converted(config)
    report = api.report(converted)
    says("writing the weights")
    save_weights(converted, staging.path("weights.safetensors"))
    says("writing the graph")
    with blame(loaded):
        graphs = rewritings(loaded.model, loaded.inputs, config)
    staging.text("graph.py", source_text(graphs, loaded.name))
    _write_report(report, config, loaded.name, staging)
    if exported:
        says("exporting the program")
        # A graph that was rewritten for kernels holds operators of ours; the untouched one is rewritten again.
        source = loaded.model if isinstance(loaded.model, fx.GraphModule) else converted
        program = export(source, loaded.inputs, config, dynamic=dynamic)
        says("writing the program")
        save_program(program, staging.path(PROGRAM))
    return report


def _write_report(report: TransformReport, config: AttnResConfig, title: str, staging: Staging) -> None:
    from attnres_compile.depth_graph import write_depth_graph  # networkx takes a moment to load

    staging.json("report.json", report.to_dict())
    staging.json("config.json", config.to_dict())
    for name in ("depth.dot", "depth.graphml"):
        write_depth_graph(report, staging.path(name))
    report.to_html(staging.path("report.html"), title=title)


def _notes(loaded: Target, folder: Path, names: list[str]) -> list[str]:
    notes = []
    kind, _, place = loaded.name.partition(":")
    if kind == "hf" and not any(entry.suffix in (".safetensors", ".bin") for entry in _entries(Path(place))):
        notes.append(f"the weights are random: {loaded.name} has none")
    if PROGRAM not in names and (folder / PROGRAM).exists():
        notes.append(f"{folder / PROGRAM} is of an earlier call and does not belong to the other files")
    return notes


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _shown(report: TransformReport, title: str, folder: Path, staging: Staging) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for file in staging.written:
        table.add_row(Text(file.name), Text(f"{file.bytes:,} B"), Text(FILES[file.name]))
    return Group(terminal.summary(report, title), Text(f"{len(staging.written)} files in {folder}:"), table)
