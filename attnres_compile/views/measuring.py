"""What ``attnres bench`` measured, as a table, readable at 80 columns. It claims no more than was measured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnres_compile.measuring import (
    INFERENCE_MEMORY,
    LATENCY,
    TRAINING,
    TRAINING_MEMORY,
    Measurement,
    Quantity,
)

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def table(found: Measurement, title: str) -> RenderableType:
    """All quantities of both models, with their spread.

    Args:
        found: what to show.
        title: what was measured.
    """
    how = "both compiled by Inductor" if found.compiled else "not compiled: sites run op by op"
    threads = f"{found.threads} thread{'' if found.threads == 1 else 's'}"
    about = f"{how}; {found.device}, {threads}, {found.dtype}, torch {found.torch}"
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("")
    for name in ("original", "spread", "converted", "spread", "ratio", "quartiles"):
        shown.add_column(name, justify="right", no_wrap=True)
    for each in found.quantities:
        timed = each.unit == "s"
        shown.add_row(
            each.name,
            _amount(each.original, each.unit),
            _share(each.original_spread, each.original) if timed else "",
            _amount(each.converted, each.unit),
            _share(each.converted_spread, each.converted) if timed else "",
            f"{each.ratio:.3f}x",
            _quartiles(each) if timed else "",
        )
    lines = [f"{each.name}: the difference is within the noise" for each in found.quantities if _noisy(each)]
    timed_ones = [each for each in found.quantities if each.unit == "s"]
    rounds = ", ".join(f"{each.rounds} pairs of turns of {each.repeats} ({each.name})" for each in timed_ones)
    lines.append(f"Medians of {rounds}; spread: between the quartiles.")
    lines.append("Memory: the most that tensors take in one step, above weights and inputs.")
    notes = [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(verdict(found, title), Text(about), Text(), shown, Text(), *map(Text, lines), *notes)


def verdict(found: Measurement, title: str) -> Text:
    """One line: the ratios, converted to original."""
    by_name = {each.name: each for each in found.quantities}
    parts = [_ratio(by_name[name]) for name in (TRAINING, LATENCY) if name in by_name]
    memory = by_name.get(TRAINING_MEMORY) or by_name.get(INFERENCE_MEMORY)
    if memory is not None:
        parts.append(f"peak memory {memory.ratio:.2f}x")
    return Text.assemble((f"{title}: " if title else "", "bold"), ", ".join(parts))


def _ratio(each: Quantity) -> str:
    noise = ", within the noise" if _noisy(each) else ""
    return f"{each.name} {each.ratio:.3f}x ({_quartiles(each)}{noise})"


def _noisy(each: Quantity) -> bool:
    return each.unit == "s" and each.within_noise


def _quartiles(each: Quantity) -> str:
    return f"{each.low:.3f}..{each.high:.3f}"


def _share(spread: float, of: float) -> str:
    return f"{spread / of:.0%}" if of else "-"


def _amount(value: float, unit: str) -> str:
    scales = _SECONDS if unit == "s" else _BYTES
    factor, name = next((each for each in scales if value >= each[0]), scales[-1])
    return f"{value / factor:.3g} {name}" if value / factor < 1000 else f"{value / factor:.0f} {name}"
