"""Whether a conversion is right, as a table of numbers: exact at zero queries, and one function however it runs.

Exactness (:mod:`attnres_compile.exactness`) compares the converted model, queries at zero, with the original. There
every site gives the plain sum, so a wrong softmax would go unseen. Agreement gives the queries random values, compares
each site with the definition of depth attention, and then the ways to run the converted model with each other: eager
or compiled, one phase or two (arXiv 2603.15031, Algorithm 1), sites fused with their neighbours or not.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from attnres_compile.agreement import ONE_PHASE, VARIANTS, Apart, Result, Variant, apart, run_variant
from attnres_compile.comparison import FLOATS, LowestPrecision, as_dtype, run, same_randomness, twin
from attnres_compile.config import AttnResConfig, Lowering
from attnres_compile.definition import SitesByDefinition
from attnres_compile.exactness import Convert, Exactness, convert_copy, private_copy, verify
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.oracle import HOLDS, NOT_JUDGED
from attnres_compile.random_queries import against_oracle
from attnres_compile.rounding import FACTOR, MEANINGLESS, move_parameters, tolerance_for

# Largest relative error between two ways to compute the same in float64.
AGREEMENT = 1e-10
# Longest reason that is given for what did not run, in characters.
LONG_REASON = 200

EXACT, DEFINED, ROUNDING, AGREES = "exactness", "definition", "rounding", "agreement"
ORACLE = "oracle"


@dataclass(frozen=True)
class Check:
    """One row: two runs that should give the same.

    Attributes:
        name: ``"exactness"`` (converted, queries at zero, against the original in the same dtype), ``"definition"``
            (each site of the reference against the definition of depth attention), ``"oracle"`` (the reference against
            the original, operator by operator, with the report's mixes put in by the equations), ``"agreement"``
            (converted, random queries, against the reference) or ``"rounding"`` (the original against itself in the
            reference's dtype, which is a measure for other rows and no check).
        what: what was run, as ``"eager, two-phase"``.
        dtype: that it was run in, as ``"float32"``.
        error_output: largest relative error of the outputs; ``None`` if there was nothing to compare.
        error_gradient: the same of the gradients of parameters, floating inputs and queries.
        tolerance: the largest error that counts as rounding, relative; ``None`` where nothing was compared.
        holds: whether it was met; ``None`` if nothing was checked.
        note: why nothing was checked, or what is behind the numbers.
        worst_output, worst_gradient: the tensors with the largest errors.
    """

    name: str
    what: str
    dtype: str
    error_output: float | None = None
    error_gradient: float | None = None
    tolerance: float | None = None
    holds: bool | None = None
    note: str = ""
    worst_output: str = ""
    worst_gradient: str = ""


@dataclass(frozen=True)
class Verification:
    """What was compared, and whether it holds.

    Attributes:
        checks: the rows.
        queries: number of pseudo-queries.
        gradients: number of tensors whose gradients were compared in exactness.
        dtype: of the model itself, the one that most of its parameters are in.
        device: that it was run on.
        mode: ``"eval"`` or ``"train"``.
        randomised: the weights were randomised first.
        reference: what agreement is measured against.
        notes: what holds for several rows.
    """

    checks: tuple[Check, ...]
    queries: int
    gradients: int
    dtype: str
    device: str
    mode: str
    randomised: bool
    reference: str
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Nothing that was checked failed, and exactness and agreement were each checked at least once."""
        checked = [check for check in self.checks if check.holds is not None]
        return {EXACT, AGREES} <= {check.name for check in checked} and all(check.holds for check in checked)

    def to_dict(self) -> dict[str, Any]:
        """``holds`` and the fields as JSON values. An infinite error (a NaN in one of the two) is the largest float."""
        values = dataclasses.asdict(self)
        for check in values["checks"]:
            for name in ("error_output", "error_gradient", "tolerance"):
                if check[name] is not None:
                    check[name] = min(check[name], sys.float_info.max)
        values["checks"], values["notes"] = list(values["checks"]), list(self.notes)
        return {"holds": self.holds, **values}


def check(
    model: nn.Module,
    example_inputs: Any,
    config: AttnResConfig | None = None,
    *,
    keep_weights: bool = False,
    train: bool = False,
    seed: int = 0,
    lowerings: Sequence[Lowering] = ("eager", "inductor"),
    convert: Convert | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare a converted model with the original and with itself, in several precisions and lowerings.

    *Exactness*: :func:`attnres_compile.verify` in float64, in float32 and, for a half-precision model, as it is. All
    rows are held to one rule (:mod:`attnres_compile.rounding`).

    *Agreement*: every query gets random values, so that the logits have a standard deviation of 1. The reference is
    the converted model in float64, run eagerly and in one phase; in float32 if the model does not run in float64.

    - Each site of the reference must be what the definition gives for the same sources, query and gradient, computed
      in float64, to within 1e-10 (or 1e-5 in float32).
    - The *original*, run operator by operator with the mixes of the report's sites put in by the equations, must give
      the same as well (:mod:`attnres_compile.oracle`). That alone shares nothing with what converts a model but the
      report: which sublayers there are, which features a stream has and what is in a source are seen by it. Where it
      cannot follow a model it says so, which fails nothing.
    - Rows in float64 (two-phase, fused) must be within 1e-10 of it, outputs and all gradients, those of the queries
      included.
    - Rows in float32 (eager and Inductor, one-phase and two-phase) must be within ``max(1e-5, 10 e)``, where e is how
      far the *original* model's own run in float32 is from its run in float64: what a model does to rounding errors
      is no fault of the conversion. The row ``rounding`` shows e. Where a row is further off, e is also what one
      rounding of each weight does to the reference: a softmax over sources can be more sensitive than their sum.
    - Rows in half precision, for a model of that dtype, must be within ``max(3 eps sqrt(queries), 10 e)``.
    - A model that computes in float32 in places, whatever its dtype, is held to the float32 rule in float64 too.
    - Where such a limit is above 1e-2 (half precision: 0.5), the comparison says nothing and is not counted.

    A row that could not be run says why. Where the original itself does not run in a dtype, that fails nothing; where
    only the converted model does not run, or Inductor cannot compile it, that fails. Errors are relative to the
    largest value of each tensor; of a gradient to no less than a tenth of the largest gradient, with the queries' and
    all others apart.

    The model itself, its inputs and all random state stay untouched. Memory: a copy of the model, and one or two more
    with their gradients, in float64.

    Args:
        model: on a real device.
        example_inputs: what to call it with, as for :func:`attnres_compile.transform`.
        config: how to convert; default ``AttnResConfig(lowering="eager")``. Exactness is tested as it says; agreement
            puts its own values in the place of ``lowering``, ``two_phase`` and ``fuse``.
        keep_weights: use the model's own weights (those in float64 rounded to float32) instead of randomised ones.
        train: compare in training mode, with equal seeds.
        seed: of random weights and queries, of the loss and of the model's own random numbers.
        lowerings: which to compare. Without ``"inductor"`` nothing is compiled, and the whole takes seconds.
        convert: what to convert a copy with, default :func:`attnres_compile.exactness.convert_copy`.
        progress: told what is being done.

    Raises:
        NoStreamError, GraphBreakError: there is nothing to convert.
        AttnResError: the model is on the meta device, cannot be copied, or returns no tensors.
        Exception: the model's own, when it rejects the inputs.
    """
    with same_randomness(), torch.inference_mode(False), torch.enable_grad():
        base = _single(private_copy(model, train, None if keep_weights else seed))
        inputs = _single(as_inputs(example_inputs))
        work = _Work(base, inputs, config or AttnResConfig(lowering="eager"), train, seed, convert, progress)
        exact = work.exactness()
        agrees = list(work.agreement(tuple(lowerings)))
    notes: tuple[str, ...] = ()
    if "inductor" not in lowerings:
        notes = ("Inductor was not asked for: what it compiles was not compared",)
    return Verification(
        checks=(*exact, *agrees),
        queries=work.queries,
        gradients=work.gradients,
        dtype=_name(work.own),
        device=str(next(iter(base.parameters()), torch.empty(0)).device),
        mode="train" if train else "eval",
        randomised=not keep_weights,
        reference=f"{ONE_PHASE.what}, {_name(work.finest)}",
        notes=notes,
    )


class _Work:
    """One model, and all that is run of it."""

    def __init__(
        self,
        base: nn.Module,
        inputs: Inputs,
        config: AttnResConfig,
        train: bool,
        seed: int,
        convert: Convert | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.base, self.inputs, self.config = base, inputs, config
        self.train, self.seed, self.convert = train, seed, convert or convert_copy
        self.says = progress or (lambda text: None)
        self.queries = self.gradients = 0
        self.own = _own_dtype(base)
        self.dtypes = [dtype for dtype in FLOATS if dtype in (torch.float64, torch.float32, self.own)]
        # The model's own dtype first: an error there is the caller's.
        self.order = [self.own, *(dtype for dtype in self.dtypes if dtype != self.own)]
        self.originals: dict[torch.dtype, Result] = {}
        self.lowest: dict[torch.dtype, torch.dtype] = {}
        self.broken: dict[torch.dtype, str] = {}
        self.rounding: dict[torch.dtype, Apart] = {}
        self.sensitivity: dict[torch.dtype, float] = {}
        for dtype in self.order:
            self._run_original(dtype)
        self.finest = next(dtype for dtype in self.dtypes if dtype in self.originals)

    def _run_original(self, dtype: torch.dtype) -> None:
        self.says(f"running the original in {_name(dtype)}")
        watch = LowestPrecision()
        watch.dtype = dtype
        try:
            self.originals[dtype] = Result(run(*self._copies(dtype), self.seed, watch))
        except Exception as error:
            if dtype == self.own:
                raise
            self.broken[dtype] = f"not run: the model itself fails in {_name(dtype)}: {_one_line(error)}"
        self.lowest[dtype] = watch.dtype

    def _copies(self, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        cast = None if dtype == self.own else dtype
        return as_dtype(twin(self.base), cast), as_dtype(self.inputs, cast)

    # --- exactness

    def exactness(self) -> list[Check]:
        """The rows of exactness, the finest dtype first."""
        rows = {dtype: self._exact(dtype) for dtype in self.order}
        return [rows[dtype] for dtype in self.dtypes]

    def _exact(self, dtype: torch.dtype) -> Check:
        what = "converted, queries at zero"
        if dtype in self.broken:
            return Check(EXACT, what, _name(dtype), note=self.broken[dtype])
        self.says(f"comparing with the original in {_name(dtype)}")
        options = {"keep_weights": True, "train": self.train, "seed": self.seed, "convert": self.convert}
        cast = None if dtype == self.own else dtype
        try:
            found: Exactness = verify(self.base, self.inputs, self.config, dtype=cast, **options)  # type: ignore[arg-type]
        except Exception as error:
            if dtype == self.own:
                raise
            return Check(EXACT, what, _name(dtype), holds=False, note=f"not run: {_one_line(error)}")
        if dtype == self.own:
            self.queries, self.gradients = found.queries, found.gradients
        notes = list(found.notes)
        if found.dtype != _name(dtype):
            notes.append(f"the model computes in {found.dtype} in places, so that is what it is held to")
        return Check(
            EXACT,
            what,
            _name(dtype),
            found.output_error,
            found.gradient_error,
            found.tolerance,
            found.holds,
            "; ".join(notes),
            found.worst_output,
            found.worst_gradient,
        )

    # --- agreement

    def agreement(self, lowerings: tuple[Lowering, ...]) -> Iterator[Check]:
        """The rows of agreement, the finest dtype first, each dtype's measure before its rows."""
        self.says("running the reference")
        sites = SitesByDefinition()
        reference = self._run(ONE_PHASE, self.finest, sites)
        yield self._defined(sites)
        yield self._by_oracle()
        absent: dict[str, str] = {}
        for dtype in self.dtypes:
            if dtype in self.broken:
                yield Check(AGREES, "all lowerings", _name(dtype), note=self.broken[dtype])
                continue
            against, note = reference, ""
            if dtype != self.finest:
                yield self._rounding(dtype)
                if self.train and not _same_draws(dtype, self.finest, self.base):
                    against = self._run(ONE_PHASE, dtype)
                    note = f"against {ONE_PHASE.what} in {_name(dtype)}: in another dtype dropout drops other values"
            for variant in VARIANTS:
                is_reference = variant == ONE_PHASE and (against is not reference or dtype == self.finest)
                if variant.lowering in lowerings and not is_reference and self._wanted(variant, dtype):
                    yield self._agrees(variant, dtype, against, note, absent)

    def _wanted(self, variant: Variant, dtype: torch.dtype) -> bool:
        """Fused where rounding hides least, Inductor in the dtypes that models run in."""
        if variant.fuse:
            return dtype == self.finest
        return variant.lowering == "eager" or dtype != torch.float64

    def _run(self, variant: Variant, dtype: torch.dtype, watch: SitesByDefinition | None = None) -> Result:
        return run_variant(variant, *self._copies(dtype), self.config, self.seed, self.convert, watch)

    def _defined(self, sites: SitesByDefinition) -> Check:
        what, lowest = "sites, by definition", self.lowest[self.finest]
        tolerance = AGREEMENT if lowest == torch.float64 else tolerance_for(lowest, 1)
        found = (sites.output, sites.gradient)
        holds = sites.sites > 0 and all(error <= tolerance for error in found if error is not None)
        note = "" if sites.sites else "no site was seen to run"
        return Check(DEFINED, what, _name(self.finest), *found, tolerance, holds, note)

    def _by_oracle(self) -> Check:
        where = (ORACLE, "original, by the equations", _name(self.finest))
        if self.finest not in (torch.float64, torch.float32):
            return Check(*where, note=f"not run: {_name(self.finest)} is too coarse to tell a mistake from rounding")
        self.says("putting the equations into the original")
        model, inputs = self._copies(self.finest)
        try:
            found = against_oracle(
                model, inputs, ONE_PHASE.of(self.config), seed=self.seed, dtype=None, convert=self.convert
            )
        except Exception as error:  # It is no part of the model, nor of the conversion.
            return Check(*where, note=f"not run: {_one_line(error)}")
        if found.status == NOT_JUDGED:
            return Check(*where, note=f"not run: {found.note}")
        return Check(
            *where,
            found.error_output,
            found.error_gradient,
            found.tolerance,
            found.status == HOLDS,
            found.note,
            found.worst_output,
            found.worst_gradient,
        )

    def _agrees(
        self, variant: Variant, dtype: torch.dtype, against: Result, note: str, absent: dict[str, str]
    ) -> Check:
        where = (AGREES, variant.what, _name(dtype))
        asked = [part for part in ("two_phase", "fuse") if getattr(variant, part)]
        known = next((absent[part] for part in asked if part in absent), "")
        if known:
            return Check(*where, note=f"not run: {known}")
        self.says(f"running {variant.what} in {_name(dtype)}{' (compiling)' * (variant.lowering == 'inductor')}")
        try:
            found = self._run(variant, dtype)
        except Exception as error:
            return Check(*where, holds=False, note=f"not run: {_one_line(error)}")
        if missing := variant.missing(found.report):
            if len(asked) == 1:
                absent[asked[0]] = missing
            return Check(*where, note=f"not run: {missing}")
        distance, tolerance = apart(against, found), self.tolerance(dtype)
        notes = [note, *distance.notes]
        measured = self.lowest[dtype] != torch.float64 and not note  # Without other draws of dropout.
        if distance.equal and distance.error > tolerance and measured:
            own = self._sensitivity(dtype, against)
            tolerance = max(tolerance, FACTOR * own)
            notes.append(f"the reference is off by {own:.1e} where each weight is moved by one rounding")
        holds: bool | None = distance.equal and distance.error <= tolerance
        if distance.equal and tolerance > MEANINGLESS[self.lowest[dtype]]:
            holds = None
            notes.append(f"not counted: this model's own rounding in {_name(dtype)} is too coarse to tell")
        return Check(*where, *_errors(distance), tolerance, holds, "; ".join(filter(None, notes)), *_places(distance))

    # --- how close is close

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest error of an agreement in ``dtype``, by the rule of :func:`check`."""
        lowest = self.lowest[dtype]
        if lowest == torch.float64:
            return AGREEMENT
        # In the finest dtype a model that computes in another in places has that one's rounding.
        measure = dtype if dtype != self.finest else lowest
        own = self._own_rounding(measure).error if measure in self.originals else 0.0
        return tolerance_for(lowest, self.queries, own)

    def _sensitivity(self, dtype: torch.dtype, reference: Result) -> float:
        """What one rounding of each weight in ``dtype`` does to the reference, its random queries included: a softmax
        over sources can be more sensitive than their sum.
        """
        if dtype not in self.sensitivity:
            model, inputs = self._copies(self.finest)
            move_parameters(model, self.lowest[dtype], self.seed + 1)
            moved = run_variant(ONE_PHASE, model, inputs, self.config, self.seed, self.convert)
            self.sensitivity[dtype] = apart(reference, moved).error
        return self.sensitivity[dtype]

    def _own_rounding(self, dtype: torch.dtype) -> Apart:
        if dtype not in self.rounding:
            self.rounding[dtype] = apart(self.originals[self.finest], self.originals[dtype])
        return self.rounding[dtype]

    def _rounding(self, dtype: torch.dtype) -> Check:
        own = self._own_rounding(dtype)
        what = f"the original vs {_name(self.finest)}"
        note = f"rows in {_name(dtype)} may be {FACTOR:g} times as far off"
        return Check(ROUNDING, what, _name(dtype), *_errors(own), None, None, note, *_places(own))


def _errors(distance: Apart) -> tuple[float | None, float | None]:
    return distance.output, distance.gradient


def _places(distance: Apart) -> tuple[str, str]:
    return distance.worst_output, distance.worst_gradient


# --- dtypes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype that most of the model's numbers are in."""
    counts = dict.fromkeys(FLOATS, 0)
    for parameter in model.parameters():
        if parameter.dtype in counts:
            counts[parameter.dtype] += parameter.numel()
    most = max(counts, key=counts.__getitem__)
    return most if counts[most] else torch.float32


def _single(value: Any) -> Any:
    """A model (in place) or inputs whose float64 numbers are such as float32 holds: every dtype gets the same."""
    if isinstance(value, nn.Module):
        with torch.no_grad():
            for tensor in (*value.parameters(), *value.buffers()):
                if tensor.dtype == torch.float64:
                    tensor.copy_(tensor.float())
        return value

    def rounded(leaf: Any) -> Any:
        return leaf.float().double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float64 else leaf

    return Inputs(*pytree.tree_map(rounded, (value.args, value.kwargs)))


def _same_draws(one: torch.dtype, other: torch.dtype, model: nn.Module) -> bool:
    """Whether dropout drops the same values in both dtypes, which is up to the device."""
    device = next(iter(model.parameters()), torch.empty(0)).device
    kept = []
    for dtype in (one, other):
        torch.manual_seed(0)
        kept.append(F.dropout(torch.ones(4096, dtype=dtype, device=device), 0.5) != 0)
    return torch.equal(*kept)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONG_REASON else text[: LONG_REASON - 3] + "..."
