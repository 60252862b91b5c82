"""Lines of Triton text, and the vocabulary that all kernels share: rows in chunks, sums over a row, statistics.

A row of ``dim`` features is cut into chunks of a power of two; a value that spans a row is one variable per chunk,
named ``<name>_<chunk>``. Names and numbers in the text come from a :class:`~attnres_compile.kernels.spec.KernelSpec`
alone: identifiers are roles with numbers, numbers are Python literals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from attnres_compile.kernels.spec import KernelSpec, Schedule

_TRITON_NAMES = {"float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.bfloat16"}


class Writer:
    """The text of one kernel as it grows.

    Args:
        spec: what the kernel computes.
        schedule: how its rows are cut.
    """

    def __init__(self, spec: KernelSpec, schedule: Schedule) -> None:
        self.spec = spec
        self.schedule = schedule
        self.lines: list[str] = []
        self.sums: set[int] = set()
        self._depth = 1

    @property
    def chunks(self) -> range:
        """Numbers of the chunks of a resident row."""
        return range(-(-self.spec.dim // self.schedule.chunk))

    # ---------------------------------------------------------------- lines

    def line(self, text: str = "") -> None:
        """One line at the present depth."""
        self.lines.append("    " * self._depth + text if text else "")

    def comment(self, text: str) -> None:
        """A comment line, with an empty line before it."""
        self.line()
        self.line(f"# {text}")

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        """``header`` with the lines written inside indented under it."""
        self.line(header)
        self._depth += 1
        yield
        self._depth -= 1

    @contextlib.contextmanager
    def rows(self) -> Iterator[None]:
        """The loop over this program's rows: ``row`` is the present one, ``at`` where it begins in dense arguments.

        Addresses are made anew for each row. Compilers would rather keep one running pointer per argument, two
        registers each for good; that they cannot step from row to row is what the exclusive or with 0 is for, which
        only a number of tokens beyond all memory would make something else.
        """
        self.line("program = tl.program_id(0)")
        with self.block("for turn in tl.range(program, tokens, tl.num_programs(0), disable_licm=True):"):
            self.line("row = tl.cast(turn, tl.int64) ^ (tl.cast(tokens, tl.int64) >> 62)")
            if not self.spec.strided:
                self.line(f"at = row * {self.spec.dim}")
            yield

    # ---------------------------------------------------------------- rows

    def each(self, assignment: str, inside: bool = False) -> None:
        """One line per chunk; ``#`` stands for its number. ``inside`` makes the value 0 behind the end of the row."""
        for chunk in self.chunks:
            text = self._filled(assignment, chunk)
            tail = self.spec.dim - chunk * self.schedule.chunk
            if inside and tail < self.schedule.chunk:
                name, _, value = text.partition(" = ")
                self.line(f"{name} = tl.where(lanes < {tail}, {value}, 0.0)")
            else:
                self.line(text)

    def _filled(self, template: str, chunk: int) -> str:
        """``template`` with the number of a chunk for ``#``, and its offset and mask for ``<#>``."""
        place = self._offset(chunk) + self._mask(chunk, load=True)
        return template.replace("<#>", place).replace("#", str(chunk))

    def row_base(self, argument: str) -> str:
        """Where the present row of a row argument begins."""
        return f"{argument} + row * {argument}_stride" if self.spec.strided else f"{argument} + at"

    def load_row(self, name: str, argument: str) -> None:
        """The present row of ``argument`` as float32."""
        self._load(name, self.row_base(argument), True)

    def fetch_row(self, name: str, argument: str) -> None:
        """The present row of ``argument`` as it is stored, to be taken by :meth:`take_row` later.

        A sum over a row makes all threads wait for one another, and no load is moved over it: what is needed behind
        the sum is asked for in front of it.
        """
        self._load(name, self.row_base(argument), False)

    def take_row(self, name: str, fetched: str) -> None:
        """What was fetched, as float32."""
        self.each(f"{name}_# = {fetched}_#.to(tl.float32)")

    def hold_queries(self) -> None:
        """Queries into registers for all rows of this program, where the schedule has room for them."""
        for s in range(self.spec.queries if self.schedule.held else 0):
            self.load_parameter(f"q{s}", f"query{s}")

    def query(self, s: int) -> str:
        """A chunk of query ``s``: a variable, or a load at each use."""
        return f"q{s}_#" if self.schedule.held else f"tl.load(query{s} + <#>).to(tl.float32)"

    def load_parameter(self, name: str, argument: str) -> None:
        """A parameter of ``dim`` numbers as float32."""
        self._load(name, argument, True)

    def _load(self, name: str, base: str, cast: bool) -> None:
        to = ".to(tl.float32)" if cast else ""
        for c in self.chunks:
            self.line(f"{name}_{c} = tl.load({base} + {self._offset(c)}{self._mask(c, load=True)}){to}")

    def store_row(self, argument: str, value: str) -> None:
        """``value`` (``#`` is the chunk's number) into the present row, rounded to the type that it is stored in."""
        self._store(self.row_base(argument), value)

    def _store(self, base: str, value: str) -> None:
        for c in self.chunks:
            stored = self._filled(value, c)
            self.line(f"tl.store({base} + {self._offset(c)}, {stored}{self._mask(c, load=False)})")

    def store_scratch(self, argument: str, name: str) -> None:
        """A value that spans a row into this program's row of a scratch matrix."""
        self._store(f"{argument} + program * {self.spec.dim}", f"{name}_#")

    def _offset(self, chunk: int) -> str:
        return f"{chunk * self.schedule.chunk} + lanes" if chunk else "lanes"

    def _mask(self, chunk: int, load: bool) -> str:
        tail = self.spec.dim - chunk * self.schedule.chunk
        if tail >= self.schedule.chunk:
            return ""
        return f", mask=lanes < {tail}" + (", other=0.0" if load else "")

    def rounded(self, expression: str) -> str:
        """``expression`` rounded to what the sources are stored in, as float32 again."""
        if self.spec.dtype == "float32":
            return expression
        return f"({expression}).to({_TRITON_NAMES[self.spec.dtype]}).to(tl.float32)"

    # ---------------------------------------------------------------- sums over a row

    def sum_rows(self, names: Sequence[str], products: Sequence[str]) -> None:
        """Sums over a row of one or more products (``#`` is the chunk's number), all in one reduction."""
        terms = [" + ".join(self._filled(product, c) for c in self.chunks) for product in products]
        if len(names) == 1:
            self.line(f"{names[0]} = tl.sum({terms[0]}, 0)")
            return
        self.sums.add(len(names))
        self.line(f"{', '.join(names)} = tl.reduce(({', '.join(terms)}), 0, _sum{len(names)})")

    def helpers(self) -> list[str]:
        """Functions that the text so far calls."""
        lines: list[str] = []
        for count in sorted(self.sums):
            left = [f"a{i}" for i in range(count)]
            right = [f"b{i}" for i in range(count)]
            lines += [
                "@triton.jit",
                f"def _sum{count}({', '.join(left + right)}):",
                f"    return {', '.join(f'{a} + {b}' for a, b in zip(left, right, strict=True))}",
                "",
                "",
            ]
        return lines
