"""Which module of a model owns a stream: whose forward is rewritten."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import fx, nn

from attnres_compile.passes import facts
from attnres_compile.passes.streams import Detection, Rejection, ResidualStream
from attnres_compile.reporting import STREAM_REASONS

# A line of a module's code, by the module's path.
Line = tuple[str, str]


def path_of(model: nn.Module, streams: Iterable[ResidualStream]) -> str:
    """Path of the lowest module of ``model`` whose one call makes all of the streams."""
    return facts.owner_path(model, [step.node for stream in streams for step in stream.steps])


def method_of(model: nn.Module, path: str, streams: Iterable[ResidualStream]) -> tuple[str, str]:
    """Which method of which module runs all steps of the streams that the module at ``path`` owns.

    The innermost one: where ``forward`` calls ``self.forward_features``, or ``self.backbone.forward_features``, in
    which all adds stand, then this. By lines of code alone; whether ``forward`` gets there by the module's attribute
    is for the caller to see.

    Returns:
        The module's path and the method's name: ``path`` and ``"forward"`` where there is no other.
    """
    nodes = [step.node for stream in streams for step in stream.steps]
    for file, line, function in reversed(facts.common(facts.frames(node) for node in nodes)):
        for below in _from_below(path, facts.common(_parts(facts.module_path(node)) for node in nodes)):
            try:
                module = model.get_submodule(below)
            except AttributeError:
                continue
            if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                continue
            if _is_method(module, function, file, line):
                return below, function
    return path, "forward"


def _parts(path: str) -> list[str]:
    return path.split(".") if path else []


def _from_below(owner: str, parts: list[str]) -> Iterator[str]:
    """The paths from that of ``parts`` upwards to ``owner``."""
    for length in range(len(parts), len(_parts(owner)) - 1, -1):
        yield ".".join(parts[:length])


def _is_method(module: nn.Module, name: str, file: str, line: int) -> bool:
    """Whether that line is in the code that ``module.name(...)`` runs, and the code is a method's of a user."""
    method = module.__dict__.get(name, inspect.getattr_static(type(module), name, None))
    function = getattr(method, "__func__", method) if inspect.ismethod(method) else method
    known = inspect.getattr_static(nn.Module, name, None)
    if not isinstance(function, types.FunctionType) or (known is not None and name != "forward"):
        return False
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE) or code.co_name != name:
        return False
    return code.co_filename == file and any(line == own for _, _, own in code.co_lines())


def streams_of(model: nn.Module, detection: Detection) -> dict[str, tuple[ResidualStream, ...]]:
    """The streams by the paths of their owners."""
    found: dict[str, list[ResidualStream]] = {}
    for stream in detection.streams:
        found.setdefault(path_of(model, [stream]), []).append(stream)
    for path, streams in list(found.items()):
        # Streams of several calls of one module belong to what makes the calls.
        caller = path_of(model, streams)
        if caller != path:
            found.setdefault(caller, []).extend(found.pop(path))
    return {path: tuple(streams) for path, streams in found.items()}


def agreeing(model: nn.Module, detection: Detection) -> Detection:
    """``detection`` without the streams of modules that are called several times and whose other calls are left alone.

    A module has one forward: what it is rewritten to, every call of it runs.
    """
    kept: list[ResidualStream] = []
    rejections = list(detection.rejections)
    for stream in detection.streams:
        why = _other_call(model, stream, detection)
        if why is None:
            kept.append(stream)
        else:
            rejections += [Rejection(why.reason, add, why.detail) for step in stream.steps for add in step.adds]
    return replace(detection, streams=tuple(kept), rejections=tuple(rejections))


def _other_call(model: nn.Module, stream: ResidualStream, detection: Detection) -> Rejection | None:
    path = path_of(model, [stream])
    lines = {line_of(step.node) for step in stream.steps}
    own = {_call(step.node, path) for step in stream.steps}
    return next(
        (
            left
            for left in detection.rejections
            if left.reason in STREAM_REASONS and line_of(left.node) in lines and _call(left.node, path) not in own
        ),
        None,
    )


def line_of(node: fx.Node) -> Line:
    """The line of code that made ``node``, which is the same in every graph and every call."""
    return facts.module_path(node), facts.source_line(node)


def _call(node: fx.Node, path: str) -> str:
    """Which call of the module at ``path`` made ``node``."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((key for key, entry in stack.items() if facts.clean_path(entry[0]) == path), "")


__all__ = ["Line", "agreeing", "line_of", "method_of", "path_of", "streams_of"]
