"""What many tests share: random weights that hide nothing, outputs and gradients, one measure of error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# The tolerances of docs/method.md.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Run with torch's global generator at ``seed``, and put it back afterwards."""
    state = torch.get_rng_state()
    # torch.manual_seed() writes down who called it, for each kind of device that is not there: 5 ms.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and running statistic a random value, in place; returns the model.

    Default weights hide wrong rewritings: a branch whose scale is 1e-6 or whose output bias is 0 can be
    dropped unseen. Here norm weights spread around 1, biases and layer scales are of order 1, and matrices
    keep activations of order 1 through their fan-in. Buffers that are tables (rotary frequencies, masks,
    position ids) mean something and stay as they are.
    """
    generator = seeded(seed)

    def normal(like: Tensor, mean: float, std: float) -> Tensor:
        # Drawn in float64, so that a model gets the same values in every dtype.
        return mean + std * torch.randn(like.shape, generator=generator, dtype=torch.float64)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=torch.float64)

    seen: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:  # tied to one that has its value
                    continue
                seen.add(id(parameter))
                if isinstance(module, nn.Embedding):
                    parameter.copy_(normal(parameter, 0.0, 1.0))
                elif parameter.ndim >= 2 and max(parameter.shape[:-1]) > 1:
                    parameter.copy_(normal(parameter, 0.0, 0.8 / math.sqrt(_fan_in(module, parameter))))
                elif "bias" in name:
                    parameter.copy_(normal(parameter, 0.0, 0.3))
                elif is_norm or parameter.ndim < 2:  # norm weights, layer scales, learned scalars
                    parameter.copy_(uniform(parameter, 0.5, 1.5))
                else:  # class tokens and the like
                    parameter.copy_(normal(parameter, 0.0, 0.5))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_mean":
                    buffer.copy_(normal(buffer, 0.0, 0.3))
                elif name == "running_var":
                    buffer.copy_(uniform(buffer, 0.5, 1.5))
    return model


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return math.prod(weight.shape[1:])
    if type(module).__name__ == "Conv1D":  # GPT-2's: stored transposed
        return weight.shape[0]
    return weight.shape[-1]


def randomize_queries(queries: Mapping[Any, Tensor], seed: int = 1, std: float = 0.5) -> None:
    """Set every pseudo-query to its own random value, in place."""
    generator = seeded(seed)
    with torch.no_grad():
        for query in queries.values():
            query.copy_(std * torch.randn(query.shape, generator=generator, dtype=torch.float64))


def floats(values: Any) -> list[Tensor]:
    """The floating-point tensors of a nested value, in order. Caches are no outputs and are left out."""
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() else []
    if isinstance(values, Mapping):
        return [leaf for key, value in values.items() if "cache" not in str(key) for leaf in floats(value)]
    if isinstance(values, (tuple, list)):
        return [leaf for value in values for leaf in floats(value)]
    leaves = pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def relative_error(got: Any, want: Any) -> float:
    """Largest difference of any pair of tensors, in units of the largest value of that pair's second one.

    Takes nested values of the same structure. NaN anywhere, or different shapes, is an infinite error.
    """
    ours, theirs = floats(got), floats(want)
    assert len(ours) == len(theirs) > 0, f"{len(ours)} tensors against {len(theirs)}"
    return max(_error(a, b, 0.0) for a, b in zip(ours, theirs, strict=True))


def gradient_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """As :func:`relative_error`, over gradients by parameter name.

    Some gradients are zero in exact arithmetic (a softmax does not see the key's bias), and what is left
    there is noise: the unit of a tensor is at least a tenth of the median tensor's largest value.
    """
    assert got.keys() == want.keys(), f"gradients differ in names: {set(got) ^ set(want)}"
    sizes = sorted(float(value.abs().max()) for value in want.values())
    floor = 0.1 * sizes[len(sizes) // 2]
    assert floor > 0.0, "most gradients are zero: the check would see nothing"
    return max(_error(got[name], want[name], floor) for name in want)


def _error(got: Tensor, want: Tensor, floor: float) -> float:
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    difference = float((got - want).abs().max())
    size = max(float(want.abs().max()), floor)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size > 0.0 else math.inf if difference else 0.0


@dataclass(frozen=True)
class Run:
    """One forward and backward: the float outputs and the gradients by parameter name."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def outputs_and_gradients(
    call: Callable[..., Any],
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor] | Sequence[Tensor],
    seed: int = 7,
) -> Run:
    """Call, project every float output on a fixed random direction, and take the gradients of the sum.

    A random direction sees every output element; the sum of a normalised output, for one, would be constant.
    ``seed`` is also where the global generator stands when the model is called, for dropout.
    """
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with random_state(seed):
        result = call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)
    outputs = floats(result)
    generator = seeded(seed)
    loss = sum(
        (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
        for out in outputs
        if out.requires_grad
    )
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(wanted[name]) if gradient is None else gradient
        for name, gradient in zip(wanted, gradients, strict=True)
    }
    return Run([out.detach() for out in outputs], found)


def main_output(result: Any) -> Tensor:
    """The tensor a loss would be taken of."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    raise AssertionError(f"no main output in {type(result).__name__}")


def saved_bytes(call: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass, parameters left out."""
    seen: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        kept = call()
    assert kept is not None
    return sum(seen.values())
