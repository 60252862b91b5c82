"""Short forms of long lists: 24 equal layers are one line, ``layers.0..23``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def numbers(values: Iterable[int]) -> str:
    """``0..5``, ``1, 3..11``, ``0..2, 7``: runs of one step, in the order given."""
    rest = list(values)
    parts: list[str] = []
    while rest:
        length, step = 1, 0
        if len(rest) > 1:
            step = rest[1] - rest[0]
            while length < len(rest) and rest[length] == rest[0] + length * step:
                length += 1
        if length < 3 and step != 1:
            length = 1
        run, rest = rest[:length], rest[length:]
        if length == 1:
            parts.append(str(run[0]))
        elif length == 2 or step == 1:
            parts.append(f"{run[0]}..{run[-1]}")
        else:
            parts.append(f"{run[0]}, {run[1]}..{run[-1]}")
    return ", ".join(parts)


def paths(modules: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Module paths that differ in one layer number, put together.

    Returns:
        ``(short path, positions in the argument)`` in order of first appearance. Paths that differ in
        several numbers (stages of blocks) come apart by the first of them.
    """
    groups: dict[str, list[int]] = {}
    for position, module in enumerate(modules):
        groups.setdefault(_NUMBER.sub("*", module), []).append(position)
    found = [pair for members in groups.values() for pair in _group(modules, members)]
    return sorted(found, key=lambda pair: pair[1][0])


def _group(modules: Sequence[str], members: list[int]) -> list[tuple[str, list[int]]]:
    indices = {member: [int(n) for n in _NUMBER.findall(modules[member])] for member in members}
    columns = list(zip(*indices.values(), strict=True))
    varying = [column for column, values in enumerate(columns) if len(set(values)) > 1]
    if not varying:
        return [(modules[members[0]], members)]
    if len(varying) > 1:
        split: dict[int, list[int]] = {}
        for member in members:
            split.setdefault(indices[member][varying[0]], []).append(member)
        return [pair for part in split.values() for pair in _group(modules, part)]
    seen = dict.fromkeys(columns[varying[0]])
    count = iter(range(len(columns)))

    def short(match: re.Match[str]) -> str:
        if next(count) != varying[0]:
            return match[0]
        text = numbers(seen)
        return f"{{{text}}}" if ", " in text else text

    return [(_NUMBER.sub(short, modules[members[0]]), members)]
