"""Which bytes a kernel for AMD GPUs touches: the integer part of its LLVM IR, run for every thread of a block.

The IR is what Triton hands to the AMD code generator after all of its own passes: each load and store of it becomes
one instruction of the same width. (Machine code for AMD GPUs spreads one address over several registers, an execution
mask and a buffer descriptor; the IR says the same in single values.) As in :mod:`.ptx`,
floating-point values are unknown, and nothing that is counted may depend on them.
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

WAVE = 64
# The size that Triton gives every buffer.
_BUFFER = 0x7FFFFFFE
# Where a mask sends the offset of a thread that is to access nothing.
_MASKED = 0x80000000
_MOST_BLOCKS = 200_000
_SCALARS = {"float": 4, "double": 8, "half": 2, "bfloat": 2, "ptr": 8}
_NAME = r"%[\w.$-]+"
# Memory operations other than those understood here; the one into shared memory would be a load as well.
_UNCOUNTED = re.compile(
    r"atomicrmw|cmpxchg|load\.lds|masked\.|memcpy|memset|struct\.ptr\.buffer|global\.load|buffer\.atomic"
)
_FLAGS = re.compile(r"\b(?:nuw|nsw|nneg|exact|disjoint|inbounds|samesign|nusw|inreg|volatile|noundef|tail) ")


@dataclass(frozen=True)
class Statement:
    """``result = text``; ``result`` may be empty."""

    result: str
    text: str


@dataclass(frozen=True)
class Function:
    """A kernel: its parameters, and its blocks of statements by name, in the order of the text."""

    parameters: tuple[str, ...]
    blocks: dict[str, tuple[Statement, ...]]


def parse(text: str) -> Function:
    """The one kernel of an LLVM module.

    Raises:
        KernelError: there is not exactly one.
    """
    found = re.findall(r"^define [^@]*amdgpu_kernel [^@]*@[\w.$]+\((.*)\)[^{\n]*\{$(.*?)^\}$", text, re.M | re.S)
    if len(found) != 1:
        raise KernelError(f"expected one kernel in the LLVM text, found {len(found)}")
    head, body = found[0]
    parameters = tuple(re.findall(rf"({_NAME})(?=,|$)", head))
    # The first block has no label where it is numbered: the number after the parameters.
    name = f"%{len(parameters)}"
    blocks: dict[str, list[Statement]] = {}
    for line in body.splitlines():
        label = re.match(r'^"?([\w.$-]+)"?:', line)
        if label:
            name = f"%{label.group(1)}"
            continue
        line = re.sub(r", ![a-z].*$|\s*;.*$| #\d+", "", line).strip()
        if line:
            result, _, text = line.partition(" = ") if re.match(rf"{_NAME} = ", line) else ("", "", line)
            blocks.setdefault(name, []).append(Statement(result, _FLAGS.sub("", text)))
    return Function(parameters, {name: tuple(statements) for name, statements in blocks.items()})


def run(
    function: Function, values: Sequence[int | None], warps: int, block: int = 0, blocks: int = 1
) -> dict[tuple[int, Way], Traffic]:
    """Runs one block of a launch, ``warps`` waves of 64 threads; else as :func:`.ptx.run`."""
    return _Block(function, values, warps * WAVE, block, blocks).run()


class _Block:
    """Threads may part ways: the earliest block that any thread has reached runs next, for those threads."""

    def __init__(self, function: Function, values: Sequence[int | None], threads: int, block: int, blocks: int) -> None:
        self.function = function
        self.order = {name: index for index, name in enumerate(function.blocks)}
        self.threads = threads
        self.block, self.blocks = one(block), one(blocks)
        self.memory = Memory(len(values), threads)
        self.values: dict[str, Tensor | None] = {
            name: one(base(index) if value is None else value)
            for index, (name, value) in enumerate(
                zip(function.parameters, [*values, *[None] * len(function.parameters)], strict=False)
            )
        }
        self.waiting: dict[str, Tensor] = {}

    def run(self) -> dict[tuple[int, Way], Traffic]:
        self.waiting[next(iter(self.order))] = torch.ones(self.threads, dtype=torch.bool)
        steps = 0
        while self.waiting:
            steps += 1
            if steps > _MOST_BLOCKS:
                raise KernelError("the kernel's loops do not end")
            name = min(self.waiting, key=self.order.__getitem__)
            self._run_block(name, self.waiting.pop(name))
        return self.memory.traffic

    def _run_block(self, name: str, mask: Tensor) -> None:
        for statement in self.function.blocks[name]:
            text = statement.text
            if text.startswith("br "):
                self._branch(name, text, mask)
            elif text.startswith("switch ") or _UNCOUNTED.search(text):
                raise KernelError(f"what {text.split('(')[0]!r} accesses cannot be counted")
            elif statement.result and not text.startswith("phi "):
                self.values[statement.result] = self._compute(text, mask)
            elif not statement.result:
                self._store(text, mask)

    # --- control

    def _branch(self, source: str, text: str, mask: Tensor) -> None:
        targets = re.findall(rf"label ({_NAME})", text)
        if len(targets) == 1:
            self._go(source, targets[0], mask)
            return
        taken = self._value(text.split()[2].rstrip(","))
        if taken is None:
            raise KernelError("a kernel jumps by floating-point data")
        chosen = (taken != 0).expand(self.threads)
        self._go(source, targets[0], mask & chosen)
        self._go(source, targets[1], mask & ~chosen)

    def _go(self, source: str, target: str, mask: Tensor) -> None:
        if not bool(mask.any()):
            return
        arriving: dict[str, Tensor | None] = {}
        for statement in self.function.blocks[target]:
            if statement.text.startswith("phi "):
                given = re.findall(r"\[ (\S+), (%[\w.$-]+) \]", statement.text)
                arriving[statement.result] = next((self._value(value) for value, of in given if of == source), None)
        for name, value in arriving.items():
            held = self.values.get(name)
            if value is None or bool(mask.all()):
                self.values[name] = value
            elif name not in self.values:
                self.values[name] = torch.where(mask, value, 0)
            else:
                self.values[name] = None if held is None else torch.where(mask, value, held)
        before = self.waiting.get(target)
        self.waiting[target] = mask if before is None else before | mask

    # --- values

    def _value(self, operand: str) -> Tensor | None:
        if operand.startswith("%"):
            return self.values.get(operand)
        if operand in ("true", "false", "null", "zeroinitializer"):
            return one(int(operand == "true"))
        try:
            return one(int(operand))
        except ValueError:
            return None

    def _store(self, text: str, mask: Tensor) -> None:
        if text.startswith("store ") and (found := re.search(rf", ptr addrspace\(1\) ({_NAME})", text)):
            self._access("st", text.removeprefix("store ").rpartition(" ")[0], found.group(1), None, mask)
        elif "raw.ptr.buffer.store" in text:
            self._buffer("st", text, mask)
        elif text.startswith("store ") and "addrspace(" not in text:
            raise KernelError("a kernel stores to memory that is of no known kind")

    def _compute(self, text: str, mask: Tensor) -> Tensor | None:
        name, _, rest = text.partition(" ")
        if name == "load":
            if found := re.search(rf", ptr addrspace\(1\) ({_NAME})", text):
                self._access("ld", rest, found.group(1), None, mask)
            # The first of the implicit arguments is the number of blocks.
            elif (found := re.search(rf"i32, ptr addrspace\(4\) ({_NAME})", text)) and (
                self.values.get(found.group(1)) is not None
            ):
                return self.blocks
            return None
        if name == "call" or " call " in f" {text}":
            return self._call(text, mask)
        if name == "getelementptr":
            return self._element(rest)
        if name == "select":
            parts = re.findall(r"(?:i1|i\d+|ptr addrspace\(\d\)) (\S+?)(?:,|$)", rest)
            values = [self._value(part) for part in parts]
            if len(values) != 3 or any(value is None for value in values):
                return None
            condition, first, second = (value for value in values if value is not None)
            return torch.where(condition != 0, first, second)
        if name == "icmp":
            return self._compare(rest)
        if name in ("zext", "sext", "trunc", "freeze"):
            return self._cast(name, rest)
        found = re.fullmatch(r"i(\d+) (\S+), (\S+)", rest)
        if found is None or name not in _BINARY:
            return None
        a, b = self._value(found.group(2)), self._value(found.group(3))
        return None if a is None or b is None else _BINARY[name](a, b, int(found.group(1)))

    def _compare(self, rest: str) -> Tensor | None:
        found = re.fullmatch(r"(\w+) i(\d+) (\S+), (\S+)", rest)
        if found is None:
            return None
        relation, bits = found.group(1), int(found.group(2))
        first, second = self._value(found.group(3)), self._value(found.group(4))
        if first is None or second is None:
            return None
        read = signed if relation.startswith("s") or bits >= 64 else wrap
        a, b = read(first, bits), read(second, bits)
        compare: dict[str, Callable[[], Tensor]] = {
            "eq": lambda: a == b,
            "ne": lambda: a != b,
            "lt": lambda: a < b,
            "le": lambda: a <= b,
            "gt": lambda: a > b,
            "ge": lambda: a >= b,
        }
        return compare[relation if relation in ("eq", "ne") else relation[1:]]().long()

    def _cast(self, name: str, rest: str) -> Tensor | None:
        found = re.fullmatch(r"i(\d+) (\S+)(?: to i(\d+))?", rest)
        value = self._value(found.group(2)) if found else None
        if found is None or value is None:
            return None
        source, target = int(found.group(1)), int(found.group(3) or found.group(1))
        return wrap((signed if name == "sext" else wrap)(value, source), target)

    def _element(self, rest: str) -> Tensor | None:
        found = re.fullmatch(rf"(.+?), ptr(?: addrspace\([14]\))? ({_NAME}), i(\d+) (\S+)", rest)
        if found is None:
            return None
        start, index = self._value(found.group(2)), self._value(found.group(4))
        if start is None or index is None:
            return None
        return start + signed(index, int(found.group(3))) * _size(found.group(1))

    def _call(self, text: str, mask: Tensor) -> Tensor | None:
        if "workitem.id.x" in text:
            return torch.arange(self.threads)
        if "workgroup.id.x" in text:
            return self.block
        if "implicitarg.ptr" in text:
            return one(0)
        if "workitem.id" in text or "workgroup.id" in text:
            return one(0)
        if "raw.ptr.buffer.load" in text:
            self._buffer("ld", text, mask)
            return None
        arguments = [part.split()[-1] for part in text[text.index("@") :].partition("(")[2].rstrip(")").split(",")]
        if "readfirstlane.i32" in text:
            value = self._value(arguments[0])
            if value is None or value.numel() == 1:
                return value
            return value.view(-1, WAVE)[:, :1].expand(-1, WAVE).reshape(-1)
        if "make.buffer.rsrc" in text:
            size = self._value(arguments[2])
            if size is None or int(size) != _BUFFER:
                raise KernelError("a buffer has another size than the one that is counted with")
            return self._value(arguments[0])
        found = re.search(r"@llvm\.([us])(min|max)\.i(\d+)", text)
        if found:
            a, b = (self._value(argument) for argument in arguments)
            if a is None or b is None:
                return None
            bits = int(found.group(3))
            read = signed if found.group(1) == "s" else wrap
            choose = torch.minimum if found.group(2) == "min" else torch.maximum
            return wrap(choose(read(a, bits), read(b, bits)), bits)
        return None

    # --- memory

    def _buffer(self, way: Way, text: str, mask: Tensor) -> None:
        """A buffer access: beyond the buffer's size, where masks send a thread's offset, nothing is accessed."""
        found = re.search(rf"\(?ptr addrspace\(8\) ({_NAME}), i32 (\S+), i32 (\S+), i32 \d+\)", text)
        kind = re.search(r"call (.+?) @" if way == "ld" else r"\((.+?) [^ ,]+, ptr addrspace\(8\)", text)
        offsets = [self._value(operand) for operand in found.groups()[1:]] if found else [None]
        if found is None or kind is None or any(offset is None for offset in offsets):
            raise KernelError("the address of a buffer access depends on floating-point data")
        offset = sum((wrap(value, 32) for value in offsets if value is not None), one(0))
        beyond = mask & (offset >= _BUFFER) & (offset != _MASKED)
        if bool(beyond.any()):
            raise KernelError("a buffer access lies outside its buffer: it is not its to touch")
        self._access(way, kind.group(1), found.group(1), offset, mask & (offset < _BUFFER))

    def _access(self, way: Way, kind: str, pointer: str, offset: Tensor | None, mask: Tensor) -> None:
        start = self._value(pointer)
        if start is None:
            raise KernelError("the address of an access depends on floating-point data")
        self.memory.access(way, _size(kind.strip()), start if offset is None else start + offset, mask)


def _size(kind: str) -> int:
    """Bytes of a type; what follows it (an operand) is not looked at."""
    found = re.match(r"[<\[](\d+) x (.+?)[>\]]", kind)
    if found:
        return int(found.group(1)) * _size(found.group(2))
    scalar = re.match(r"i(\d+)", kind)
    if scalar:
        return (int(scalar.group(1)) + 7) // 8
    for name, size in _SCALARS.items():
        if kind.startswith(name):
            return size
    raise KernelError(f"the size of {kind!r} is not known")


def _shift_right(a: Tensor, b: Tensor, bits: int) -> Tensor | None:
    # A logical shift of a negative int64 is not an arithmetic one.
    return wrap(a, bits) >> b.clamp(0, bits - 1) if bits < 64 or bool((a >= 0).all()) else None


def _quotient(a: Tensor, b: Tensor, bits: int, *, is_signed: bool, remainder: bool) -> Tensor | None:
    read = signed if is_signed else wrap
    return divide(read(a, bits), read(b, bits), remainder)


_BINARY: dict[str, Callable[[Tensor, Tensor, int], Tensor | None]] = {
    "add": lambda a, b, bits: wrap(a + b, bits),
    "sub": lambda a, b, bits: wrap(a - b, bits),
    "mul": lambda a, b, bits: wrap(a * b, bits),
    "and": lambda a, b, bits: wrap(a & b, bits),
    "or": lambda a, b, bits: wrap(a | b, bits),
    "xor": lambda a, b, bits: wrap(a ^ b, bits),
    "shl": shift_left,
    "lshr": _shift_right,
    "ashr": lambda a, b, bits: wrap(signed(a, bits) >> b.clamp(0, bits - 1), bits),
    "udiv": lambda a, b, bits: _quotient(a, b, bits, is_signed=False, remainder=False),
    "sdiv": lambda a, b, bits: _quotient(a, b, bits, is_signed=True, remainder=False),
    "urem": lambda a, b, bits: _quotient(a, b, bits, is_signed=False, remainder=True),
    "srem": lambda a, b, bits: _quotient(a, b, bits, is_signed=True, remainder=True),
}
