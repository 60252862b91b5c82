"""Every architecture of the survey, from all libraries. Importing this imports none of them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from tests.zoo.survey.entry import Entry

# Which module lists the entries of which library.
SOURCES: dict[str, tuple[str, ...]] = {
    "torch": ("tests.zoo.survey.layer_models",),
    "x-transformers": ("tests.zoo.survey.x_models",),
    "transformers": ("tests.zoo.survey.hf",),
    "torchvision": ("tests.zoo.survey.torch_models",),
    "timm": ("tests.zoo.survey.timm_models",),
}
# What to import once before models are built in processes of their own.
PACKAGES = {"torch": "torch", "x-transformers": "x_transformers", "transformers": "transformers"}


def entries(library: str | None = None) -> list[Entry]:
    """The entries of one library, or of all, by name.

    Raises:
        ModuleNotFoundError: a library is not installed.
        ValueError: two entries have one name.
    """
    return list(by_name(library).values())


@functools.cache
def by_name(library: str | None = None) -> dict[str, Entry]:
    """The same by name, in order; made once per process."""
    wanted = [library] if library is not None else list(SOURCES)
    found: dict[str, Entry] = {}
    for each in wanted:
        for source in SOURCES[each]:
            listed: Callable[[], list[Entry]] = importlib.import_module(source).entries
            for entry in listed():
                if entry.library != each:
                    continue
                if entry.name in found:
                    raise ValueError(f"two entries are called {entry.name}")
                found[entry.name] = entry
    return dict(sorted(found.items()))
