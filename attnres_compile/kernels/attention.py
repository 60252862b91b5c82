"""Depth attention for people who only want the operation: no model, no compiler pass.

Equations: arXiv 2603.15031, and docs/method.md for the options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attnres_compile.errors import ConfigError
from attnres_compile.kernels import cpu, differentiation, ops, plain

_WHERE = "attnres_compile.ops.depth_attention"


def depth_attention(
    query: Tensor,
    sources: Sequence[Tensor],
    *,
    gain: Literal["mean", "sum"] | float = "mean",
    eps: float = 1e-6,
    key_norm_weight: Tensor | None = None,
    value: Literal["raw", "normalized"] = "raw",
    logit_scale: Literal["rsqrt_dim"] | float = 1.0,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``gain * sum_i softmax_i(logit_scale * <query, key_norm_weight * RMSNorm(v_i)>) * v_i`` over the sources.

    Differentiable once, for the query, the key norm's weight and the sources. Works eagerly, under ``torch.compile``
    and ``torch.export``, on any device; CUDA and ROCm devices run generated kernels. Sums are float32 (float64 for
    float64 sources), also under autocast, and rounded once.

    Args:
        query: ``[d]``, or ``[S, d]`` for S reads of the same sources at once; any floating dtype.
        sources: N >= 1 tensors ``[..., d]`` of one shape, dtype and device.
        gain: ``"mean"`` is 1, the paper's convex mix; ``"sum"`` is N, with which a zero query gives the plain sum; or
            the factor itself.
        eps: added to the mean square of a source in its RMSNorm.
        key_norm_weight: learned weight of the keys' RMSNorm, ``[d]``, or ``[S, d]`` with one for each of S queries.
        value: mix the ``"raw"`` sources or the ``"normalized"`` ones.
        logit_scale: factor on the logits; ``"rsqrt_dim"`` is ``d ** -0.5``.
        return_weights: also return the softmax's numbers. They carry no gradient.

    Returns:
        ``[..., d]``, or ``[S, ..., d]`` for S reads, in the sources' dtype. With ``return_weights`` a pair of that and
        the weights, ``[N, ...]`` or ``[S, N, ...]``, float32 (float64 for float64 sources), which sum to 1 over N.

    Raises:
        ConfigError: an argument is of the wrong shape or dtype, or not one of its values.
    """
    sources = _checked(query, sources, key_norm_weight)
    eps = _finite("eps", eps)
    factor = _gain(gain, len(sources))
    scale = _scale(logit_scale, sources[0].shape[-1])
    if value not in ("raw", "normalized"):
        raise ConfigError(f"value is {value!r}", where=_WHERE, remedy='Give "raw" or "normalized"')
    normalized = value == "normalized"
    if key_norm_weight is not None:
        compute = plain.compute_dtype(sources[0].dtype)
        query = query.to(compute) * key_norm_weight.to(compute)
    if torch.compiler.is_dynamo_compiling():
        _prepare()
    if query.dim() == 1:
        mixed = _one(query, sources, eps, factor, scale, normalized)
    else:
        found = torch.ops.attnres.inter.default(list(query.unbind(0)), sources, -1, eps, scale, normalized)
        mixed = torch.stack(found[: query.shape[0]])
        mixed = mixed if factor == 1.0 else mixed * factor
    if return_weights:
        return mixed, _weights(query, sources, eps, scale)
    return mixed


def _one(query: Tensor, sources: list[Tensor], eps: float, gain: float, scale: float, normalized: bool) -> Tensor:
    """The read of one query, by whatever is fastest where it runs."""
    compiling = torch.compiler.is_compiling()
    # The compiled kernel knows gradients alone.
    native = not compiling and not differentiation.transformed([query, *sources])
    if native and all(tensor.is_cpu for tensor in (query, *sources)) and cpu.served(sources[0].dtype):
        return cpu.mix_through(query, sources, -1, eps, gain, scale, normalized)[0]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, *sources))
    found: list[Tensor] = torch.ops.attnres.site.default(
        query, sources, None, None, None, None, None, "", 0.0, -1, eps, gain, scale, normalized, keep
    )
    return found[0]


def _prepare() -> None:
    """Dynamo runs this while it traces: Inductor must know the operators before it lowers the graph."""
    ops.register_decompositions()


# The mark of torch.compiler.assume_constant_result, which would import dynamo and Inductor right here.
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _weights(query: Tensor, sources: list[Tensor], eps: float, scale: float) -> Tensor:
    with torch.no_grad():
        compute = plain.compute_dtype(sources[0].dtype)
        wide = query.to(compute)
        logits = []
        for source in sources:
            v = source.to(compute)
            rms = torch.rsqrt((v * v).mean(-1) + eps)
            logits.append(torch.stack([(v * one).sum(-1) * rms * scale for one in wide.reshape(-1, wide.shape[-1])]))
        weights = torch.softmax(torch.stack(logits, dim=1), dim=1)
        return weights[0] if query.dim() == 1 else weights


def _checked(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None) -> list[Tensor]:
    """The sources as a list, after all that shapes and dtypes can get wrong."""
    if isinstance(sources, Tensor):
        raise ConfigError(
            f"sources is one tensor of shape {tuple(sources.shape)}", where=_WHERE, remedy="Give a list of tensors"
        )
    found = list(sources)
    if not found:
        raise ConfigError("sources is empty", where=_WHERE, remedy="Give at least one tensor")
    first = found[0]
    if first.dim() == 0 or first.shape[-1] == 0 or not first.is_floating_point():
        raise ConfigError(
            f"the sources are {first.dtype} of shape {tuple(first.shape)}",
            where=_WHERE,
            remedy="Give floating-point tensors whose last dimension holds the features",
        )
    for index, source in enumerate(found):
        if source.shape != first.shape or source.dtype != first.dtype or source.device != first.device:
            raise ConfigError(
                f"source {index} is {tuple(source.shape)} {source.dtype} on {source.device}, and source 0 "
                f"{tuple(first.shape)} {first.dtype} on {first.device}",
                where=_WHERE,
                remedy="Give sources of one shape, dtype and device",
            )
    if query.dim() not in (1, 2) or query.shape[-1] != first.shape[-1] or query.shape[0] == 0:
        raise ConfigError(
            f"the query has the shape {tuple(query.shape)} for {first.shape[-1]} features",
            where=_WHERE,
            remedy=f"Give a query of shape [{first.shape[-1]}], or [S, {first.shape[-1]}] for S reads",
        )
    if key_norm_weight is not None and key_norm_weight.shape != (
        query.shape if key_norm_weight.dim() == 2 else first.shape[-1:]
    ):
        raise ConfigError(
            f"key_norm_weight has the shape {tuple(key_norm_weight.shape)} for a query of shape {tuple(query.shape)}",
            where=_WHERE,
            remedy="Give one weight per feature, or one of the query's shape",
        )
    return found


def _gain(gain: str | float, count: int) -> float:
    if isinstance(gain, str):
        if gain not in ("mean", "sum"):
            raise ConfigError(f"gain is {gain!r}", where=_WHERE, remedy='Give "mean", "sum" or a number')
        return 1.0 if gain == "mean" else float(count)
    return _finite("gain", gain)


def _scale(scale: str | float, size: int) -> float:
    if isinstance(scale, str):
        if scale != "rsqrt_dim":
            raise ConfigError(f"logit_scale is {scale!r}", where=_WHERE, remedy='Give "rsqrt_dim" or a number')
        root: float = size**-0.5
        return root
    return _finite("logit_scale", scale)


def _finite(name: str, number: object) -> float:
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ConfigError(f"{name} is {number!r}", where=_WHERE, remedy="Give a finite number")
    return number
