"""One walk over a graph that recognises residual steps.

For each add of two floating tensors of one shape it asks which operand the other one is computed from, and
whether a learned contraction lies between. "Computed from" is answered with one bit per tensor that is an
operand of an add, set for as long as some add still needs it, so that the cost stays linear in the graph.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.streams import Reason, Rejection, Term


@dataclass
class AddRecord:
    """An add as it was understood. ``skip`` is ``None`` where it is no residual step."""

    node: fx.Node
    terms: list[Term]
    skip: fx.Node | None = None
    base: fx.Node | None = None
    adds: list[fx.Node] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    anchored: bool = False
    # Earlier steps on the same state that this one's branch is computed from.
    fed_by: list[fx.Node] = field(default_factory=list)


@dataclass
class Scan:
    """The result of :func:`scan`.

    Attributes:
        steps: residual steps by their add, in graph order.
        children: steps by the tensor that their skip comes from.
        rejections: adds that are no residual step, and why.
        base: each node's origin behind ops that keep every element (itself where there is none).
        carried: for each such op the operand whose elements it hands on.
        contractions: learned contractions in graph order, each with the node of its weight.
        checkpoints: activation-checkpointed regions.
    """

    steps: dict[fx.Node, AddRecord] = field(default_factory=dict)
    children: dict[fx.Node, list[AddRecord]] = field(default_factory=lambda: defaultdict(list))
    rejections: dict[fx.Node, Rejection] = field(default_factory=dict)
    base: dict[fx.Node, fx.Node] = field(default_factory=dict)
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)
    contractions: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    checkpoints: list[fx.Node] = field(default_factory=list)


class _Bits:
    """Bits for the tensors that some add ahead still needs; compacted when most of them are spent."""

    def __init__(self) -> None:
        self.bit: dict[fx.Node, int] = {}
        self._next = 0

    def give(self, node: fx.Node) -> int:
        bit = 1 << self._next
        self._next += 1
        self.bit[node] = bit
        return bit

    @property
    def crowded(self) -> bool:
        return self._next > 64 and self._next > 2 * len(self.bit)

    def compact(self, *tables: dict[fx.Node, int]) -> None:
        """Renumber the live bits from 0 and carry ``tables`` over."""
        moves = [(old, 1 << new) for new, old in enumerate(sorted(self.bit.values()))]
        live = sum(old for old, _ in moves)
        for table in tables:
            for node, bits in table.items():
                bits &= live
                if bits:
                    table[node] = self._moved(bits, moves)
                else:
                    table[node] = 0
        renumbered = dict(moves)
        self.bit = {node: renumbered[old] for node, old in self.bit.items()}
        self._next = len(moves)

    @staticmethod
    def _moved(bits: int, moves: list[tuple[int, int]]) -> int:
        return sum(new for old, new in moves if bits & old)


class _Scanner:
    def __init__(self, graph: fx.Graph, memory: Memory) -> None:
        self.graph = graph
        self.memory = memory
        self.out = Scan()
        self.constant: dict[fx.Node, bool] = {}
        self.learned: dict[fx.Node, bool] = {}
        self.rank: dict[fx.Node, int] = {}
        self.weight: dict[fx.Node, fx.Node | None] = {}
        self.tree: dict[fx.Node, fx.Node] = {}
        self.reach: dict[fx.Node, int] = {}
        self.anchored: dict[fx.Node, int] = {}
        self.bits = _Bits()
        self.last_use: dict[fx.Node, int] = {}
        self.expiring: dict[int, list[fx.Node]] = defaultdict(list)
        self.needed_until: dict[fx.Node, int] = {}

    def run(self) -> Scan:
        nodes = list(self.graph.nodes)
        position = self.memory.position
        for node in nodes:
            self._flags(node)
        self._plan_bits(nodes)
        for at, node in enumerate(nodes):
            self._flow(node)
            operands = self._operands(node)
            if operands is not None:
                self._add(node, operands)
            if node in self.needed_until and node not in self.bits.bit:
                self._track(node)
            for spent in self.expiring.pop(at, ()):
                if self.needed_until.get(spent, at) <= at:
                    self.bits.bit.pop(spent, None)
            for operand in node.all_input_nodes:
                if self.last_use.get(operand) == position[node]:
                    self.reach.pop(operand, None)
                    self.anchored.pop(operand, None)
            if self.bits.crowded:
                self.bits.compact(self.reach, self.anchored)
        return self.out

    # -------------------------------------------------- what kind of value a node makes

    def _flags(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        for operand in inputs:
            self.last_use[operand] = self.memory.position[node]
        name = ops.name_of(node)
        if facts.is_parameter_input(node):
            value = facts.tensor(node)
            self.constant[node] = True
            self.learned[node] = False
            self.rank[node] = value.dim() if value is not None else 0
            self.weight[node] = node
        else:
            self.constant[node] = bool(inputs) and all(self.constant[i] for i in inputs)
            self.rank[node] = max((self.rank[i] for i in inputs), default=0) if self.constant[node] else 0
            if self.constant[node]:
                self.weight[node] = next((w for i in inputs if (w := self.weight.get(i)) is not None), None)
            is_input = node.op == "placeholder" and facts.is_float(node)
            learns = name in ops.LOOKUPS or self._anchor_weight(node) is not None
            self.learned[node] = is_input or learns or any(self.learned[i] for i in inputs)
        through = self._passed_operand(node, name)
        self.out.base[node] = self.out.base[through] if through is not None else node
        if through is not None:
            self.out.carried[node] = through
        if name in ops.CHECKPOINTS:
            self.out.checkpoints.append(node)

    def _anchor_weight(self, node: fx.Node) -> fx.Node | None:
        """The weight of a learned contraction, or ``None`` if ``node`` is none."""
        name = ops.name_of(node)
        if name in ops.CONTRACTIONS:
            return next((i for i in node.all_input_nodes if self.constant[i] and self.rank[i] >= 2), None)
        if name.startswith("module:"):
            module = ops.module_of(node)
            weighty = module is not None and any(p.dim() >= 2 for p in module.parameters())
            return node if weighty and name.removeprefix("module:") in ops.CONTRACTION_MODULES else None
        return None

    def _passed_operand(self, node: fx.Node, name: str) -> fx.Node | None:
        """The operand whose every element ``node`` hands on, maybe cast, re-laid or scaled; else ``None``."""
        if not facts.is_float(node) or ops.written_argument(node):
            return None
        first = node.args[0] if node.args else None
        lays = name in ops.RESHAPES or name in ops.PERMUTES or name in ops.SHUFFLES or name in ops.COPIES
        if lays or name in ops.CASTS:
            return first if isinstance(first, fx.Node) and facts.is_float(first) else None
        if name in ops.DROPOUTS:
            return first if isinstance(first, fx.Node) and ops.dropout_is_identity(node) else None
        if name in ops.ADDS and len(node.args) == 2:
            other = [a for a in node.args if not isinstance(a, fx.Node)]
            zero = len(other) == 1 and isinstance(other[0], (int, float)) and other[0] == 0
            return next((a for a in node.args if isinstance(a, fx.Node)), None) if zero else None
        if name in ops.SCALES and len(node.args) == 2:
            return self._scaled_operand(node, name)
        return None

    def _scaled_operand(self, node: fx.Node, name: str) -> fx.Node | None:
        value = facts.tensor(node)
        left, right = node.args[0], node.args[1]
        pairs = [(left, right)] if "div" in name else [(left, right), (right, left)]
        for kept, factor in pairs:
            if not isinstance(kept, fx.Node) or self.constant[kept] or node.kwargs:
                continue
            kept_value = facts.tensor(kept)
            if kept_value is None or value is None or not facts.same_shape(kept_value.shape, value.shape):
                continue
            if isinstance(factor, (int, float)):
                return kept
            # A per-token mask or a learned scale may not depend on any learned value of the data.
            if isinstance(factor, fx.Node) and not self.learned[factor] and facts.tensor(factor) is not None:
                return kept if self.learned[kept] else None
        return None

    # -------------------------------------------------- who is computed from whom

    def _plan_bits(self, nodes: list[fx.Node]) -> None:
        position = self.memory.position
        ends: dict[fx.Node, int] = {}
        for node in reversed(nodes):
            operands = self._operands(node)
            if operands is None:
                continue
            end = position[node]
            users = list(node.users)
            if len(users) == 1 and users[0] in ends:
                end = ends[users[0]]
            ends[node] = end
            for term in operands:
                base = self.out.base[term.node]
                self.needed_until[base] = max(self.needed_until.get(base, 0), end)

    def _track(self, node: fx.Node) -> None:
        bit = self.bits.give(node)
        self.reach[node] = self.reach.get(node, 0) | bit
        self.expiring[self.needed_until[node]].append(node)

    def _flow(self, node: fx.Node) -> None:
        reach = anchored = 0
        for operand in node.all_input_nodes:
            reach |= self.reach.get(operand, 0)
            anchored |= self.anchored.get(operand, 0)
        weight = self._anchor_weight(node)
        if weight is not None:
            data = [i for i in node.all_input_nodes if not self.constant[i]]
            # The first operand of addmm is added to the product, not multiplied.
            if ops.name_of(node) in ops.FUSED_PRODUCTS and data and data[0] is node.args[0]:
                data = data[1:]
            for operand in data:
                anchored |= self.reach.get(operand, 0)
            self.out.contractions.append((node, self.weight.get(weight) or weight))
        if reach:
            self.reach[node] = reach
        if anchored:
            self.anchored[node] = anchored

    # -------------------------------------------------- adds

    def _operands(self, node: fx.Node) -> tuple[Term, Term] | None:
        """The two summands of an add of two floating tensors, in any spelling; ``None`` if it is none."""
        if node.op not in ("call_function", "call_method") or not facts.is_float(node):
            return None
        name = ops.name_of(node)
        if name in ops.ADDS or name in ops.INPLACE_ADDS:
            factor = node.kwargs.get("alpha", 1)
        elif name in ops.SUBS or name in ops.INPLACE_SUBS:
            factor = node.kwargs.get("alpha", 1)
            factor = -factor if isinstance(factor, (int, float)) else factor
        elif name in ops.FUSED_PRODUCTS:
            return _product_terms(node, ops.FUSED_PRODUCTS[name])
        else:
            return None
        sides = _two_arguments(node)
        if sides is None or not isinstance(factor, (int, float)):
            return None
        return Term(sides[0]), Term(sides[1], float(factor))

    def _add(self, node: fx.Node, operands: tuple[Term, Term]) -> None:
        left, right = (_Side(self, term, node) for term in operands)
        if all(self.constant[t.node] for t in operands):
            self._reject(node, Reason.CONSTANT_OPERAND)
            return
        if ops.written_argument(node) and not self.memory.is_functional(node):
            self._reject(node, Reason.MUTATED)
            return
        skip_side, branch_side = self._choose(left, right)
        if skip_side is None or branch_side is None:
            self._no_step(node, operands)
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
        if skip_side.head_factor != 1.0:
            self._reject(node, Reason.UNSUPPORTED_FORM, "the stream is the subtracted operand")
            return
        record = AddRecord(node, [*skip_side.rest, *branch_side.terms], skip, self.out.base[skip])
        for side in (skip_side, branch_side):
            if side.opened is not None:
                self._withdraw(side.opened)
                record.adds += side.opened.adds
                record.inner += side.opened.inner
            elif side.unread_add is not None:
                record.inner.append(side.unread_add)
        record.adds.append(node)
        if skip_side.opened is not None:
            record.anchored = skip_side.opened.anchored
            record.fed_by = list(skip_side.opened.fed_by)
        self._enter(record, branch_side)

    def _choose(self, left: _Side, right: _Side) -> tuple[_Side | None, _Side | None]:
        """Which side carries the stream, and which one is the branch (opened or closed as it must be)."""
        a = left.carries(right)
        b = right.carries(left)
        if a and b:
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
        if branch.opened is not None and not self._same_tree(skip, branch):
            branch.close()
        return skip, branch

    def _same_tree(self, left: _Side, right: _Side) -> bool:
        base = self.out.base
        trees = [self.tree.get(base[s.head], base[s.head]) for s in (left, right)]
        return trees[0] is trees[1] and base[left.head] is not base[right.head]

    def _no_step(self, node: fx.Node, operands: tuple[Term, Term]) -> None:
        constant = any(self.constant[t.node] and t.product is None for t in operands)
        self._reject(node, Reason.CONSTANT_OPERAND if constant else Reason.UNRELATED_OPERANDS)

    def _reject(self, node: fx.Node, reason: Reason, detail: str = "") -> None:
        self.out.rejections[node] = Rejection(reason, node, detail)

    def _withdraw(self, record: AddRecord) -> None:
        """An unread step became part of a larger one."""
        assert record.base is not None
        del self.out.steps[record.node]
        self.out.children[record.base].remove(record)

    def _enter(self, record: AddRecord, branch: _Side) -> None:
        base, node = record.base, record.node
        assert base is not None
        bit = self.bits.bit.get(base, 0)
        through = 0
        # The operand as it stands, not its terms: an opened step's own operands are forgotten by now.
        term = branch.term
        factor = term.product[1] if term.product else None
        for operand in (term.node, factor):
            if operand is None:
                continue
            through |= self.reach.get(operand, 0)
            record.anchored |= bool(self.anchored.get(operand, 0) & bit)
        if factor is not None and self.constant[factor] and self.rank[factor] >= 2:
            record.anchored |= bool(self.reach.get(term.node, 0) & bit)
        for sibling in self.out.children[base]:
            if through & self.bits.bit.get(sibling.node, 0):
                record.fed_by.append(sibling.node)
        self.out.children[base].append(record)
        self.out.steps[node] = record
        self.tree[node] = self.tree.get(base, base)
        # Later steps on the same state ask whether this one feeds them.
        until = self.needed_until.get(base, 0)
        if until > self.memory.position[node] or node in self.needed_until:
            self.needed_until[node] = max(self.needed_until.get(node, 0), until)


class _Side:
    """One operand of an add: the tensor itself, or an unread step opened into its skip and its terms."""

    def __init__(self, scanner: _Scanner, term: Term, add: fx.Node) -> None:
        self.scanner = scanner
        self.term = term
        out = scanner.out
        node = term.node
        alone = term.product is None and list(node.users) == [add] and not _twice(add, node)
        record = out.steps.get(node) if alone and term.factor == 1.0 else None
        if record is not None and not _same_type(node, add):
            record = None
        self.opened = record
        self.unread_add = node if alone and record is None and node in out.rejections else None

    def close(self) -> None:
        """Take the operand as one tensor after all."""
        self.opened = None

    @property
    def head(self) -> fx.Node:
        """The tensor that would be the skip."""
        if self.opened is not None and self.opened.skip is not None:
            return self.opened.skip
        return self.term.node

    @property
    def head_factor(self) -> float:
        return self.term.factor if self.opened is None else 1.0

    @property
    def rest(self) -> list[Term]:
        """What is left of this side when its head is the skip."""
        return list(self.opened.terms) if self.opened is not None else []

    @property
    def terms(self) -> list[Term]:
        """This side as part of a branch."""
        if self.opened is None:
            return [self.term]
        return [Term(self.head), *self.opened.terms]

    @property
    def is_state(self) -> bool:
        """Whether the head is a state of a stream with a learned branch so far."""
        if self.opened is not None:
            return True
        base = self.scanner.out.base[self.term.node]
        return self.term.product is None and base in self.scanner.out.steps

    def carries(self, other: _Side) -> bool:
        """Whether this side can be the skip of a step whose branch is the other side."""
        return self.term.product is None and (self.opened is not None or self.reaches(other))

    def reaches(self, other: _Side) -> bool:
        """Whether the other side is computed from this side's head."""
        scanner = self.scanner
        bit = scanner.bits.bit.get(scanner.out.base[self.head], 0)
        operands = [other.term.node, *([other.term.product[1]] if other.term.product else [])]
        if scanner.out.base[self.head] is scanner.out.base[other.term.node] and not other.term.product:
            return False
        return any(scanner.reach.get(o, 0) & bit for o in operands)


def _twice(add: fx.Node, node: fx.Node) -> bool:
    return sum(argument is node for argument in add.args) > 1


def _same_type(node: fx.Node, add: fx.Node) -> bool:
    a, b = facts.tensor(node), facts.tensor(add)
    return a is not None and b is not None and a.dtype == b.dtype and facts.same_shape(a.shape, b.shape)


def _two_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    arguments = list(node.args) + [node.kwargs[k] for k in ("input", "other") if k in node.kwargs]
    if len(arguments) != 2 or not all(isinstance(a, fx.Node) and facts.is_float(a) for a in arguments):
        return None
    if "out" in node.kwargs:
        return None
    left, right = arguments
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def _product_terms(node: fx.Node, product: str) -> tuple[Term, Term] | None:
    operands = node.args[:3]
    if len(operands) != 3 or not all(isinstance(a, fx.Node) and facts.is_float(a) for a in operands):
        return None
    first, left, right = operands
    assert isinstance(first, fx.Node) and isinstance(left, fx.Node) and isinstance(right, fx.Node)
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", node.kwargs.get("value", 1))
    if beta != 1 or not isinstance(alpha, (int, float)):
        return None
    return Term(first), Term(left, float(alpha), (product, right))


def scan(graph: fx.Graph, memory: Memory) -> Scan:
    """Recognise the residual steps of ``graph``; reads it and changes nothing."""
    return _Scanner(graph, memory).run()
