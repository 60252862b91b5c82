"""The operators of this package: schemas, shapes, autograd and the default implementations.

``attnres::mix`` is depth attention of one site (arXiv 2603.15031), ``attnres::mix_backward`` its gradients,
``attnres::declare`` the mark that a transformed module leaves in every graph it is traced into. Importing this
module registers them; it does not import Inductor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnres_compile.errors import PlainExecutionError
from attnres_compile.kernels import plain

_ARGUMENTS = "int dim, float eps, float gain, float scale, bool normalized"

LIBRARY = torch.library.Library("attnres", "DEF")
LIBRARY.define(f"mix(Tensor query, Tensor[] sources, {_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"mix_backward(Tensor grad, Tensor query, Tensor[] sources, {_ARGUMENTS}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define("declare(Tensor(a!) token, Tensor[] queries, str plan) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _check(query: Tensor, sources: list[Tensor], dim: int) -> None:
    """Raise ``ValueError`` for arguments that broadcasting would silently accept."""
    if not sources:
        raise ValueError("attnres::mix needs at least one source")
    first = sources[0]
    if not first.is_floating_point():
        raise ValueError(f"attnres::mix needs floating-point sources, not {first.dtype}")
    for source in sources:
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                "attnres::mix needs sources of one shape and dtype, not "
                f"{tuple(first.shape)} {first.dtype} and {tuple(source.shape)} {source.dtype}"
            )
    if query.dim() != 1 or query.shape[0] != first.shape[dim]:
        raise ValueError(
            f"attnres::mix needs a query of shape [{first.shape[dim]}], the size of dimension {dim} of its "
            f"sources, not {tuple(query.shape)}"
        )


def _mix(
    query: Tensor, sources: list[Tensor], dim: int, eps: float, gain: float, scale: float, normalized: bool
) -> Tensor:
    _check(query, sources, dim)
    return plain.mix(query, sources, dim, eps, gain, scale, normalized)


def _mix_fake(query: Tensor, sources: list[Tensor], dim: int, *_: Any) -> Tensor:
    _check(query, sources, dim)
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


def _differentiate_twice(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("depth attention has no second derivative: attnres::mix_backward was differentiated")


def _declare(token: Tensor, queries: list[Tensor], plan: str) -> None:
    raise PlainExecutionError(
        "A transformed model was about to run without its depth attention: its residual stream would have been "
        "the plain sum",
        remedy='Compile it with torch.compile(model, backend="attnres") or plain torch.compile(model); if dynamo '
        "gave up recompiling, raise torch._dynamo.config.recompile_limit; undo "
        'torch.compiler.set_stance("force_eager"); or take the depth attention away with '
        "attnres_compile.revert(model)",
    )


def _declare_fake(token: Tensor, queries: list[Tensor], plan: str) -> None:
    return None


LIBRARY.impl("mix", _mix, "CompositeExplicitAutograd")
LIBRARY.impl("mix_backward", plain.mix_backward, "CompositeExplicitAutograd")
LIBRARY.impl("declare", _declare, "CompositeExplicitAutograd")
# Nothing flows through `declare`; without these keys a query that needs gradients meets an autograd kernel.
for _key in ("Autograd", "ADInplaceOrView"):
    LIBRARY.impl("declare", torch.library.fallthrough_kernel, _key)
torch.library.register_fake("attnres::mix", _mix_fake, lib=LIBRARY)
torch.library.register_fake("attnres::mix_backward", _mix_backward_fake, lib=LIBRARY)
torch.library.register_fake("attnres::declare", _declare_fake, lib=LIBRARY)
torch.library.register_autograd("attnres::mix", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("attnres::mix_backward", _differentiate_twice, lib=LIBRARY)


def register_decompositions() -> None:
    """Let Inductor open ``mix`` and ``mix_backward`` up into the code of :mod:`plain`; doing it again is free."""
    from torch._inductor import decomposition

    mix, mix_backward = torch.ops.attnres.mix.default, torch.ops.attnres.mix_backward.default
    if mix in decomposition.decompositions:
        return
    decomposition.register_decomposition([mix])(plain.mix)
    decomposition.register_decomposition([mix_backward])(plain.mix_backward)
    # Inductor keeps a copy of its table from its first use on.
    decomposition.fast_random_decomps.cache_clear()
