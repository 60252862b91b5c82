"""What the survey writes down about one architecture. Data only; one JSON object per line of a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# converted: all of its sublayers, exact.
# partly: exact, but fewer sublayers than the count by hooks says.
# refused: nothing converted, with a reason.
# no_stream: it adds nothing up over depth by the count by hooks, and nothing was converted.
# differs: exact, but more sublayers than the count by hooks says.
# traced: not exact, since torch.compile alone makes something else of it; exact against that. verify=True refuses it.
# wrong: converted and not exact.
# not_run: eager PyTorch cannot build or run it.
# error: this package (or dynamo under it) raised something that is not one of its own refusals.
# timeout, memory: limits of the survey.
STATUSES = (
    *("converted", "partly", "refused", "no_stream", "differs", "traced", "wrong"),
    *("not_run", "error", "timeout", "memory"),
)


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        name, library, kind: as in :class:`tests.zoo.survey.entry.Entry`.
        class_name: of the model.
        status: one of :data:`STATUSES`.
        expected: sublayers of each stream by the count by hooks (:mod:`tests.zoo.survey.count`), in depth order.
        found: sublayers of each converted stream, in depth order.
        reason: why it was refused or left in part: the main rejection reason's name, or the error's kind.
        detail: one line for a reader: the error's message or what differs; no path of this machine.
        reasons: how often each rejection reason stands in the report.
        output_error: relative, float32, queries zero, every parameter randomised; ``None`` if nothing ran.
        gradient_error: the same for the gradients.
        oracle: at random queries, ``"holds"``, ``"disagrees"`` or ``"not judged"`` by the oracle
            (:mod:`attnres_compile.oracle`); empty where nothing was converted, or the row is older than that.
        oracle_error: the larger one of the relative errors of outputs and gradients then.
        oracle_note: what disagrees, or why it was not judged.
        graph_breaks: number of breaks that dynamo makes in the model, or ``None`` where unknown.
        break_at: file and line of the first one, the file relative to site-packages.
        parameters: of the model.
        seconds: wall clock in all.
        versions: of torch and the library.
        source: digest of the package's source files that the row was made with.
        design: what the entry says about its blocks.
    """

    name: str
    library: str
    kind: str
    class_name: str
    status: str
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    reason: str = ""
    detail: str = ""
    reasons: dict[str, int] = field(default_factory=dict)
    output_error: float | None = None
    gradient_error: float | None = None
    oracle: str = ""
    oracle_error: float | None = None
    oracle_note: str = ""
    graph_breaks: int | None = None
    break_at: str = ""
    parameters: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""
    design: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        """The row that :meth:`to_dict` made these of."""
        return cls(**{**values, "expected": tuple(values["expected"]), "found": tuple(values["found"])})
