"""What a real browser makes of the page of `gdq compare` and of the site of the documentation: the system's Chromium.

The Makefile installs Playwright, which drives it, into .venv-browser. As root the tests install Debian's chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gdq.consumers.compare.figures import LatencyFigures, SampleFigures
from gdq.consumers.compare.page import compare_page
from gdq.consumers.compare.recommend import recommend
from tests.support.compare_figures import figures_of, phases
from tests.support.page import ROOT
from tests.support.site import built_site

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="an sdist has no Makefile, which installs Playwright"),
]

WIDTHS = (390, 1280)

Browse = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def browse() -> Browse:
    """Visits of pages, as tests/support/browse.py makes them."""
    if shutil.which("chromium") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("no chromium on this machine, and only root can install it, with apt-get install chromium")
        installed = subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], capture_output=True, check=False)
        if installed.returncode != 0:
            pytest.skip(f"chromium cannot be installed: {installed.stderr.decode().strip().splitlines()[-1:]}")
    made = subprocess.run(["make", ".venv-browser/ready"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr

    def visits(*wanted: dict[str, Any]) -> list[dict[str, Any]]:
        command = [str(ROOT / ".venv-browser" / "bin" / "python"), str(ROOT / "tests" / "support" / "browse.py")]
        given = json.dumps({"chromium": shutil.which("chromium"), "visits": wanted})
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told: list[dict[str, Any]] = json.loads(done.stdout)
        return told

    return visits


def check_layout(seen: dict[str, Any], width: int) -> None:
    """The page is as wide as the window, and nothing in it hangs over the edge or was complained of."""
    assert (seen["width"], seen["scrolls"], seen["complaints"]) == (width, 0, []), seen["asked"]


def long_names() -> str:
    """The page of a run whose names, numbers and verdict are as long as they get."""
    name = "x" * 63
    figures = figures_of(
        tables=[f"{name}.{name}"] * 20,
        database=name,
        old_missing=123_456_789,
        phases=phases((1000, 100_000), (700, 900_000), (700, 900_000)),
        samples=[SampleFigures(0, 0, 0), SampleFigures(0.7, 10, 15 * 2**20), SampleFigures(1, 10, 16 * 2**40)],
        queue__latency=LatencyFigures(4, 1.5, 200.0, 200.0, [(0.0001, 2), (200.0, 2)]),
        slot__latency=LatencyFigures(4, None, 0.2, 0.3, [(0.1, 4)]),
        slot__retained_per_second=90_000_000.0,
        difference_counts={"`old` of an update or delete": 123_456_789},
        noise={"slot.latency": 0.00002, "queue.cpu_seconds.consumer": 0.01},
    )
    figures.queue.events = figures.slot.events = {f"{name}.{name}{number}": {"update": 10**9} for number in range(20)}
    figures.queue.cpu_seconds = {"consumer": None}
    found = recommend(figures)
    assert found.choice == "slot"
    assert len(found.unless["queue"]) == 2
    return compare_page(figures, found)


def test_the_page_of_compare_fits_phone_and_desk(browse: Browse, tmp_path: Path) -> None:
    """Also with names of the greatest length the verdict is in the first screen, and nothing scrolls sideways."""
    written = tmp_path / "compare.html"
    written.write_text(long_names(), encoding="utf-8")
    address = written.as_uri()
    visit: dict[str, Any] = {"address": address, "first": ".verdict"}
    wanted = [visit | {"width": width, "dark": dark} for width in WIDTHS for dark in (False, True)]
    told = browse(*wanted)
    for seen, visit in zip(told, wanted, strict=True):
        check_layout(seen, visit["width"])
        assert seen["in_first_screen"], visit
        assert seen["asked"] == [address]
    light, dark, *_ = (seen["colours"] for seen in told)
    assert light[0] == dark[0].replace("23, 25, 35", "255, 255, 255") != dark[0]
    # the check can fail: without the style that breaks long names the page is wider than a phone
    written.write_text(long_names().replace("overflow-wrap: anywhere", ""), encoding="utf-8")
    (seen,) = browse(wanted[0])
    assert seen["scrolls"] > 0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served: a page that was opened as a file may not read its search index."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_site_works_in_a_browser(browse: Browse, tmp_path: Path) -> None:
    """Every page has its heading and fits; its search finds; nothing is asked of other machines."""
    site = built_site(tmp_path)
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    assert len(names) > 20
    with served(site) as address:
        wanted: list[dict[str, Any]] = [
            {"address": f"{address}/{name}", "width": width} for name in names for width in WIDTHS
        ]
        wanted.append({"address": f"{address}/index.html", "width": 1280, "search": "replica identity"})
        told = browse(*wanted)
    for seen, visit in zip(told, wanted, strict=True):
        check_layout(seen, visit["width"])
        assert seen["heading"], visit
        assert {urlsplit(one).netloc for one in seen["asked"] if not one.startswith("data:")} == {address[7:]}, visit
    assert any("slot" in title.lower() for title in told[-1]["found"])
