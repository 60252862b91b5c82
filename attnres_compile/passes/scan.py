"""One walk over a graph that recognises residual steps.

For each add of two floating tensors of one shape it asks which operand the other one is computed from, and
whether a learned contraction lies between. "Computed from" is answered with one bit per tensor that is an
operand of an add, set for as long as some add still needs it, so that the cost stays linear in the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attnres_compile.passes import bodies, facts, lookalikes, opaque, ops
from attnres_compile.passes.bits import Bits
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.sides import AddRecord, Side
from attnres_compile.passes.spellings import Sum, is_opaque_add, summands
from attnres_compile.passes.streams import Reason, Rejection, Term
from attnres_compile.passes.values import Values, entering
from attnres_compile.passes.weights import Weights
from attnres_compile.passes.writes import written


@dataclass
class Scan:
    """The result of :func:`scan`.

    Attributes:
        steps: residual steps by their add, in graph order.
        children: steps by the tensor that their skip comes from.
        rejections: adds that are no residual step, and why.
        base: each node's origin behind ops that keep every element (itself where there is none).
        carried: for each such op the operand whose elements it hands on.
        written: in-place scales that count as their functional twins.
        contractions: learned contractions in graph order, each with the node of its weight.
        highways: ``t * f(x) + (1 - t) * x`` by its add, each with the origin of its ``x``.
        shifted: the same for ``(x + constant) + f(x)``, where something is done to the first sum in between.
        lanes: the same for ``f(x) + matmul(m, x)``, where ``m`` is computed and mixes lanes of ``x``.
        opaque: what may be a step although no add makes it, by the new state.
        affine: steps that add a learned vector to a state that was scaled by another one.
        checkpoints: activation-checkpointed regions.
    """

    steps: dict[fx.Node, AddRecord] = field(default_factory=dict)
    children: dict[fx.Node, list[AddRecord]] = field(default_factory=lambda: defaultdict(list))
    rejections: dict[fx.Node, Rejection] = field(default_factory=dict)
    base: dict[fx.Node, fx.Node] = field(default_factory=dict)
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    contractions: dict[fx.Node, fx.Node] = field(default_factory=dict)
    highways: dict[fx.Node, fx.Node] = field(default_factory=dict)
    shifted: dict[fx.Node, fx.Node] = field(default_factory=dict)
    lanes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    opaque: dict[fx.Node, opaque.Opaque] = field(default_factory=dict)
    affine: set[fx.Node] = field(default_factory=set)
    checkpoints: list[fx.Node] = field(default_factory=list)


class Scanner:
    def __init__(self, graph: fx.Graph, memory: Memory) -> None:
        self.graph = graph
        self.memory = memory
        self.out = Scan()
        self.values = Values(memory)
        self.weights = Weights()
        self.tree: dict[fx.Node, fx.Node] = {}
        # By root of a tree of steps, and by sum of unrelated tensors: what was added as it is, as bits.
        self.injected: dict[fx.Node, int] = {}
        # x + constant that only another add reads: part of that one if it turns out to be a step.
        self.loose: dict[fx.Node, AddRecord] = {}
        self.sums: dict[fx.Node, Sum] = {}
        self.reach: dict[fx.Node, int] = {}
        self.anchored: dict[fx.Node, int] = {}
        # The same for memory that is written, by group: what has been written into it so far.
        self.poured: dict[fx.Node, tuple[int, int]] = {}
        self.bits = Bits()
        self.last_use: dict[fx.Node, int] = {}
        self.expiring: dict[int, list[fx.Node]] = defaultdict(list)
        # Where the last add stands that needs a tensor as an operand, and the last that asks for it as a sibling.
        self.needed_until: dict[fx.Node, int] = {}
        self.asked_until: dict[fx.Node, int] = {}

    def run(self) -> Scan:
        nodes = list(self.graph.nodes)
        position = self.memory.position
        for node in nodes:
            self._flags(node)
            if (total := summands(node)) is not None:
                self.sums[node] = total
                for operand in total.inputs(node):
                    self.last_use[operand] = position[node]
            elif is_opaque_add(node):
                constant = self.values.is_constant(node)
                self._reject(node, Reason.CONSTANT_OPERAND if constant else Reason.UNSUPPORTED_FORM)
        self.values.rewind()
        self._plan_bits(nodes)
        for at, node in enumerate(nodes):
            self._flow(node)
            if node in self.sums:
                self._add(node, self.sums[node])
            else:
                opaque.note(self, node)
            self._pour(node)
            if node in self.needed_until or node in self.asked_until:
                self._track(node)
            for spent in self.expiring.pop(at, ()):
                self.bits.bit.pop(spent, None)
            used = self.sums[node].inputs(node) if node in self.sums else node.all_input_nodes
            for operand in used:
                if self.last_use.get(operand) == at:
                    self.reach.pop(operand, None)
                    self.anchored.pop(operand, None)
        self._name_writes()
        return self.out

    def _name_writes(self) -> None:
        """Call the sums that are written into a part of a state, or over what was computed before, what they are."""
        held = (self.memory.group(n) for record in self.out.steps.values() for n in (record.node, record.base) if n)
        states = {group for group in held if group is not None}
        for node, left in self.out.rejections.items():
            written = {self.memory.group(target) for target in self.memory.targets(node)}
            # Not a tensor that a branch makes for itself, to write into.
            computed = any(origin in self.out.contractions for origin in self.memory.origins(node))
            suspect = {
                Reason.CONSTANT_OPERAND: bool(written & states),
                Reason.UNRELATED_OPERANDS: bool(written & states) or computed,
            }
            if suspect.get(left.reason) and not self.memory.is_functional(node):
                self.out.rejections[node] = Rejection(Reason.MUTATED, node)

    # -------------------------------------------------- what kind of value a node makes

    def _flags(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        for operand in inputs:
            self.last_use[operand] = self.memory.position[node]
        name = ops.name_of(node)
        if ops.is_metadata(node):
            # No value of its tensor enters it.
            self.values.see_source(node, 0)
        elif facts.is_parameter_input(node):
            value = facts.tensor(node)
            self.values.see_source(node, value.dim() if value is not None else 0)
            self.weights.source(node)
        else:
            learns = self._learns(node)
            self.values.see(node, learns)
            if self.values.constant[node]:
                self.weights.made(node, entering(node))
            self.values.write(node, learns)
        through = self._passed_operand(node, name)
        self.out.base[node] = self.out.base[through] if through is not None else node
        if through is not None:
            self.out.carried[node] = through
        if name in ops.CHECKPOINTS:
            self.out.checkpoints.append(node)

    def _learns(self, node: fx.Node) -> bool:
        return ops.name_of(node) in ops.LOOKUPS or self.anchor_weight(node) is not None

    def anchor_weight(self, node: fx.Node) -> fx.Node | None:
        """The weight of a learned contraction, or ``None`` if ``node`` is none."""
        name = ops.name_of(node)
        # What somebody else's operator does with data and a matrix of the model is taken for a product.
        foreign = ops.is_foreign(name) and not all(map(self.values.is_constant, node.all_input_nodes))
        if name in ops.CONTRACTIONS or name.removesuffix("_") in ops.CONTRACTIONS or foreign:
            # A recurrent layer's own weights stand behind the state that it starts from, which may be a parameter.
            inputs = reversed(node.all_input_nodes) if name in ops.RECURRENCES else node.all_input_nodes
            return next((i for i in inputs if self.values.is_matrix(i)), None)
        if name.startswith("module:"):
            module = ops.module_of(node)
            weighty = module is not None and any(p.dim() >= 2 for p in module.parameters())
            return node if weighty and name.removeprefix("module:") in ops.CONTRACTION_MODULES else None
        return bodies.learned_operand(
            node, self.values.weight_rank, lambda inner: inner in ops.CONTRACTIONS or ops.is_foreign(inner)
        )

    def _passed_operand(self, node: fx.Node, name: str) -> fx.Node | None:
        """The operand whose every element ``node`` hands on, maybe cast, re-laid or scaled; else ``None``."""
        first = node.args[0] if node.args else None
        if name in ops.INPLACE_SCALES and len(node.args) == 2 and facts.is_float(node):
            return self._scaled_in_place(node)
        if not facts.is_float(node) or written(node):
            return None
        lays = name in ops.RESHAPES or name in ops.PERMUTES or name in ops.SHUFFLES or name in ops.COPIES
        if lays or name in ops.CASTS:
            return first if isinstance(first, fx.Node) and facts.is_float(first) else None
        if name in ops.DROPOUTS:
            return first if isinstance(first, fx.Node) and ops.dropout_is_identity(node) else None
        if name in ops.ADDS:
            return ops.adds_zero(node)
        if name in ops.SCALES and len(node.args) == 2:
            left, right = node.args
            return self._scaled_operand(node, ((left, right),) if "div" in name else ((left, right), (right, left)))
        return None

    def _scaled_in_place(self, node: fx.Node) -> fx.Node | None:
        """The operand of ``x *= a`` where that could be ``x = x * a`` without anyone noticing."""
        kept, factor = node.args
        before = facts.tensor(kept) if isinstance(kept, fx.Node) else None
        by = facts.tensor(factor) if isinstance(factor, fx.Node) else None
        # A product would widen what a write does not.
        widens = before is not None and by is not None and by.dim() > 0
        if widens and torch.promote_types(before.dtype, by.dtype) != before.dtype:  # type: ignore[union-attr]
            return None
        if self._scaled_operand(node, ((kept, factor),)) is not kept or not self.memory.is_functional(node):
            return None
        self.out.written.add(node)
        return kept if isinstance(kept, fx.Node) else None

    def _scaled_operand(self, node: fx.Node, pairs: Sequence[tuple[Any, Any]]) -> fx.Node | None:
        """What ``node`` scales, of ``pairs`` of what may be scaled and by what; ``None`` if it is no scale."""
        value = facts.tensor(node)
        for kept, factor in pairs:
            if not isinstance(kept, fx.Node) or self.values.is_constant(kept) or node.kwargs:
                continue
            kept_value = facts.tensor(kept)
            if kept_value is None or value is None or not facts.same_shape(kept_value.shape, value.shape):
                continue
            if isinstance(factor, (int, float)):
                return kept
            # A mask or a learned scale may not depend on the stream: nothing learned has been done to it, while a
            # state holds a learned branch.
            if isinstance(factor, fx.Node) and not self.values.is_learned(factor) and facts.tensor(factor) is not None:
                return kept
        return None

    # -------------------------------------------------- who is computed from whom

    def _plan_bits(self, nodes: list[fx.Node]) -> None:
        position = self.memory.position
        for node in nodes:
            for operand in opaque.operands(node):
                self.needed_until[self.out.base[operand]] = position[node]
        ends: dict[fx.Node, int] = {}
        for node in reversed(nodes):
            total = self.sums.get(node)
            if total is None:
                continue
            end = position[node]
            users = list(node.users)
            if len(users) == 1 and users[0] in ends:
                end = ends[users[0]]
            ends[node] = end
            if total.packed is not None:
                ends[total.packed] = end
            for term in total.terms:
                base = self.out.base[term.node]
                behind = lookalikes.looked_behind(self, base)
                for needed in (base, *(self.out.base[i] for i in behind)):
                    self.needed_until[needed] = max(self.needed_until.get(needed, 0), end)

    def _track(self, node: fx.Node) -> None:
        bit = self.bits.give(node)
        self.reach[node] = self.reach.get(node, 0) | bit
        until = max(self.needed_until.get(node, 0), self.asked_until.get(node, 0))
        self.expiring[until].append(node)

    def _flow(self, node: fx.Node) -> None:
        # Which entry is the nearest does not say how near: a codebook's entry is not computed from what chose it.
        if ops.is_metadata(node) or facts.is_index(node):
            return
        reach = anchored = 0
        inputs = entering(node)
        for operand in inputs:
            reach |= self.reach_of(operand)
            anchored |= self.anchored_of(operand)
        weight = self.anchor_weight(node)
        if weight is not None:
            data = [i for i in inputs if not self.values.is_constant(i)]
            # The first operand of addmm is added to the product, not multiplied.
            if ops.name_of(node).removesuffix("_") in ops.FUSED_PRODUCTS and data and data[0] is node.args[0]:
                data = data[1:]
            for operand in data:
                anchored |= self.reach_of(operand)
            self.out.contractions[node] = self.weights.of(weight)
        if reach:
            self.reach[node] = reach
        if anchored:
            self.anchored[node] = anchored

    def _pour(self, node: fx.Node) -> None:
        """What the write ``node`` puts into a tensor is in whatever shares that one's memory from now on."""
        targets = self.memory.targets(node)
        if not targets:
            return
        self.values.write(node, self._learns(node))
        reach, anchored = self.reach.get(node, 0), self.anchored.get(node, 0)
        for group in {self.memory.group(target) for target in targets}:
            if group is not None and (reach or anchored):
                before = self.poured.get(group, (0, 0))
                self.poured[group] = before[0] | reach, before[1] | anchored

    def reach_of(self, node: fx.Node) -> int:
        """The tensors that ``node`` holds by now, as bits."""
        found = self.reach.get(node, 0)
        group = self.memory.group(node)
        return found if group is None else found | self.poured.get(group, (0, 0))[0]

    def anchored_of(self, node: fx.Node) -> int:
        """Those of them from which a learned contraction leads to ``node``."""
        found = self.anchored.get(node, 0)
        group = self.memory.group(node)
        return found if group is None else found | self.poured.get(group, (0, 0))[1]

    # -------------------------------------------------- adds

    def _add(self, node: fx.Node, total: Sum) -> None:
        operands = total.terms
        left, right = (Side(self, term, total.packed or node, node) for term in operands)
        if all(self.values.is_constant(t.node) for t in operands):
            self._reject(node, Reason.CONSTANT_OPERAND)
            return
        skip_side, branch_side = self._choose(left, right)
        if skip_side is None or branch_side is None:
            self._no_step(node, operands)
            return
        if self.memory.targets(node) and not self.memory.is_functional(node):
            self._reject(node, Reason.MUTATED)
            return
        skip = skip_side.head
        value, skip_value = facts.tensor(node), facts.tensor(skip)
        assert value is not None
        fits = all(
            t.product is not None
            or ((b := facts.tensor(t.node)) is not None and facts.broadcasts_into(b.shape, value.shape))
            for t in [*skip_side.rest, *branch_side.terms]
        )
        if skip_value is None or not facts.same_shape(skip_value.shape, value.shape) or not fits:
            self._reject(node, Reason.BROADCAST_SKIP)
            return
        record = AddRecord(node, [*skip_side.rest, *branch_side.terms], skip, self.out.base[skip], gated=total.gated)
        if skip_side.head_factor != 1.0:
            if self._is_anchored(record, branch_side):
                self._reject(node, Reason.UNSUPPORTED_FORM, "the stream is the subtracted operand")
            else:
                self._reject(node, Reason.NO_LEARNED_BRANCH)
            return
        for side in (skip_side, branch_side):
            if side.opened is not None:
                self._withdraw(side.opened)
                record.adds += side.opened.adds
                record.adds += side.zeros
                record.inner += side.opened.inner
            elif side.unread_add is not None:
                record.inner.append(side.unread_add)
        record.adds += [node] if total.packed is None else [total.packed, node]
        if skip_side.opened is not None:
            record.anchored = skip_side.opened.anchored
            record.fed_by = list(skip_side.opened.fed_by)
        self._enter(record, branch_side)
        if lookalikes.shifts_a_scaled_state(self, record):
            self.out.affine.add(node)

    def _choose(self, left: Side, right: Side) -> tuple[Side | None, Side | None]:
        """Which side carries the stream, and which one is the branch (opened or closed as it must be)."""
        a = left.carries(right)
        b = right.carries(left)
        if self.out.base[left.head] is self.out.base[right.head]:
            # x + w * x, and a * x + b * x0 in the first layer: a copy of the stream is added to it.
            a = left.term.product is None and not self.values.is_constant(left.head)
            b = not a
        elif (again := self._injected_again(left, right)) is not None:
            a = again is right
        elif a and b:
            if self._same_tree(left, right):
                # Both are states of one stream: the later one goes on, the older one is added to it.
                a = self.memory.position[self.out.base[left.head]] >= self.memory.position[self.out.base[right.head]]
            else:
                a = left.reaches(right)
        elif (a or b) and self._same_tree(left, right):
            # An older state added to the stream: the stream is what is later.
            at = self.memory.position
            a = at[self.out.base[left.head]] > at[self.out.base[right.head]]
        elif not a and not b:
            # An independent addend to something that is a state already.
            a, b = left.is_state, right.is_state
            if not a and not b:
                return None, None
        skip, branch = (left, right) if a else (right, left)
        twice = self.out.base[skip.head] is self.out.base[branch.head]
        if branch.opened is not None and not twice and not self._same_tree(skip, branch):
            branch.close()
        return skip, branch

    def _injected_again(self, left: Side, right: Side) -> Side | None:
        """The side that was added to the other one's stream before, and is no state: it is added once more."""
        for state, other in ((left, right), (right, left)):
            base = self.out.base[state.head]
            known = self.injected.get(self.tree.get(base, base), 0)
            if known & self.bits.bit.get(self.out.base[other.head], 0) and state.is_state and not other.is_state:
                return other
        return None

    def _holds(self, node: fx.Node) -> int:
        """``node`` and what was added to make it, as bits."""
        base = self.out.base[node]
        return self.bits.bit.get(base, 0) | self.injected.get(base, 0)

    def _same_tree(self, left: Side, right: Side) -> bool:
        base = self.out.base
        trees = [self.tree.get(base[s.head], base[s.head]) for s in (left, right)]
        return trees[0] is trees[1] and base[left.head] is not base[right.head]

    def _no_step(self, node: fx.Node, operands: tuple[Term, Term]) -> None:
        constant = [t for t in operands if self.values.is_constant(t.node) and t.product is None]
        self._reject(node, Reason.CONSTANT_OPERAND if constant else Reason.UNRELATED_OPERANDS)
        if not constant:
            self.injected[node] = self._holds(operands[0].node) | self._holds(operands[1].node)
            lookalikes.note_mixture(self, node, operands)
            lookalikes.note_shift(self, node, operands)
            if lookalikes.updates_a_part(self, node, operands):
                self._reject(node, Reason.PARTIAL_UPDATE)
        elif len(constant) == 1:
            added = constant[0]
            other = operands[1] if added is operands[0] else operands[0]
            values = [facts.tensor(n) for n in (node, other.node, added.node)]
            total, kept, constant_value = values
            if (
                total is not None
                and kept is not None
                and constant_value is not None
                and other.product is None
                and other.factor == 1.0
                and total.dtype == kept.dtype
                and facts.same_shape(total.shape, kept.shape)
                and facts.broadcasts_into(constant_value.shape, total.shape)
            ):
                self.loose[node] = AddRecord(node, [added], other.node, self.out.base[other.node], adds=[node])

    def _reject(self, node: fx.Node, reason: Reason, detail: str = "") -> None:
        self.out.rejections[node] = Rejection(reason, node, detail)

    def _withdraw(self, record: AddRecord) -> None:
        """An unread step became part of a larger one."""
        assert record.base is not None
        if record.node in self.loose:
            del self.out.rejections[record.node]
            return
        del self.out.steps[record.node]
        self.out.children[record.base].remove(record)

    def _is_anchored(self, record: AddRecord, branch: Side) -> bool:
        """Whether a learned contraction lies between the skip of ``record`` and the branch."""
        assert record.base is not None
        bit = self.bits.bit.get(record.base, 0)
        # The operand as it stands, not its terms: an opened step's own operands are forgotten by now.
        factors = branch.factors
        if any(self.anchored_of(factor) & bit for factor in factors):
            return True
        # A product with a weight is the contraction itself.
        weighty = any(map(self.values.is_matrix, factors))
        product = branch.term.product is not None and branch.term.product[0] != "mul"
        return product and weighty and any(self.reach_of(factor) & bit for factor in factors)

    def _enter(self, record: AddRecord, branch: Side) -> None:
        base, node = record.base, record.node
        assert base is not None
        record.anchored |= self._is_anchored(record, branch)
        through = 0
        for factor in branch.factors:
            through |= self.reach_of(factor)
        root = self.tree.get(base, base)
        self.injected[root] = self.injected.get(root, 0) | self._holds(branch.head)
        for sibling in self.out.children[base]:
            if through & self.bits.bit.get(sibling.node, 0):
                record.fed_by.append(sibling.node)
        self.out.children[base].append(record)
        self.out.steps[node] = record
        self.tree[node] = root
        # Later steps on the same state ask whether this one feeds them.
        until = self.needed_until.get(base, 0)
        if until > self.memory.position[node]:
            self.asked_until[node] = until


def scan(graph: fx.Graph, memory: Memory) -> Scan:
    """Recognise the residual steps of ``graph``; reads it and changes nothing."""
    return Scanner(graph, memory).run()
