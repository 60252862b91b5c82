"""``program.pt2``: a program that ``torch.export.save`` wrote. It is rewritten as the graph that it is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import fx, nn

from attnres_compile import api
from attnres_compile.cli.targets.inputs import beside
from attnres_compile.cli.targets.target import Target
from attnres_compile.cli.targets.user_code import user_code
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import NoStreamError, TargetError
from attnres_compile.inputs import GRAMMAR, Inputs
from attnres_compile.report import TransformReport
from attnres_compile.views.paths import short_path

SUFFIX = ".pt2"


class ExportedTarget(Target):
    """A target whose model is the graph of a program; dynamo, which would lose its lines, does not see it."""

    def explain(self, config: AttnResConfig) -> TransformReport:
        """What :meth:`converted` would do, with the module paths and lines that the program remembers."""
        try:
            with _no_advice():
                return api.rewrite_graph(_graph(self.model), config=config)[1]
        except NoStreamError as error:  # with ``strict`` also where there are streams
            return error.report

    def converted(self, config: AttnResConfig) -> nn.Module:
        """The rewritten graph as a module that runs eagerly: parameters of its own, queries at zero among them.

        It computes what the program did with the inputs' shapes that it admits; it does not check them again.

        Raises:
            NoStreamError: the program holds no stream that can be converted, or with ``strict`` one that cannot.
            AttnResError: it cannot be copied.
        """
        with _no_advice():
            return api.rewrite_graph(_graph(self._copy()), config=config)[0]


def load_exported(path: str, given: Inputs | None) -> Target:
    """The program in ``path`` as a module over its parameters, and the inputs that it was exported with.

    Args:
        path: a file in the present format of ``torch.export.save``.
        given: what ``--input`` describes, or ``None``.

    Raises:
        TargetError: there is no such file, it holds something else or what could run code of its own, or it was
            saved without inputs and none are given.
    """
    from attnres_compile.cli.targets.archive import open_program  # torch's archives take a moment to load

    program = open_program(path)
    # Its own checks of inputs are Python text in the file, which this argument leaves alone; a hook checks the shapes.
    model: fx.GraphModule = program.module(check_guards=False)
    for name in ("train", "eval"):
        # torch puts functions there that raise; a graph is in the one mode that it was traced in.
        model.__dict__.pop(name, None)
    model.training = False
    name = short_path(path)
    if given is None:
        if program.example_inputs is None:
            raise TargetError(f"{name} was saved without inputs", remedy=f"Give --input for each. {GRAMMAR}")
        args, kwargs = program.example_inputs
        return ExportedTarget(name, model, Inputs(args, kwargs), f"the program {name}")
    inputs = beside(given, model)
    with user_code(f"{name} called with --input", "Give what it was exported with"), torch.no_grad():
        model(*inputs.args, **inputs.kwargs)
    return ExportedTarget(name, model, inputs, "--input")


def _graph(model: nn.Module) -> fx.GraphModule:
    assert isinstance(model, fx.GraphModule)
    return model


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Without what torch's own trees warn of when they are copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
