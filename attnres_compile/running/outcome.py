"""What came of running a script, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.errors import AttnResError
from attnres_compile.inputs import Inputs
from attnres_compile.parameters import DepthQueries
from attnres_compile.report import TransformReport
from attnres_compile.reporting import join
from attnres_compile.running.script import Ending


@dataclass(frozen=True)
class Refused:
    """A module that the script called, and why it was not converted.

    Attributes:
        module: name of its class.
        kind: class of the error that said so, or ``""``.
        reason: why, in one sentence.
        report: the adds left alone, where it was traced.
    """

    module: str
    kind: str
    reason: str
    report: TransformReport | None = None

    @classmethod
    def because(cls, module: nn.Module, error: BaseException) -> Refused:
        """The refusal that an error stands for."""
        what = str(error) if isinstance(error, AttnResError) else f"{type(error).__name__}: {_first_line(error)}"
        return cls(type(module).__name__, type(error).__name__, what, getattr(error, "report", None))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the report."""
        return {"module": self.module, "kind": self.kind, "reason": self.reason}


@dataclass(frozen=True)
class HeldQueries:
    """An optimizer that trains the queries.

    Attributes:
        optimizer: name of its class.
        how: ``"own"``: the queries were among the parameters that it was given; ``"added"``: we added them.
        group: index of the parameter group, from 0.
        groups: number of groups.
        lr: learning rate of the group (the one a schedule starts from, where there is one), or ``None``.
        weight_decay: of the group, or ``None``.
    """

    optimizer: str
    how: str
    group: int
    groups: int
    lr: float | None
    weight_decay: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))

    def __str__(self) -> str:
        rates = [f"{name} {value:g}" for name, value in (("lr", self.lr), ("weight decay", self.weight_decay))
                 if value is not None]  # fmt: skip
        group = f", group {self.group + 1} of {self.groups}" if self.groups > 1 else ""
        return f"{self.optimizer}{group}" + (f" ({', '.join(rates)})" if rates else "")


@dataclass
class Conversion:
    """The model that was converted.

    Attributes:
        name: name of its class.
        training: whether it was in training mode.
        when: what was about to happen: ``"first call"`` or ``"optimizer"`` (the building of one).
        inputs_from: whose inputs it was traced with: ``"call"``, ``"given"`` or ``"dummy_inputs"``.
        report: what was converted.
        stores: path of each converted module, and its queries.
        model: the model, where it is kept.
        inputs: copies of the inputs, where they are kept.
        held: the optimizers that train the queries.
    """

    name: str
    training: bool
    when: str
    inputs_from: str
    report: TransformReport
    stores: tuple[tuple[str, DepthQueries], ...]
    model: nn.Module | None = None
    inputs: Inputs | None = None
    held: list[HeldQueries] = field(default_factory=list)

    def queries(self) -> dict[str, nn.Parameter]:
        """Site name -> pseudo-query, in depth order."""
        return {join(path, site): query for path, store in self.stores for site, query in store.queries().items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that were added, by their state_dict keys."""
        return {
            join(path, f"attnres.{key}"): value
            for path, store in self.stores
            for key, value in store.named_parameters()
        }

    def moved(self) -> dict[str, float]:
        """Site name -> Euclidean norm of its query, which began at zero; the largest first."""
        with torch.no_grad():
            norms = {site: float(torch.linalg.vector_norm(_plain(q))) for site, q in self.queries().items()}
        return dict(sorted(norms.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; norms that are no numbers are ``None``."""
        moved = {
            site: norm if norm == norm and abs(norm) != float("inf") else None for site, norm in self.moved().items()
        }
        return {
            "model": self.name,
            "mode": "train" if self.training else "eval",
            "when": self.when,
            "inputs_from": self.inputs_from,
            "optimizers": [each.to_dict() for each in self.held],
            "query_norms": moved,
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True)
class Outcome:
    """What came of running a script.

    Attributes:
        ending: how it ended.
        conversion: what was converted, or ``None``.
        refused: the modules that were called and not converted, in order.
        notes: what somebody should know, a sentence each.
        own_process: false in a process that the script forked off and that came back here.
    """

    ending: Ending
    conversion: Conversion | None
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]
    own_process: bool = True


def _plain(query: Tensor) -> Tensor:
    return query.detach().to(torch.float64)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
