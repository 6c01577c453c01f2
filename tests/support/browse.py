"""Opens pages in the system's Chromium and tells what became of them: a program of .venv-browser, which has Playwright.

Its input is a JSON object: `chromium`, the path of the browser, and `visits`, a list of keyword arguments of visit().
Its output is a JSON list with what visit() returned for each.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright  # noqa: A004

_PHONE_WIDTH_MAX = 500
_HEIGHTS = {True: 844, False: 800}

# Milliseconds after which a page is opened anew in another browser: one that was starved may wait for ever for an event
# that it has missed; how often; and those after which a word is typed again, for the page may have been drawn before it
# listened.
_LIMIT, _TRIES, _AGAIN = 60_000, 10, 10_000


def visit(
    browser: Browser,
    address: str,
    *,
    width: int,
    first: str | None = None,
    search: str | None = None,
    picture: str | None = None,
    dark: bool = False,
) -> dict[str, Any]:
    """Open an address in a window of a width; a narrow one is a phone's.

    Returns `width` of the layout, `scrolls` (what hangs over its edge, in pixels), `complaints` of the console and
    of requests that failed, `asked` (addresses), `heading`, `colours`; with `first`, a selector, whether all of its
    element is `in_first_screen`; with `search`, the titles `found` on the site for a word. `picture`: a file to write.
    """
    phone = width <= _PHONE_WIDTH_MAX
    context = browser.new_context(
        viewport={"width": width, "height": _HEIGHTS[phone]},
        is_mobile=phone,
        device_scale_factor=2 if picture and phone else 1,
        color_scheme="dark" if dark else "light",
    )
    context.set_default_timeout(_LIMIT)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda one: complaints.append(one.text) if one.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address, wait_until="load")
    found = _seen(page)
    if first is not None:
        found["in_first_screen"] = page.eval_on_selector(
            first,
            "one => { const box = one.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight }",
        )
    if picture is not None:
        page.screenshot(path=picture)
    if search is not None:
        found["found"] = _search(page, search)
    context.close()
    return found | {"complaints": complaints, "asked": sorted(set(asked))}


def _seen(page: Page) -> dict[str, Any]:
    return {
        "width": page.evaluate("document.documentElement.clientWidth"),
        "scrolls": page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"),
        "heading": page.inner_text("h1"),
        "colours": page.evaluate(
            "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
        ),
    }


def _search(page: Page, word: str) -> list[str]:
    """The titles that the site's search, a worker that loads its index, shows for a word."""
    for _ in range(_LIMIT // _AGAIN - 1):
        page.fill("input[name=query]", "")
        page.fill("input[name=query]", word)
        with suppress(TimeoutError):
            page.wait_for_selector(".md-search-result__item h1", timeout=_AGAIN)
            break
    else:
        raise TimeoutError(f"nothing is found for {word}")
    titles: list[str] = page.locator(".md-search-result__item h1").all_inner_texts()
    return titles


def main() -> None:
    """Visit what the input names."""
    asked = json.load(sys.stdin)
    with sync_playwright() as playwright:

        def launched() -> Browser:
            # Chromium refuses its sandbox to root
            return playwright.chromium.launch(executable_path=asked["chromium"], args=["--no-sandbox"])

        browser, told = launched(), []
        for one in asked["visits"]:
            for tries_left in reversed(range(_TRIES)):
                try:
                    told.append(visit(browser, **one))
                    break
                except TimeoutError:
                    if not tries_left:
                        raise
                    browser.close()
                    browser = launched()
        browser.close()
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
