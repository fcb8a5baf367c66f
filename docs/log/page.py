"""The page of a running server: its size, and when a browser first paints it.

specdec serve --port 8123 &
python docs/log/page.py http://127.0.0.1:8123      # with playwright, and Chromium on the PATH
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from typing import Any

LOADS = 15


def main(url: str) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        loads = [_load(browser, url) for _ in range(LOADS)]
        version = browser.version
        browser.close()
    paints = [paint for paint, _ in loads]
    result = {
        "chromium": version,
        "loads": LOADS,
        "bytes": loads[0][1],
        "first_paint_ms": {
            "median": round(statistics.median(paints)),
            "min": round(min(paints)),
            "max": round(max(paints)),
        },
    }
    print(json.dumps(result))


def _load(browser: Any, url: str) -> tuple[float, int]:
    """Milliseconds until something is painted, and bytes of all files, with nothing kept."""
    context = browser.new_context()
    page = context.new_page()
    sizes: list[int] = []
    page.on("response", lambda r: sizes.append(len(r.body())) if _is_part(r.url, url) else None)
    page.goto(url)
    page.wait_for_timeout(300)
    asked = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    paint = page.evaluate(asked)
    context.close()
    return paint, sum(sizes)


def _is_part(found: str, url: str) -> bool:
    return found == url.rstrip("/") + "/" or "/ui/" in found


if __name__ == "__main__":
    main(*sys.argv[1:])
