"""Exactness in numbers: does the converted model with zero queries compute what the original computes?"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnres_compile import api
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.inputs import Inputs, as_inputs

# Largest relative error that still is rounding: this project's promise.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
# Half precisions round the running sum once per sublayer, in either form of it: a random walk. Llamas of 4 to 64
# sublayers measured 0.5 to 1.3 eps * sqrt(sublayers), in both dtypes, outputs and gradients.
HALF_PRECISIONS = (torch.float16, torch.bfloat16)
HALF_FACTOR = 3.0
_FLOATS = (*TOLERANCES, *HALF_PRECISIONS)
# Some gradients are zero but for rounding (the bias of an attention's keys). No gradient is measured against
# less than this share of the largest one.
GRADIENT_FLOOR = 0.1


@dataclass(frozen=True)
class Exactness:
    """How far a converted model with zero queries is from the original.

    Attributes:
        holds: nothing that was compared is further off than ``tolerance``, and the queries got gradients:
            the depth attention has run.
        output_error: largest ``max |a - b| / max |a|`` over the floating outputs; ``None`` without any.
        gradient_error: the same over the gradients of all parameters and floating inputs, for a fixed random
            projection of the outputs as the loss; no gradient is measured against less than a tenth of the
            largest one. ``None`` when there was nothing to differentiate.
        tolerance: the largest error that counts as rounding, relative.
        dtype: lowest floating precision that the original computes in; the tolerance is for it.
        queries: number of pseudo-queries.
        gradients: number of tensors whose gradients were compared.
        mode: ``"eval"`` or ``"train"``.
        randomised: the weights were randomised first.
        worst_output: path of the output with the largest error.
        worst_gradient: name of the parameter or input with the largest gradient error.
        notes: what was not compared, and why.
    """

    holds: bool
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
    train: bool = False,
    seed: int = 0,
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
            statistics are updated in the copies alone. Default is eval mode.
        seed: of the random weights, of the loss and of the model's own random numbers.

    Raises:
        NoStreamError: there is nothing to convert; the error carries the report.
        AttnResError: the model is on the meta device, cannot be copied, or returns no tensors.
        Exception: the model's own, when it rejects the inputs.
    """
    inputs = as_inputs(example_inputs)
    config = config or AttnResConfig(lowering="eager")
    if any(tensor.is_meta for tensor in _tensors(model)):
        raise AttnResError(
            "a model on the meta device has no numbers to compare",
            remedy="Build it on the CPU, or load weights",
        )

    def make() -> nn.Module:
        try:
            made = copy.deepcopy(model).train(train)
        except Exception as error:
            raise AttnResError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
        if not keep_weights:
            randomise_(made, seed)
        return made

    with _same_randomness(), torch.inference_mode(False), torch.enable_grad():
        lowest = _LowestPrecision()
        original = _run(make(), inputs, seed, lowest)
        converted = api.transform(make(), inputs, config)
        queries = api.pseudo_queries(converted)
        run = _run(converted, inputs, seed)
        reached = [name for name, query in queries.items() if query.grad is not None and query.grad.any()]
    # The queries' own gradients have nothing to be compared with.
    kept = {name: tensor for name, tensor in run.gradients.items() if name in original.differentiable}
    outputs = _compare(original.outputs, run.outputs, floor=0.0)
    gradients = _compare(original.gradients, kept, floor=GRADIENT_FLOOR)
    tolerance = tolerance_for(lowest.dtype, len(queries))
    notes = (*original.notes, *outputs.notes, *gradients.notes, *_expectations(config))
    # Exact because the depth attention did not run is the one thing that must not pass.
    ran = bool(reached) or not original.gradients
    if original.gradients and len(reached) < len(queries):
        idle = ", ".join(name for name in list(queries) if name not in reached)
        notes += (f"{len(queries) - len(reached)} of {len(queries)} queries got no gradient: {idle}",)
    errors = [error for error in (outputs.error, gradients.error) if error is not None]
    return Exactness(
        holds=ran and outputs.equal and gradients.equal and all(error <= tolerance for error in errors),
        output_error=outputs.error,
        gradient_error=gradients.error,
        tolerance=tolerance,
        dtype=str(lowest.dtype).removeprefix("torch."),
        queries=len(queries),
        gradients=len(original.gradients),
        mode="train" if train else "eval",
        randomised=not keep_weights,
        worst_output=outputs.worst,
        worst_gradient=gradients.worst,
        notes=notes,
    )


def _expectations(config: AttnResConfig) -> Iterator[str]:
    if config.gain != "sum":
        yield f"gain={config.gain!r} divides the sum by the number of sources: not exact by construction"
    if config.value != "raw":
        yield f"value={config.value!r} mixes normalised sources: not exact by construction"


def tolerance_for(dtype: torch.dtype, queries: int) -> float:
    """Largest relative error that is rounding, for a model with that many queries that computes in ``dtype``."""
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    return float(HALF_FACTOR * torch.finfo(dtype).eps * math.sqrt(max(queries, 1)))


# --- weights that hide nothing


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> None:
    """Moves all weights away from values that make a wrong rewriting look right; the same for one seed.

    Every floating parameter gets normal noise added: of deviation ``fan_in ** -0.5`` with two or more
    dimensions (fan-in: elements per slice of the first dimension), 0.2 otherwise. Running means of batch and
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
            parameter.copy_(parameter.nan_to_num() + noise(parameter) * fan_in**-0.5)
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
    return tensor.dtype in _FLOATS and tensor.numel() > 0 and not overlapping


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# --- one run


@dataclass(frozen=True)
class _Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    differentiable: frozenset[str]  # names of all parameters and inputs, with or without a gradient
    notes: tuple[str, ...]


class _LowestPrecision(TorchDispatchMode):
    """Watches a run: a float64 model whose norms compute in float32 is only as good as float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Numbers without dimensions are constants more often than results.
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.ndim]
        dtypes = [leaf.dtype for leaf in leaves if leaf.dtype in _FLOATS]
        self.dtype = max([self.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        return result


def _run(model: nn.Module, inputs: Inputs, seed: int, watch: _LowestPrecision | None = None) -> _Run:
    """Outputs, and gradients of a loss that depends on every floating output."""
    for parameter in model.parameters():
        parameter.grad = None
    leaves: dict[str, Tensor] = {}

    def fresh(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)  # a cache is written into
        value = value.detach().clone()
        if value.is_floating_point() and value.dtype in _FLOATS:
            leaves[f"input {pytree.keystr(path)}"] = value.requires_grad_()
            # Models may write into what they are given, but not into a leaf.
            return value.clone()
        return value

    args, kwargs = pytree.tree_map_with_path(fresh, (inputs.args, inputs.kwargs))
    _seed_all(seed)
    with watch or contextlib.nullcontext():
        result = model(*args, **kwargs)
    outputs = dict(_named_tensors(result))
    if not outputs:
        raise AttnResError(f"the model returns no tensors to compare, but {type(result).__name__}")
    loss = _projection(outputs, seed)
    notes: tuple[str, ...] = ()
    named = {**dict(model.named_parameters()), **leaves}
    gradients: dict[str, Tensor] = {}
    if loss is None:
        notes = ("gradients were not compared: no floating output depends on a parameter or input by a gradient",)
    else:
        torch.autograd.backward(loss)
        gradients = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    detached = {name: tensor.detach() for name, tensor in outputs.items()}
    return _Run(detached, gradients, frozenset(named), notes)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _projection(outputs: dict[str, Tensor], seed: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    loss: Tensor | None = None
    for tensor in outputs.values():
        if not (tensor.requires_grad and tensor.is_floating_point()):
            continue
        # In float64, so that the loss's own rounding is not what is measured. Infinities are masks.
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        finite = torch.where(tensor.isfinite(), tensor, 0).to(torch.float64)
        part = (finite * direction).sum() / max(tensor.numel(), 1) ** 0.5
        loss = part if loss is None else loss + part
    return loss


def _named_tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a result, with its path. Objects (a cache of keys and values) are looked into."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield path or "output", torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return
    if isinstance(value, (str, bytes, int, float, bool, type(None), type, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        items = [(f"{path}.{name}" if path else name, item) for name, item in getattr(value, "__dict__", {}).items()]
    for name, item in items:
        yield from _named_tensors(item, name, seen)


# --- comparison


@dataclass(frozen=True)
class _Difference:
    error: float | None
    worst: str
    equal: bool  # in everything that has no rounding: names, shapes, dtypes, integers
    notes: tuple[str, ...]


def _compare(before: dict[str, Tensor], after: dict[str, Tensor], floor: float) -> _Difference:
    notes = [f"{name} exists in only one of the two" for name in sorted(before.keys() ^ after.keys())]
    errors: dict[str, float] = {}
    scales = {name: _largest(tensor) for name, tensor in before.items() if tensor.is_floating_point()}
    least = floor * max(scales.values(), default=0.0)
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            continue
        if old.shape != new.shape or old.dtype != new.dtype:
            was, now = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (old, new))
            notes.append(f"{name} was {was} and is {now} when converted")
        elif name in scales:
            errors[name] = _relative(old, new, max(scales[name], least))
        elif not torch.equal(old, new):
            notes.append(f"{name} ({old.dtype}) differs in {int((old != new).sum())} of {old.numel()} values")
    if not errors:
        return _Difference(None, "", not notes, tuple(notes))
    worst = max(errors, key=errors.__getitem__)
    return _Difference(errors[worst], worst, not notes, tuple(notes))


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _relative(old: Tensor, new: Tensor, scale: float) -> float:
    """``max |old - new| / scale``; infinite where one of them is not finite and the other is not the same."""
    same = (old == new) | (old.isnan() & new.isnan())
    if bool(same.all()):
        return 0.0
    off = (old.double() - new.double()).abs()[~same]
    if scale == 0.0 or not bool(off.isfinite().all()):
        return math.inf
    return float(off.max()) / scale


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Puts random state back: torch's on every device, Python's, and numpy's if it is loaded."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(kept[0])
        if numpy:
            numpy.random.set_state(kept[1])
