"""``transform(..., verify=True)``: a conversion that is compared with the original on the spot, and undone if wrong.

Only copies run, so the model, its gradients, its statistics and its random numbers stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from attnres_compile import api, data_parallel
from attnres_compile.comparison import LowestPrecision, run, same_randomness, twin
from attnres_compile.config import AttnResConfig
from attnres_compile.crossing.regions import compiled
from attnres_compile.errors import AttnResError, ConfigError, InexactError
from attnres_compile.exactness import Exactness, judge, verify
from attnres_compile.inputs import as_inputs
from attnres_compile.rounding import Original
from attnres_compile.study import refuse_wrapped
from attnres_compile.tracing import changes

# Of the loss and of the model's own random numbers.
SEED = 0


def checked_transform(model: nn.Module, example_inputs: Any, config: AttnResConfig) -> nn.Module:
    """:func:`attnres_compile.transform` with ``verify=True``; arguments, result and errors are told there."""
    _refuse_what_is_not_exact(config)
    refuse_wrapped(model)
    data_parallel.refuse(model)
    _refuse_regions(model)
    inputs = as_inputs(example_inputs)
    with same_randomness(), torch.inference_mode(False), torch.enable_grad():
        lowest = LowestPrecision()
        original = run(_copy(model), inputs, SEED, lowest)
        api.transform(model, inputs, config)
        try:
            made = twin(model)
            with _same_random_numbers(model, config):
                found = run(made, inputs, SEED)
        except BaseException as error:
            api.revert(model)
            error.add_note("This came up while the converted model was compared with the original; it was reverted")
            raise
        queries = api.pseudo_queries(made)
        # Not whether the gradient is zero: the model's own weights are, where a head or gate starts from zero.
        reached = [name for name, query in queries.items() if query.grad is not None]

        def plain() -> nn.Module:
            return api.revert(_copy(model))

        def finer() -> Exactness | None:
            # The conversion is what float64 decides; it need not be compiled again for that.
            checked = dataclasses.replace(config, lowering="eager")
            try:
                return verify(plain(), inputs, checked, keep_weights=True, train=None, dtype=torch.float64)
            except Exception:  # Many models name a dtype in their code, and do not run in another.
                return None

        asked = Original(plain, inputs, SEED, original, lowest.dtype)
        exactness = judge(
            asked, original, found, list(queries), reached, config, finer, train=model.training, randomised=False
        )
        if exactness.holds:
            return model
        api.revert(model)
        own = changes(original, _copy(model), inputs, SEED, exactness.tolerance)
    raise _inexact(model, exactness, own)


def _copy(model: nn.Module) -> nn.Module:
    if any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors):
        raise AttnResError(
            "verify=True runs the model, and one on the meta device has no numbers",
            remedy="Build it on the CPU, load weights, or transform without verify",
        )
    try:
        return twin(model)
    except AttnResError as error:
        raise AttnResError(
            error.what, remedy="verify=True compares copies; transform without it, and compare outputs yourself"
        ) from error.__cause__


def _refuse_what_is_not_exact(config: AttnResConfig) -> None:
    for name, exact, why in (
        ("gain", "sum", "divides the sum by the number of sources"),
        ("value", "raw", "mixes normalised sources"),
    ):
        value = getattr(config, name)
        if value != exact:
            raise ConfigError(
                f"verify=True needs {name}={exact!r}: {name}={value!r} {why}, so that even with zero queries the "
                "converted model computes something else than the original",
                remedy=f"Check with {name}={exact!r}, then revert and transform with {name}={value!r}",
            )


def _refuse_regions(model: nn.Module) -> None:
    for path in compiled(model):
        raise AttnResError(
            "verify=True compares copies, and the copy of a compiled part is not compiled",
            module=path,
            remedy="Check the model before its parts are compiled: transform with verify=True, revert, compile them",
        )


@contextlib.contextmanager
def _same_random_numbers(model: nn.Module, config: AttnResConfig) -> Iterator[None]:
    """Compiled code draws what eager code draws: dropout masks must be the original's."""
    if config.lowering == "eager" or not any(module.training for module in model.modules()):
        yield
        return
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True):
        yield


def _inexact(model: nn.Module, exactness: Exactness, own: str) -> InexactError:
    remedy = (
        "That is a bug of this package: please report it with the model. attnres verify shows the numbers of each "
        "dtype and site"
    )
    if own:
        remedy = (
            "What runs only under torch.compiler.is_compiling() is a usual cause. Compare the model with "
            'torch.compile(model, backend="eager"); where the compiled one is right, transform without verify'
        )
    told = "; ".join(part for part in (_difference(exactness), own) if part)
    name = type(model).__name__
    what = f"the converted {name} does not compute what the original does"
    if exactness.holds is None:
        what = f"whether the converted {name} computes what the original does cannot be told"
        remedy = (
            "Check it in float64, or with inputs and weights that magnify rounding less; or transform without verify"
        )
    return InexactError(f"{what}: {told}. It was reverted", exactness=exactness, remedy=remedy)


def _difference(exactness: Exactness) -> str:
    parts = [
        f"{what} {name!r} is off by {error:.1e}, relative ({exactness.dtype}: {exactness.tolerance:.1e} is rounding)"
        for what, name, error in (
            ("output", exactness.worst_output, exactness.output_error),
            ("the gradient of", exactness.worst_gradient, exactness.gradient_error),
        )
        if error is not None and not error <= exactness.tolerance
    ]
    return "; ".join((*parts, *exactness.notes))


__all__ = ["checked_transform"]
