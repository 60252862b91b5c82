"""The options of x-transformers' layers and wrappers, one set per block design."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Design:
    """Options of ``Decoder`` or ``Encoder`` that change how a block adds up.

    Attributes:
        text: what they do to the stream.
        options: of the attention layers; ``None`` takes one of the sizes away.
        wrapper: options of the wrapper around them.
        extra: further inputs by name.
        encoder: not causal.
    """

    text: str
    options: dict[str, Any] = field(default_factory=dict)
    wrapper: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    encoder: bool = False


# --- what a block's residual is
RESIDUALS: dict[str, Design] = {
    "pre-norm": Design("pre-norm, LayerNorm"),
    "post-norm": Design("post-norm", {"pre_norm": False}),
    "pre-and-post-norm": Design("pre-norm and a norm on the stream", {"pre_and_post_norm": True}),
    "sandwich-norm": Design("a norm before and behind each branch", {"sandwich_norm": True}),
    "no-final-norm": Design("pre-norm without a final norm", {"pre_norm_has_final_norm": False}),
    "macaron": Design("two halved feed-forwards around the attention", {"macaron": True}),
    "sandwich-layers": Design("attentions first, feed-forwards last", {"sandwich_coef": 2}),
    "par-layers": Design("fewer attentions than feed-forwards", {"par_ratio": 4}),
    "custom-layers": Design(
        "attention and feed-forward in an order of one's own",
        {"custom_layers": ("a", "f", "f", "a", "f"), "depth": None},
    ),
    "only-attention": Design("no feed-forwards", {"only_attn": True}),
    "shared-layers": Design("all layers share their weights", {"weight_tie_layers": True}),
    "repeated-layers": Design(
        "layers run in an order with repetitions", {"depth": 2, "layers_execute_order": (0, 1, 2, 3, 2, 3, 0, 1)}
    ),
    "repeat-blocks": Design("one block is run three times", {}, extra=("repeat_blocks",)),
    "looped": Design(
        "the whole stack is run again",
        {"pre_and_post_norm": True},
        {"looped": True, "max_looped_steps": 3},
        extra=("looped_steps",),
    ),
    "recycling": Design(
        "the output enters the input of a second run", {}, {"recycling": True}, extra=("recycle_steps",)
    ),
    "scaled-residual": Design("a learned scale per feature on the stream", {"scale_residual": True}),
    "constant-scaled-residual": Design("a constant scale on the stream", {"scale_residual_constant": 0.7}),
    "both-scaled-residual": Design(
        "a learned and a constant scale on the stream", {"scale_residual": True, "scale_residual_constant": 1.25}
    ),
    "scaled-branches": Design("a constant scale on each branch", {"depth_scale_residual": 0.5}),
    "layer-scale": Design(
        "a learned scale per feature on each branch", {"use_layerscale": True, "layerscale_init_value": 0.1}
    ),
    "gated-residual": Design("a GRU instead of an add", {"gate_residual": True}),
    "scaled-gated-residual": Design(
        "a GRU of a scaled stream instead of an add", {"gate_residual": True, "scale_residual": True}
    ),
    "orthogonal-residual": Design(
        "the branch's part that is orthogonal to the stream is added", {"orthog_residual": True}
    ),
    "mean-variance-residual": Design("the stream's mean over tokens is faded out", {"mv_split_residual": True}),
    "learned-mean-variance-residual": Design(
        "the same with learned gates", {"mv_split_residual": True, "residual_fn_kwargs": {"learned": True}}
    ),
    "hyper-connections": Design("several streams, mixed by matrices", {"num_residual_streams": 3}),
    "hyper-connections-views": Design(
        "several streams, q, k and v read different mixes",
        {"num_residual_streams": 3, "qkv_receive_diff_residuals": True},
    ),
    "gated-multi-residual": Design(
        "several streams, read and written through gates",
        {"num_residual_streams": 3, "gated_multi_residual": True, "residual_fn_kwargs": {"read_gate_rank": 5}},
    ),
    "attention-residuals": Design(
        "reads attend over depth already",
        {"attn_aggregated_residuals": True, "attn_aggregated_residual_kwargs": {"lora_rank": 8}},
    ),
    "layer-memory": Design("each layer reads a mix of all earlier states", {"integrate_layers": True}),
    "unet-skips": Design("early states are concatenated to late ones and projected", {"unet_skips": True}),
    "reinject-input": Design("the root is projected and added at each read", {"reinject_input": True}),
    "gated-reinject-input": Design(
        "the same through a gate", {"reinject_input": True, "learned_reinject_input_gate": True}
    ),
    "value-residual": Design("the first attention's values enter the later ones'", {"add_value_residual": True}),
    "attention-score-residual": Design("attention scores add up over depth", {"residual_attn": True}),
    "soft-clamp": Design("a soft clamp behind the last layer", {"softclamp_output": True}),
    "deep-embeddings": Design("each feed-forward is multiplied by an embedding", {}, {"ff_deep_embed": True}),
}

# --- what stands in a branch
BRANCHES: dict[str, Design] = {
    "rms-norm": Design("RMSNorm", {"use_rmsnorm": True}),
    "simple-rms-norm": Design("RMSNorm without weights", {"use_simple_rmsnorm": True}),
    "scale-norm": Design("ScaleNorm", {"use_scalenorm": True}),
    "dynamic-tanh": Design("tanh instead of a norm", {"use_dynamic_tanh": True}),
    "derf": Design("erf instead of a norm", {"use_derf": True}),
    "adaptive-layer-norm": Design(
        "norms conditioned on an input", {"use_adaptive_layernorm": True, "dim_condition": 12}, extra=("condition",)
    ),
    "adaptive-rms-norm": Design(
        "RMS norms conditioned on an input",
        {"use_adaptive_rmsnorm": True, "dim_condition": 12, "adaptive_condition_mlp": True},
        extra=("condition",),
    ),
    "adaptive-layer-scale": Design(
        "norms and branch gates conditioned on an input, as in DiT",
        {"use_adaptive_layernorm": True, "use_adaptive_layerscale": True, "dim_condition": 12},
        extra=("condition",),
    ),
    "rotary": Design("rotary positions", {"rotary_pos_emb": True, "rotary_emb_dim": 8}),
    "rotary-xpos": Design("rotary positions with decay", {"rotary_xpos": True, "rotary_emb_dim": 8}),
    "polar": Design("polar positions", {"polar_pos_emb": True}),
    "alibi": Design("linear position biases", {"alibi_pos_bias": True}),
    "data-dependent-alibi": Design("forgetting gates in the attention", {"attn_data_dependent_alibi": True}),
    "relative-bias": Design("T5's position biases", {"rel_pos_bias": True}),
    "dynamic-bias": Design("position biases from an MLP", {"dynamic_pos_bias": True}),
    "cope": Design("contextual positions", {"attn_use_cope": True, "attn_cope_max_pos": 8}),
    "sinusoidal": Design("scaled sinusoidal positions", {}, {"scaled_sinu_pos_emb": True}),
    "flash": Design("scaled_dot_product_attention", {"attn_flash": True}),
    "grouped-queries": Design("fewer key heads", {"attn_kv_heads": 2}),
    "one-key-head": Design("one key head", {"attn_one_kv_head": True}),
    "qk-norm": Design("norms of queries and keys", {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True}),
    "talking-heads": Design("heads are mixed", {"attn_pre_talking_heads": True, "attn_post_talking_heads": True}),
    "value-gate": Design("the attention's output is gated by its input", {"attn_gate_values": True}),
    "head-gate": Design("the attention's heads are gated", {"attn_gate_value_heads": True}),
    "attention-on-attention": Design("a gated linear unit on the attention's output", {"attn_on_attn": True}),
    "memory-keys": Design("learned keys and values", {"attn_num_mem_kv": 3}),
    "sparse-top-k": Design("attention to the highest scores only", {"attn_sparse_topk": 3}),
    "sigmoid-attention": Design("sigmoid instead of softmax", {"attn_sigmoid": True}),
    "distance-attention": Design("scores from distances", {"attn_l2_distance": True}),
    "selective-attention": Design("heads mask each other's scores", {"attn_selective": True}),
    "laser": Design("attention over exponentials of values", {"attn_laser": True}),
    "hard-attention": Design("one-hot attention, gradients straight through", {"attn_hard": True}),
    "softclamp-scores": Design("soft-clamped scores", {"attn_softclamp_logits": True}),
    "shifted-tokens": Design("features of the token before", {"shift_tokens": 1}),
    "glu": Design("a gated linear unit", {"ff_glu": True}),
    "swiglu-no-bias": Design(
        "a gated linear unit with SiLU, no biases", {"ff_glu": True, "ff_swish": True, "ff_no_bias": True}
    ),
    "glu-mult-bias": Design("a gated linear unit with a scale", {"ff_glu": True, "ff_glu_mult_bias": True}),
    "relu-squared": Design("squared ReLU", {"ff_relu_squared": True}),
    "norm-in-feed-forward": Design("a norm behind the feed-forward's activation", {"ff_post_act_ln": True}),
    "dropout": Design(
        "dropout, in evaluation mode",
        {"attn_dropout": 0.2, "ff_dropout": 0.2, "layer_dropout": 0.3},
        {"emb_dropout": 0.1},
    ),
}

# --- what stands around the layers
AROUND: dict[str, Design] = {
    "encoder": Design("an encoder", encoder=True),
    "masked-encoder": Design("an encoder with a padding mask", {}, extra=("mask",), encoder=True),
    "class-token": Design("an encoder with a class token", {}, {"use_cls_token": True}, encoder=True),
    "average-pool": Design("an encoder with pooling", {}, {"average_pool_embed": True}, encoder=True),
    "attention-pool": Design(
        "an encoder with attention pooling",
        {},
        {"attn_pool": True, "num_pooled_tokens": 2, "attn_pool_depth": 2},
        encoder=True,
    ),
    "memory-tokens": Design("learned tokens in front", {}, {"num_memory_tokens": 3}),
    "interspersed-memory-tokens": Design(
        "learned tokens in between", {}, {"num_memory_tokens": 2, "memory_tokens_interspersed_every": 4}
    ),
    "narrow-embedding": Design("an embedding of another width", {}, {"emb_dim": 24}),
    "tied-embedding": Design("a tied head", {}, {"tie_embedding": True}),
    "embedding-norm": Design("a norm behind the embedding", {}, {"post_emb_norm": True}),
    "mixture-of-softmax": Design("several softmaxes at the end", {}, {"mixture_of_softmax": True}),
    "cross-attention": Design(
        "self-attention, cross-attention, feed-forward", {"cross_attend": True}, extra=("context",)
    ),
    "only-cross-attention": Design(
        "cross-attention, feed-forward", {"cross_attend": True, "only_cross": True}, extra=("context",)
    ),
    "cross-attention-scaled-residual": Design(
        "cross-attention with a learned scale on the stream",
        {"cross_attend": True, "scale_residual": True},
        extra=("context",),
    ),
    "returned-hiddens": Design("every hidden state is returned", {}, extra=("return_hiddens",)),
}
