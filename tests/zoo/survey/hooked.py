"""One forward of a model with hooks on its modules: every module call, and the tensors that go between the calls.

Each module that calls no other module is a black box: its outputs are detached and become variables of their own. What
autograd then records is only the code *between* such modules, where residual adds are written. A module that hands its
input on (``Identity``, dropout in eval mode, a layer scale, a table of positions that is added) is no box but part of
that code; of a box that adds what it computes to its input only the former is a variable.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.survey.derivatives import Edge, scale


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: of the module; a module called twice has two calls.
        module: the module.
        parents: indices of the calls within which this one happens, outermost first.
        begin, end: when, as numbers that ascend.
        box: whether its outputs were detached.
        called: whether it calls another module.
        inputs: the floating tensors that it is given.
        outputs: the floating tensors that it returns; variables where ``box``.
    """

    path: str
    module: nn.Module
    parents: tuple[int, ...]
    begin: int
    end: int = 0
    box: bool = False
    called: bool = False
    inputs: list[Edge] = field(default_factory=list)
    outputs: list[Edge] = field(default_factory=list)


@dataclass
class Recording:
    """What one forward did.

    Attributes:
        calls: in the order in which they begin.
        inputs, outputs: the floating tensors that the model is given and returns.
        parameters: the autograd node of each parameter, and whether it is a weight matrix.
        notes: what could not be done.
    """

    calls: list[Call]
    inputs: list[Edge]
    outputs: list[Edge]
    parameters: dict[Any, bool]
    notes: list[str]
    kept: list[Any]  # autograd nodes have an identity only while Python holds them


def record(model: nn.Module, inputs: Mapping[str, Any]) -> Recording:
    """Runs ``model(**inputs)`` once in eval mode and float64, on a copy of the model.

    A model that does not run in float64 runs in its own dtype.
    """
    try:
        return _record(copy.deepcopy(model).double(), _as(inputs, torch.float64))
    except Exception as error:
        recording = _record(copy.deepcopy(model), inputs)
        recording.notes.append(f"ran in its own dtype: float64 raises {type(error).__name__}")
        return recording


def _as(inputs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if is_float(x) else x, dict(inputs))


def is_float(x: Any) -> bool:
    """Whether ``x`` is an ordinary dense floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided and not x.is_nested


def edge(tensor: Tensor) -> Edge | None:
    """Where ``tensor`` stands in autograd's graph."""
    if not tensor.requires_grad:
        return None
    found = torch.autograd.graph.get_gradient_edge(tensor)
    return found.node, found.output_nr


def variable(tensor: Tensor) -> Tensor:
    """The same numbers, and nothing before them. May be written in place."""
    return tensor.detach().requires_grad_().clone()


def floats(values: Any) -> list[Tensor]:
    """The floating-point tensors of nested arguments or outputs."""
    return [leaf for leaf in pytree.tree_leaves(_opened(values)) if is_float(leaf)]


def _opened(values: Any) -> Any:
    """Dataclasses that pytree does not know, as dictionaries."""
    if isinstance(values, tuple | list) and type(values) in (tuple, list):
        return [_opened(value) for value in values]
    if dataclasses.is_dataclass(values) and not isinstance(values, Mapping) and not isinstance(values, type):
        return {f.name: _opened(getattr(values, f.name)) for f in dataclasses.fields(values)}
    return values


def replaced(values: Any, change: Any) -> Any:
    """``values`` with ``change`` applied to each of its tensors."""
    if type(values) in (tuple, list):
        return type(values)(replaced(value, change) for value in values)
    if dataclasses.is_dataclass(values) and not isinstance(values, Mapping) and not isinstance(values, type):
        made = copy.copy(values)
        for f in dataclasses.fields(values):
            with contextlib.suppress(AttributeError):
                object.__setattr__(made, f.name, replaced(getattr(values, f.name), change))
        return made
    return pytree.tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, values)


def is_matrix(tensor: Tensor) -> bool:
    """Whether a weight has at least two dimensions of more than one element."""
    return sum(size > 1 for size in tensor.shape) >= 2


def has_matrix(module: nn.Module) -> bool:
    """Whether a module, or one within it, has a weight with which it can contract."""
    return any(is_matrix(tensor) for tensor in (*module.parameters(), *_float_buffers(module)))


def _float_buffers(module: nn.Module) -> Iterator[Tensor]:
    # Quantised weights are integer buffers.
    return (buffer for buffer in module.buffers() if not buffer.dtype.is_complex and buffer.dtype != torch.bool)


# --- the run


class _Hooks:
    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.stack: list[int] = []
        self.kept: list[Any] = []
        self.opened: dict[int, bool] = {}
        self.fixed: dict[int, bool] = {}
        self.notes: set[str] = set()
        self.constants: dict[int, tuple[Tensor, Tensor]] = {}
        self.paths = {module: path for path, module in model.named_modules()}
        self.versions: list[dict[int, tuple[Tensor, int]]] = []
        self.tick = 0

    def now(self) -> int:
        self.tick += 1
        return self.tick

    def edges(self, values: Any) -> list[Edge]:
        found = [e for tensor in floats(values) if (e := edge(tensor)) is not None]
        self.kept += found
        return found

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)
        if self.stack:
            self.calls[self.stack[-1]].called = True
        args, kwargs = replaced((args, kwargs), self.tracked)
        self.calls.append(Call(self.paths[module], module, tuple(self.stack), self.now()))
        self.calls[-1].inputs = self.edges((args, kwargs))
        self.versions.append({id(t): (t, t._version) for t in floats((list(args), kwargs))})
        self.stack.append(len(self.calls) - 1)
        return args, kwargs

    def tracked(self, x: Any) -> Any:
        """A constant as a variable, since a stream may start from zeros; the same one each time."""
        if not is_float(x) or x.requires_grad:
            return x
        if id(x) not in self.constants:
            self.constants[id(x)] = x, variable(x)
        return self.constants[id(x)][1]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self.calls[self.stack.pop()]
        versions = self.versions.pop()
        call.end = self.now()
        self.write_back()
        given = (list(args), kwargs)
        if call.parents and self.is_box(call, given, output):
            call.box = True
            if not call.called and self.is_constant(module, given, output):
                call.inputs = []
            untouched = {key for key, (tensor, version) in versions.items() if tensor._version == version}
            alone = not call.called and len(untouched) == len(versions)
            skipped = _skipped(module, given, output) if alone else None
            if skipped is not None:
                if has_matrix(module):
                    self.notes.add(f"{call.path}: what it adds to its input within its own code counts as one sublayer")
                branch = variable(output - skipped)
                call.outputs = self.edges(branch)
                return skipped + branch
            output = replaced(output, lambda x: x if id(x) in untouched or not is_float(x) else variable(x))
        call.outputs = self.edges(output)
        return output

    def write_back(self) -> None:
        """What was written into a constant that a module was given is seen by its owner, too."""
        for key, (own, given) in list(self.constants.items()):
            if given._version:
                own.data.copy_(given.detach())
                del self.constants[key]

    def is_box(self, call: Call, given: Any, output: Any) -> bool:
        """Whether the outputs of a call become variables."""
        if isinstance(call.module, nn.modules.batchnorm._NormBase):
            return True
        if not call.called:
            return not self.is_open(call.module, given, output)
        # A module that calls others, and beside them contracts what it is given with weights of its own.
        own = [parameter for parameter in call.module.parameters(recurse=False) if is_matrix(parameter)]
        return bool(own) and _computes(call.inputs, floats(output)) and _contracts(call.inputs, floats(output), own)

    def is_constant(self, module: nn.Module, given: Any, output: Any) -> bool:
        """Whether only the shapes of its inputs enter a module's output, as those of a table of positions."""
        known = self.fixed.get(id(module))
        if known is None:
            try:
                known = is_float(output) and bool(floats(given)) and torch.equal(output, _again(module, given, _other))
            except Exception:  # It does not take other numbers.
                known = False
            self.fixed[id(module)] = known
        return known

    def is_open(self, module: nn.Module, given: Any, output: Any) -> bool:
        """Whether a module that calls no other one hands its input on; asked once per module."""
        known = self.opened.get(id(module))
        if known is None:
            try:
                known = _hands_on(module, given, output)
            except Exception:  # It does not take random numbers: a box, then.
                known = False
            self.opened[id(module)] = known
        return known


def _hands_on(module: nn.Module, given: Any, output: Any) -> bool:
    """Whether the output is a sum of inputs, or one of them: laid out anew, plus a constant, or times fixed scales."""
    if not is_float(output):
        return False
    mine = [tensor for tensor in floats(given) if tensor.numel() == output.numel()]
    factors = [factor for tensor in mine if (factor := _factor_in(module, given, tensor)) is not None]
    if len(factors) == 1:
        # Scales and a constant: a norm with fixed statistics.
        return bool((factors[0] == 1).all()) or _maps_zero_to_zero(module, given)
    return len(factors) > 1


def _factor_in(module: nn.Module, given: Any, tensor: Tensor) -> Tensor | None:
    # Random numbers: an activation may be the identity on the ones that it was given.
    start = (3 * torch.randn_like(tensor)).requires_grad_().clone()
    args, kwargs = replaced(given, lambda x: start if x is tensor else x.detach().clone())
    out = module.forward(*args, **kwargs)
    end = edge(out)
    return None if end is None else scale(end, [edge(start)], out)[0]


def _computes(given: Sequence[Edge], outputs: Sequence[Tensor]) -> bool:
    """Whether outputs follow from inputs, between the boxes, and none of them carries one."""
    follows = False
    for output in outputs:
        end = edge(output)
        if end is None or not given:
            continue
        start = torch.autograd.graph.GradientEdge(*end)
        wanted = [torch.autograd.graph.GradientEdge(*e) for e in given]
        found = torch.autograd.grad([start], wanted, [torch.ones_like(output)], retain_graph=True, allow_unused=True)
        follows = follows or any(gradient is not None for gradient in found)
        if any(factor is not None for factor in scale(end, given, output)):
            return False
    return follows


def _contracts(given: Sequence[Edge], outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether the weights are factors of what is given, and not only put beside it or added."""
    ends = [output for output in outputs if output.requires_grad]
    wanted = [torch.autograd.graph.GradientEdge(*e) for e in given]
    try:
        probe = [torch.randn_like(end) for end in ends]
        first = torch.autograd.grad(ends, wanted, probe, create_graph=True, allow_unused=True)
        parts = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        if not parts:
            return False
        probe = [torch.randn_like(part) for part in parts]
        second = torch.autograd.grad(parts, list(weights), probe, retain_graph=True, allow_unused=True)
    except RuntimeError:  # An operator without a second derivative: an attention, which contracts.
        return True
    return any(gradient is not None and bool(gradient.any()) for gradient in second)


def _maps_zero_to_zero(module: nn.Module, given: Any) -> bool:
    return not bool(_again(module, given, _zeros).any())


def _skipped(module: nn.Module, given: Any, output: Any) -> Tensor | None:
    """The input that a box adds to what it computes.

    That is the one which it returns when all its weight matrices are zero, or when all its other inputs are. Of several
    it is the one that was made first: what is added to it is computed from it.
    """
    same = [x for x in floats(given) if is_float(output) and x.shape == output.shape]
    same.sort(key=lambda x: e[0]._sequence_nr() % (1 << 62) if (e := edge(x)) is not None else -1)
    matrices = [parameter for parameter in module.parameters() if is_matrix(parameter)]
    own = [parameter.data for parameter in matrices]
    try:
        if matrices and same:
            for parameter in matrices:
                parameter.data = torch.zeros_like(parameter)
            bare = _again(module, given, lambda x: x.detach().clone())
            return next((x for x in same if torch.equal(x, bare)), None)
        for x in same if len(same) > 1 else ():
            if torch.equal(x, _again(module, given, lambda y, x=x: x.detach().clone() if y is x else _zeros(y))):
                return x
    except Exception:  # It does not take zeros.
        return None
    finally:
        for parameter, data in zip(matrices, own, strict=True):
            parameter.data = data
    return None


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if is_float(x) else x


def _other(x: Tensor) -> Tensor:
    # Not one number for all elements: norms would not tell.
    return x.detach() + torch.arange(x.numel()).sin().view(x.shape).to(x) if is_float(x) else x


def _again(module: nn.Module, given: Any, change: Any) -> Tensor:
    args, kwargs = replaced(given, change)
    output: Tensor = module.forward(*args, **kwargs).detach()
    return output


@contextlib.contextmanager
def _always_recording() -> Iterator[None]:
    """What a model does under its own ``no_grad`` is recorded too, and attention takes no fast path around modules."""

    def enter(self: torch.no_grad) -> None:
        self.prev = torch.is_grad_enabled()

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.enable_grad(), mock.patch.object(torch.no_grad, "__enter__", enter):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _record(model: nn.Module, inputs: Mapping[str, Any]) -> Recording:
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.no_grad():
        # Some models change their own weights at their first call.
        model(**pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, dict(inputs)))
    hooks = _Hooks(model)
    given = pytree.tree_map(lambda x: variable(x) if is_float(x) else x, dict(inputs))
    starts = hooks.edges(given)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.after, with_kwargs=True))
    try:
        with _always_recording():
            output = model(**given)
            ends = hooks.edges(output)
    finally:
        for handle in handles:
            handle.remove()
    nodes: dict[Any, bool] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            nodes[torch.autograd.graph.get_gradient_edge(parameter).node] = is_matrix(parameter)
    hooks.kept += [output, *nodes]
    return Recording(hooks.calls, starts, ends, nodes, sorted(hooks.notes), hooks.kept)
