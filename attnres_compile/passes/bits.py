"""One bit per tensor that some add ahead still needs, in integers that stay as short as the live ones are many."""

from __future__ import annotations

from torch import fx


class Bits:
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
