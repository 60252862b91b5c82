"""The pseudo-queries: how they are named, where they live, how they are found again."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import PlanMismatchError
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.recorded import RECORD, Record
from attnres_compile.report import TransformReport
from attnres_compile.tracers import refuse_script

# Name of the child module that a converted module gets: the one prefix of the added state_dict keys.
CHILD = "attnres"
# Attribute of a parameter of an untransformed model that holds the queries made at compile time.
LATE = "_attnres_late_queries"


@dataclass(frozen=True)
class Declaration:
    """What a converted module says of itself in every graph it is traced into, as one string constant.

    Attributes:
        config: the configuration of the conversion.
        sites: names of the sites that have a query, in depth order.
        dims: feature size of each of them.
        left: names of sites in streams that only the module's own graph takes for streams, and that the report says
            are left alone: in the whole model they are something else (the beginning of a post-norm stream).
        method: name of the module's method that was converted.
    """

    config: AttnResConfig
    sites: tuple[str, ...]
    dims: tuple[int, ...]
    left: tuple[str, ...] = ()
    method: str = "forward"

    @classmethod
    def of(
        cls, plans: Sequence[BlockPlan], config: AttnResConfig, left: Sequence[str] = (), method: str = "forward"
    ) -> Declaration:
        """The declaration for ``plans``."""
        named = [(name, plan.stream.feature_dim) for plan in plans for name in plan.queries]
        return cls(config, tuple(name for name, _ in named), tuple(dim for _, dim in named), tuple(left), method)

    def to_text(self) -> str:
        """A JSON string, the same for equal declarations."""
        values = {
            "config": self.config.to_dict(),
            "sites": self.sites,
            "dims": self.dims,
            "left": self.left,
            "method": self.method,
        }
        return json.dumps(values, sort_keys=True)

    def wanted(self, plans: Sequence[BlockPlan]) -> tuple[BlockPlan, ...]:
        """``plans`` without those that are left alone."""
        left = set(self.left)
        return tuple(
            plan for plan in plans if not ({site.query for site in plan.sites if site.num_sources > 1} or {""}) <= left
        )

    def recognised(self, plans: Sequence[BlockPlan]) -> tuple[BlockPlan, ...]:
        """``plans`` with the names that this declaration has for their sites.

        A site is named after what reads it first, and what looks at a model (a hook that was registered since) reads
        it, too. So a site that stands where a declared one stands, and that is still read by what that one is named
        after, is the same. Where anything else differs, the plans stay as they are, for :meth:`check` to refuse.
        """
        wanted = self.wanted(plans)
        sites = [site for plan in wanted for site in plan.sites if site.name in plan.queries]
        readers = [name.partition(":")[0] for name in self.sites]
        if len(sites) != len(self.sites) or not all(
            reader in site.label for reader, site in zip(readers, sites, strict=True)
        ):
            return wanted
        names = {site.name: name for site, name in zip(sites, self.sites, strict=True)}
        others = [site.name for plan in wanted for site in plan.sites if site.name not in names]
        if set(others) & set(self.sites):
            return wanted

        def named(site: SitePlan) -> SitePlan:
            shares = None if site.shares is None else names[site.shares]
            return replace(site, name=names.get(site.name, site.name), shares=shares)

        return tuple(replace(plan, sites=tuple(map(named, plan.sites))) for plan in wanted)

    @classmethod
    def from_text(cls, text: str) -> Declaration:
        """The declaration that :meth:`to_text` was taken from."""
        values = json.loads(text)
        return cls(
            AttnResConfig.from_dict(values["config"]),
            tuple(values["sites"]),
            tuple(values["dims"]),
            tuple(values["left"]),
            values["method"],
        )

    def check(self, plans: Sequence[BlockPlan], where: str, found: Sequence[str] = ()) -> None:
        """Compare with the plans of a new capture.

        Args:
            plans: its plans.
            where: path of the module.
            found: reasons for which streams of the capture were left alone, for the message.

        Raises:
            PlanMismatchError: sites are missing, or there are others.
        """
        self.refuse(Declaration.of(plans, self.config), where, found)

    def refuse(self, found: Declaration, where: str, reasons: Sequence[str] = ()) -> None:
        """Raise if ``found`` names other sites than this declaration.

        Raises:
            PlanMismatchError: it does.
        """
        here, there = dict(zip(found.sites, found.dims, strict=True)), dict(zip(self.sites, self.dims, strict=True))
        if here == there:
            return
        missing = [name for name in there if name not in here]
        extra = [name for name in here if name not in there]
        parts = [f"missing {_some(missing)}"] if missing else []
        parts += [f"unknown {_some(extra)}"] if extra else []
        parts += ["feature sizes differ"] if not parts else []
        parts += [f"left alone here: {', '.join(sorted(set(reasons)))}"] if reasons else []
        raise PlanMismatchError(
            f"this capture of the model holds {len(here)} of the {len(there)} sites that its pseudo-queries were made "
            f"for: {'; '.join(parts)}",
            module=where,
            remedy="A graph break, a different mode (train/eval) or a different dtype changed what is on the residual "
            "stream. Remove the break, or revert the model and transform it in the mode it will run in",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class DepthQueries(nn.Module):
    """The parameters of one converted module: a pseudo-query ``[d]`` per site, zero at first, and the key norm
    weights ``[d]``, one at first, where the configuration asks for them.

    They are one-dimensional, so that optimizers which treat matrices apart (weight decay, Muon) leave them alone.
    """

    token: Tensor

    def __init__(
        self,
        declaration: Declaration,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        report: TransformReport | None = None,
    ) -> None:
        super().__init__()
        self.declaration = declaration
        self.report = report or TransformReport()
        self.keys: dict[str, str] = {}
        for site, dim in zip(declaration.sites, declaration.dims, strict=True):
            key = self._free_key(site)
            self.keys[site] = key
            self.register_parameter(key, nn.Parameter(torch.zeros(dim, dtype=dtype, device=device)))
            if declaration.config.key_norm_weight:
                self.register_parameter(f"{key}_key_norm", nn.Parameter(torch.ones(dim, dtype=dtype, device=device)))
        # The declaring op claims to write it, which keeps the op in every graph. Not saved.
        self.register_buffer("token", torch.zeros(1, device=device), persistent=False)
        self.text = declaration.to_text()

    def _free_key(self, site: str) -> str:
        key = "".join(c if c.isalnum() else "_" for c in site)
        for suffix in itertools.chain([""], (f"_{n}" for n in itertools.count(2))):
            if not hasattr(self, key + suffix) and not hasattr(self, f"{key}{suffix}_key_norm"):
                return key + suffix
        raise AssertionError

    def queries(self) -> dict[str, nn.Parameter]:
        """Site name -> pseudo-query, in depth order."""
        return {site: getattr(self, key) for site, key in self.keys.items()}

    def key_norms(self) -> dict[str, nn.Parameter]:
        """Site name -> weight of the key norm; empty unless ``key_norm_weight``."""
        if not self.declaration.config.key_norm_weight:
            return {}
        return {site: getattr(self, f"{key}_key_norm") for site, key in self.keys.items()}

    def tensors(self) -> list[nn.Parameter]:
        """All parameters as the declaring op takes them: the queries, then the key norm weights."""
        return [*self.queries().values(), *self.key_norms().values()]

    @property
    def record(self) -> Record:
        """How the module was converted: what its checkpoints say of it."""
        streams = self.report.streams
        return Record(self.declaration.config.layout(), tuple(tuple(map(len, stream.blocks)) for stream in streams))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})[RECORD] = self.record.to_dict()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        own = {prefix + name for name, _ in self.named_parameters()}
        held = {key for key in state_dict if key.startswith(prefix)}
        if own & held and RECORD in local_metadata:
            self.record.refuse(Record.from_dict(local_metadata[RECORD]), "the state_dict", prefix[: -len(CHILD) - 2])
        if held and held != own:
            # With strict=False nobody else says it, and half of the queries is no model that anybody trained.
            missing, strange = sorted(own - held), sorted(held - own)
            parts = [f"lacks {_some(missing)}"] if missing else []
            parts += [f"holds {_some(strange)}"] if strange else []
            warnings.warn(
                "the pseudo-queries in a state_dict are those of another conversion: it "
                f"{' and '.join(parts)}. What it lacks stays as it is",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def __prepare_scriptable__(self) -> None:
        refuse_script()

    def forward(self, value: Any) -> Any:
        """``value`` itself: a container such as ``nn.Sequential`` calls all its children in turn."""
        return value

    def extra_repr(self) -> str:
        """Number of queries, for ``print(model)``."""
        return f"{len(self.keys)} pseudo-queries"


def converted(model: nn.Module) -> Iterator[tuple[str, nn.Module, DepthQueries]]:
    """Path, module and queries of every converted module in ``model``."""
    for path, module in model.named_modules():
        queries = queries_in(module)
        if queries is not None:
            yield path, module, queries


def queries_in(owner: nn.Module) -> DepthQueries | None:
    """The queries that a module runs with, or ``None`` if it is not converted.

    They are its child ``attnres``, or inside of what wraps that: libraries of adapters put a module there that hands
    attributes on to a copy which they train.
    """
    if isinstance(owner, torch.jit.ScriptModule):
        return None  # it keeps its children elsewhere
    child = owner._modules.get(CHILD)
    if child is None or isinstance(child, DepthQueries):
        return child
    token = getattr(child, "token", None)
    inside = [module for module in child.modules() if isinstance(module, DepthQueries)]
    return next((queries for queries in inside if queries.token is token), None)


def late_queries(model: nn.Module) -> list[DepthQueries]:
    """Queries made by the backend for an untransformed model, in the order of its parameters."""
    found: dict[int, DepthQueries] = {}
    for parameter in model.parameters():
        stores: dict[str, DepthQueries] = getattr(parameter, LATE, {})
        for store in list(stores.values())[-1:]:
            found.setdefault(id(store), store)
    return list(found.values())
