"""Screenshots of the HTML report, to look at: ``python -m tests.browser.screenshots FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from attnres_compile.views.html import write_page
from tests.browser import chromium, pages


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    reports = {"blocks": pages.decoder(24, 6), "full": pages.decoder(24, 1), "deep": pages.decoder(100, 1)}
    with chromium.browser() as browser:
        for name, report in reports.items():
            html = folder / f"{name}.html"
            write_page(report, html, pages.weights(report), title=name)
            for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
                page = context.new_page()
                page.goto(html.as_uri())
                page.screenshot(path=folder / f"{name}-{scheme}-{width}.png", full_page=True)
                context.close()
    print(f"{len(list(folder.glob('*.png')))} screenshots in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.browser.screenshots FOLDER")
    main(Path(sys.argv[1]))
