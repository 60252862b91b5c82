"""From a :class:`~attnres_compile.kernels.spec.KernelSpec` to readable Triton text, written out for that spec."""

from __future__ import annotations

import textwrap

from attnres_compile.errors import KernelError
from attnres_compile.kernels.codegen.backward import write_backward
from attnres_compile.kernels.codegen.chunked import write_chunked
from attnres_compile.kernels.codegen.forward import write_forward
from attnres_compile.kernels.codegen.writer import Writer
from attnres_compile.kernels.spec import KernelSpec, Schedule, arguments, entry


def generate(spec: KernelSpec, schedule: Schedule) -> str:
    """The text of a Python module that holds one Triton kernel, named :func:`~attnres_compile.kernels.spec.entry`.

    Args:
        spec: what the kernel computes. Its arguments are those of :func:`~attnres_compile.kernels.spec.arguments`.
        schedule: the launch that the text is laid out for.

    Returns:
        Text that depends on nothing but the two arguments.

    Raises:
        KernelError: a backward whose norm would have to be a kernel of its own, as :func:`tuning.plan` has it.
    """
    if not schedule.resident and spec.norm and spec.backward and spec.kind != "norm" and spec.delta != "load":
        raise KernelError(
            f"a row of {spec.dim} features does not fit into registers beside the backward of its norm",
            remedy="Generate the kernels of attnres_compile.kernels.tuning.plan(spec)",
        )
    w = Writer(spec, schedule)
    w.line(f"lanes = tl.arange(0, {schedule.chunk})")
    if not schedule.resident:
        write_chunked(w)
    elif spec.backward:
        write_backward(w)
    else:
        write_forward(w)
    names = textwrap.wrap(", ".join(argument.name for argument in arguments(spec)), 100)
    start = f"def {entry(spec)}("
    signature = [f"{start}{names[0]}):"] if len(names) == 1 else [start, *(f"    {line}" for line in names), "):"]
    return "\n".join(
        [
            f'"""{_title(spec)}, {schedule.warps} warps."""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "",
            *w.helpers(),
            '@triton.jit(do_not_specialize=["tokens"])',
            *signature,
            *w.lines,
            "",
        ]
    )


def _title(spec: KernelSpec) -> str:
    """One line that says what the kernel is."""
    parts = [f"Depth attention, {spec.kind} {spec.direction}"]
    if spec.sources:
        parts.append(f"{spec.sources} source{'s' * (spec.sources > 1)} of {spec.dim} {spec.dtype}")
    else:
        parts.append(f"rows of {spec.dim} {spec.dtype}")
    if spec.queries > 1:
        parts.append(f"{spec.queries} queries")
    if spec.branch_dtype:
        parts.append("the partial sum's add before it")
    if spec.norm:
        parts.append(f"{'RMSNorm' if spec.norm == 'rmsnorm' else 'LayerNorm'} after it")
    return ", ".join(parts)
