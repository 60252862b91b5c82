"""The one configuration object, validated when it is made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attnres_compile.errors import ConfigError

Gain = Literal["sum", "mean"]
Value = Literal["raw", "normalized"]
Queries = Literal["state", "reader"]
Calls = Literal["shared", "separate"]
Lowering = Literal["inductor", "eager"]
Choice = Literal["auto", "on", "off"]

DEFAULT_NUM_BLOCKS = 8
# ``num_blocks`` left unsaid: 8, unless ``block_size`` is given. No user's value can be this one.
_UNSAID = -1
# Fields that say how a converted model runs, not which sites and parameters it has.
RUN_TIME = ("lowering", "two_phase", "fuse")


@dataclass(frozen=True)
class AttnResConfig:
    """How a residual stream becomes depth attention (equations: arXiv 2603.15031, and docs/method.md).

    Attributes:
        num_blocks: number of blocks per stream, in blocks; default 8. ``None`` with ``block_size=None`` is
            the full form, in which every sublayer is a source of its own. A stream with fewer sublayers than
            blocks is converted in its full form. A remainder of ``L / num_blocks`` joins the last block.
        block_size: sublayers (not transformer layers) per block; default ``None``. Excludes ``num_blocks``.
        gain: ``"sum"`` (default) multiplies the softmax mix by the number of sources, so that zero queries
            give the plain residual sum exactly; ``"mean"`` is the paper's convex mix.
        eps: added to the mean square inside the key RMSNorm, in units of the squared activation; default 1e-6.
        key_norm_weight: learn a weight of the key RMSNorm per site (shape ``[d]``, ones at first); default
            ``False``.
        value: ``"raw"`` (default) mixes the sources themselves, ``"normalized"`` mixes their RMS-normalised
            values, which is not exact at zero queries.
        logit_scale: factor on the logits, dimensionless; default 1.0. ``"rsqrt_dim"`` is ``d ** -0.5``.
        queries: ``"state"`` (default): one pseudo-query per read value of the stream; ``"reader"``: one per
            module that reads it.
        calls: several calls of one network in one forward, on the same weights (energy and forces, a siamese encoder):
            ``"shared"`` (default): one set of queries for all; ``"separate"``: a set for each.
        min_sublayers: a stream of fewer residual steps is left alone; default 3.
        depth_loops: convert streams whose steps share weights (a loop over depth); default ``False``, because
            a loop over time looks the same.
        strict: raise :class:`~attnres_compile.errors.RejectedStreamError` instead of leaving a residual
            stream alone; default ``False``.
        lowering: ``"inductor"`` (default) compiles the converted part, ``"eager"`` runs it op by op.
        two_phase: attend over the finished blocks once per block for all its sites (phase 1) and merge the running
            sum in at each site (phase 2). ``"auto"`` (default): where generated kernels run (CUDA, ROCm, with
            ``lowering="inductor"``) and fewer bytes move; on the CPU never, its own kernel works in one phase.
            ``"on"`` wherever sites share their finished blocks, on any device; ``"off"`` nowhere.
        fuse: put the residual add before a site and the RMSNorm or LayerNorm after it into the site's kernel.
            ``"auto"`` (default): where generated kernels run; ``"on"`` on any device; ``"off"`` nowhere.

    Raises:
        ConfigError: a value is unknown, out of range or contradicts another one.
    """

    num_blocks: int | None = _UNSAID
    block_size: int | None = None
    gain: Gain = "sum"
    eps: float = 1e-6
    key_norm_weight: bool = False
    value: Value = "raw"
    logit_scale: float | Literal["rsqrt_dim"] = 1.0
    queries: Queries = "state"
    calls: Calls = "shared"
    min_sublayers: int = 3
    depth_loops: bool = False
    strict: bool = False
    lowering: Lowering = "inductor"
    two_phase: Choice = "auto"
    fuse: Choice = "auto"

    def __post_init__(self) -> None:
        if self.num_blocks == _UNSAID:
            object.__setattr__(self, "num_blocks", None if self.block_size is not None else DEFAULT_NUM_BLOCKS)
        elif self.num_blocks is not None and self.block_size is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and block_size={self.block_size} contradict each other",
                remedy="Give one of the two; num_blocks counts blocks, block_size counts sublayers per block",
            )
        for name, least in (("num_blocks", 1), ("block_size", 1), ("min_sublayers", 1)):
            self._check_int(name, least)
        for name, choices in (
            ("gain", Gain),
            ("value", Value),
            ("queries", Queries),
            ("calls", Calls),
            ("lowering", Lowering),
            ("two_phase", Choice),
            ("fuse", Choice),
        ):
            self._check_choice(name, get_args(choices))
        for name in ("key_norm_weight", "depth_loops", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_number("eps", self.eps, least=0.0)
        if self.logit_scale != "rsqrt_dim":
            if isinstance(self.logit_scale, str):
                raise ConfigError(f"logit_scale must be a number or 'rsqrt_dim', not {self.logit_scale!r}")
            self._check_number("logit_scale", self.logit_scale, least=-math.inf)

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and name != "min_sublayers":
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")

    @staticmethod
    def _check_number(name: str, value: Any, least: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, not {value!r}")
        if value < least:
            raise ConfigError(f"{name} must be at least {least:g}, not {value!r}")

    def scale_for(self, feature_dim: int) -> float:
        """The factor on the logits for sources of ``feature_dim`` features."""
        if self.logit_scale == "rsqrt_dim":
            return 1.0 / math.sqrt(feature_dim)
        return float(self.logit_scale)

    def layout(self) -> AttnResConfig:
        """This configuration with all choices about running at their defaults: what sites and parameters hang on."""
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in RUN_TIME}
        return dataclasses.replace(self, **defaults)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values; :meth:`from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AttnResConfig:
        """A configuration from field names and values.

        Raises:
            ConfigError: a name is no field, or a value is not valid.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(map(repr, unknown))}",
                remedy=f"The options are {', '.join(sorted(known))}",
            )
        return cls(**values)

    def fingerprint(self) -> str:
        """A short digest of all fields, for cache keys."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
