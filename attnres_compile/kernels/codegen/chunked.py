"""Kernels for rows that do not fit into registers: loops over chunks of a row, which is read once for each sweep.

The first sweep makes the sums over a row, the next ones use them; all but the first find the row in a cache. A
parameter's gradient is added up in this program's row of the scratch matrix, which must be zero at first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from attnres_compile.kernels.codegen.writer import Writer
from attnres_compile.kernels.spec import ACCUMULATE, UNWANTED, norm_statistics


def write_chunked(w: Writer) -> None:
    """The body of a kernel that keeps no row in registers."""
    with w.rows():
        if w.spec.kind == "norm":
            _norm_backward(w)
        elif w.spec.backward:
            _backward(w)
        else:
            _forward(w)


@contextlib.contextmanager
def _sweep(w: Writer, sums: Sequence[str] = ()) -> Iterator[None]:
    """A loop over the chunks of a row; each name of ``sums`` is added to inside and a number afterwards."""
    for name in sums:
        w.line(f"{name} = tl.zeros([{w.schedule.chunk}], tl.float32)")
    with w.block(f"for start in tl.range(0, {w.spec.dim}, {w.schedule.chunk}):"):
        w.line("column = start + lanes")
        yield
    for name in sums:
        w.line(f"{name} = tl.sum({name}, 0)")


def _base(w: Writer, argument: str) -> str:
    return f"{w.row_base(argument)} + column"


def _ends(w: Writer) -> str:
    return f", mask=column < {w.spec.dim}" if w.spec.dim % w.schedule.chunk else ""


def _load(w: Writer, name: str, argument: str, parameter: bool = False) -> None:
    base = f"{argument} + column" if parameter else _base(w, argument)
    ends = _ends(w)
    w.line(f"{name} = tl.load({base}{ends}{', other=0.0' if ends else ''}).to(tl.float32)")


def _store(w: Writer, argument: str, value: str) -> None:
    w.line(f"tl.store({_base(w, argument)}, {value}{_ends(w)})")


def _scratch(w: Writer, argument: str, value: str) -> None:
    ends = _ends(w)
    w.line(f"place = {argument} + program * {w.spec.dim} + column")
    w.line(f"tl.store(place, tl.load(place{ends}{', other=0.0' if ends else ''}) + {value}{ends})")


def _inside(w: Writer, expression: str) -> str:
    return f"tl.where(column < {w.spec.dim}, {expression}, 0.0)" if w.spec.dim % w.schedule.chunk else expression


def _source(w: Writer, i: int, store: bool = False) -> None:
    """``v``, a chunk of source ``i``; the last one with the branch that joins it."""
    spec = w.spec
    _load(w, "v", f"source{i}")
    if spec.branch_dtype is not None and i == spec.sources - 1:
        _load(w, "b", "branch")
        w.line(f"v = {w.rounded('v + b')}")
        if store:
            _store(w, "partial", "v")


def _scaled(w: Writer, expression: str) -> str:
    return f"{expression} * {w.spec.scale!r}" if w.spec.scale != 1.0 else expression


def _rms(w: Writer, name: str, square: str) -> None:
    w.line(f"{name} = tl.rsqrt({square} * {1.0 / w.spec.dim!r} + {w.spec.eps!r})")


# ------------------------------------------------------------------ forward


def _forward(w: Writer) -> None:
    spec = w.spec
    queries = range(spec.queries)
    for i in range(spec.sources):
        w.comment(f"sums over source {i}")
        with _sweep(w, [f"square{i}", *(f"dot{i}_{s}" for s in queries)]):
            _source(w, i, store=True)
            w.line(f"square{i} += v * v")
            for s in queries:
                _load(w, "q", f"query{s}", parameter=True)
                w.line(f"dot{i}_{s} += q * v")
        _rms(w, f"rms{i}", f"square{i}")
    w.line()
    for s in queries:
        _softmax(w, s)
    _write_mixes(w)


def _softmax(w: Writer, s: int) -> None:
    """``weight<i>_<s>``, the factor on source ``i``, and ``rest<s>``, that on phase 1's mix."""
    spec = w.spec
    logits = [f"logit{i}_{s}" for i in range(spec.sources)]
    for i, name in enumerate(logits):
        w.line(f"{name} = {_scaled(w, f'dot{i}_{s} * rms{i}')}")
    if spec.kind == "merge":
        w.line("phase_1 = tl.load(lse + row)")
        logits.append("phase_1")
    w.line(f"top = {logits[0]}")
    for name in logits[1:]:
        w.line(f"top = tl.maximum(top, {name}, propagate_nan=tl.PropagateNan.ALL)")
    w.line("parts = 0.0")
    for name in logits:
        w.line(f"parts += tl.exp({name} - top)")
    w.line(f"factor = {spec.gain!r} / parts")
    for i in range(spec.sources):
        value = f" * rms{i}" if spec.normalized else ""
        w.line(f"weight{i}_{s} = tl.exp(logit{i}_{s} - top) * factor{value}")
    if spec.kind == "merge":
        w.line("rest0 = tl.exp(phase_1 - top) * factor")
    if spec.kind == "inter":
        w.line(f"tl.store(lse{s} + row, top + tl.log(parts))")
    elif spec.keep and spec.kind == "mix":
        w.line("tl.store(total + row, top + tl.log(parts))")


def _mix_chunk(w: Writer, queries: Sequence[int]) -> None:
    """``h<s>``: a chunk of each mix."""
    spec = w.spec
    for s in queries:
        w.line(f"h{s} = tl.zeros([{w.schedule.chunk}], tl.float32)")
    if spec.kind == "merge":
        _load(w, "m", "mixed")
        w.line("h0 += rest0 * m")
    for i in range(spec.sources):
        _source(w, i)
        for s in queries:
            w.line(f"h{s} += weight{i}_{s} * v")
    if spec.norm:
        w.line(f"h0 = {w.rounded('h0')}")


def _write_mixes(w: Writer) -> None:
    spec = w.spec
    if not spec.norm:
        w.comment("the mixes")
        with _sweep(w):
            _mix_chunk(w, range(spec.queries))
            for s in range(spec.queries):
                _store(w, f"mix{s}" if spec.kind == "inter" else "out", f"h{s}")
        return
    _normalise(w, lambda: _mix_chunk(w, [0]), "h0")
    w.comment("the norm's result")
    with _sweep(w):
        _mix_chunk(w, [0])
        if spec.keep and spec.kind == "mix":
            _store(w, "mix", "h0")
        if spec.norm == "layernorm":
            w.line("h0 = h0 - mean_row")
        w.line("h0 = h0 * rstd_row")
        if spec.norm_weight:
            _load(w, "weight", "norm_weight", parameter=True)
            w.line("h0 = h0 * weight")
        if spec.norm_bias:
            _load(w, "bias", "norm_bias", parameter=True)
            w.line("h0 = h0 + bias")
        _store(w, "out", "h0")


def _normalise(w: Writer, chunk: Callable[[], None], name: str) -> None:
    """``rstd_row`` and, for a LayerNorm, ``mean_row`` of the row whose chunks ``chunk`` leaves in ``name``."""
    spec = w.spec
    w.comment("LayerNorm" if spec.norm == "layernorm" else "RMSNorm")
    if spec.norm == "layernorm":
        with _sweep(w, ["mean_row"]):
            chunk()
            w.line(f"mean_row += {name}")
        w.line(f"mean_row = mean_row * {1.0 / spec.dim!r}")
    with _sweep(w, ["variance"]):
        chunk()
        if spec.norm == "layernorm":
            w.line(f"{name} = {_inside(w, f'{name} - mean_row')}")
        w.line(f"variance += {name} * {name}")
    w.line(f"rstd_row = tl.rsqrt(variance * {1.0 / spec.dim!r} + {spec.norm_eps!r})")


# ------------------------------------------------------------------ backward


def _backward(w: Writer) -> None:
    spec = w.spec
    queries = range(spec.queries)
    _incoming(w)
    for i in range(spec.sources):
        w.comment(f"sums over source {i}")
        with _sweep(w, ["square", *(f"dot{s}" for s in queries), *(f"slope{s}" for s in queries)]):
            _load(w, "v", f"source{i}")
            w.line("square += v * v")
            for s in queries:
                _load(w, "q", f"query{s}", parameter=True)
                w.line(f"dot{s} += q * v")
                _gradient(w, "g", s)
                w.line(f"slope{s} += g * v")
        _rms(w, "rms", "square")
        w.line("own = 0.0")
        for s in queries:
            _logit_gradient(w, i, s)
        w.line(f"of_row{i} = own * rms * rms * {-1.0 / spec.dim!r}")
    w.comment("the gradients")
    with _sweep(w):
        for s in queries:
            _load(w, f"q{s}", f"query{s}", parameter=True)
            _gradient(w, f"g{s}", s)
            w.line(f"dq{s} = tl.zeros([{w.schedule.chunk}], tl.float32)")
        if spec.kind == "merge":
            _store(w, "mixed_grad", "rest * g0")
        for i, letter in enumerate(spec.gradients):
            _load(w, "v", f"source{i}")
            for s in queries:
                w.line(f"dq{s} += of_query{i}_{s} * v")
            if letter == UNWANTED:
                continue
            w.line(f"d = of_row{i} * v")
            for s in queries:
                w.line(f"d += of_grad{i}_{s} * g{s} + of_query{i}_{s} * q{s}")
            if letter == ACCUMULATE:
                _load(w, "there", f"accumulated{i}")
                w.line("d += there")
            _store(w, f"source_grad{i}", "d")
        for s in queries:
            _scratch(w, f"query_sum{s}", f"dq{s}")


def _incoming(w: Writer) -> None:
    """``extra<s>``: what the gradients of a query's logits share; of a merge what phase 1's mix takes."""
    spec = w.spec
    if spec.norm:
        for name in norm_statistics(spec)[1:]:
            w.line(f"{name}_row = tl.load({name} + row)")
    if spec.kind == "mix":
        if spec.delta == "load":
            w.line("extra0 = -tl.load(delta + row)")
        else:
            with _sweep(w, ["delta0"]):
                _load(w, "g", "grad")
                _load(w, "h", "mix")
                w.line("delta0 += g * h")
            w.line("extra0 = -delta0")
            if spec.delta == "store":
                w.line("tl.store(delta + row, delta0)")
        w.line("lse0_row = tl.load(total + row)")
    elif spec.kind == "merge":
        with _sweep(w, ["of_mixed"]):
            _gradient(w, "g", 0)
            _load(w, "m", "mixed")
            w.line("of_mixed += g * m")
        w.line("lse0_row = tl.load(lse + row)")
    else:
        for s in range(spec.queries):
            with _sweep(w, ["shared"]):
                _load(w, "g", f"grad{s}")
                _load(w, "h", f"mix{s}")
                w.line("shared += g * h")
            w.line(f"extra{s} = tl.load(lse_grad{s} + row) - shared")
            w.line(f"lse{s}_row = tl.load(lse{s} + row)")


def _logit_gradient(w: Writer, i: int, s: int) -> None:
    """Factors of source ``i``'s gradient that come of query ``s``; adds to ``own``."""
    spec = w.spec
    w.line(f"logit = {_scaled(w, f'dot{s} * rms')}")
    slope = f"slope{s} * rms" if spec.normalized else f"slope{s}"
    if spec.kind == "merge":
        w.line("part = 1.0 / (1.0 + tl.exp(lse0_row - logit))")
        w.line(f"rest = {spec.gain!r} / (1.0 + tl.exp(logit - lse0_row))")
        w.line(f"turn_grad = part * rest * ({slope} - of_mixed)")
        w.line("tl.store(lse_grad + row, -turn_grad)")
        w.line(f"logit_grad = {_scaled(w, 'turn_grad')}")
    else:
        w.line(f"part = tl.exp(logit - lse{s}_row)")
        w.line(f"logit_grad = {_scaled(w, f'part * ({spec.gain!r} * {slope} + extra{s})')}")
    w.line(f"of_query{i}_{s} = logit_grad * rms")
    w.line(f"of_grad{i}_{s} = part * {spec.gain!r}{' * rms' if spec.normalized else ''}")
    w.line(f"own += of_query{i}_{s} * dot{s}" + (f" + of_grad{i}_{s} * slope{s}" if spec.normalized else ""))


def _gradient(w: Writer, name: str, s: int) -> None:
    """A chunk of the gradient that arrives at query ``s``'s mix; through the norm, where there is one."""
    spec = w.spec
    _load(w, name, f"grad{s}" if spec.kind == "inter" else "grad")
    if not spec.norm:
        return
    shift = "shift_row - " if spec.norm == "layernorm" else ""
    _centred(w)
    if spec.norm_weight:
        _load(w, "weight", "norm_weight", parameter=True)
        w.line(f"{name} = {name} * weight")
    w.line(f"{name} = {_inside(w, f'rstd_row * ({name} - {shift}pull_row * h)')}")


def _centred(w: Writer) -> None:
    """``h``: a chunk of the norm's operand, without its mean in a LayerNorm."""
    _load(w, "h", "mix")
    if w.spec.norm == "layernorm":
        w.line(f"h = {_inside(w, 'h - mean_row')}")


def _norm_backward(w: Writer) -> None:
    """A norm's statistics for the kernels that follow, and its parameters' gradients."""
    spec = w.spec
    layer = spec.norm == "layernorm"
    _normalise(w, lambda: _load(w, "h", "mix"), "h")
    w.comment("the gradients of its parameters, and what its operand's follows from")
    with _sweep(w, ["pull_row", "shift_row"] if layer else ["pull_row"]):
        _load(w, "g", "grad")
        _centred(w)
        if spec.norm_bias:
            _scratch(w, "norm_bias_sum", "g")
        if spec.norm_weight:
            _scratch(w, "norm_weight_sum", "g * h * rstd_row")
            _load(w, "weight", "norm_weight", parameter=True)
            w.line("g = g * weight")
        w.line("pull_row += g * h")
        if layer:
            w.line("shift_row += g")
    w.line("pull_row = pull_row * rstd_row * rstd_row")
    w.line(f"delta_row = pull_row * rstd_row * {spec.norm_eps!r}")
    w.line(f"pull_row = pull_row * {1.0 / spec.dim!r}")
    if layer:
        w.line(f"shift_row = shift_row * {1.0 / spec.dim!r}")
    for name in norm_statistics(spec):
        w.line(f"tl.store({name} + row, {name}_row)")
