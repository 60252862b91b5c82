"""The ways to run a converted model, and how far two of them are apart while its queries have something to say."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attnres_compile import api
from attnres_compile.comparison import Run, compare, run
from attnres_compile.config import AttnResConfig, Lowering
from attnres_compile.exactness import Convert
from attnres_compile.inputs import Inputs
from attnres_compile.parameters import converted
from attnres_compile.report import TransformReport
from attnres_compile.rounding import GRADIENT_FLOOR

# Standard deviation of the logits that random queries give: of eight sources one then has 20 times another's weight.
LOGIT_DEVIATION = 1.0


@dataclass(frozen=True)
class Variant:
    """A way to run a converted model.

    Attributes:
        lowering: op by op, or compiled.
        two_phase: finished blocks once per block for all its sites.
        fuse: adds and norms beside a site in its operator. Inductor fuses by itself where its kernels do.
    """

    lowering: Lowering
    two_phase: bool = False
    fuse: bool = False

    @property
    def what(self) -> str:
        """For people, as ``"eager, two-phase"``."""
        name = "Inductor" if self.lowering == "inductor" else self.lowering
        return f"{name}, {'two-phase' if self.two_phase else 'one-phase'}{', fused' if self.fuse else ''}"

    def of(self, config: AttnResConfig) -> AttnResConfig:
        """``config``, run in this way."""
        left = "off" if self.lowering == "eager" else "auto"
        return replace(
            config,
            lowering=self.lowering,
            two_phase="on" if self.two_phase else "off",
            fuse="on" if self.fuse else left,  # type: ignore[arg-type]
        )

    def missing(self, report: TransformReport) -> str:
        """Why the model cannot be run in this way, from the report of trying; or ``""``."""
        split = any(phase.applies and phase.chosen == "two_phase" for phase in report.phases)
        if self.two_phase and not split:
            return "no two sites read the same finished blocks, so there is nothing to share (fewer blocks would)"
        if self.fuse and not any(fusion.add or fusion.norm for fusion in report.fusions):
            return "no add and no norm can be fused into a site"
        return ""


ONE_PHASE = Variant("eager")
VARIANTS = (
    ONE_PHASE,
    Variant("eager", two_phase=True),
    Variant("eager", fuse=True),
    Variant("eager", two_phase=True, fuse=True),
    Variant("inductor"),
    Variant("inductor", two_phase=True),
)


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        run: outputs and gradients.
        queries: names of the parameters that the conversion added.
        report: what the passes did.
    """

    run: Run
    queries: frozenset[str] = frozenset()
    report: TransformReport = field(default_factory=TransformReport)


def run_variant(
    variant: Variant,
    model: nn.Module,
    inputs: Inputs,
    config: AttnResConfig,
    seed: int,
    convert: Convert,
    watch: contextlib.AbstractContextManager[object] | None = None,
) -> Result:
    """Convert ``model``, which nobody else uses, give it random queries, and run it forward and backward.

    Args:
        variant: how to run it.
        model, inputs: what to convert, and what to call it with.
        config: how to convert it; the variant has the last word on how it runs.
        seed: of the queries, the loss, and the model's own random numbers.
        convert: what converts.
        watch: open while it runs.

    Raises:
        Exception: of the conversion, of the compiler, or of the model.
    """
    model = convert(model, inputs, variant.of(config))
    added = spread_queries(model, config, seed)
    with _eager_random_numbers(variant), watch or contextlib.nullcontext():
        found = run(model, inputs, seed)
    return Result(found, added, api.report(model))


@torch.no_grad()
def spread_queries(model: nn.Module, config: AttnResConfig, seed: int) -> frozenset[str]:
    """Give the queries of a converted model normal values with which the logits' standard deviation is 1, and key
    norm weights a deviation of 0.2 around 1. The same for one seed in any floating dtype that holds them.

    Returns:
        The names of these parameters in ``model``.
    """
    generator = torch.Generator().manual_seed(seed)
    added: set[int] = set()
    for _, _, child in converted(model):
        for query in child.queries().values():
            # Keys are normalised: their norm is the root of their size.
            per_unit = abs(config.scale_for(query.numel())) * math.sqrt(query.numel())
            query.copy_(_noise(query, generator) * (LOGIT_DEVIATION / per_unit if per_unit else 1.0))
        for weight in child.key_norms().values():
            weight.copy_(1.0 + 0.2 * _noise(weight, generator))
        added.update(map(id, child.tensors()))
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in added)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    # Rounded to the coarsest format, so that every dtype gets the same numbers.
    noise = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return noise.to(torch.bfloat16).to(like.device, torch.float32)


def _eager_random_numbers(variant: Variant) -> contextlib.AbstractContextManager[None]:
    """Inductor draws dropout's numbers in its own way unless it is told to draw them as the eager model does."""
    if variant.lowering == "eager":
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


# --- how far apart


@dataclass(frozen=True)
class Apart:
    """How far one run is from another.

    Attributes:
        output, gradient: largest relative errors; ``None`` if there was nothing to compare.
        worst_output, worst_gradient: where they are.
        equal: they agree in everything that has no rounding.
        notes: where they do not.
    """

    output: float | None
    gradient: float | None
    worst_output: str
    worst_gradient: str
    equal: bool
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """The largest error; 0 if there was nothing to compare."""
        return max(self.output or 0.0, self.gradient or 0.0)


def apart(reference: Result, other: Result) -> Apart:
    """Compare two runs, which may be in different floating dtypes.

    Gradients are relative to no less than a tenth of the largest one, those of the queries, which are smaller by nature
    and what is left of larger terms that cancel, to the largest of theirs.
    """
    outputs = compare(reference.run.outputs, other.run.outputs, floor=0.0, dtypes=False)
    groups = [
        compare(_only(reference, queries), _only(other, queries), floor=floor, dtypes=False)
        for queries, floor in ((False, GRADIENT_FLOOR), (True, 1.0))
    ]
    worst = max(groups, key=lambda group: -1.0 if group.error is None else group.error)
    return Apart(
        outputs.error,
        worst.error,
        outputs.worst,
        worst.worst,
        outputs.equal and all(group.equal for group in groups),
        (*outputs.notes, *groups[0].notes, *groups[1].notes),
    )


def _only(result: Result, queries: bool) -> dict[str, Tensor]:
    gradients: Iterator[tuple[str, Tensor]] = iter(result.run.gradients.items())
    return {name: tensor for name, tensor in gradients if (name in result.queries) == queries}
