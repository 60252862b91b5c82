"""What ``attnres verify`` found, as two tables of numbers, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnres_compile.rounding import FACTOR
from attnres_compile.verification import EXACT, ROUNDING, Check, Verification

# Widest text of the first column, in characters: both tables stand under each other.
WIDTH = 26


def table(found: Verification, title: str) -> RenderableType:
    """All rows, the rule that they are held to, and why some were not run.

    Args:
        found: what to show.
        title: what was verified.
    """
    weights = "randomised weights" if found.randomised else "the model's own weights"
    about = (
        f"{_count(found.queries, 'query', 'queries')}, {found.dtype} on {found.device}, {found.mode} mode, {weights}, "
        f"{_count(found.gradients, 'gradient')} compared"
    )
    notes = _Notes()
    exact = [check for check in found.checks if check.name == EXACT]
    agree = [check for check in found.checks if check.name != EXACT]
    parts: list[RenderableType] = [
        verdict(found, title),
        Text(about),
        Text(),
        Text("Exactness: queries at zero, against the original in the same dtype", style="bold"),
        _rows(exact, notes),
        Text(),
        Text(f"Agreement: random queries, against {found.reference}", style="bold"),
        _rows(agree, notes),
        Text(),
    ]
    measured = list(dict.fromkeys(check.dtype for check in agree if check.name == ROUNDING))
    if measured:
        parts.append(
            Text(
                f"Allowed in {' and '.join(measured)}: rounding of that dtype, or {FACTOR:g} times what the original "
                "is off by itself, if that is more."
            )
        )
    parts += [Text(f"({number}) {note}") for note, number in notes.numbers.items()]
    parts += [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


def verdict(found: Verification, title: str) -> Text:
    """One line: right or not."""
    checked = [check for check in found.checks if check.holds is not None]
    failed = [check for check in checked if not check.holds]
    text = Text(f"{title}: " if title else "", style="bold")
    if found.holds:
        return text.append(f"exact, and in agreement ({_count(len(checked), 'check')})", style="bold green")
    if not failed:
        return text.append("NOT verified: nothing could be compared", style="bold red")
    wrong = [check for check in failed if _ran(check)]
    if not wrong:
        what, how = "NOT verified", "could not be run"
    else:
        what = "NOT exact" if any(check.name == EXACT for check in wrong) else "exact, but NOT in agreement"
        how = "failed"
    return text.append(f"{what} ({len(failed)} of {_count(len(checked), 'check')} {how})", style="bold red")


class _Notes:
    """Footnotes; rows with the same text share one."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, texts: Iterable[str]) -> str:
        """``" (2)"`` for a row with these notes, or ``""``."""
        said = "; ".join(filter(None, texts))
        return f" ({self.numbers.setdefault(said, len(self.numbers) + 1)})" if said else ""


def _rows(checks: Sequence[Check], notes: _Notes) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("run", min_width=WIDTH)
    shown.add_column("in", min_width=8)
    for name in ("outputs", "gradients", "allowed"):
        shown.add_column(name, justify="right", min_width=max(len(name), 7))
    shown.add_column("result", no_wrap=True)
    for check in checks:
        error = _figure(check.error_output), _figure(check.error_gradient)
        allowed = "" if check.tolerance is None else f"{check.tolerance:.2g}"
        shown.add_row(*map(Text, (check.what, check.dtype, *error, allowed)), _result(check, notes))
    return shown


def _result(check: Check, notes: _Notes) -> Text:
    if check.name == ROUNDING:
        return Text("measure", style="dim")
    if check.holds is None:
        return Text(("unclear" if _ran(check) else "not run") + notes.mark([check.note]), style="yellow")
    if check.holds:
        return Text("pass" + notes.mark([check.note]), style="green")
    limit = check.tolerance or 0.0
    places = [
        f"{kind} differ most at {where}"
        for kind, error, where in (
            ("outputs", check.error_output, check.worst_output),
            ("gradients", check.error_gradient, check.worst_gradient),
        )
        if error is not None and error > limit and where
    ]
    return Text("FAIL" + notes.mark([check.note, *places]), style="bold red")


def _ran(check: Check) -> bool:
    return check.error_output is not None or check.error_gradient is not None or check.tolerance is not None


def _figure(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
