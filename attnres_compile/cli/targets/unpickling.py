"""Files of others are data: nothing but tensors and plain values is unpickled from them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_SAFE_ONLY, _UNSAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def nothing_unpickled() -> Iterator[None]:
    """While open, every ``torch.load`` is with ``weights_only``, whatever the library that calls it says."""
    kept = {key: os.environ.pop(key, None) for key in (_SAFE_ONLY, _UNSAFE)}
    os.environ[_SAFE_ONLY] = "1"
    try:
        yield
    finally:
        for key, value in kept.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
