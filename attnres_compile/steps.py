"""The steps of a converted stream, run outside of any call of the module that owns it: that would be the plain sum.

A converted module replaces the ``forward`` (or another method) that runs its stream. What stands inside can be called
in other ways: layers one by one, another method with a loop of its own, the class's own ``forward``. Objects of this
file stand in the instance ``__dict__`` of some modules inside and see such calls.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from attnres_compile import calls, tracers
from attnres_compile.errors import PlainExecutionError
from attnres_compile.kernels import ops as kernel_ops
from attnres_compile.passes import facts
from attnres_compile.passes.streams import ResidualStream, Step

# The op that refuses claims to write it, as `declare` does.
_TOKEN = torch.zeros(1)


@dataclass(frozen=True)
class Place:
    """A module to guard.

    Attributes:
        path: of the module in the model.
        lines: lines of code, ``file:line``, of the steps that it is a branch of. Then only a call that comes from the
            code of one of them is refused: by itself a branch is no step. Empty where the module's own code holds a
            step.
        where: line of a step, for the message.
    """

    path: str
    lines: tuple[str, ...] = ()
    where: str = ""


class StepGuard:
    """The ``forward`` of a module that must not run outside of a converted call.

    Args:
        module: the module.
        key: of the converted module that owns the stream.
        place: which module it is.
    """

    def __init__(self, module: nn.Module, key: str, place: Place) -> None:
        setattr(self, facts.OWNER, module)
        self.key = key
        self.place = place
        self.previous = module.__dict__.get("forward")
        # Once reverted, where something else keeps it.
        self.released = False
        _let_be()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _let_be()

    @property
    def __signature__(self) -> inspect.Signature:
        """The original forward's signature."""
        return inspect.signature(self.original)

    @property
    def __code__(self) -> types.CodeType:
        """The original forward's code, which torch.export looks at before it calls."""
        code: types.CodeType = inspect.unwrap(self.original).__code__
        return code

    @property
    def original(self) -> Any:
        """The module's forward without this."""
        module = getattr(self, facts.OWNER)
        return self.previous if self.previous is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if _is_refused():
                torch.ops.attnres.outside.default(_TOKEN, self.place.path)
        elif not (calls.is_running(self.key) or self.released or calls.is_plain(self.key)):
            self.refuse()
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self._attnres_owner).forward(self._attnres_owner, *args, **kwargs)  # type: ignore[attr-defined]

    def refuse(self) -> None:
        """Raises:
        PlainExecutionError: this call is a step outside of a converted call.
        """
        if not self.place.lines or self.is_called_from(_codes(sys._getframe(2))):
            raise self.refusal()

    def refusal(self) -> PlainExecutionError:
        """The error."""
        place = self.place
        return PlainExecutionError(
            kernel_ops.OUTSIDE, module=place.path, where=place.where, remedy=kernel_ops.OUTSIDE_REMEDY
        )

    def is_called_from(self, codes: Iterable[types.CodeType]) -> bool:
        """Whether one of ``codes``, the callers', holds a step that the module is a branch of."""
        return any(line in _lines(code) for code in codes for line in self.place.lines)


@calls.asked_while_traced
def _is_refused() -> bool:
    """Whether the guard that is traced would refuse."""
    guard = calls.asking()
    assert isinstance(guard, StepGuard)
    if guard.released or calls.is_marked(guard.key) or calls.is_running(guard.key):
        return False
    if guard.place.lines and not guard.is_called_from(calls.traced_codes()):
        return False
    if tracers.exporting():
        # What is exported would raise where it runs, and should here.
        raise guard.refusal()
    return True


@functools.cache
def _let_be() -> None:
    """As a frame of its own dynamo is to let a guard be: what it calls is compiled, or runs, as without it. All guards
    share one code, and dynamo has only so many variants of one code.
    """
    from torch._dynamo.eval_frame import skip_code  # Importing this package loads no compiler.

    skip_code(StepGuard.__call__.__code__)


def _codes(frame: types.FrameType | None) -> Iterator[types.CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def _lines(code: types.CodeType) -> frozenset[str]:
    return frozenset(f"{code.co_filename}:{line}" for _, _, line in code.co_lines())


# ------------------------------------------------------------------ which modules


def places(
    model: nn.Module,
    owner: str,
    method: str,
    streams: Sequence[ResidualStream],
    graph: fx.Graph,
    in_pieces: bool = False,
) -> tuple[Place, ...]:
    """The modules to guard for the streams that the module at path ``owner`` owns.

    Args:
        model: the model.
        owner: path of the owner.
        method: the one of it that is converted.
        streams: its streams, in ``graph``.
        graph: a graph of the model, or of the owner.
        in_pieces: whether the stream runs through graph breaks. dynamo traces layers by themselves then, and a guard
            inside of one would keep layers from sharing their graphs: the one that the layer has must do.
    """
    found: dict[str, Place] = {}
    branches: dict[str, set[str]] = {}
    elsewhere = _elsewhere(owner, method, streams, graph)
    for stream in streams:
        for step in stream.steps:
            # A module that only adds may have other users: then the one that calls it holds the step.
            inside = [path for path in reversed(_stack(step.node)) if path not in elsewhere and _is_below(path, owner)]
            path = next(iter(inside), owner)
            line = _line(model, step, path)
            if inside and _is_guardable(model, path):
                compiled = isinstance(model.get_submodule(path), torch._dynamo.eval_frame.OptimizedModule)
                place = f"{path}._orig_mod" if compiled else path
                found.setdefault(place, Place(place, where=line))
            if inside and in_pieces:
                continue
            branch = _branch(model, step, path)
            if branch is not None and line:
                branches.setdefault(branch, set()).add(line)
    for path, lines in branches.items():
        found.setdefault(path, Place(path, tuple(sorted(lines)), min(lines)))
    return tuple(found.values())


def _stack(node: fx.Node) -> list[str]:
    """Paths of the modules whose calls made ``node``, from the outermost one inwards."""
    return [facts.clean_path(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]


def _is_below(path: str, owner: str) -> bool:
    return path != owner and (not owner or path.startswith(owner + "."))


def _line(model: nn.Module, step: Step, path: str) -> str:
    """A line of the code that holds the step: of its add, or the first one of its module's ``forward`` where nodes do
    not tell, as in code that was typed in.
    """
    line = facts.source_line(step.node)
    if line and not line.startswith(facts.OURS):
        return line
    code = getattr(type(model.get_submodule(path)).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _elsewhere(owner: str, method: str, streams: Sequence[ResidualStream], graph: fx.Graph) -> set[str]:
    """Paths of modules that are called outside of the owner's method as well."""
    found: set[str] = set()
    call = _call([step.node for stream in streams for step in stream.steps], method)
    for node in graph.nodes:
        entries = _stack(node)
        if owner not in ("", *entries) and not (call and _begins(facts.frames(node), call)):
            found.update(entries)
    return found


def _call(nodes: Sequence[fx.Node], method: str) -> list[tuple[str, int, str]]:
    """The frames of all ``nodes`` down to that of the method, whose own line is left open; empty if there is none."""
    shared = facts.common(facts.frames(node) for node in nodes)
    at = max((n for n, (_, _, function) in enumerate(shared) if function == method), default=None)
    return [] if at is None else [*shared[:at], (shared[at][0], 0, method)]


def _begins(frames: list[tuple[str, int, str]], call: list[tuple[str, int, str]]) -> bool:
    if len(frames) < len(call) or frames[: len(call) - 1] != call[:-1]:
        return False
    file, _, function = frames[len(call) - 1]
    return (file, 0, function) == call[-1]


def _is_guardable(model: nn.Module, path: str) -> bool:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return not isinstance(module, torch.jit.ScriptModule)


def _branch(model: nn.Module, step: Step, path: str) -> str | None:
    """The first module that the step's own code calls for its branch."""
    seen: set[fx.Node] = {step.skip}
    waiting = [term.node for term in step.terms]
    called: list[tuple[int, str]] = []
    order: dict[fx.Node, int] | None = None
    while waiting:
        node = waiting.pop()
        if node in seen or node.op in ("placeholder", "get_attr"):
            continue
        seen.add(node)
        entries = _stack(node)
        inside = entries[entries.index(path) + 1 :] if path in entries else entries if not path else []
        if inside and inside[0] == path:
            inside = inside[1:]
        if inside and _is_below(inside[0], path) and _is_guardable(model, inside[0]):
            if order is None:
                order = {each: at for at, each in enumerate(node.graph.nodes)}
            called.append((order[node], inside[0]))
            waiting += node.all_input_nodes
        elif entries[-1:] == [path] or (not entries and not path):
            waiting += node.all_input_nodes
    return min(called)[1] if called else None


# ------------------------------------------------------------------ putting them in and taking them out


def guard(model: nn.Module, key: str, wanted: Iterable[Place]) -> None:
    """Let the modules ``wanted`` run in calls of the converted module of that key alone."""
    for place in wanted:
        module = model.get_submodule(place.path)
        if not isinstance(module.__dict__.get("forward"), StepGuard):
            module.__dict__["forward"] = StepGuard(module, key, place)


def release(model: nn.Module, keys: Iterable[str]) -> None:
    """Take all guards of converted modules of these keys away."""
    wanted = set(keys)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, StepGuard) and value.key in wanted:
                value.released = True
                if name == "forward":
                    del module.__dict__[name]
                    if value.previous is not None:
                        module.__dict__[name] = value.previous


__all__ = ["Place", "StepGuard", "guard", "places", "release"]
