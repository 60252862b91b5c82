"""Chromium for the tests of the HTML report: the one of the system, in a fresh profile, without network services."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def executable() -> str | None:
    """Path of Chromium: ``ATTNRES_CHROMIUM`` names it, or it is found on the path."""
    names = (os.environ.get("ATTNRES_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A running headless Chromium.

    Raises:
        RuntimeError: there is none.
    """
    from playwright.sync_api import sync_playwright

    path = executable()
    if path is None:
        raise RuntimeError("no Chromium on the path; install it, or name it in ATTNRES_CHROMIUM")
    # Playwright makes a new user data directory for each launch.
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        try:
            yield running
        finally:
            running.close()
