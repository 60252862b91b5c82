"""Forward kernels: a mix, the batched first phase, and the merge of the second phase, with fused neighbours.

The softmax over the sources is a stream: a running maximum, a running denominator and a running sum, so that each
source is read once and forgotten. A merge is the same stream that starts from phase 1's result
(arXiv 2603.15031, Algorithm 1).
"""

from __future__ import annotations

from attnres_compile.kernels.codegen.writer import Writer


def write_forward(w: Writer) -> None:
    """The body of a resident forward kernel."""
    spec = w.spec
    queries = range(spec.queries)
    w.hold_queries()
    with w.rows():
        if spec.kind == "merge":
            w.comment("what phase 1 found over the finished blocks")
            w.load_row("acc0", "mixed")
            w.line("top0 = tl.load(lse + row)")
            w.line("total0 = 1.0")
        w.comment("the sources")
        w.fetch_row("raw0", "source0")
        for i in range(spec.sources):
            _source(w, i)
        w.line()
        for s in queries:
            _finish(w, s)
        for s in queries if spec.kind == "inter" else ():
            w.line(f"tl.store(lse{s} + row, top{s} + tl.log(total{s}))")


def _source(w: Writer, i: int) -> None:
    """Read source ``i`` and let it join the stream of each query."""
    spec = w.spec
    last = i == spec.sources - 1
    if i and w.schedule.ahead < 2:
        w.fetch_row(f"raw{i}", f"source{i}")
    if last and spec.branch_dtype is not None:
        w.comment(f"source {i}: the partial sum and the branch that joins it")
        w.load_row("b", "branch")
        w.take_row("v", f"raw{i}")
        w.each(f"v_# = {w.rounded('v_# + b_#')}")
        w.store_row("partial", "v_#")
    else:
        w.comment(f"source {i}")
        if not last and w.schedule.ahead == 2:
            w.fetch_row(f"raw{i + 1}", f"source{i + 1}")
        w.take_row("v", f"raw{i}")
    dots = [f"dot{s}" for s in range(spec.queries)]
    products = [f"{w.query(s)} * v_#" for s in range(spec.queries)]
    w.sum_rows(["square", *dots], ["v_# * v_#", *products])
    w.line(f"rms = tl.rsqrt(square * {1.0 / spec.dim!r} + {spec.eps!r})")
    first = i == 0 and spec.kind != "merge"
    for s in range(spec.queries):
        logit = f"dot{s} * rms" + (f" * {spec.scale!r}" if spec.scale != 1.0 else "")
        value = " * rms" if spec.normalized else ""
        if first:
            w.line(f"top{s} = {logit}")
            w.line(f"total{s} = 1.0")
            w.each(f"acc{s}_# = v_#{value}")
            continue
        w.line(f"logit = {logit}")
        # A NaN must stay one: max alone may drop it.
        w.line(f"new_top = tl.maximum(top{s}, logit, propagate_nan=tl.PropagateNan.ALL)")
        w.line(f"keep = tl.exp(top{s} - new_top)")
        w.line("part = tl.exp(logit - new_top)")
        w.line(f"total{s} = total{s} * keep + part")
        if spec.normalized:
            w.line("share = part * rms")
        share = "share" if spec.normalized else "part"
        w.each(f"acc{s}_# = acc{s}_# * keep + {share} * v_#")
        w.line(f"top{s} = new_top")


def _finish(w: Writer, s: int) -> None:
    """Divide by the denominator, apply the fused norm, store."""
    spec = w.spec
    if spec.kind == "inter":
        w.line(f"factor = 1.0 / total{s}")
        w.store_row(f"mix{s}", f"acc{s}_# * factor")
        return
    w.line(f"factor = {spec.gain!r} / total0")
    if not spec.norm:
        w.store_row("out", "acc0_# * factor")
        _store_total(w)
        return
    w.each(f"h_# = {w.rounded('acc0_# * factor')}")
    if spec.keep and spec.kind == "mix":
        w.store_row("mix", "h_#")
    normalise(w)
    for name, dtype in (("norm_weight", spec.norm_weight), ("norm_bias", spec.norm_bias)):
        if dtype is not None:
            w.load_parameter(name, name)
    weight = " * norm_weight_#" if spec.norm_weight else ""
    bias = " + norm_bias_#" if spec.norm_bias else ""
    w.store_row("out", f"h_# * rstd_row{weight}{bias}")
    _store_total(w)


def _store_total(w: Writer) -> None:
    """Numbers per token come last: one thread stores them, and AMD's compiler moves no row over that branch."""
    if w.spec.keep and w.spec.kind == "mix":
        w.line("tl.store(total + row, top0 + tl.log(total0))")


def normalise(w: Writer) -> None:
    """``rstd_row`` of ``h``; a LayerNorm also takes ``mean_row`` off ``h``."""
    spec = w.spec
    w.comment("LayerNorm" if spec.norm == "layernorm" else "RMSNorm")
    over = repr(1.0 / spec.dim)
    if spec.norm == "layernorm":
        w.sum_rows(["mean_row"], ["h_#"])
        w.line(f"mean_row = mean_row * {over}")
        w.each("h_# = h_# - mean_row", inside=True)
    w.sum_rows(["variance"], ["h_# * h_#"])
    w.line(f"rstd_row = tl.rsqrt(variance * {over} + {spec.norm_eps!r})")
