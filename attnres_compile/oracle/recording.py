"""The first run: which operators are called, and which of their results carry which earlier sums."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.oracle import features
from attnres_compile.oracle.events import Call, Key, Watch, is_float, places, tensors, version
from attnres_compile.oracle.linear import Image, carry, is_pointwise

# Known by name where a sum is looked for; whether something is one is told from numbers.
ADDS = {
    *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "subtract"),
    *("addcmul", "addcmul_", "addmm", "baddbmm", "lerp", "index_add", "index_add_"),
}
# The second half of a sum that is a stack first.
OVER_A_STACK = "sum"
# They never carry: trying takes time.
_NEVER = {
    *("linear", "conv1d", "conv2d", "conv3d", "layer_norm", "batch_norm", "group_norm", "embedding", "softmax"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "cross_entropy"),
}

Dims = tuple[frozenset[int], ...]


@dataclass(eq=False)
class Event:
    """One call that mattered.

    Attributes:
        key: what it is known by.
        written: slots of the arguments that it wrote into.
        nth: how many calls with this key came before it.
        operands: the values in its slots.
    """

    key: Key
    written: tuple[int, ...]
    nth: int
    operands: tuple[tuple[int, Value], ...]


@dataclass(eq=False)
class Link:
    """One way by which a value carries an earlier one.

    Attributes:
        event: what was called.
        slot: the argument that is carried.
        out: the result that carries it.
        before: the value in that slot.
        adds: whether something is added to it.
        nth: how many calls with this key read that value in that slot before.
        origin: the sum that ``before`` holds the elements of, as far as this way is concerned.
        dims: for each dimension of the result, those of ``origin`` that change along it.
        summed: whether something was added anywhere on the way from ``origin``.
    """

    event: Event
    slot: int
    out: int
    before: Value
    adds: bool
    nth: int
    origin: Value
    dims: Dims
    summed: bool

    @property
    def counted(self) -> bool:
        """Whether the report counts its node among a sublayer's adds."""
        return self.adds or self.event.key[2] == OVER_A_STACK


@dataclass(eq=False)
class Value:
    """A tensor as it was at some time; another one after it was written into.

    Attributes:
        number: ascends with time.
        event, out: what made it, if it was seen.
        inputs: what it was made of.
        is_data: whether it is made of more than parameters and constants.
        shape, dtype: of it.
        links: how it carries other values.
        origins: the sums whose elements it holds or follows, each with the dimensions of it that change along each of
            its own; itself if it is one.
        places: for a sum, where it was made.
        votes: for a sum, what its readers say of its dimensions: kind and dimension.
        is_read: whether something is computed from it that does not hand it on.
    """

    number: int
    event: Event | None
    out: int
    inputs: tuple[Value, ...]
    is_data: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    links: list[Link] = field(default_factory=list)
    origins: dict[Value, Dims] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    votes: list[tuple[int, int]] = field(default_factory=list)
    is_read: bool = False


@dataclass
class _Live:
    tensor: Any
    value: Value
    version: int
    images: dict[Value, Image] = field(default_factory=dict)


class Recorder(Watch):
    """Open while a model runs.

    Args:
        model: the model.
        wanted: per path of a module, the places of adds in its code that matter.
        shapes: of what these adds give.

    Attributes:
        sums: results of adds and of what else stands in a wanted place, in order.
    """

    def __init__(
        self, model: nn.Module, wanted: Mapping[str, Iterable[str]], shapes: Iterable[Sequence[int | str]]
    ) -> None:
        super().__init__(model)
        self.ranks = {len(shape) for shape in shapes}
        self.wanted = {path: frozenset(lines) for path, lines in wanted.items()}
        self.constants = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.live: dict[int, _Live] = {}
        self.writers: dict[int, Value] = {}
        self.sums: list[Value] = []
        self.count = 0
        self.by_key: Counter[Key] = Counter()
        self.by_reader: Counter[tuple[Key, int, int]] = Counter()

    # ---------------------------------------------------------------- values

    def _look(self, tensor: Tensor) -> _Live:
        found = self.live.get(id(tensor))
        if found is not None and found.tensor() is tensor:
            if found.version == version(tensor):
                return found
            # Written through another tensor that shares its memory.
            writer = self.writers.get(_memory(tensor))
            inputs = (found.value, *((writer,) if writer is not None else ()))
            return self._keep(tensor, self._value(tensor, None, 0, inputs))
        constant = id(tensor) in self.constants or isinstance(tensor, nn.Parameter)
        return self._keep(tensor, self._value(tensor, None, 0, (), not constant))

    def _value(
        self, tensor: Tensor, event: Event | None, out: int, inputs: tuple[Value, ...], is_data: bool = False
    ) -> Value:
        self.count += 1
        data = is_data or any(value.is_data for value in inputs)
        return Value(self.count, event, out, inputs, data, tuple(tensor.shape), tensor.dtype)

    def _keep(self, tensor: Tensor, value: Value) -> _Live:
        key = id(tensor)
        made = _Live(weakref.ref(tensor), value, version(tensor))
        self.live[key] = made
        weakref.finalize(tensor, _forget, self.live, key, made)
        return made

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters and constants alone."""
        return not self._look(tensor).value.is_data

    # ---------------------------------------------------------------- calls

    def seen(self, call: Call, args: Any, kwargs: Any) -> Any:
        given = [(slot, call.leaves[slot]) for slot in call.slots]
        before = [(slot, tensor, self._look(tensor), version(tensor)) for slot, tensor in given]
        result = call.func(*args, **kwargs)
        written = tuple(slot for slot, tensor, _, was in before if version(tensor) != was)
        if call.name in ("__setitem__",) and not written and given:
            written = (given[0][0],)
        operands = {id(tensor) for _, tensor in given}
        fresh = [(out, tensor) for out, tensor in enumerate(tensors(result)) if id(tensor) not in operands or written]
        if not fresh and written:
            fresh = [(out, call.leaves[slot]) for out, slot in enumerate(written)]
        if not fresh:
            return result
        self._record(call, before, written, fresh)
        return result

    def _record(
        self,
        call: Call,
        before: list[tuple[int, Tensor, _Live, int]],
        written: tuple[int, ...],
        fresh: list[tuple[int, Tensor]],
    ) -> None:
        lines = places()
        key = (call.path, lines[0] if lines else "", call.name)
        carried = [(slot, held) for slot, _, held, _ in before if held.value.origins]
        event = Event(key, written, self.by_key[key], tuple((slot, held.value) for slot, _, held, _ in before))
        self.by_key[key] += 1
        inputs = tuple(held.value for _, _, held, _ in before)
        is_here = not self.wanted.get(call.path, frozenset()).isdisjoint(lines)
        made = []
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for slot, held in carried:
                self._vote(call, slot, held.value)
            for out, tensor in fresh:
                value = self._value(tensor, event, out, inputs)
                images = self._carried(call, event, value, tensor, carried)
                fits = tensor.dim() in self.ranks and call.path in self.wanted
                is_sum = call.name in ADDS or (fits and (is_here or call.name == OVER_A_STACK))
                if is_sum and is_float(tensor) and value.is_data and tensor.numel():
                    value.origins = {value: tuple(frozenset((dim,)) for dim in range(tensor.dim()))}
                    value.places, images = tuple(lines), {value: Image.of(tensor)}
                    self.sums.append(value)
                made.append((tensor, value, images))
            for slot, held in carried:
                handed = any(link.slot == slot for _, value, _ in made for link in value.links)
                if not handed and any(is_float(tensor) for _, tensor in fresh):
                    for origin, _ in _origins(held.value):
                        origin.is_read = True
                self.by_reader[key, held.value.number, slot] += 1
        for tensor, value, images in made:
            self._keep(tensor, value).images = images
            if written:
                self.writers[_memory(tensor)] = value

    def _vote(self, call: Call, slot: int, value: Value) -> None:
        for kind, dim in features.votes(call, slot, self.is_weight):
            for origin, dims in _origins(value):
                if len(dims[dim]) == 1:
                    origin.votes.append((kind, next(iter(dims[dim]))))

    def _carried(
        self, call: Call, event: Event, value: Value, tensor: Tensor, carried: list[tuple[int, _Live]]
    ) -> dict[Value, Image]:
        """Finds out how a result carries what the call was given, or follows it element by element."""
        images: dict[Value, Image] = {}
        if not is_float(tensor) or call.name in _NEVER or not carried:
            return images
        state = torch.get_rng_state()
        written = list(event.written)
        for slot, held in carried:
            for origin, image in held.images.items():
                way = carry(call, slot, written, value.out, image)
                if way is None:
                    continue
                found, adds = way
                nth = self.by_reader[event.key, held.value.number, slot]
                dims = found.dims()
                alone = origin is held.value or any(o.origin is origin and not o.summed for o in held.value.links)
                summed = adds or not alone
                value.links.append(Link(event, slot, value.out, held.value, adds, nth, origin, dims, summed))
                if origin not in images:
                    images[origin], value.origins[origin] = found, dims
        if not images:
            for slot, held in carried:
                if is_pointwise(call, slot, written, value.out):
                    value.origins = dict(held.value.origins)
                    break
        torch.set_rng_state(state)
        return images


def _origins(value: Value) -> Iterator[tuple[Value, Dims]]:
    """The sums that a value holds, also behind what only hands them on in a place where sums are looked for."""
    waiting = list(value.origins.items())
    seen: set[Value] = set()
    while waiting:
        origin, dims = waiting.pop()
        if origin in seen:
            continue
        seen.add(origin)
        yield origin, dims
        for link in origin.links:
            if not link.summed:
                waiting.append(
                    (link.origin, tuple(frozenset(d for dim in which for d in link.dims[dim]) for which in dims))
                )


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _forget(live: dict[int, _Live], key: int, made: _Live) -> None:
    if live.get(key) is made:
        del live[key]
