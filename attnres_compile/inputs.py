"""Example inputs: what a model is called with, and the short text form of it that the command line takes."""

from __future__ import annotations

import collections
import copy
import keyword
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnres_compile.errors import InputsError, TargetError, is_out_of_memory

# Without a bound, integers are 0 or 1: valid as token ids, as masks and as segment ids of any model.
DEFAULT_BOUND = 2

GRAMMAR = (
    "An input is [NAME=]DTYPE[DIM,DIM,...][<BOUND]: int64[2,128]<32000 is ids from 0 to 31999, "
    "pixel_values=float32[1,3,224,224] is a keyword argument of normal noise, float32[] is a single number"
)

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
}
_SHORT = {
    "half": "float16", "f16": "float16", "fp16": "float16", "bf16": "bfloat16",
    "float": "float32", "f32": "float32", "fp32": "float32",
    "double": "float64", "f64": "float64", "fp64": "float64",
    "i8": "int8", "i16": "int16", "short": "int16", "i32": "int32", "int": "int32",
    "i64": "int64", "long": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "c64": "complex64", "c128": "complex128",
}  # fmt: skip
_SPEC = re.compile(r"\s*(?:(?P<name>[^=\[\]<]*)=)?\s*(?P<dtype>[\w.]+)\s*\[(?P<dims>[^\[\]]*)\]\s*(?:<(?P<bound>.*))?")


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword arguments of one call of a model.

    Attributes:
        args: positional arguments; any sequence is taken and kept as a tuple.
        kwargs: keyword arguments; any mapping is taken and kept as a dict.

    Raises:
        InputsError: ``args`` is no tuple or list, or ``kwargs`` no mapping with text keys.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.args, (tuple, list)):
            raise InputsError(f"Inputs.args must be a tuple or a list, not {_describe(self.args)}")
        if not isinstance(self.kwargs, Mapping):
            raise InputsError(f"Inputs.kwargs must be a dict, not {_describe(self.kwargs)}")
        strangers = [key for key in self.kwargs if not isinstance(key, str)]
        if strangers:
            raise InputsError(
                f"keyword inputs are named by text, not by {', '.join(map(repr, strangers[:3]))}",
                remedy="Give {'input_ids': ...}, or a tuple for positional inputs",
            )
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs))

    def copied(self) -> Inputs:
        """Deep copies, for a call that may write into them.

        Tensors that share memory share that of their copies. One that was computed becomes a leaf that asks for a
        gradient as it did. Only an object that cannot be copied at all, not even without what it holds, stays itself.
        """
        memo: dict[int, Any] = {}
        for tensor in _not_deeply(self):
            detached = tensor.detach()
            # deepcopy refuses a tensor with a history; of the detached one, which has the same storage, it copies that
            # once. It copies the offsets of a nested tensor, too, and by them such tensors know those of their sizes.
            made = detached.clone() if tensor.is_nested else copy.deepcopy(detached, memo)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return Inputs(_copy(self.args, memo), _copy(self.kwargs, memo))


def _not_deeply(value: Any) -> list[Tensor]:
    """Every tensor that ``value`` holds, in containers and attributes, and that deepcopy does not copy rightly: those
    with a history, and nested ones.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(each)] = each  # kept: the id of an object that is gone can be another's
        if isinstance(each, Tensor):
            found += [] if each.is_leaf and not each.is_nested else [each]
        elif isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, collections.deque)):
            waiting += each
        waiting += _attributes(each).values()
    return found


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    found.pop("__dict__", None)
    found.pop("__weakref__", None)
    return found


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; where that fails, a copy of the object with deep copies of all that can be copied in it."""
    if id(value) in memo:
        return memo[id(value)]
    trial = dict(memo)
    # Where it fails, what it noted is half made. Kept: the notes are by id, its own among them.
    memo.setdefault(id(memo), []).append(trial)
    try:
        made: Any = copy.deepcopy(value, trial)
        memo.update(trial)
        return made
    except Exception as error:  # Anybody's class: a lock, a stream, a generator.
        if is_out_of_memory(error):
            raise
    if type(value) in (list, dict):
        made = type(value)()
        memo[id(value)] = made
        if isinstance(value, list):
            made.extend(_copy(each, memo) for each in value)
        else:
            made.update((key, _copy(each, memo)) for key, each in value.items())
        return made
    if type(value) is tuple:
        return tuple(_copy(each, memo) for each in value)
    try:
        made = copy.copy(value)
        if made is not value:
            memo[id(value)] = made
            for name, each in _attributes(made).items():
                object.__setattr__(made, name, _copy(each, memo))
    except Exception:
        made = value
    return made


def as_inputs(value: Any) -> Inputs:
    """The call that ``example_inputs`` stands for.

    A tensor is one positional argument; a tuple or list holds positional ones; a mapping (a dict,
    transformers' ``BatchEncoding``) holds keyword ones; an :class:`Inputs` is returned as it is.

    Raises:
        InputsError: the value is of another kind.
    """
    if isinstance(value, Inputs):
        return value
    if isinstance(value, Tensor):
        return Inputs((value,))
    if isinstance(value, (tuple, list)):
        return Inputs(tuple(value))
    if isinstance(value, Mapping):
        return Inputs((), dict(value))
    raise InputsError(
        f"example inputs cannot be {_describe(value)}",
        remedy="Give a tensor, a tuple or list of positional arguments, a dict of keyword arguments, "
        "or attnres_compile.Inputs(args, kwargs)",
    )


@dataclass(frozen=True)
class InputSpec:
    """One input in short form.

    Attributes:
        name: the keyword that it is passed by, or ``None`` for a positional input.
        dtype: of the tensor.
        shape: sizes; ``()`` is a scalar.
        bound: integers are drawn from ``0 .. bound - 1``; ``None`` for other dtypes.
    """

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    bound: int | None

    def make(self, generator: torch.Generator) -> Tensor:
        """A tensor on the CPU: bounded integers, random truth values or normal noise.

        Raises:
            TargetError: there is no memory for it.
        """
        try:
            if self.dtype == torch.bool:
                return torch.randint(0, 2, self.shape, generator=generator).to(torch.bool)
            if self.bound is not None:
                return torch.randint(0, self.bound, self.shape, generator=generator).to(self.dtype)
            if self.dtype.is_complex or self.dtype == torch.float64:
                return torch.randn(self.shape, generator=generator, dtype=self.dtype)
            return torch.randn(self.shape, generator=generator).to(self.dtype)
        except RuntimeError as error:
            sizes = ",".join(map(str, self.shape))
            raise TargetError(f"no tensor of shape [{sizes}] could be made: {error}") from error


def parse_spec(text: str) -> InputSpec:
    """The input that ``text`` describes, in the form ``[NAME=]DTYPE[DIM,DIM,...][<BOUND]``.

    ``DTYPE`` is a torch name (``int64``, ``bfloat16``) or a common short one (``i64``, ``bf16``, ``long``).
    ``BOUND`` is exclusive and for integers alone; without it they are 0 or 1.

    Raises:
        TargetError: the text is no such description; the message says which part of it.
    """

    def wrong(what: str) -> TargetError:
        return TargetError(f"input {text!r}: {what}", remedy=GRAMMAR)

    match = _SPEC.fullmatch(text)
    if match is None:
        raise wrong("this is not a name, a dtype and a shape in brackets")
    name = match["name"].strip() if match["name"] is not None else None
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise wrong(f"{name!r} cannot be the name of an argument")
    dtype_name = match["dtype"].removeprefix("torch.")
    dtype = _DTYPES.get(_SHORT.get(dtype_name, dtype_name))
    if dtype is None:
        raise wrong(f"{dtype_name!r} is no dtype; known are {', '.join(_DTYPES)}")
    dims = [dim.strip() for dim in match["dims"].split(",")] if match["dims"].strip() else []
    bad = [dim for dim in dims if not re.fullmatch(r"[0-9]+", dim)]
    if bad:
        raise wrong(f"{bad[0]!r} is no size; sizes are whole numbers, separated by commas")
    return InputSpec(name, dtype, tuple(map(int, dims)), _bound(match["bound"], dtype, wrong))


def _bound(text: str | None, dtype: torch.dtype, wrong: Any) -> int | None:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        if text is not None:
            raise wrong(f"a bound is for integers, not for {str(dtype).removeprefix('torch.')}")
        return None
    if text is None:
        return DEFAULT_BOUND
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < 1:
        raise wrong(f"the bound {text.strip()!r} is no whole number of at least 1")
    # One past the largest value, as far as a random generator of 64-bit integers reaches.
    most = min(torch.iinfo(dtype).max + 1, torch.iinfo(torch.int64).max)
    if int(text) > most:
        raise wrong(f"the bound {int(text)} is more than {dtype} can hold ({most})")
    return int(text)


def make_inputs(specs: Sequence[str], seed: int = 0) -> Inputs:
    """The call that a list of input descriptions stands for, the same at every call.

    Args:
        specs: one text per input; positional ones in order.
        seed: of a generator of its own: global random state is neither read nor changed.

    Raises:
        TargetError: a description is wrong, or a keyword is given twice.
    """
    generator = torch.Generator().manual_seed(seed)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for spec in map(parse_spec, specs):
        if spec.name is None:
            args.append(spec.make(generator))
        elif spec.name in kwargs:
            raise TargetError(f"input {spec.name!r} is given twice", remedy=GRAMMAR)
        else:
            kwargs[spec.name] = spec.make(generator)
    return Inputs(tuple(args), kwargs)


def _describe(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"None ({name})" if value is None else f"a value of type {name}"
