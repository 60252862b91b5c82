"""What the sublayer behind a read computes: attention, MLP, or something else. For pictures, never for decisions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.streams import ResidualStream

ATTENTION, MLP, OTHER, OUTPUT = "attention", "mlp", "other", "output"


def reader_kind(stream: ResidualStream, index: int, readers: Iterable[fx.Node]) -> str:
    """The kind of what reads the stream's value after ``index`` steps.

    Returns:
        ``"attention"`` where the next branch contracts two things computed from the read value, or calls an operator
        of attention; ``"mlp"`` where its contractions are all with weights and no token meets another;
        ``"other"`` for convolutions over tokens, recurrences, pooling and what does not lead to the next branch;
        ``"output"`` behind the last step.
    """
    if index >= len(stream.steps):
        return OUTPUT
    between = _between(stream, index, set(readers))
    names = {ops.name_of(node) for node in between}
    if any(_is_attention(node, between) for node in between):
        return ATTENTION
    mixes = any(_mixes_tokens(node) for node in between)
    contracts = any(_contracts(name) for name in names)
    return MLP if contracts and not mixes else OTHER


def _between(stream: ResidualStream, index: int, readers: set[fx.Node]) -> set[fx.Node]:
    """The nodes on the way from ``readers`` to the branch of the next step, both ends included."""
    step = stream.steps[index]
    states = {stream.root, *(each.node for each in stream.steps)}
    back: set[fx.Node] = set()
    stack = [node for term in step.terms for node in (term.node, *(term.product[1:] if term.product else ()))]
    while stack:
        node = stack.pop()
        if node in back or node in states or node.op == "placeholder":
            continue
        back.add(node)
        stack.extend(node.all_input_nodes)
    reached: set[fx.Node] = set()
    stack = [node for node in readers if node in back]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(user for user in node.users if user in back)
    return reached


def _contracts(name: str) -> bool:
    return name in ops.CONTRACTIONS or name.removeprefix("module:") in ops.CONTRACTION_MODULES


def _is_attention(node: fx.Node, between: set[fx.Node]) -> bool:
    name = ops.name_of(node)
    if any(mark in name.lower() for mark in ops.ATTENTION_MARKS):
        return True
    if name not in ops.CONTRACTIONS:
        return False
    made = [operand for operand in node.all_input_nodes if operand in between and not _is_weight(operand)]
    return len(made) > 1


def _is_weight(node: fx.Node) -> bool:
    """Whether ``node`` is a weight, or the part of one that an index picked (experts)."""
    while node.all_input_nodes and ops.name_of(node) in ops.VIEWS | ops.PICKS:
        node = node.all_input_nodes[0]
    return facts.is_parameter_input(node)


def _mixes_tokens(node: fx.Node) -> bool:
    name = ops.name_of(node)
    if name in ops.TOKEN_MIXERS:
        # Experts count their tokens by cumulative sums of integers.
        return facts.tensor(node) is None or facts.is_float(node)
    if "conv" not in name.lower() or not _contracts(name):
        return False
    module = ops.module_of(node)
    weight = getattr(module, "weight", None) if module is not None else None
    if weight is None and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        weight = facts.tensor(node.args[1])
    return weight is None or any(size != 1 for size in weight.shape[2:])
