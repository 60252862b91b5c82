"""Exactness in numbers: does the converted model with zero queries compute what the original computes?"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile import api
from attnres_compile.accepting import refuse_strangers
from attnres_compile.comparison import (
    FLOATS,
    LowestPrecision,
    Run,
    as_dtype,
    compare,
    run,
    same_randomness,
    switch,
    twin,
)
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.rounding import GRADIENT_FLOOR, Original, Verdict, decide, tolerance_for
from attnres_compile.tracing import traced_run

# Converts a model that it may change, as :func:`convert_copy` does; returns the converted one.
Convert = Callable[[nn.Module, Inputs, AttnResConfig], nn.Module]


@dataclass(frozen=True)
class Exactness:
    """How far a converted model with zero queries is from the original.

    Attributes:
        holds: nothing that was compared is further off than ``tolerance``, and the queries got gradients:
            the depth attention has run. ``None`` where the original's own rounding is too coarse to tell, and it does
            not compute in float64, where one could.
        output_error: largest ``max |a - b| / max |a|`` over the floating outputs; ``None`` without any.
        gradient_error: the same over the gradients of all parameters and floating inputs, for a fixed random
            projection of the outputs as the loss; no gradient is measured against less than a tenth of the
            largest one. ``None`` when there was nothing to differentiate.
        tolerance: the largest error that counts as rounding, relative: 1e-12 in float64, 1e-5 in float32. Where the
            errors are larger, and the conversion holds in float64 if the model computes in it, ten times what the
            original is off by itself (:mod:`attnres_compile.rounding`).
        dtype: lowest floating precision that the original computes in; the tolerance is for it.
        queries: number of pseudo-queries.
        gradients: number of tensors whose gradients were compared.
        mode: ``"eval"`` or ``"train"``.
        randomised: the weights were randomised first.
        worst_output: path of the output with the largest error.
        worst_gradient: name of the parameter or input with the largest gradient error.
        notes: what was not compared, and why.
    """

    holds: bool | None
    output_error: float | None
    gradient_error: float | None
    tolerance: float
    dtype: str
    queries: int
    gradients: int
    mode: str
    randomised: bool
    worst_output: str = ""
    worst_gradient: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values. An infinite error (a NaN in one of the two) is the largest float."""
        values = dataclasses.asdict(self)
        for name in ("output_error", "gradient_error"):
            if values[name] is not None:
                values[name] = min(values[name], sys.float_info.max)
        values["notes"] = list(self.notes)
        return values


def verify(
    model: nn.Module,
    example_inputs: Any,
    config: AttnResConfig | None = None,
    *,
    keep_weights: bool = False,
    train: bool | None = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    convert: Convert | None = None,
    traced: bool = False,
) -> Exactness:
    """Converts a copy of ``model`` and compares it, queries at zero, with another copy that stays as it is.

    The model itself, its inputs and all random state stay untouched. Memory: two copies of the model's
    parameters, one at a time with activations, and their gradients.

    Args:
        model: on a real device.
        example_inputs: what to call it with, as for :func:`attnres_compile.transform`.
        config: default ``AttnResConfig(lowering="eager")``, which tests the rewriting and not the compiler.
            Only ``gain="sum"`` with raw values is exact by construction.
        keep_weights: compare with the model's own weights. By default the copies' are randomised
            (:func:`randomise_`), because fresh ones - zero biases, unit norms, tiny LayerScale - hide errors.
        train: compare in training mode, both with the same seed (dropout draws the same masks); batch
            statistics are updated in the copies alone. Default is eval mode; ``None`` leaves each module in its own.
        seed: of the random weights, of the loss and of the model's own random numbers.
        dtype: compare in this floating dtype, the copies and the floating inputs cast to it; default: as they are.
        convert: what to convert a copy with, default :func:`convert_copy`.
        traced: compare with what the original computes when ``torch.compile`` traces it, which is not always what it
            computes eagerly.

    Raises:
        ModelError: ``model`` is no module, or TorchScript.
        NoStreamError: there is nothing to convert; the error carries the report.
        AttnResError: the model is on the meta device, cannot be copied, or returns no tensors.
        Exception: the model's own, when it rejects the inputs.
    """
    refuse_strangers(model)
    given = as_inputs(example_inputs)
    inputs = as_dtype(given, dtype)
    config = config or AttnResConfig(lowering="eager")
    with same_randomness(), torch.inference_mode(False), torch.enable_grad():

        def make() -> nn.Module:
            return as_dtype(private_copy(model, train, None if keep_weights else seed), dtype)

        lowest = LowestPrecision()
        eager = original = run(make(), inputs, seed, lowest)
        if traced:
            original = traced_run(make(), inputs, seed)
        converted = (convert or convert_copy)(make(), inputs, config)
        queries = api.pseudo_queries(converted)
        found = run(converted, inputs, seed)
        reached = [name for name, query in queries.items() if query.grad is not None and query.grad.any()]

        def finer() -> Exactness | None:
            if dtype == torch.float64:
                return None
            options: dict[str, Any] = {"train": train, "seed": seed, "convert": convert, "traced": traced}
            try:
                return verify(model, given, config, keep_weights=keep_weights, dtype=torch.float64, **options)
            except Exception:  # Many models name a dtype in their code, and do not run in another.
                return None

        asked = Original(make, inputs, seed, eager, lowest.dtype)
        return judge(
            asked,
            original,
            found,
            list(queries),
            reached,
            config,
            finer,
            train=model.training if train is None else train,
            randomised=not keep_weights,
        )


def judge(
    asked: Original,
    original: Run,
    found: Run,
    queries: Sequence[str],
    reached: Sequence[str],
    config: AttnResConfig,
    finer: Callable[[], Exactness | None],
    *,
    train: bool,
    randomised: bool,
) -> Exactness:
    """How far the run of a converted model is from the original's.

    Args:
        asked: the original, for what rounding does to it.
        original: the run of it to compare with.
        found: the converted model's, on the same inputs and random numbers.
        queries: names of the pseudo-queries.
        reached: those of them that show by a gradient that they took part.
        config: what was asked for.
        finer: the same comparison in float64; ``None`` if the model does not run in it.
        train, randomised: how the two ran, for the record.
    """
    # The queries' own gradients have nothing to be compared with.
    kept = {name: tensor for name, tensor in found.gradients.items() if name in original.differentiable}
    outputs = compare(original.outputs, found.outputs, floor=0.0)
    gradients = compare(original.gradients, kept, floor=GRADIENT_FLOOR)
    notes = (*original.notes, *outputs.notes, *gradients.notes, *_expectations(config))
    # Exact because the depth attention did not run is the one thing that must not pass.
    ran = bool(reached) or not original.gradients
    if original.gradients and len(reached) < len(queries):
        idle = ", ".join(name for name in queries if name not in reached)
        notes += (f"{len(queries) - len(reached)} of {len(queries)} queries got no gradient: {idle}",)
    largest = max(outputs.error or 0.0, gradients.error or 0.0)

    def holds(tolerance: float) -> bool:
        return ran and outputs.equal and gradients.equal and largest <= tolerance

    def double() -> tuple[bool, float] | None:
        exact = finer()
        if exact is None or exact.dtype != "float64" or exact.holds is None:
            return None
        return exact.holds, max(exact.output_error or 0.0, exact.gradient_error or 0.0)

    if list(_expectations(config)):
        # Further off by construction: nothing to look into.
        tolerance = tolerance_for(asked.dtype, len(queries))
        verdict = Verdict(holds(tolerance), tolerance)
    else:
        verdict = decide(asked, len(queries), holds, largest, double)
    return Exactness(
        holds=verdict.holds,
        output_error=outputs.error,
        gradient_error=gradients.error,
        tolerance=verdict.tolerance,
        dtype=str(asked.dtype).removeprefix("torch."),
        queries=len(queries),
        gradients=len(original.gradients),
        mode="train" if train else "eval",
        randomised=randomised,
        worst_output=outputs.worst,
        worst_gradient=gradients.worst,
        notes=(*notes, verdict.note) if verdict.note else notes,
    )


def convert_copy(model: nn.Module, inputs: Inputs, config: AttnResConfig) -> nn.Module:
    """A converted model for one that nobody else uses: :func:`attnres_compile.transform`, or, for the module of a
    ``torch.export`` program, :func:`attnres_compile.rewrite_graph`, compiled if ``config.lowering`` says so.
    """
    if not is_exported(model):
        return api.transform(model, inputs, config)
    assert isinstance(model, fx.GraphModule)
    with warnings.catch_warnings():
        # As for a twin.
        warnings.simplefilter("ignore", FutureWarning)
        rewritten, _ = api.rewrite_graph(model, None, config)
    if config.lowering == "inductor":
        rewritten.compile()
    return rewritten


def is_exported(model: nn.Module) -> bool:
    """Whether this is the module of a ``torch.export`` program, whose mode is part of its graph."""
    # There is no public name for its class, and its train() raises, but not that of a copy.
    return isinstance(model, fx.GraphModule) and any(c.__name__ == "_StatefulGraphModule" for c in type(model).__mro__)


def private_copy(model: nn.Module, train: bool | None, seed: int | None) -> nn.Module:
    """A copy in that mode (``None``: as it is), its weights randomised by ``seed`` unless that is ``None``.

    Raises:
        AttnResError: the model is on the meta device or cannot be copied.
    """
    if any(tensor.is_meta for tensor in _tensors(model)):
        raise AttnResError(
            "a model on the meta device has no numbers to compare",
            remedy="Build it on the CPU, or load weights",
        )
    made = twin(model)
    if train is not None:
        switch(made, train)
    if seed is not None:
        randomise_(made, seed)
    return made


def _expectations(config: AttnResConfig) -> Iterator[str]:
    if config.gain != "sum":
        yield f"gain={config.gain!r} divides the sum by the number of sources: not exact by construction"
    if config.value != "raw":
        yield f"value={config.value!r} mixes normalised sources: not exact by construction"


# --- weights that hide nothing


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> None:
    """Moves all weights away from values that make a wrong rewriting look right; the same for one seed.

    Every floating parameter gets normal noise added: of deviation ``fan_in ** -0.5`` with two or more
    dimensions (fan-in: elements per slice of the first dimension), 0.2 otherwise. Its size - the root of its mean
    square - then is that of the noise or what it was before, whichever is larger: a network whose weights are all
    larger than they should be magnifies rounding errors. Running means of batch and
    instance norms get noise of deviation 0.2, running variances a positive factor. Other persistent floating
    buffers are multiplied by positive factors around 1, so that zeros, signs and infinities (masks) stay.
    Left as they are: non-persistent buffers, which are derived from the configuration (rotary frequencies,
    masks) and that a checkpoint does not hold either; integers, truth values, 8-bit and expanded tensors.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)

    for parameter in model.parameters():
        if _can_change(parameter):
            fan_in = parameter.numel() / parameter.shape[0] if parameter.ndim > 1 else 25.0
            own, new = parameter.nan_to_num(), fan_in**-0.5
            size = float(own.double().square().mean().sqrt())
            parameter.copy_((own + noise(parameter) * new) * (max(size, new) / math.hypot(size, new)))
    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or not _can_change(buffer):
                continue
            seen.add(id(buffer))
            if name in module._non_persistent_buffers_set:
                continue
            if name == "running_mean":
                buffer.add_(noise(buffer) * 0.2)
            else:
                buffer.mul_((noise(buffer) * 0.2).exp())


def _can_change(tensor: Tensor) -> bool:
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.dtype in FLOATS and tensor.numel() > 0 and not overlapping


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
