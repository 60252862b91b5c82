"""Hooks that are registered or removed after a converted module has been compiled: they run as on the original.

dynamo traces the hooks of modules into its graphs, and by default does not look again whether they are still the same.
A converted module is called as the plain module that it was, by people who do not know that it compiles itself, so here
it looks. A model that its user hands to ``torch.compile`` is under the user's own setting.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.modules import module as torch_module

# Hooks of all modules at once stand in dicts of torch's, which dynamo does not guard either.
_GLOBAL = [
    value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)
]


def guarded() -> contextlib.AbstractContextManager[Any]:
    """While open, what dynamo compiles holds only as long as the hooks of each module are those that it traced: by
    their code, not by their objects, so that a hook which is registered anew for each call costs one compilation.
    """
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # type: ignore[no-any-return]


def of_all_modules() -> str:
    """A text that is another one when other hooks are registered for all modules."""
    if not any(_GLOBAL):
        return ""
    return ";".join(",".join(map(str, held)) for held in _GLOBAL)
