"""Block Attention Residuals models written by hand from the paper's equations (arXiv 2603.15031).

Each takes the weights of a library's model and calls its submodules for the branches and the norms; what runs
over depth stands here, in the words of docs/method.md, and owes nothing to the package. ``depth=None``
gives the plain residual network, which must equal the library's own forward: that is how these models are
themselves checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Depth:
    """The free choices of the method, as method.md names them.

    ``num_blocks=None`` with ``block_size=None`` is the full form; ``scale="rsqrt_dim"`` is ``d ** -0.5``;
    ``per_reader`` gives each module that reads a value of the stream a query of its own.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    gain: str = "mean"
    value: str = "raw"
    scale: float | str = 1.0
    eps: float = 1e-6
    per_reader: bool = False

    def block_sizes(self, sublayers: int) -> list[int]:
        """How many sublayers each block sums: ``S = L // N``, and a remainder goes into the last block."""
        if self.block_size is not None:
            blocks = max(1, sublayers // self.block_size)
            size = self.block_size
        else:
            blocks = sublayers if self.num_blocks is None else min(self.num_blocks, sublayers)
            size = sublayers // blocks
        return [size] * (blocks - 1) + [sublayers - size * (blocks - 1)]


@dataclass
class Queries:
    """Pseudo-queries in depth order, and for each the weight of its key norm, if it has one."""

    values: list[Tensor]
    key_weights: list[Tensor] | None = None
    used: int = 0

    def take(self) -> tuple[Tensor, Tensor | None]:
        index = self.used
        self.used += 1
        return self.values[index], None if self.key_weights is None else self.key_weights[index]

    def check_all_used(self) -> None:
        assert self.used == len(self.values), f"{len(self.values)} queries, {self.used} sites that need one"


class Stream:
    """One residual stream: ``b_0 .. b_n`` and the partial sum, read through depth attention.

    Args:
        root: what the stream starts from, ``b_0``.
        sublayers: L, its number of branches.
        depth: the method's choices; ``None`` for the plain residual sum.
        queries: where the sites take their queries, in depth order.
        dim: the feature dimension.
    """

    def __init__(self, root: Tensor, sublayers: int, depth: Depth | None, queries: Queries, dim: int = -1) -> None:
        self.blocks = [root]
        self.partial: Tensor | None = None
        self.filled = 0
        self.depth = depth
        self.queries = queries
        self.dim = dim
        self.sizes = [sublayers] if depth is None else depth.block_sizes(sublayers)

    def read(self) -> Tensor:
        """``h``: what the next sublayer, or whatever stands after the last one, gets to see."""
        sources = self.blocks if self.partial is None else [*self.blocks, self.partial]
        if self.depth is None:
            return torch.stack(sources).sum(0)
        if len(sources) == 1:  # a softmax over one source: nothing to choose, so no query
            return sources[0]
        query, key_weight = self.queries.take()
        return depth_mix(query, key_weight, sources, self.depth, self.dim)

    def add(self, branch: Tensor) -> None:
        """Take in the next branch's output; a full block becomes a source of its own."""
        self.partial = branch if self.partial is None else self.partial + branch
        self.filled += 1
        if self.filled == self.sizes[len(self.blocks) - 1]:
            self.blocks.append(self.partial)
            self.partial, self.filled = None, 0


def depth_mix(query: Tensor, key_weight: Tensor | None, sources: list[Tensor], depth: Depth, dim: int) -> Tensor:
    """``gain * sum_i softmax_i(scale * <w, RMSNorm(v_i)>) * v_i`` over the feature dimension ``dim``."""
    width = sources[0].shape[dim]
    shape = [1] * sources[0].ndim
    shape[dim] = width
    w = query.view(shape)
    keys = [v / torch.sqrt((v**2).mean(dim, keepdim=True) + depth.eps) for v in sources]
    weighted = keys if key_weight is None else [key * key_weight.view(shape) for key in keys]
    scale = width**-0.5 if depth.scale == "rsqrt_dim" else depth.scale
    logits = torch.cat([scale * (w * key).sum(dim, keepdim=True) for key in weighted], dim)
    attention = torch.softmax(logits, dim)
    values = keys if depth.value == "normalized" else sources
    gain = len(sources) if depth.gain == "sum" else 1
    return gain * sum(attention.narrow(dim, i, 1) * v for i, v in enumerate(values))


Forward = Callable[[Any, dict[str, Tensor], "Depth | None", Queries], Tensor]


def llama(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """Two sublayers per layer, each behind its own norm."""
    body = model.model
    root = body.embed_tokens(inputs["input_ids"])
    rotary = body.rotary_emb(root, torch.arange(root.shape[1])[None])
    stream = Stream(root, 2 * len(body.layers), depth, queries)
    for layer in body.layers:
        normed = layer.input_layernorm(stream.read())
        stream.add(layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0])
        stream.add(layer.mlp(layer.post_attention_layernorm(stream.read())))
    return model.lm_head(body.norm(stream.read()))


def granite(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """Llama with a scaled embedding, scaled branches and scaled logits."""
    body, config = model.model, model.config
    root = body.embed_tokens(inputs["input_ids"]) * config.embedding_multiplier
    rotary = body.rotary_emb(root, torch.arange(root.shape[1])[None])
    stream = Stream(root, 2 * len(body.layers), depth, queries)
    for layer in body.layers:
        normed = layer.input_layernorm(stream.read())
        attended = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
        stream.add(config.residual_multiplier * attended)
        stream.add(config.residual_multiplier * layer.mlp(layer.post_attention_layernorm(stream.read())))
    return model.lm_head(body.norm(stream.read())) / config.logits_scaling


def olmo2(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """The norm stands on the branch's output, so the branch reads the mix itself."""
    body = model.model
    root = body.embed_tokens(inputs["input_ids"])
    rotary = body.rotary_emb(root, torch.arange(root.shape[1])[None])
    stream = Stream(root, 2 * len(body.layers), depth, queries)
    for layer in body.layers:
        attended = layer.self_attn(stream.read(), position_embeddings=rotary, attention_mask=None)[0]
        stream.add(layer.post_attention_layernorm(attended))
        stream.add(layer.post_feedforward_layernorm(layer.mlp(stream.read())))
    return model.lm_head(body.norm(stream.read()))


def gptj(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """Attention and MLP read the same norm of the same value: one sublayer per layer."""
    body = model.transformer
    root = body.wte(inputs["input_ids"])
    length = root.shape[1]
    rotary = body.rotary_emb(root, position_ids=torch.arange(length)[None])
    mask = torch.full((1, 1, length, length), torch.finfo(root.dtype).min, dtype=root.dtype).triu(1)
    stream = Stream(root, len(body.h), depth, queries)
    for layer in body.h:
        normed = layer.ln_1(stream.read())
        stream.add(layer.attn(normed, position_embeddings=rotary, attention_mask=mask)[0] + layer.mlp(normed))
    return model.lm_head(body.ln_f(stream.read()))


def cohere(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """As GPT-J, with the adds in another order and a scaled head."""
    body = model.model
    root = body.embed_tokens(inputs["input_ids"])
    rotary = body.rotary_emb(root, torch.arange(root.shape[1])[None])
    stream = Stream(root, len(body.layers), depth, queries)
    for layer in body.layers:
        normed = layer.input_layernorm(stream.read())
        attended = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
        stream.add(attended + layer.mlp(normed))
    return model.lm_head(body.norm(stream.read())) * model.logit_scale


def gpt_neox(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """One sublayer per layer whose two halves read the same value through a norm each: two readers."""
    body = model.gpt_neox
    root = body.embed_in(inputs["input_ids"])
    rotary = body.rotary_emb(root, torch.arange(root.shape[1])[None])
    stream = Stream(root, len(body.layers), depth, queries)
    for layer in body.layers:
        for_attention = for_mlp = stream.read()
        if depth is not None and depth.per_reader and len(stream.blocks) > 1:
            for_mlp = stream.read()
        normed = layer.input_layernorm(for_attention)
        attended = layer.attention(normed, attention_mask=None, position_embeddings=rotary)[0]
        stream.add(layer.mlp(layer.post_attention_layernorm(for_mlp)) + attended)
    return model.lm_head(body.final_layer_norm(stream.read()))


def t5(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """Two streams: the encoder's ends in its final norm, which every layer of the decoder's reads."""
    memory = _t5_stack(model.encoder, inputs["input_ids"], None, depth, queries)
    hidden = _t5_stack(model.decoder, inputs["decoder_input_ids"], memory, depth, queries)
    scale = model.config.d_model**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0
    return model.lm_head(hidden * scale)


def _t5_stack(stack: Any, ids: Tensor, memory: Tensor | None, depth: Depth | None, queries: Queries) -> Tensor:
    root = stack.embed_tokens(ids)
    length = root.shape[1]
    mask = None
    if memory is not None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    position_bias = memory_bias = None
    stream = Stream(root, (2 if memory is None else 3) * len(stack.block), depth, queries)
    for block in stack.block:
        attention, *cross, feed_forward = block.layer
        normed = attention.layer_norm(stream.read())
        # The first layer computes the position bias, the others are given it.
        branch, position_bias, _ = attention.SelfAttention(normed, mask=mask, position_bias=position_bias)
        stream.add(branch)
        for layer in cross:
            normed = layer.layer_norm(stream.read())
            branch, memory_bias, _ = layer.EncDecAttention(normed, key_value_states=memory, position_bias=memory_bias)
            stream.add(branch)
        stream.add(feed_forward.DenseReluDense(feed_forward.layer_norm(stream.read())))
    return stack.final_layer_norm(stream.read())


def vit(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """The stream starts from patches plus positions, which are one source together."""
    body = model.vit
    stream = Stream(body.embeddings(inputs["pixel_values"]), 2 * len(body.layers), depth, queries)
    for layer in body.layers:
        stream.add(layer.attention(layer.layernorm_before(stream.read()), None)[0])
        stream.add(layer.mlp(layer.layernorm_after(stream.read())))
    return model.classifier(body.layernorm(stream.read())[:, 0])


def convnext(model: Any, inputs: dict[str, Tensor], depth: Depth | None, queries: Queries) -> Tensor:
    """One stream per stage, over the channels of NCHW; the branch's convolution reads it without a norm."""
    hidden = model.convnext.embeddings(inputs["pixel_values"])
    for stage in model.convnext.encoder.stages:
        for layer in stage.downsampling_layer:
            hidden = layer(hidden)
        stream = Stream(hidden, len(stage.layers), depth, queries, dim=1)
        for layer in stage.layers:
            branch = layer.layernorm(layer.dwconv(stream.read()).permute(0, 2, 3, 1))
            branch = layer.pwconv2(layer.act(layer.pwconv1(branch)))
            stream.add((layer.layer_scale_parameter * branch).permute(0, 3, 1, 2))
        hidden = stream.read()
    return model.classifier(model.convnext.layernorm(hidden.mean((-2, -1))))


FORWARDS: dict[str, Forward] = {
    "llama": llama,
    "granite": granite,
    "olmo2": olmo2,
    "gptj": gptj,
    "cohere": cohere,
    "gpt_neox_parallel": gpt_neox,
    "t5": t5,
    "vit": vit,
    "convnext": convnext,
}
