"""``attnres diff``: the original and the rewritten graph around each site."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

import typer

from attnres_compile.cli.options import InputTexts, SettingTexts, TargetText, takes_config, takes_output
from attnres_compile.cli.output import Output
from attnres_compile.cli.passes import showing_passes
from attnres_compile.cli.targets import load_target
from attnres_compile.cli.targets.blame import blame
from attnres_compile.config import AttnResConfig
from attnres_compile.differences import SiteDiff, site_diffs
from attnres_compile.errors import TargetError
from attnres_compile.rewriting import rewritings
from attnres_compile.views import diff as view


@takes_output
@takes_config
def diff(
    target: TargetText,
    config: AttnResConfig,
    out: Output,
    input: InputTexts = None,
    set_: SettingTexts = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show every site.")] = False,
    site: Annotated[
        list[str] | None,
        typer.Option("--site", metavar="NAME", show_default=False, help="Show this site; once per site."),
    ] = None,
) -> None:
    """Show the original and the rewritten graph side by side around each site.

    Residual adds and what reads them, before; sums of blocks, mixes and what reads them, after. Lines that go have
    a -, lines that come a +. Without --all a few sites of each stream; --json has all of them. Changes nothing.

    Example: attnres diff attnres_compile.demo --num-blocks 2
    """
    with out.working("loading the model") as says:
        loaded = load_target(target, input or (), set_ or (), weights=False)
        says("tracing the model")
        with showing_passes(out), blame(loaded):
            found = [each for one in rewritings(loaded.model, loaded.inputs, config) for each in site_diffs(one)]
    shown = _named(found, site) if site else found if everything or out.json else view.few(found)
    out.result(
        {"target": loaded.name, "sites": [each.to_dict() for each in shown]},
        view.diff(shown, len(found), loaded.name),
        view.summary(shown, len(found), loaded.name),
    )


def _named(found: Sequence[SiteDiff], names: Sequence[str]) -> list[SiteDiff]:
    """The sites of these names, in depth order.

    Raises:
        TargetError: there is no site of a name.
    """
    known = list(dict.fromkeys(each.site for each in found))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            meant = f"Did you mean {' or '.join(close)}? " if close else ""
            raise TargetError(f"there is no site {name!r}", remedy=f"{meant}attnres inspect TARGET --all lists all")
    return [each for each in found if each.site in names]
