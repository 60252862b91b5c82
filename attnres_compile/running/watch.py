"""Sees the outermost calls of modules while a script runs, and leaves everything else as it is."""

from __future__ import annotations

import enum
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attnres_compile.running.patch import Patch

# Compiled functions run as they are written until so many calls of modules were seen: a model that is called inside
# one is seen then, and nothing is slow for long where none is converted.
CALLS_IN_EAGER = 16


class Seen(enum.Enum):
    """What to do with a call that was seen."""

    WHOLE = enum.auto()
    INSIDE = enum.auto()  # a wrapper's call: the modules that it calls are seen too


class ModuleWatch:
    """Calls ``seen(module, args, kwargs)`` before each outermost call of a module, in each thread of this process, and
    ``compiled(module)`` after ``torch.compile`` has made one, until it is closed.

    ``nn.Module.__call__`` is replaced while it is started. Code that dynamo, ``torch.jit`` or ``torch.fx`` traces,
    fake tensors and function transforms go through unseen.
    """

    def __init__(
        self,
        seen: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Seen],
        compiled: Callable[[OptimizedModule], None],
    ) -> None:
        self._seen = seen
        self._compiled = compiled
        self._inside = threading.local()
        self._pid = os.getpid()
        self._calls = 0
        self._stance: Any = None
        self._call = Patch(nn.Module, "__call__", self._watched)
        # A compiled module binds nn.Module.__call__ when it is made, for good.
        self._bind = Patch(OptimizedModule, "_initialize", self._with_the_original)

    def start(self) -> None:
        """Begin to watch."""
        self._bind.start()
        self._call.start()
        self._hook = register_optimizer_step_pre_hook(self._no_longer_in_eager)
        self._stance = torch.compiler.set_stance("force_eager")

    def stop(self) -> None:
        """Watch calls no longer; may be called again."""
        self._call.stop()
        self._no_longer_in_eager()

    def close(self) -> None:
        """Leave everything as it was."""
        self.stop()
        self._bind.stop()

    def pause(self) -> None:
        """Let module calls through unseen until :meth:`resume`."""
        self._call.stop()

    def resume(self) -> None:
        """Go on watching."""
        self._call.start()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not self._call.active or getattr(self._inside, "yes", False):
                return original(module, *args, **kwargs)
            if os.getpid() != self._pid or _traced():
                return original(module, *args, **kwargs)
            self._calls += 1
            self._inside.yes = True
            try:
                if self._seen(module, args, kwargs) is Seen.INSIDE:
                    self._inside.yes = False
                if self._calls >= CALLS_IN_EAGER:
                    self._no_longer_in_eager()
                return original(module, *args, **kwargs)
            finally:
                self._inside.yes = False

        return __call__

    def _with_the_original(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _initialize(module: OptimizedModule) -> None:
            watching = self._call.active
            self._call.stop()
            try:
                original(module)
            finally:
                if watching:
                    self._call.start()
            if self._bind.active:
                self._compiled(module)

        return _initialize

    def _no_longer_in_eager(self, *_: Any) -> None:
        stance, self._stance = self._stance, None
        if stance is None or torch.compiler.is_dynamo_compiling():
            return
        self._hook.remove()
        # In place: a stance that the script has chosen meanwhile stays, and comes back to ours when it is left.
        vars(stance.stance).update(vars(stance.prev))


def _traced() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._guards.active_fake_mode() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
