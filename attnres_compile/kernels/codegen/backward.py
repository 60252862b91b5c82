"""Backward kernels: one pass over the sources, since the log-sum-exp and ``delta = <grad, mix>`` are at hand.

Per source three sums over its row (``<q, v>``, ``<v, v>``, ``<g, v>``) give the gradient of its logit, and with it that
of the row, which is written while the row is still in registers; gradients that later readers left for the source are
added on the way. The query's gradient stays in registers over all rows of a program and goes to the program's row of
a scratch matrix: no atomics, so equal launches give equal bits. Equations: docs/method.md, gradients.
"""

from __future__ import annotations

from attnres_compile.kernels.codegen.forward import normalise
from attnres_compile.kernels.codegen.writer import Writer
from attnres_compile.kernels.spec import ACCUMULATE, UNWANTED, norm_statistics, summed


def write_backward(w: Writer) -> None:
    """The body of a resident backward kernel."""
    spec = w.spec
    queries = range(spec.queries) if spec.kind != "norm" else range(0)
    if queries:
        w.hold_queries()
    for s in queries:
        w.each(f"dq{s}_# = tl.zeros([{w.schedule.chunk}], tl.float32)")
    for name in summed(spec):
        w.each(f"d{name}_# = tl.zeros([{w.schedule.chunk}], tl.float32)")
    with w.rows():
        if spec.kind == "inter":
            _gradients_of_phase_1(w)
        elif spec.kind == "merge":
            _gradient_of_merge(w)
        else:
            _gradient_of_mix(w)
        if spec.kind in ("mix", "inter"):
            w.comment("the sources")
            _fetch(w, 0)
        for i in range(spec.sources if spec.kind != "merge" else 0):
            w.comment(f"source {i}")
            if i and w.schedule.ahead < 2:
                _fetch(w, i)
            if i + 1 < spec.sources and w.schedule.ahead == 2:
                _fetch(w, i + 1)
            w.take_row("v", f"raw{i}")
            _sums(w)
            _source_gradient(w, i)
    w.line()
    for s in queries:
        w.store_scratch(f"query_sum{s}", f"dq{s}")
    for name in summed(spec):
        w.store_scratch(f"{name}_sum", f"d{name}")


# ------------------------------------------------------------------ what arrives at the site


def _gradient_of_mix(w: Writer) -> None:
    """``g0``, the gradient of the mix, and ``delta0 = gain * <g, h>``, its part that all logits share."""
    spec = w.spec
    w.load_row("g0", "grad")
    if spec.norm or spec.delta != "load":
        w.load_row("h", "mix")
    if spec.norm and spec.delta == "load":
        _from_statistics(w)
    elif spec.norm:
        _through_norm(w)
    elif spec.delta != "load":
        # The mix holds the gain already.
        w.sum_rows(["delta0"], ["g0_# * h_#"])
    if spec.kind == "norm":
        for name in norm_statistics(spec):
            w.line(f"tl.store({name} + row, {name}{'0' if name == 'delta' else '_row'})")
        return
    if spec.delta == "load":
        w.line("delta0 = tl.load(delta + row)")
    elif spec.delta == "store":
        w.line("tl.store(delta + row, delta0)")
    w.line("lse0 = tl.load(total + row)")
    w.line("extra0 = -delta0")


def _gradients_of_phase_1(w: Writer) -> None:
    """``g`` of each query's mix, and ``extra = d lse - <g, mix>``, what its logits' gradients share."""
    for s in range(w.spec.queries):
        w.comment(f"query {s}")
        w.load_row(f"g{s}", f"grad{s}")
        w.load_row("h", f"mix{s}")
        w.sum_rows([f"delta{s}"], [f"g{s}_# * h_#"])
        w.line(f"lse{s}_row = tl.load(lse{s} + row)")
        w.line(f"extra{s} = tl.load(lse_grad{s} + row) - delta{s}")


def _gradient_of_merge(w: Writer) -> None:
    """All of a merge: phase 1's mix and the partial sum are two sources, and both fit into registers."""
    spec = w.spec
    w.load_row("g0", "grad")
    if spec.delta == "load":
        w.load_row("h", "mix")
        _from_statistics(w)
    w.load_row("m", "mixed")
    w.load_row("v", "source0")
    if spec.gradients[0] == ACCUMULATE and w.schedule.ahead:
        w.fetch_row("there0", "accumulated0")
    w.line("lse_row = tl.load(lse + row)")
    w.sum_rows(["square", "dot0"], ["v_# * v_#", f"{w.query(0)} * v_#"])
    w.line(f"rms = tl.rsqrt(square * {1.0 / spec.dim!r} + {spec.eps!r})")
    w.line(f"logit = {_logit(w, 0)}")
    w.line("share = 1.0 / (1.0 + tl.exp(lse_row - logit))")
    w.line("rest = 1.0 / (1.0 + tl.exp(logit - lse_row))")
    if spec.norm and spec.delta != "load":
        value = "share * rms" if spec.normalized else "share"
        w.line(f"of_partial = {value}")
        w.each(f"h_# = {w.rounded(f'{spec.gain!r} * (rest * m_# + of_partial * v_#)')}")
        _through_norm(w)
    w.sum_rows(["of_mixed", "slope0"], ["g0_# * m_#", "g0_# * v_#"])
    slope = "slope0 * rms" if spec.normalized else "slope0"
    w.line(f"turn_grad = share * rest * {spec.gain!r} * ({slope} - of_mixed)")
    w.line("tl.store(lse_grad + row, -turn_grad)")
    w.store_row("mixed_grad", f"{spec.gain!r} * rest * g0_#")
    w.line(f"logit_grad = turn_grad * {spec.scale!r}")
    w.line(f"part = {spec.gain!r} * share")
    _coefficients(w, 0, first=True)
    _write_gradient(w, 0, [0])


def _through_norm(w: Writer) -> None:
    """``g0``: from the gradient of the norm's result to that of the mix ``h``; and ``delta0 = <g0, h>``.

    A norm's result hardly depends on the length of ``h``, so that little is left of ``delta0``: what its eps leaves.
    """
    spec = w.spec
    layer = spec.norm == "layernorm"
    normalise(w)
    if spec.norm_weight:
        w.load_parameter("norm_weight", "norm_weight")
        w.each("dnorm_weight_# += g0_# * h_# * rstd_row")
    if spec.norm_bias:
        w.each("dnorm_bias_# += g0_#")
    if spec.norm_weight:
        w.each("g0_# = g0_# * norm_weight_#")
    over = repr(1.0 / spec.dim)
    if layer:
        w.sum_rows(["pull_row", "shift_row"], ["g0_# * h_#", "g0_#"])
        w.line(f"shift_row = shift_row * {over}")
    else:
        w.sum_rows(["pull_row"], ["g0_# * h_#"])
    w.line("pull_row = pull_row * rstd_row * rstd_row")
    w.line(f"delta0 = pull_row * rstd_row * {spec.norm_eps!r}")
    w.line(f"pull_row = pull_row * {over}")
    if spec.kind != "norm":
        _pull_back(w)


def _pull_back(w: Writer) -> None:
    """``g0``, times the weight already, to the gradient of ``h``, whose mean is off already."""
    shift = "shift_row - " if w.spec.norm == "layernorm" else ""
    w.each(f"g0_# = rstd_row * (g0_# - {shift}pull_row * h_#)", inside=True)


def _from_statistics(w: Writer) -> None:
    """``g0`` as :func:`_through_norm` leaves it, from what a norm kernel found."""
    spec = w.spec
    for name in norm_statistics(spec)[1:]:
        w.line(f"{name}_row = tl.load({name} + row)")
    if spec.norm == "layernorm":
        w.each("h_# = h_# - mean_row")
    if spec.norm_weight:
        w.load_parameter("norm_weight", "norm_weight")
        w.each("g0_# = g0_# * norm_weight_#")
    _pull_back(w)


# ------------------------------------------------------------------ what goes to a source


def _fetch(w: Writer, i: int) -> None:
    """Ask for a source, and for the gradient that is there already."""
    w.fetch_row(f"raw{i}", f"source{i}")
    if w.spec.gradients[i] == ACCUMULATE and w.schedule.ahead:
        w.fetch_row(f"there{i}", f"accumulated{i}")


def _sums(w: Writer) -> None:
    queries = range(w.spec.queries)
    names = ["square", *(f"dot{s}" for s in queries), *(f"slope{s}" for s in queries)]
    products = ["v_# * v_#"]
    products += [f"{w.query(s)} * v_#" for s in queries]
    products += [f"g{s}_# * v_#" for s in queries]
    w.sum_rows(names, products)
    w.line(f"rms = tl.rsqrt(square * {1.0 / w.spec.dim!r} + {w.spec.eps!r})")


def _logit(w: Writer, s: int) -> str:
    return f"dot{s} * rms" + (f" * {w.spec.scale!r}" if w.spec.scale != 1.0 else "")


def _source_gradient(w: Writer, i: int) -> None:
    """The gradient of the source in ``v``, and its part of each query's."""
    spec = w.spec
    for s in range(spec.queries):
        lse = "lse0" if spec.kind == "mix" else f"lse{s}_row"
        w.line(f"part = tl.exp({_logit(w, s)} - {lse})")
        slope = f"slope{s} * rms" if spec.normalized else f"slope{s}"
        slope = f"{spec.gain!r} * {slope}" if spec.gain != 1.0 else slope
        w.line(f"logit_grad = part * ({slope} + extra{s})" + (f" * {spec.scale!r}" if spec.scale != 1.0 else ""))
        if spec.gain != 1.0:
            w.line(f"part = part * {spec.gain!r}")
        _coefficients(w, s, first=s == 0)
    _write_gradient(w, i, list(range(spec.queries)))


def _coefficients(w: Writer, s: int, first: bool) -> None:
    """What the source's gradient takes of the incoming gradient, of the query and of the source itself."""
    spec = w.spec
    w.line(f"of_query{s} = logit_grad * rms")
    w.line(f"of_grad{s} = part * rms" if spec.normalized else f"of_grad{s} = part")
    pull = f"of_query{s} * dot{s}" + (f" + of_grad{s} * slope{s}" if spec.normalized else "")
    w.line(f"of_row {'=' if first else '-='} {'-(' if first else ''}{pull}{')' if first else ''}")


def _write_gradient(w: Writer, i: int, queries: list[int]) -> None:
    spec = w.spec
    letter = spec.gradients[i]
    if letter != UNWANTED:
        w.line(f"of_row = of_row * rms * rms * {1.0 / spec.dim!r}")
        if letter == ACCUMULATE and not w.schedule.ahead:
            w.fetch_row(f"there{i}", f"accumulated{i}")
        value = " + ".join(f"of_grad{s} * g{s}_# + of_query{s} * {w.query(s)}" for s in queries)
        there = f" + there{i}_#.to(tl.float32)" if letter == ACCUMULATE else ""
        w.store_row(f"source_grad{i}", f"{value} + of_row * v_#{there}")
    for s in queries:
        w.each(f"dq{s}_# += of_query{s} * v_#")
