"""Which module of a model owns a stream: whose forward is rewritten."""

from __future__ import annotations

from collections.abc import Iterable
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


__all__ = ["Line", "agreeing", "line_of", "path_of", "streams_of"]
