"""What detection finds, as data: residual streams, and every add left alone with its reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import fx


class Reason(enum.StrEnum):
    """Why an add was left alone."""

    POST_NORM = "post_norm"
    POST_ACTIVATION = "post_activation"
    GATED = "gated"
    MULTI_LANE = "multi_lane"
    DEPTH_ATTENTION = "depth_attention"
    SHIFTED_STREAM = "shifted_stream"
    MUTATED = "mutated"
    GRADIENT_MODE = "gradient_mode"
    UNDER_VMAP = "under_vmap"
    NESTED_TENSOR = "nested_tensor"
    SHARED_WEIGHTS = "shared_weights"
    DROPOUT_ON_STREAM = "dropout_on_stream"
    CLAMP_ON_STREAM = "clamp_on_stream"
    PARTIAL_UPDATE = "partial_update"
    OPAQUE_STEP = "opaque_step"
    TOO_FEW_SUBLAYERS = "too_few_sublayers"
    NO_LEARNED_BRANCH = "no_learned_branch"
    CONSTANT_OPERAND = "constant_operand"
    BROADCAST_SKIP = "broadcast_skip"
    UNRELATED_OPERANDS = "unrelated_operands"
    OUTER_SKIP = "outer_skip"
    CHECKPOINTED = "checkpointed"
    UNKNOWN_FEATURES = "unknown_features"
    UNSUPPORTED_FORM = "unsupported_form"


MESSAGES = {
    Reason.POST_NORM: "the stream is normalised between its adds (post-norm), so it is no plain running sum",
    Reason.POST_ACTIVATION: "an activation stands on the stream between its adds (post-activation)",
    Reason.GATED: "the branch holds a multiple of the stream itself (a gated or interpolated residual)",
    Reason.MULTI_LANE: "the state has lanes that a computed matrix mixes between adds (hyper-connections)",
    Reason.DEPTH_ATTENTION: "the model attends over its own depth already: a softmax weighs its stacked states",
    Reason.SHIFTED_STREAM: "a constant is added to the state itself, and more is done to it before the next add",
    Reason.MUTATED: "a tensor of the stream is written in place where that cannot be undone safely",
    Reason.GRADIENT_MODE: "steps of the stream record no gradient (no_grad, set_grad_enabled, inference_mode)",
    Reason.UNDER_VMAP: "steps of the stream run inside torch.vmap, which the operators of depth attention do not",
    Reason.NESTED_TENSOR: "the stream is a nested tensor, which the operators of depth attention do not take",
    Reason.SHARED_WEIGHTS: "steps of the stream share weights (a loop); depth_loops=True converts loops over depth",
    Reason.DROPOUT_ON_STREAM: "dropout acts on the stream itself between its adds",
    Reason.CLAMP_ON_STREAM: "a clamp (an overflow guard) acts on the stream itself between its adds",
    Reason.PARTIAL_UPDATE: "some parts of the state are updated and some are not (a join of parts, an index, a mask)",
    Reason.OPAQUE_STEP: "a state and what is learned from it are put together by something else than an add",
    Reason.TOO_FEW_SUBLAYERS: "the stream has fewer residual steps than min_sublayers",
    Reason.NO_LEARNED_BRANCH: "no learned contraction lies between the two operands",
    Reason.CONSTANT_OPERAND: "one operand is a parameter or a constant (a bias or a position table)",
    Reason.BROADCAST_SKIP: "the operands' shapes differ in a way that only a plain add can broadcast",
    Reason.UNRELATED_OPERANDS: "neither operand is computed from the other",
    Reason.OUTER_SKIP: "a skip around a converted stream, too short to be a stream of its own",
    Reason.CHECKPOINTED: "an activation-checkpointed region that calls modules, or is used whole, is not looked into",
    Reason.UNKNOWN_FEATURES: "which dimension of the stream holds its features cannot be told",
    Reason.UNSUPPORTED_FORM: "this spelling of an add is not taken apart",
}


@dataclass(frozen=True)
class Rejection:
    """An add that was left alone: why, and which node."""

    reason: Reason
    node: fx.Node
    detail: str = ""

    @property
    def message(self) -> str:
        """One sentence for a person."""
        text = MESSAGES[self.reason]
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True)
class Term:
    """``factor`` times a tensor that a step adds to the stream; a product of two tensors where given.

    Attributes:
        node: the tensor, or the left factor of ``product``.
        factor: a number; -1 for a subtracted branch.
        product: ``("mm" | "bmm" | "mul", right factor)`` for addmm and its kin.
    """

    node: fx.Node
    factor: float = 1.0
    product: tuple[str, fx.Node] | None = None


@dataclass(frozen=True)
class Step:
    """One residual step ``state + branch``.

    Attributes:
        node: the add whose value is the new state.
        skip: the operand that carries the stream, as it enters the add.
        passes: the ops that the stream went through between the previous state and ``skip``, in order.
        terms: the branch, as terms to be summed.
        adds: every add node that this step replaces, ``node`` included, in graph order.
        inner: add nodes inside the branch's own sum, which stay.
        anchored: whether a learned contraction lies between skip and branch.
    """

    node: fx.Node
    skip: fx.Node
    passes: tuple[fx.Node, ...]
    terms: tuple[Term, ...]
    adds: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...] = ()
    anchored: bool = True


@dataclass(frozen=True)
class Read:
    """All that reads the stream's value after ``index`` steps.

    Attributes:
        index: number of steps behind it; 0 is the root.
        readers: the reading nodes in graph order (a path op that is read counts by what reads it).
    """

    index: int
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class ResidualStream:
    """A residual stream: ``root``, then one :class:`Step` after another.

    Attributes:
        root: the tensor it starts from.
        steps: its steps in order; step i makes state i + 1.
        reads: the states that are read, in order.
        axes: feature dimension (>= 0) of the root and of each state.
        feature_dim: size of the features.
        written: in-place scales of its states that are to make tensors of their own.
    """

    root: fx.Node
    steps: tuple[Step, ...]
    reads: tuple[Read, ...]
    axes: tuple[int, ...]
    feature_dim: int
    written: tuple[fx.Node, ...] = ()

    def state(self, index: int) -> fx.Node:
        """The node whose value is the stream's after ``index`` steps."""
        return self.steps[index - 1].node if index else self.root


@dataclass(frozen=True)
class Detection:
    """The streams of a graph, and every add of it that belongs to none."""

    streams: tuple[ResidualStream, ...]
    rejections: tuple[Rejection, ...]
