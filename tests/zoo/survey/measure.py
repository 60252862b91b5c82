"""One architecture is built, counted, converted and compared: everything that its row says.

How a row comes about, in this order:

1. The model is built in eval mode, and every parameter and buffer is randomised. Where its outputs are not finite
   then, smaller noise and other seeds are tried.
2. Its sublayers are counted by forward hooks, without the detector (:mod:`tests.zoo.survey.count`).
3. A copy is converted and compared with another copy, queries at zero, in float32: every tensor of the outputs, and
   the gradients of all parameters and floating inputs. Up to 1e-5, relative, is rounding.
4. A random network can be so ill-conditioned that reordering a sum moves its output further than that. Where the error
   is larger, :mod:`attnres_compile.rounding` decides: the conversion must hold in float64, if the model computes in it,
   and the errors must not exceed ten times what the *original* is off by itself: from its own run in float64, or when
   each of its parameters is moved by one rounding. What fails that is compared with the original under
   ``torch.compile(backend="eager")``, without this package: a model that is exact against that is ``traced``, and all
   others are ``wrong``. The row's detail has all the numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

import attnres_compile as ac
from attnres_compile import comparison, exactness
from attnres_compile.errors import AttnResError, GraphBreakError, NoStreamError
from attnres_compile.inputs import Inputs
from attnres_compile.oracle import Verdict
from attnres_compile.report import TransformReport
from attnres_compile.reporting import STREAM_REASONS
from tests.zoo.survey.count import Count, count
from tests.zoo.survey.entry import Entry
from tests.zoo.survey.exact import Verdict as Exact
from tests.zoo.survey.exact import judged
from tests.zoo.survey.models import NotRun, built, randomise, twin
from tests.zoo.survey.random_queries import at_random_queries
from tests.zoo.survey.row import Row
from tests.zoo.survey.source import digest
from tests.zoo.survey.wording import clean, kind_and_place, one_line, rounded, sizes, snake, versions

# Three blocks leave a remainder in most streams, so partial sums and whole blocks mix.
CONFIG = ac.AttnResConfig(lowering="eager", num_blocks=3)

Says = Callable[[str], None]
Convert = exactness.Convert


@dataclass
class Findings:
    """What is known of a model so far; the fields are those of the row."""

    class_name: str = ""
    parameters: int = 0
    expected: tuple[int, ...] | None = None
    found: tuple[int, ...] = ()
    report: TransformReport | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    oracle: Verdict = field(default_factory=lambda: Verdict(""))
    graph_breaks: int | None = None
    break_at: str = ""
    notes: list[str] = field(default_factory=list)


def measure(entry: Entry, says: Says | None = None, convert: Convert | None = None) -> Row:
    """The row of one architecture.

    Args:
        entry: what to build.
        says: told what is being done.
        convert: what to convert a copy with, as for :func:`attnres_compile.verify`.
    """
    begin = time.perf_counter()
    found = Findings()
    try:
        status, reason, detail = _measure(entry, found, says or (lambda text: None), convert)
    except NotRun as error:
        _ERRORS.append(error)
        status, reason, detail = "not_run", error.reason, error.detail
    except Exception as error:
        _ERRORS.append(error)
        status, reason, detail = "error", type(error).__name__, kind_and_place(error)
    report = found.report or TransformReport()
    return Row(
        name=entry.name,
        library=entry.library,
        kind=entry.kind,
        class_name=found.class_name,
        status=status,
        expected=found.expected or (),
        found=found.found,
        reason=reason,
        detail=clean("; ".join(part for part in (detail, *found.notes) if part)),
        reasons=dict(sorted(Counter(str(left.reason) for left in report.rejections).items())),
        output_error=rounded(found.output_error),
        gradient_error=rounded(found.gradient_error),
        oracle=found.oracle.status,
        oracle_error=rounded(found.oracle.error),
        oracle_note=clean(found.oracle.note),
        graph_breaks=found.graph_breaks,
        break_at=found.break_at,
        parameters=found.parameters,
        seconds=round(time.perf_counter() - begin, 1),
        versions=versions(entry.library),
        source=digest(),
        design=entry.design,
    )


def _measure(entry: Entry, found: Findings, says: Says, convert: Convert | None) -> tuple[str, str, str]:
    says("build")
    model, inputs = built(entry)
    found.class_name = type(model).__name__
    found.parameters = sum(parameter.numel() for parameter in model.parameters())
    says("run eagerly")
    randomise(model, inputs)
    says("count")
    found.expected = _counted(model, inputs, found)
    try:
        verdict = _compared(model, inputs, found, says, convert)
    except NotConverted as failure:
        _ERRORS.append(failure.error)
        return _refused(failure.error, model, inputs, found)
    finally:
        if found.report is not None:
            _breaks(model, inputs, found)
    found.output_error, found.gradient_error = verdict.output_error, verdict.gradient_error
    says("compare with the oracle at random queries")
    assert found.report is not None
    found.oracle = at_random_queries(model, inputs, CONFIG, found.report, convert)
    if not verdict.exact:
        if against_traced(model, inputs, convert):
            return "traced", "is_compiling", f"{verdict.detail}; exact against the original that is traced"
        return "wrong", "not_exact", verdict.detail
    found.notes.append(verdict.detail)
    return _whole(found)


_ERRORS: list[BaseException] = []


@contextlib.contextmanager
def keeping_errors() -> Iterator[list[BaseException]]:
    """What rows that are made within say in a word, whole; for a reader who looks into one model."""
    _ERRORS.clear()
    yield _ERRORS


def _counted(model: nn.Module, inputs: Inputs, found: Findings) -> tuple[int, ...] | None:
    try:
        with comparison.same_randomness():
            counted = count(twin(model), dict(inputs.kwargs))
    except Exception as error:
        _ERRORS.append(error)
        found.notes.append(f"counting failed: {kind_and_place(error)}")
        return None
    found.notes += counted.notes
    return counted.sizes


# --- conversion


class NotConverted(Exception):
    """Conversion itself failed, before anything was compared."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


def _compared(model: nn.Module, inputs: Inputs, found: Findings, says: Says, convert: Convert | None) -> Exact:
    """Converts and compares."""

    def converted(mine: nn.Module, given: Inputs, config: ac.AttnResConfig) -> nn.Module:
        try:
            made = (convert or exactness.convert_copy)(mine, given, config)
        except Exception as error:
            raise NotConverted(error) from error
        report = ac.report(made)
        if found.report is None:
            found.report = report
            found.found = tuple(len(stream.sublayers) for stream in report.streams)
        return made

    def verified() -> exactness.Exactness:
        says("convert and compare")
        return exactness.verify(model, inputs, CONFIG, keep_weights=True, convert=converted)

    return judged(model, inputs, verified)


def against_traced(model: nn.Module, inputs: Inputs, convert: Convert | None = None) -> bool:
    """Whether what is off is what tracing makes of the original, before anything is converted."""
    return exactness.verify(model, inputs, CONFIG, keep_weights=True, traced=True, convert=convert).holds


# --- the status


def _whole(found: Findings) -> tuple[str, str, str]:
    """The status of an exact conversion: does it have all sublayers?"""
    if found.expected is None:
        return "error", "not_counted", f"found {sizes(found.found)}"
    expected, got = sorted(found.expected), sorted(found.found)
    if expected == got:
        return "converted", "", ""
    text = f"counted {sizes(found.expected)}, found {sizes(found.found)}"
    if sum(got) > sum(expected) or max(got) > max(expected, default=0):
        # Exact all the same. Which of the two is right is for a reader of the model to say.
        return "differs", "more_than_counted", text
    if sum(got) == sum(expected):
        return "partly", "split", text
    assert found.report is not None
    return "partly", main_reason(found.report) or "not_seen", text


def _refused(error: Exception, model: nn.Module, inputs: Inputs, found: Findings) -> tuple[str, str, str]:
    if not isinstance(error, AttnResError):
        raise error
    if isinstance(error, NoStreamError):
        found.report = error.report
        reason = main_reason(error.report)
        if found.expected == () and reason not in STREAM_REASONS:
            return "no_stream", reason or "no_adds", one_line(error)
        return "refused", reason or "no_adds", _message(error.report, reason) or one_line(error)
    if isinstance(error, GraphBreakError):
        found.report = _explained(model, inputs)
        return "refused", "graph_break", one_line(error)
    return "refused", snake(type(error).__name__.removesuffix("Error")), one_line(error)


def main_reason(report: TransformReport) -> str:
    """The reason that says most about a model: of the adds left alone, the most frequent one that names a stream."""
    counts = Counter(str(left.reason) for left in report.rejections)
    for wanted in (STREAM_REASONS, counts.keys()):
        among = [(number, reason) for reason, number in counts.items() if reason in wanted]
        if among:
            return max(among, key=lambda pair: pair[0])[1]
    return ""


def _message(report: TransformReport, reason: str) -> str:
    for left in report.rejections:
        if left.reason == reason:
            place = ", ".join(part for part in (left.module, left.where) if part)
            return f"{left.message} ({place})" if place else left.message
    return ""


def _explained(model: nn.Module, inputs: Inputs) -> TransformReport:
    try:
        return ac.explain(twin(model), inputs, CONFIG)
    except AttnResError:
        return TransformReport()


def _breaks(model: nn.Module, inputs: Inputs, found: Findings) -> None:
    """Counts graph breaks, where the report says that there are any."""
    assert found.report is not None
    if not found.report.graph_breaks:
        found.graph_breaks = 0
        return
    found.break_at = clean(found.report.graph_breaks[0].where)
    found.notes.append(f"graph break: {found.report.graph_breaks[0].reason}")
    torch._dynamo.reset()
    try:
        with comparison.same_randomness(), torch.no_grad():
            explained = torch._dynamo.explain(twin(model))(*inputs.args, **inputs.kwargs)
    except Exception:  # The number is for the reader; what matters has been measured.
        return
    finally:
        torch._dynamo.reset()
    # Breaks in frames that are compiled on their own make no graph of their own where nothing is computed.
    found.graph_breaks = max(explained.graph_break_count, 1)


def stopped(entry: Entry, status: str, detail: str, seconds: float) -> Row:
    """The row of a model whose process was ended from outside, or ended itself."""
    return Row(
        name=entry.name,
        library=entry.library,
        kind=entry.kind,
        class_name="",
        status=status,
        reason=status,
        detail=clean(detail),
        seconds=round(seconds, 1),
        versions=versions(entry.library),
        source=digest(),
        design=entry.design,
    )


def report_of(entry: Entry) -> TransformReport:
    """The report on the model with its random weights, for a reader."""
    model, inputs = built(entry)
    randomise(model, inputs)
    return _explained(model, inputs)


def counted(entry: Entry) -> Count:
    """The count of the model with its random weights, for a reader."""
    model, inputs = built(entry)
    randomise(model, inputs)
    return count(twin(model), dict(inputs.kwargs))
