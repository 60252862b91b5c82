"""The second run: the same model, with a mix wherever the report names a query."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres_compile.config import AttnResConfig
from attnres_compile.oracle.equation import attend
from attnres_compile.oracle.events import Call, Key, Watch, places, tensors
from attnres_compile.oracle.streams import Disagreement, Hop, Way
from attnres_compile.report import Site

_PLAIN = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass
class _Lane:
    """A tensor that is a stream.

    Attributes:
        run: of the stream.
        position: of the next hop that it waits for.
        tensor: reference to it.
        values: what readers with queries of their own see, by the path of the reader.
        seen: how often it was read by calls of one key and slot.
    """

    run: _Run
    position: int
    tensor: Any
    values: dict[str, Tensor] = field(default_factory=dict)
    seen: Counter[tuple[Key, int]] = field(default_factory=Counter)


@dataclass
class _Run:
    """Where one stream is.

    Attributes:
        way: what it goes through.
        parts: the root and what each sublayer added, as the stream has them now.
        pending: what the sublayer in progress has added so far.
        position: of the next hop.
    """

    way: Way
    parts: list[Tensor] = field(default_factory=list)
    pending: Tensor | None = None
    position: int = 0


class Interpreter(Watch):
    """Open while the model runs: the model then computes with depth attention.

    Args:
        model: the original, or a copy.
        ways: its streams.
        queries, key_norms: parameters of the sites by their names; no key norm has no weight.
        config: of the conversion.

    Attributes:
        reached: names of the queries whose site was made.
        lost: what went another way than before.
    """

    def __init__(
        self,
        model: nn.Module,
        ways: Sequence[Way],
        queries: Mapping[str, Tensor],
        key_norms: Mapping[str, Tensor],
        config: AttnResConfig,
    ) -> None:
        super().__init__(model)
        self.runs = [_Run(way) for way in ways]
        self.queries, self.key_norms, self.config = queries, key_norms, config
        self.lanes: dict[int, list[_Lane]] = {}
        self.by_key: Counter[Key] = Counter()
        self.watched = {hop.event.key[::2] for way in ways for hop in way.hops}
        self.reached: set[str] = set()
        self.grad = torch.is_grad_enabled()

    @property
    def lost(self) -> list[str]:
        """Streams that did not go through all that they went through in the first run."""
        return [
            f"stream {run.way.stream.name} took another way than without depth attention, behind hop {run.position} of "
            f"{len(run.way.hops)}"
            for run in self.runs
            if run.position < len(run.way.hops)
        ]

    # ---------------------------------------------------------------- calls

    def seen(self, call: Call, args: Any, kwargs: Any) -> Any:
        held = {slot: lanes for slot in call.slots if (lanes := self._lanes(call.leaves[slot]))}
        watched = (call.path, call.name) in self.watched
        if not held and not watched:
            return call.func(*args, **kwargs)
        moves = list(self._moves(call, held)) if watched else []
        if self._read(call, held, {hop.slot for _, hop, _ in moves}):
            args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
        todo = [self._prepared(call, run, hop, lane) for run, hop, lane in moves]
        result = call.func(*args, **kwargs)
        for (run, hop, lane), parts in zip(moves, todo, strict=True):
            result = self._moved(call, run, hop, lane, parts, result)
        return result

    def _lanes(self, tensor: Tensor) -> list[_Lane]:
        return [lane for lane in self.lanes.get(id(tensor), ()) if lane.tensor() is tensor]

    def _moves(self, call: Call, held: dict[int, list[_Lane]]) -> Iterator[tuple[_Run, Hop, _Lane | None]]:
        """The hops that this call is."""
        lines = places()
        key = (call.path, lines[0] if lines else "", call.name)
        nth = self.by_key[key]
        self.by_key[key] += 1
        for run in self.runs:
            if run.position == 0 and run.way.hops[0].event.key == key and run.way.hops[0].nth == nth:
                yield run, run.way.hops[0], None
        for slot, lanes in held.items():
            for lane in lanes:
                count = lane.seen[key, slot]
                lane.seen[key, slot] += 1
                run = lane.run
                if lane.position != run.position or run.position >= len(run.way.hops):
                    continue
                hop = run.way.hops[run.position]
                if hop.event.key == key and hop.slot == slot and hop.nth == count:
                    yield run, hop, lane

    # ---------------------------------------------------------------- the stream

    def _prepared(self, call: Call, run: _Run, hop: Hop, lane: _Lane | None) -> tuple[list[Tensor], Tensor | None, Any]:
        """The parts behind a hop, what it adds, and the readers' own values; before it is made, which may write."""
        with torch._C.DisableTorchFunction():
            given = call.leaves[hop.slot]
            if lane is None:
                run.parts = [given.clone()]
            parts, pending = list(run.parts), run.pending
            if not torch.is_grad_enabled():
                parts = [part.detach() for part in parts]
                pending = None if pending is None else pending.detach()

            def through(value: Tensor) -> Tensor:
                return call.again({hop.slot: value}, hop.event.written)[hop.out]

            values = {name: through(value) for name, value in (lane.values if lane else {}).items()}
            if not hop.adds and not hop.ends and lane is not None:
                return [through(part) for part in parts], None if pending is None else through(pending), values
            if call.name in _PLAIN and len(call.slots) == 2 and not call.argument(9, "alpha"):
                other = call.leaves[next(slot for slot in call.slots if slot != hop.slot)]
                dtype = torch.result_type(given, other)
                base = (torch.zeros_like(given) + other).to(dtype if not hop.event.written else given.dtype)
                parts = [part.to(base.dtype) for part in parts]
                return parts, base if pending is None else pending.to(base.dtype) + base, values
            base = through(torch.zeros_like(given))
            parts = [through(part) - base for part in parts]
            return parts, base if pending is None else through(pending), values

    def _moved(self, call: Call, run: _Run, hop: Hop, lane: _Lane | None, prepared: Any, result: Any) -> Any:
        run.parts, run.pending, values = prepared
        run.position += 1
        found = tensors(result)
        state = found[hop.out] if found else call.leaves[hop.event.written[hop.out]]
        with torch._C.DisableTorchFunction():
            if hop.ends:
                assert run.pending is not None
                run.parts.append(run.pending)
                run.pending, values = None, {}
                mixes = self._mixes(run, hop.ends, state)
                alone = sum(site.index == hop.ends for site in run.way.stream.sites) == 1
                if len(mixes) == 1 and alone:
                    (mixed,) = mixes.values()
                    if any(state is call.leaves[slot] for slot in call.slots):
                        state.copy_(mixed)
                    else:
                        result, state = _with(result, state, mixed), mixed
                else:
                    values = mixes
        self.lanes.setdefault(id(state), []).append(_Lane(run, run.position, weakref.ref(state), values))
        weakref.finalize(state, _forget, self.lanes, id(state))
        return result

    def _mixes(self, run: _Run, index: int, state: Tensor) -> dict[str, Tensor]:
        """What the sites of a state see."""
        stream, found = run.way.stream, {}
        for site in stream.sites:
            if site.index != index or site.query is None:
                continue
            sources = [run.parts[0]]
            for block in stream.blocks:
                members = [run.parts[i + 1] for i in block if i < index]
                if members:
                    sources.append(torch.stack(members).sum(0) if len(members) > 1 else members[0])
            if len(sources) != len(site.sources):
                raise Disagreement(f"site {site.name} names {len(site.sources)} sources, and has {len(sources)}")
            axis = run.way.axes[index]
            if axis is None:
                reason = run.way.unknown or "the dimension of the features is split on the way to it"
                raise Disagreement(f"site {site.name}: {reason}")
            query = self.queries[site.query]
            if query.numel() != sources[0].shape[axis]:
                raise Disagreement(
                    f"the feature dimension of stream {stream.name} is {query.numel()} in the report, and "
                    f"{sources[0].shape[axis]} (dimension {axis} of {list(sources[0].shape)}) by what reads the stream"
                )
            # A query learns from who reads the mix, whatever the mode in which the sum was made.
            with torch.enable_grad() if self.grad else contextlib.nullcontext():
                mixed = attend(query, self.key_norms.get(site.query), sources, axis, self.config)
                # Laid out in memory as the sum was: dropout draws in that order.
                laid = torch.empty_like(state).copy_(mixed)
            found[_reader(site, stream.owner)] = laid
            self.reached.add(site.query)
        return found

    # ---------------------------------------------------------------- readers with queries of their own

    def _read(self, call: Call, held: dict[int, list[_Lane]], moved: set[int]) -> bool:
        """Puts a reader's own value in the place of what it reads; whether there is one."""
        changed = False
        for slot, lanes in held.items():
            for lane in lanes:
                label = _label(call.path, lane.run.way.stream.owner)
                if slot not in moved and label in lane.values:
                    call.leaves[slot], changed = lane.values[label], True
        return changed

    def returned(self, path: str, result: Any) -> Any:
        changed = False

        def own(tensor: Tensor) -> Tensor:
            nonlocal changed
            for lane in self._lanes(tensor):
                if lane.run.way.stream.owner == path and "output" in lane.values:
                    changed = True
                    return lane.values["output"]
            return tensor

        if not self.lanes:
            return None
        made = pytree.tree_map_only(Tensor, own, result)
        return made if changed else None


def _with(result: Any, old: Tensor, new: Tensor) -> Any:
    """A result with one tensor in the place of another."""
    return pytree.tree_map_only(Tensor, lambda tensor: new if tensor is old else tensor, result)


def _label(path: str, owner: str) -> str:
    """What a reader is called in a site's list of readers."""
    if owner and path != owner and not path.startswith(owner + "."):
        return "output"
    return path


def _reader(site: Site, owner: str) -> str:
    (name, *others) = site.readers
    if others or name.split(".")[-1] in ("output", "stream"):
        return "output" if name.endswith("output") else owner
    return name


def _forget(lanes: dict[int, list[_Lane]], key: int) -> None:
    left = [lane for lane in lanes.get(key, ()) if lane.tensor() is not None]
    if left:
        lanes[key] = left
    else:
        lanes.pop(key, None)
