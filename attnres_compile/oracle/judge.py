"""A converted model's run at random queries against the interpreter's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.comparison import LowestPrecision, Run, compare, forward, run
from attnres_compile.config import AttnResConfig
from attnres_compile.inputs import Inputs
from attnres_compile.oracle.interpret import Interpreter
from attnres_compile.oracle.recording import Recorder
from attnres_compile.oracle.streams import Disagreement, NotFound, Way, locate
from attnres_compile.report import TransformReport
from attnres_compile.rounding import FACTOR, GRADIENT_FLOOR, UNDECIDED, Original, tolerance_for

HOLDS, DISAGREES, NOT_JUDGED = "holds", "disagrees", "not judged"

# Largest relative error between two ways to compute the same in float64, at random queries.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Verdict:
    """What the interpreter says of a conversion.

    Attributes:
        status: ``"holds"``, ``"disagrees"``, or ``"not judged"`` where the interpreter could not follow the model.
        error_output, error_gradient: largest relative errors; ``None`` where nothing was compared.
        tolerance: the largest error that counts as rounding.
        note: what disagrees, or why nothing was judged.
        worst_output, worst_gradient: the tensors with the largest errors.
        lowest: lowest floating precision that the original computes in, as ``"float64"``.
    """

    status: str
    error_output: float | None = None
    error_gradient: float | None = None
    tolerance: float | None = None
    note: str = ""
    worst_output: str = ""
    worst_gradient: str = ""
    lowest: str = ""

    @property
    def error(self) -> float | None:
        """The larger one of the two errors."""
        known = [error for error in (self.error_output, self.error_gradient) if error is not None]
        return max(known, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values. An infinite error is the largest float."""
        values = dataclasses.asdict(self)
        for name in ("error_output", "error_gradient", "tolerance"):
            if values[name] is not None:
                values[name] = min(values[name], sys.float_info.max)
        return values


def judge(
    make: Callable[[], nn.Module],
    inputs: Inputs,
    report: TransformReport,
    config: AttnResConfig,
    queries: Mapping[str, Tensor],
    key_norms: Mapping[str, Tensor],
    found: Run,
    seed: int,
) -> Verdict:
    """Compare a converted model's run with what the equations give.

    Up to 1e-10 (1e-5 for a model that computes in float32 in places) is rounding, and so is what
    :mod:`attnres_compile.rounding` says where that is more.

    Args:
        make: a new copy of the original at each call, in the mode and dtype that the converted one ran in.
        inputs: what it ran on.
        report: on the conversion.
        config: of the conversion.
        queries: values of the pseudo-queries by the names that the report has for them, shape ``[d]``.
        key_norms: weights of the key norms by the same names, shape ``[d]``; empty without.
        found: the converted model's outputs and gradients. Those of the queries are called ``query NAME``, those of the
            key norms ``key norm NAME``, and all others as in the original.
        seed: of its random numbers and loss.
    """
    lowest = LowestPrecision()
    try:
        ways = located(make(), inputs, report, seed, lowest)
    except NotFound as error:
        return Verdict(NOT_JUDGED, note=str(error))
    except Disagreement as error:
        return Verdict(DISAGREES, note=str(error))
    name = str(lowest.dtype).removeprefix("torch.")
    leaves = {f"query {key}": _leaf(value) for key, value in queries.items()}
    leaves |= {f"key norm {key}": _leaf(value) for key, value in key_norms.items()}
    second = make()
    mode = Interpreter(
        second,
        ways,
        {key: leaves[f"query {key}"] for key in queries},
        {key: leaves[f"key norm {key}"] for key in key_norms},
        config,
    )
    try:
        wanted = run(second, inputs, seed, mode)
    except Disagreement as error:
        return Verdict(DISAGREES, note=str(error), lowest=name)
    if mode.lost:
        return Verdict(NOT_JUDGED, note="; ".join(mode.lost), lowest=name)
    gradients = dict(wanted.gradients)
    gradients |= {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    verdict = _compared(wanted, gradients, found, _tolerance(lowest.dtype), name)
    unsure = [way.stream.name for way in ways if not way.sure]
    if verdict.status == DISAGREES and unsure:
        note = f"of stream {unsure[0]} the report does not say which of several sums on one line are meant"
        return dataclasses.replace(verdict, status=NOT_JUDGED, note=note)
    off = verdict.error
    if verdict.status == HOLDS or verdict.note or off is None or not math.isfinite(off):
        return verdict
    own = Original(make, inputs, seed, run(make(), inputs, seed), lowest.dtype).off()
    allowed = tolerance_for(lowest.dtype, len(queries), own)
    told = f"the original itself is off by {own:.1e} in {name}, and {FACTOR:g} times that is rounding"
    if off > allowed:
        return dataclasses.replace(verdict, tolerance=max(allowed, verdict.tolerance or 0.0), note=told)
    if allowed > UNDECIDED[lowest.dtype]:
        return dataclasses.replace(verdict, status=NOT_JUDGED, tolerance=allowed, note=f"{told}: too coarse to tell")
    return dataclasses.replace(verdict, status=HOLDS, tolerance=allowed, note=told)


def located(model: nn.Module, inputs: Inputs, report: TransformReport, seed: int, watch: Any = None) -> list[Way]:
    """Run a model once and find the streams of a report in it.

    Raises:
        NotFound: a stream is not where the report has it.
        Disagreement: its features are not those of the report.
    """
    wanted: dict[str, set[str]] = {}
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    for stream in report.streams:
        for sublayer in stream.sublayers:
            with contextlib.suppress(AttributeError):
                path = paths.get(id(model.get_submodule(sublayer.module)), sublayer.module)
                wanted.setdefault(path, set()).add(sublayer.where)
    shapes = [sublayer.shape for stream in report.streams for sublayer in stream.sublayers]
    recorder = Recorder(model, wanted, shapes)
    with watch or contextlib.nullcontext():
        forward(model, inputs, seed, recorder)
    taken: set[Any] = set()
    ways = [locate(stream, recorder.sums, model, taken) for stream in report.streams]
    for way in ways:
        stream = way.stream
        if all(axis is None for axis in way.axes) and any(site.query for site in stream.sites):
            raise Disagreement(
                f"the features of stream {stream.name}: {way.unknown or 'no dimension of it holds them'}"
            )
    return ways


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE if dtype == torch.float64 else tolerance_for(dtype, 1)


def _compared(wanted: Run, gradients: dict[str, Tensor], found: Run, tolerance: float, lowest: str) -> Verdict:
    outputs = compare(wanted.outputs, found.outputs, floor=0.0, dtypes=False)
    groups = []
    # Those of queries are smaller by nature.
    for added, floor in ((False, GRADIENT_FLOOR), (True, 1.0)):
        before, after = (
            {name: value for name, value in each.items() if name.startswith(("query ", "key norm ")) == added}
            for each in (gradients, found.gradients)
        )
        # A gradient of zeros is as good as none.
        for one, other in ((before, after), (after, before)):
            for name in [name for name in one if name not in other and not bool(one[name].any())]:
                del one[name]
        groups.append(compare(before, after, floor=floor, dtypes=False))
    worst = max(groups, key=lambda group: -1.0 if group.error is None else group.error)
    notes = [*outputs.notes, *(note for group in groups for note in group.notes)]
    errors = [error for error in (outputs.error, worst.error) if error is not None]
    holds = not notes and all(error <= tolerance for error in errors)
    return Verdict(
        HOLDS if holds else DISAGREES,
        outputs.error,
        worst.error,
        tolerance,
        "; ".join(notes[:4]),
        outputs.worst,
        worst.worst,
        lowest,
    )
