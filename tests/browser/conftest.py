"""A page per test, and a note of everything it should not do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attnres_compile.report import TransformReport
from attnres_compile.views.html import write_page
from tests.browser import chromium

Open = Callable[..., Any]


@dataclass
class Watch:
    """What a page did besides showing itself."""

    trouble: list[str] = field(default_factory=list)

    def follow(self, page: Any, own: str) -> None:
        page.on("console", lambda message: self.trouble.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("request", lambda request: request.url == own or self.trouble.append(f"request: {request.url}"))
        page.on("popup", lambda popup: self.trouble.append(f"popup: {popup.url}"))

        def dialog(found: Any) -> None:
            self.trouble.append(f"dialog: {found.message}")
            found.dismiss()

        page.on("dialog", dialog)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if chromium.executable() is None:
        message = "no Chromium on this machine (ATTNRES_CHROMIUM may name one)"
        pytest.fail(message) if os.environ.get("ATTNRES_NEED_BROWSER") == "1" else pytest.skip(message)
    with chromium.browser() as running:
        yield running


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path, watch: Watch) -> Iterator[Open]:
    """Writes a report and opens it from disk; at the end, nothing but that must have happened."""
    contexts = []

    def open_report(report: TransformReport, weights: Any = None, *, width: int = 1280, scheme: str = "light") -> Any:
        file = tmp_path / f"report-{len(contexts)}.html"
        write_page(report, file, weights, title="a title")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        watch.follow(page, file.as_uri())
        page.goto(file.as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert watch.trouble == []
