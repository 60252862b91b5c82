"""The operators of this package: schemas, shapes, autograd and the default implementations.

``attnres::mix`` is depth attention of one site (arXiv 2603.15031), ``attnres::mix_backward`` its gradients,
``attnres::declare`` the mark that a transformed module leaves in every graph it is traced into, ``attnres::outside``
the one of a step of its stream that is traced without it. The two phases and whole sites are in :mod:`phase_ops`.
Importing any module of this package registers all; none imports Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnres_compile.errors import PlainExecutionError
from attnres_compile.kernels import checks, differentiation, plain

_ARGUMENTS = "int dim, float eps, float gain, float scale, bool normalized"

LIBRARY = torch.library.Library("attnres", "DEF")
LIBRARY.define(f"mix(Tensor query, Tensor[] sources, {_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"mix_backward(Tensor grad, Tensor query, Tensor[] sources, {_ARGUMENTS}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define("declare(Tensor(a!) token, Tensor[] queries, str plan) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("outside(Tensor(a!) token, str module) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


# What Inductor opens each operator up into; :mod:`phase_ops` adds its own.
DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _mix(
    query: Tensor, sources: list[Tensor], dim: int, eps: float, gain: float, scale: float, normalized: bool
) -> Tensor:
    checks.mix(query, sources, dim)
    return plain.mix(query, sources, dim, eps, gain, scale, normalized)


def _mix_fake(query: Tensor, sources: list[Tensor], dim: int, *_: Any) -> Tensor:
    checks.mix(query, sources, dim)
    return torch.empty_like(sources[0])


def _mix_backward_fake(grad: Tensor, query: Tensor, sources: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(query), *(torch.empty_like(source) for source in sources)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, sources, *ctx.rest = inputs
    ctx.save_for_backward(query, *sources)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, *sources = ctx.saved_tensors
    query_grad, *grads = torch.ops.attnres.mix_backward.default(grad, query, sources, *ctx.rest)
    wants_query, wants_sources, *_ = ctx.needs_input_grad
    return (
        query_grad if wants_query else None,
        [value if wanted else None for value, wanted in zip(grads, wants_sources, strict=True)],
        *[None] * 5,
    )


def _declare(token: Tensor, queries: list[Tensor], plan: str) -> None:
    raise PlainExecutionError(
        "A transformed model was about to run without its depth attention: its residual stream would have been "
        "the plain sum",
        remedy='Compile it with torch.compile(model, backend="attnres") or plain torch.compile(model); if dynamo '
        "gave up recompiling, raise torch._dynamo.config.recompile_limit; undo "
        'torch.compiler.set_stance("force_eager"); or take the depth attention away with '
        "attnres_compile.revert(model)",
    )


OUTSIDE = "a step of a converted residual stream was about to run outside of the module that owns it, as the plain sum"
OUTSIDE_REMEDY = (
    "Call what was converted (attnres_compile.report names the owners of streams). For the original use `with "
    "attnres_compile.plain(model):`, or take the depth attention away with attnres_compile.revert(model)"
)


def _outside(token: Tensor, module: str) -> None:
    raise PlainExecutionError(OUTSIDE, module=module, remedy=OUTSIDE_REMEDY)


def _outside_fake(token: Tensor, module: str) -> None:
    return None


def _declare_fake(token: Tensor, queries: list[Tensor], plan: str) -> None:
    return None


LIBRARY.impl("mix", _mix, "CompositeExplicitAutograd")
LIBRARY.impl("mix_backward", plain.mix_backward, "CompositeExplicitAutograd")
LIBRARY.impl("declare", _declare, "CompositeExplicitAutograd")
LIBRARY.impl("outside", _outside, "CompositeExplicitAutograd")
# Nothing flows through them; without these keys a query that needs gradients meets an autograd kernel.
for _key in ("Autograd", "ADInplaceOrView"):
    for _name in ("declare", "outside"):
        LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
torch.library.register_fake("attnres::mix", _mix_fake, lib=LIBRARY)
torch.library.register_fake("attnres::mix_backward", _mix_backward_fake, lib=LIBRARY)
torch.library.register_fake("attnres::declare", _declare_fake, lib=LIBRARY)
torch.library.register_fake("attnres::outside", _outside_fake, lib=LIBRARY)
differentiation.register(LIBRARY, "mix", plain.mix, _differentiate, _save)
differentiation.register_plainly(LIBRARY, "mix_backward", plain.mix_backward)
DECOMPOSITIONS[torch.ops.attnres.mix.default] = plain.mix
DECOMPOSITIONS[torch.ops.attnres.mix_backward.default] = plain.mix_backward


def register_decompositions() -> None:
    """Let Inductor open the operators up into plain tensor code; doing it again is free."""
    from torch._inductor import decomposition

    missing = {op: plainly for op, plainly in DECOMPOSITIONS.items() if op not in decomposition.decompositions}
    if not missing:
        return
    for op, plainly in missing.items():
        decomposition.register_decomposition([op])(plainly)
    # Inductor keeps a copy of its table from its first use on.
    decomposition.fast_random_decomps.cache_clear()
