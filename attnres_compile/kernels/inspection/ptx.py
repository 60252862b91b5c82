"""Which bytes a compiled kernel touches: the integer part of its PTX, run for every thread of a block.

Addresses, masks and loop bounds of the generated kernels depend on integers alone (thread and block numbers, the
number of tokens, strides), so running just those instructions gives every address that the kernel loads from or
stores to, exactly: nothing is taken from what the generator meant to write. Floating-point values are unknown here;
an address or a mask that depended on one would be an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_compile.errors import KernelError
from attnres_compile.kernels.inspection.accesses import (
    Memory,
    Traffic,
    Way,
    base,
    divide,
    one,
    shift_left,
    signed,
    wrap,
)

_MOST_STEPS = 2_000_000
_REGISTER = re.compile(r"%[a-zA-Z_]+\d*(?:\.[xyz])?")
_ACCESS = re.compile(r"(ld|st)\.(?:[a-z0-9_:]+\.)*?global(?:\.[\w:]+?)*?(?:\.v(\d+))?\.[bfus](\d+)$")
# Other ways to global memory, which the counts below would miss.
_UNCOUNTED = re.compile(r"^(atom|red|cp\.async|cp\.reduce|ld\.(?!param|shared|local|const)|st\.(?!param|shared|local))")
# Jumps and what has an effect beside a result.
_FLOW = ("bra", "ret", "exit")


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction: ``guard`` as ``%p2`` or ``!%p2`` or ``""``, ``op`` with its suffixes, ``operands``."""

    guard: str
    op: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A kernel's instructions, where its labels are, its parameters' names and the threads of a block."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    threads: int


def parse(text: str) -> Program:
    """The one kernel of a PTX module.

    Raises:
        KernelError: there is not exactly one, or it is not written as expected.
    """
    text = re.sub(r"//[^\n]*", "", text)
    heads = list(re.finditer(r"\.entry\s+\w+\s*\(([^)]*)\)", text))
    if len(heads) != 1:
        raise KernelError(f"expected one kernel in the PTX text, found {len(heads)}")
    threads = re.search(r"\.reqntid\s+(\d+)", text)
    body = re.search(r"^\{\s*$(.*?)^\}\s*$", text[heads[0].end() :], re.MULTILINE | re.DOTALL)
    if threads is None or body is None:
        raise KernelError("the PTX text does not say how many threads a block has, or has no body")
    parameters = tuple(re.findall(r"(\w+)\s*(?:,|$)", heads[0].group(1).replace("\n", " ").strip()))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.group(1).splitlines():
        for statement in line.split(";"):
            statement = statement.strip()
            while found := re.match(r"([$\w]+):\s*", statement):
                labels[found.group(1)] = len(instructions)
                statement = statement[found.end() :]
            # Inline assembly may open a scope of its own.
            statement = re.sub(r"^[{}]\s*(?![^{]*\})", "", statement).strip()
            if statement and not statement.startswith((".", "}")):
                instructions.append(_instruction(statement))
    return Program(tuple(instructions), labels, parameters, int(threads.group(1)))


def _instruction(statement: str) -> Instruction:
    guard = ""
    if statement.startswith("@"):
        guard, statement = statement[1:].split(None, 1)
    op, _, rest = statement.partition(" ") if " " in statement else statement.partition("\t")
    op = op.strip()
    if "\t" in op:
        op, _, more = op.partition("\t")
        rest = more + " " + rest
    # Braces and brackets hold operands that belong together.
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest.strip())
    return Instruction(guard, op, tuple(operand.strip() for operand in operands if operand.strip()))


def _registers(*texts: str) -> set[str]:
    return {name for text in texts for name in _REGISTER.findall(text)}


def access(instruction: Instruction) -> tuple[Way, int] | None:
    """``("ld" or "st", bytes per thread)`` of a plain access to global memory, else None."""
    found = _ACCESS.match(instruction.op)
    if found is None:
        return None
    return "ld" if found.group(1) == "ld" else "st", int(found.group(2) or 1) * int(found.group(3)) // 8


def _address(instruction: Instruction) -> str:
    return next(operand for operand in instruction.operands if operand.startswith("["))


def _targets(instruction: Instruction) -> tuple[str, ...]:
    """Registers that the instruction writes."""
    if not instruction.operands or instruction.op.split(".")[0] in ("st", "bra", "ret", "bar", "exit"):
        return ()
    first = instruction.operands[0]
    return tuple(_REGISTER.findall(first)) if not first.startswith("[") else ()


def _needed(program: Program) -> list[bool]:
    """Which instructions decide what is accessed and where control goes; the rest need not run."""
    wanted: set[str] = set()
    kept = [False] * len(program.instructions)
    for index, instruction in enumerate(program.instructions):
        if access(instruction) is not None:
            wanted |= _registers(_address(instruction), instruction.guard)
            kept[index] = True
        elif instruction.op.split(".")[0] in _FLOW:
            wanted |= _registers(instruction.guard)
            kept[index] = True
        elif _UNCOUNTED.match(instruction.op):
            raise KernelError(f"global memory is accessed by {instruction.op}, whose bytes cannot be counted")
    grown = True
    while grown:
        before = len(wanted)
        for index, instruction in enumerate(program.instructions):
            targets = _targets(instruction)
            if access(instruction) is None and wanted.intersection(targets):
                kept[index] = True
                wanted |= _registers(instruction.guard, *instruction.operands)
        grown = len(wanted) > before
    return kept


def run(
    program: Program, values: Sequence[int | None], block: int = 0, blocks: int = 1
) -> dict[tuple[int, Way], Traffic]:
    """Runs one block of a launch.

    Args:
        program: see :func:`parse`.
        values: of the kernel's parameters in order; ``None`` for a tensor. Parameters beyond are Triton's own.
        block: the block's number, below ``blocks``.
        blocks: number of blocks launched.

    Returns:
        By ``(number of the parameter, "ld" or "st")`` what its memory saw.

    Raises:
        KernelError: an address, a mask or a jump depends on floating-point data, threads part ways, or memory of
            no argument is accessed.
    """
    return _Block(program, values, block, blocks).run()


class _Block:
    """The state of one block: registers hold int64 tensors of one element or one per thread; None is unknown."""

    def __init__(self, program: Program, values: Sequence[int | None], block: int, blocks: int) -> None:
        self.program = program
        self.kept = _needed(program)
        self.memory = Memory(len(values), program.threads)
        thread = torch.arange(program.threads)
        special: dict[str, Tensor | None] = {"%tid.x": thread, "%laneid": thread % 32, "%warpid": thread // 32}
        special |= {"%ctaid.x": one(block), "%nctaid.x": one(blocks), "%ntid.x": one(program.threads)}
        zeros = ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z")
        self.registers: dict[str, Tensor | None] = special | {name: one(0) for name in zeros}
        self.parameters = {
            name: one(base(index) if value is None else value)
            for index, (name, value) in enumerate(
                zip(program.parameters, [*values, *[None] * len(program.parameters)], strict=False)
            )
        }

    def run(self) -> dict[tuple[int, Way], Traffic]:
        position, steps = 0, 0
        instructions = self.program.instructions
        while position < len(instructions):
            steps += 1
            if steps > _MOST_STEPS:
                raise KernelError("the kernel's loops do not end")
            instruction = instructions[position]
            name = instruction.op.split(".")[0]
            if not self.kept[position]:
                position += 1
            elif name in ("ret", "exit"):
                if self._whole(instruction, position):
                    break
                position += 1
            elif name == "bra":
                position = self._jump(instruction, position)
            else:
                self._step(instruction)
                position += 1
        return self.memory.traffic

    # --- control

    def _jump(self, instruction: Instruction, position: int) -> int:
        target = self.program.labels[instruction.operands[-1]]
        if instruction.guard and self._guard(instruction.guard) is None:
            return self._join(position + 1, target)
        return target if self._whole(instruction, position) else position + 1

    def _whole(self, instruction: Instruction, position: int) -> bool:
        """Whether all threads take the jump; they must agree."""
        if not instruction.guard:
            return True
        taken = self._guard(instruction.guard)
        if taken is None:
            raise KernelError(f"instruction {position} jumps by floating-point data")
        if bool(taken.all()) != bool(taken.any()):
            raise KernelError(f"the threads part ways at instruction {position}")
        return bool(taken.all())

    def _join(self, *starts: int) -> int:
        """Where two ways, chosen by data, meet again; on the way there must be neither memory nor another choice."""
        ways = [self._way(start) for start in starts]
        meeting = next((position for position in ways[0] if position in ways[1]), None)
        if meeting is None:
            raise KernelError("what a kernel accesses depends on floating-point data")
        for way in ways:
            for position in way[: way.index(meeting)]:
                for name in _targets(self.program.instructions[position]):
                    # Which way was taken is not known, so neither is what it left behind.
                    self.registers[name] = None
        return meeting

    def _way(self, position: int) -> list[int]:
        """Positions that follow each other from ``position`` on, up to an access to memory or a choice."""
        way: list[int] = []
        while position < len(self.program.instructions) and position not in way:
            way.append(position)
            instruction = self.program.instructions[position]
            flow = instruction.op.split(".")[0]
            if access(instruction) is not None or (flow in _FLOW and (instruction.guard or flow != "bra")):
                break
            position = self.program.labels[instruction.operands[-1]] if flow == "bra" else position + 1
        return way

    # --- values

    def _guard(self, guard: str) -> Tensor | None:
        value = self.registers.get(guard.lstrip("!"))
        if value is None:
            return None
        return (value == 0) if guard.startswith("!") else (value != 0)

    def _value(self, operand: str) -> Tensor | None:
        operand = operand.strip()
        if operand.startswith("%"):
            return self.registers.get(operand)
        try:
            return one(int(operand.rstrip("U"), 0))
        except ValueError:  # a floating-point constant, a symbol of shared memory
            return None

    def _step(self, instruction: Instruction) -> None:
        found = access(instruction)
        if found is not None:
            self._access(instruction, *found)
            for name in _targets(instruction):
                self.registers[name] = None
            return
        results = self._compute(instruction)
        guard = self._guard(instruction.guard) if instruction.guard else None
        for name, result in zip(_targets(instruction), results, strict=False):
            if not instruction.guard:
                self.registers[name] = result
            elif guard is None or result is None or self.registers.get(name) is None:
                # Unknown, but for a guard that holds for all.
                self.registers[name] = result if guard is not None and bool(guard.all()) else None
            else:
                self.registers[name] = torch.where(guard, result, self.registers[name])  # type: ignore[arg-type]

    def _access(self, instruction: Instruction, way: Way, width: int) -> None:
        text = _address(instruction)[1:-1]
        register, _, offset = text.partition("+")
        start = self._value(register)
        mask = self._guard(instruction.guard) if instruction.guard else torch.ones(1, dtype=torch.bool)
        if start is None or mask is None:
            raise KernelError(f"the address or the mask of {instruction.op} depends on floating-point data")
        start = start + (int(offset, 0) if offset.strip() else 0)
        self.memory.access(way, width, start, mask)

    def _compute(self, instruction: Instruction) -> list[Tensor | None]:
        """The values that an instruction gives; ``[None]`` where it is none of the integer ones known here."""
        parts = instruction.op.split(".")
        name, kind = parts[0], parts[-1]
        operands = instruction.operands
        if name == "ld" and parts[1] == "param":
            text = operands[1][1:-1]
            return [self.parameters.get(text)] if "+" not in text else [None]
        if name == "mov" and operands[0].startswith("{"):
            value = self._value(operands[1])
            return [value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF] if value is not None and kind == "b64" else [None]
        if name == "mov" and operands[1].startswith("{"):
            halves = [self._value(part) for part in operands[1][1:-1].split(",")]
            low, high = (*halves, None)[:2]
            return [low | (high << 32)] if low is not None and high is not None and kind == "b64" else [None]
        arguments = [self._value(operand) for operand in operands[1:]]
        if name == "setp" and len(arguments) > 2:
            return [None]
        known = [value for value in arguments if value is not None]
        if len(known) < len(arguments) or kind[0] not in "busp":
            return [None]
        bits = 1 if kind == "pred" else int(kind[1:])
        result = _integer(name, parts, kind[0] == "s", bits, known)
        return [result]


def _integer(name: str, parts: list[str], is_signed: bool, bits: int, v: list[Tensor]) -> Tensor | None:
    """One integer instruction; None for one that is not known here."""
    if name == "cvt":
        target, source = parts[-2], parts[-1]
        read = signed if source[0] == "s" else wrap
        return wrap(read(v[0], int(source[1:])), int(target[1:])) if target[0] in "bus" else None
    read = signed if is_signed else wrap
    if name in ("mul", "mad") and "wide" in parts:
        product = read(v[0], bits) * read(v[1], bits)
        return wrap(product + v[2] if name == "mad" else product, bits * 2)
    if name in ("mul", "mad") and "hi" in parts:
        return None
    if name == "setp":
        a, b = read(v[0], bits), read(v[1], bits)
        compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        compare |= {"lo": a < b, "ls": a <= b, "hi": a > b, "hs": a >= b}
        return compare[parts[1]].long() if parts[1] in compare else None
    if name == "selp":
        return torch.where(v[2] != 0, v[0], v[1])
    if name == "shl":
        return shift_left(v[0], v[1], bits)
    if name == "shr":
        a = read(v[0], bits)
        # A logical shift of a negative int64 is not an arithmetic one.
        return wrap(a >> v[1].clamp(0, bits - 1), bits) if is_signed or bool((a >= 0).all()) else None
    if name in ("div", "rem"):
        result = divide(read(v[0], bits), read(v[1], bits), name == "rem")
        return None if result is None else wrap(result, bits)
    if name in ("min", "max"):
        choose = torch.minimum if name == "min" else torch.maximum
        return wrap(choose(read(v[0], bits), read(v[1], bits)), bits)
    simple = _SIMPLE.get((name, len(v)))
    return None if simple is None else wrap(simple(*v), bits)


_SIMPLE: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("mov", 1): lambda a: a,
    ("cvta", 1): lambda a: a,
    ("not", 1): lambda a: ~a,
    ("neg", 1): lambda a: -a,
    ("add", 2): lambda a, b: a + b,
    ("sub", 2): lambda a, b: a - b,
    ("mul", 2): lambda a, b: a * b,
    ("mad", 3): lambda a, b, c: a * b + c,
    ("and", 2): lambda a, b: a & b,
    ("or", 2): lambda a, b: a | b,
    ("xor", 2): lambda a, b: a ^ b,
}
