"""Two runs of a model, and how far apart they are: outputs, and gradients of a loss that depends on all of them."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnres_compile.errors import AttnResError, is_out_of_memory
from attnres_compile.inputs import Inputs

# The precisions that are compared, the finest first.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# --- copies


T = TypeVar("T", nn.Module, Inputs)


def as_dtype(value: T, dtype: torch.dtype | None) -> T:
    """A model (in place) or the inputs of a call with all floating tensors in ``dtype``; ``None`` is as they are."""
    if dtype is None:
        return value
    if isinstance(value, nn.Module):
        return value.to(dtype)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in FLOATS else leaf

    args, kwargs = pytree.tree_map(cast, (value.args, value.kwargs))
    return Inputs(args, kwargs)


def twin(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own, without their gradients.

    Raises:
        AttnResError: the model cannot be copied.
    """
    try:
        with warnings.catch_warnings():
            # torch's own trees, in modules that it exported, warn of themselves when they are copied.
            warnings.simplefilter("ignore", FutureWarning)
            made = copy.deepcopy(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise AttnResError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
    for parameter in made.parameters():
        parameter.grad = None
    return made


def switch(model: nn.Module, train: bool) -> bool:
    """Puts a model into training or eval mode; false for one that has its mode in its graph (torch.export)."""
    try:
        model.train(train)
    except NotImplementedError:
        return False
    return True


# --- one run


@dataclass(frozen=True)
class Run:
    """What one run gave.

    Attributes:
        outputs: every tensor of the result by its path, detached.
        gradients: of the loss, by the name of the parameter or input; what got none is missing.
        differentiable: names of all parameters and floating inputs, with or without a gradient.
        notes: what could not be had, and why.
        draws: whether random numbers were drawn.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    differentiable: frozenset[str]
    notes: tuple[str, ...]
    draws: bool = False


class LowestPrecision(TorchDispatchMode):
    """Watches a run: a float64 model whose norms compute in float32 is only as good as float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Numbers without dimensions are constants more often than results.
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.ndim]
        dtypes = [leaf.dtype for leaf in leaves if leaf.dtype in FLOATS]
        self.dtype = max([self.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        return result


def forward(
    model: nn.Module, inputs: Inputs, seed: int, watch: contextlib.AbstractContextManager[Any] | None = None
) -> tuple[Any, dict[str, Tensor], bool]:
    """What a model returns for copies of the inputs, the floating ones among them as leaves by name, and whether it
    drew random numbers.

    Args:
        model: in the mode that it is to run in.
        inputs: what to call it with.
        seed: of the model's own random numbers.
        watch: open while it runs.
    """
    leaves: dict[str, Tensor] = {}

    def fresh(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)  # a cache is written into
        value = value.detach().clone()
        if value.is_floating_point() and value.dtype in FLOATS:
            leaves[f"input {pytree.keystr(path)}"] = value.requires_grad_()
            # Models may write into what they are given, but not into a leaf.
            return value.clone()
        return value

    args, kwargs = pytree.tree_map_with_path(fresh, (inputs.args, inputs.kwargs))
    _seed_all(seed)
    before = _random_states()
    with watch or contextlib.nullcontext():
        result = model(*args, **kwargs)
    return result, leaves, _random_states() != before


def run(
    model: nn.Module, inputs: Inputs, seed: int, watch: contextlib.AbstractContextManager[Any] | None = None
) -> Run:
    """Outputs, and gradients of a loss that depends on every floating output; ``watch`` is open in the forward."""
    for parameter in model.parameters():
        parameter.grad = None
    result, leaves, draws = forward(model, inputs, seed, watch)
    outputs = dict(named_tensors(result))
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
    return Run(detached, gradients, frozenset(named), notes, draws)


def _random_states() -> list[Any]:
    """Of torch on every device in use, Python and numpy, to be compared."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states: list[Any] = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    states.append(random.getstate())
    if numpy := sys.modules.get("numpy"):
        states.append([getattr(part, "tobytes", lambda part=part: part)() for part in numpy.random.get_state()])
    return states


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


def named_tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
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
        yield from named_tensors(item, name, seen)


# --- comparison


@dataclass(frozen=True)
class Difference:
    """How far two sets of tensors are apart.

    Attributes:
        error: the largest relative error of the floating ones; ``None`` without any.
        worst: the name of the tensor that has it.
        equal: they agree in everything that has no rounding: names, shapes, dtypes, integers.
        notes: where they do not.
    """

    error: float | None
    worst: str
    equal: bool
    notes: tuple[str, ...]


def compare(before: dict[str, Tensor], after: dict[str, Tensor], floor: float, dtypes: bool = True) -> Difference:
    """The difference of two sets of named tensors.

    Args:
        before: what to measure against.
        after: what is measured.
        floor: no tensor's error is taken relative to less than this share of the largest value of ``before``.
        dtypes: floating dtypes must be equal too; otherwise values are compared in float64.
    """
    notes = [f"{name} exists in only one of the two" for name in sorted(before.keys() ^ after.keys())]
    errors: dict[str, float] = {}
    scales = {name: _largest(tensor) for name, tensor in before.items() if tensor.is_floating_point()}
    least = floor * max(scales.values(), default=0.0)
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            continue
        same = old.dtype == new.dtype or (not dtypes and name in scales and new.is_floating_point())
        if old.shape != new.shape or not same:
            was, now = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (old, new))
            notes.append(f"{name} was {was} and is {now} when converted")
        elif name in scales:
            errors[name] = _relative(old, new, max(scales[name], least))
        elif not torch.equal(old, new):
            notes.append(f"{name} ({old.dtype}) differs in {int((old != new).sum())} of {old.numel()} values")
    if not errors:
        return Difference(None, "", not notes, tuple(notes))
    worst = max(errors, key=errors.__getitem__)
    return Difference(errors[worst], worst, not notes, tuple(notes))


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


def _gpus_in_use() -> list[int]:
    """Of all GPUs those that this process has memory on, and the current one."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    return [at for at in range(torch.cuda.device_count()) if at == current or torch.cuda.memory_reserved(at)]


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Puts random state back: torch's on every device that this process uses, Python's, and numpy's if it is loaded."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=_gpus_in_use()):
            yield
    finally:
        random.setstate(kept[0])
        if numpy:
            numpy.random.set_state(kept[1])
