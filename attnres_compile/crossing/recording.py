"""A model's call as one ATen graph, recorded while the model runs for real.

dynamo stops where Python does something that it cannot trace. A recording does not: it sees every operator that is
called, whatever Python calls it, and so holds the whole of a stream that dynamo sees in pieces. It is made to be
detected in and compared with, not to be compiled.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from attnres_compile.comparison import named_tensors
from attnres_compile.guarding import without_fast_path
from attnres_compile.inputs import Inputs
from attnres_compile.passes import facts
from attnres_compile.passes.writes import written


@dataclass(frozen=True)
class Recording:
    """A call that was recorded.

    Attributes:
        module: the graph. Its placeholders are the parameters, buffers, inputs and constants that the call used; its
            results are those of ``results``, then every other tensor that outlived the call.
        given: what stood at each placeholder: the model's own parameters themselves, copies of everything else.
        results: where among the graph's results the floating-point ones of the call are, by their path in what it
            returned.
    """

    module: fx.GraphModule
    given: tuple[Tensor, ...]
    results: dict[str, int]


def record(model: nn.Module, inputs: Inputs) -> Recording:
    """Run ``model`` on ``inputs`` without gradients and record what it computes.

    What the run changes stays changed; see :func:`attnres_compile.guarding.untouched`.

    Raises:
        Exception: the model's own error.
    """
    recorder = _Recorder(model)
    plainly = torch.compiler.set_stance("force_eager")
    with without_fast_path(), torch.no_grad(), plainly, recorder.modules(), recorder:
        returned = model(*inputs.args, **inputs.kwargs)
    return recorder.end(returned)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.given: list[Tensor] = []
        self.nodes: Any = WeakTensorKeyDictionary()
        self.paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self.parameters = {id(value) for value in (*model.parameters(), *model.buffers())}
        self.stack: list[tuple[str, tuple[str, type]]] = []
        self.calls = 0
        self.last: fx.Node | None = None

    # ---------------------------------------------------------------- modules

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """While open, modules that this thread calls are on the stack that nodes are marked with."""
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread and id(module) in self.paths:
                self.calls += 1
                self.stack.append((f"{id(module)}@{self.calls}", (self.paths[id(module)], type(module))))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == thread and id(module) in self.paths:
                self.stack.pop()

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ---------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (same := _handed_on(func, result, args)) is not None:
            self.nodes[result] = self._node(same)
            return result
        node = self.graph.call_function(func, *taken)
        node.meta["nn_module_stack"] = dict(self.stack)
        node.meta["stack_trace"] = _place(sys._getframe(1))
        if isinstance(result, Tensor):
            self._give(node, result)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    part.meta = dict(node.meta)
                    self._give(part, item)
        return result

    def _give(self, node: fx.Node, value: Tensor) -> None:
        node.meta["val"] = _outline(value)
        self.nodes[value] = node

    def _node(self, value: Tensor) -> fx.Node:
        found: fx.Node | None = self.nodes.get(value)
        if found is not None:
            return found
        is_parameter = isinstance(value, nn.Parameter) or id(value) in self.parameters
        before = self.last
        with self.graph.inserting_after(before) if before is not None else self._at_the_start():
            node = self.graph.placeholder(f"given_{len(self.given)}")
        self.last = node
        node.meta.update(attnres_parameter=is_parameter, val=_outline(value))
        with torch.utils._python_dispatch._disable_current_modes():
            # FSDP2 frees the parameters that it made for the call, and has others in their place before and after.
            own = isinstance(value, nn.Parameter) and id(value) in self.parameters
            self.given.append(value if own else value.detach().clone())
        self.nodes[value] = node
        return node

    def _at_the_start(self) -> Any:
        first = next(iter(self.graph.nodes), None)
        return self.graph.inserting_before(first) if first is not None else contextlib.nullcontext()

    # ---------------------------------------------------------------- the end

    def end(self, returned: Any) -> Recording:
        """The graph of everything that was of any use."""
        named = {name: self.nodes.get(value) for name, value in named_tensors(returned) if value.is_floating_point()}
        found = {name: node for name, node in named.items() if node is not None}
        # What is alive now is in the result, or was kept by someone: a cache, a list of hidden states.
        alive = [node for node in list(self.nodes.values()) if node.op != "placeholder"]
        outputs = list(dict.fromkeys([*found.values(), *alive]))
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and not _matters(node):
                self.graph.erase_node(node)
        module = fx.GraphModule(nn.Module(), self.graph)
        return Recording(module, tuple(self.given), {name: outputs.index(node) for name, node in found.items()})


def _matters(node: fx.Node) -> bool:
    """Whether a node without users does something: writes, or draws random numbers."""
    target: Any = node.target
    random = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return random or bool(written(node))


def _handed_on(func: Any, result: Tensor, args: tuple[Any, ...]) -> Tensor | None:
    """The first operand, where ``result`` is a view of the whole of it: hooks make such views of all that passes."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or func._schema.is_mutable or first.layout != torch.strided:
        return None
    alike = (
        result.dtype == first.dtype
        and result.shape == first.shape
        and result.stride() == first.stride()
        and result.storage_offset() == first.storage_offset()
        and result.untyped_storage()._cdata == first.untyped_storage()._cdata
    )
    return first if alike else None


def _outline(value: Tensor) -> Tensor:
    """A tensor of the same sizes without memory."""
    if value.layout != torch.strided:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _place(frame: FrameType | None) -> str:
    """The innermost frame of the user's code, as a line of a stack trace."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*facts.NOT_THE_USERS, "<")):
            return f'  File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        frame = frame.f_back
    return ""
