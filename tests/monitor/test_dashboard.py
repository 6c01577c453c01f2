"""The Grafana dashboard and the alerts, put to real servers: a Prometheus that scrapes `gdq metrics`, and a Grafana.

Debian's Prometheus is used where none is installed; it is unpacked, not installed. No registry has Grafana, so it is
asked only where GDQ_TEST_GRAFANA names one: http://admin:admin@127.0.0.1:3000.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

pytest.importorskip("prometheus_client")

from tests.support.programs import start_gdq
from tests.support.server import Database
from tests.support.waiting import until

DOCS = Path(__file__).parent.parent.parent / "docs"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DOCS.exists(), reason="an sdist has no documentation"),
]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


def answer(url: str, sent: object = None, method: str | None = None) -> Any:
    """The JSON that a server answers; user and password stand in the URL."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    headers = {"Content-Type": "application/json"}
    if parts.username is not None:
        headers["Authorization"] = (
            "Basic " + base64.b64encode(unquote(parts.netloc.rpartition("@")[0]).encode()).decode()
        )
    data = None if sent is None else json.dumps(sent).encode()
    request = urllib.request.Request(plain, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as got:
        return json.load(got)


@pytest.fixture
def prometheus_program(tmp_path: Path) -> str:
    """The path of Prometheus."""
    if installed := shutil.which("prometheus"):
        return installed
    if shutil.which("apt-get") is None:
        pytest.skip("no prometheus on this machine, and no apt-get to download it")
    folder = tmp_path / "debian"
    folder.mkdir()
    got = subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, capture_output=True, check=False)
    packages = list(folder.glob("*.deb"))
    if not packages:
        pytest.skip(f"no prometheus on this machine, and apt-get cannot download it: {got.stderr.decode().strip()}")
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(folder)], check=True)
    return str(folder / "usr" / "bin" / "prometheus")


@pytest.fixture
def prometheus(db: Database, prometheus_program: str, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes a queue with a consumer, a table and a view each second."""
    with db.connect() as owner:
        for statement in (
            "create table item (id int primary key)",
            "select gdq.create_queue('shop')",
            "select gdq.add_table('shop', 'item')",
            "select gdq.register_consumer('shop', 'mail')",
            "select gdq.create_view('v', 'shop', 'select id from public.item', 'public.v', '{item}')",
            "insert into item select generate_series(1, 1000)",
            "select gdq.force_tick('shop')",
            "select gdq.finish_view_run(gdq.start_view_run('v'), 'full', rows_changed => 3, delta_rows => 7)",
        ):
            owner.execute(statement)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{taken.getsockname()[1]}"
    exporter = start_gdq("metrics", "--listen", "127.0.0.1:0", dsn=db.dsn)
    assert exporter.stderr
    scraped = urlsplit(exporter.stderr.readline().split()[-1]).netloc
    settings = tmp_path / "prometheus.yml"
    jobs = [{"job_name": "gdq", "static_configs": [{"targets": [scraped]}]}]
    settings.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}), encoding="utf-8")
    options = [f"--config.file={settings}", f"--web.listen-address={own}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([prometheus_program, *options], stdout=log, stderr=log)
        try:
            yield f"http://{own}"
        finally:
            server.terminate()
            server.wait()
            exporter.terminate()
            exporter.communicate()


def series(server: str, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query of the dashboard for all queues; an error of its is one of the test."""
    asked = expression.replace("$queue", "shop|other")
    found: list[dict[str, Any]] = answer(f"{server}/api/v1/query?query={quote(asked)}")["data"]["result"]
    return found


def has_two_scrapes(server: str) -> bool:
    try:
        found = series(server, "count_over_time(gdq_up[5m])")
    except OSError:
        return False
    return any(float(one["value"][1]) >= 2 for one in found)


def test_every_query_has_an_answer(db: Database, prometheus: str) -> None:
    """Panels show series of the real exporter, with the labels of their legends; alerts are queries, and silent."""
    until(lambda: has_two_scrapes(prometheus), "two scrapes")
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            # of what is wrong nothing is shown, as nothing is wrong
            expression = re.sub(r"( > 0)$", "", target["expr"])
            found = series(prometheus, expression)
            assert found, (panel["title"], expression)
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(legend <= one["metric"].keys() for one in found), panel["title"]
            assert not expression.endswith(" > 0")
    alerts = re.findall(r"(?m)^  expr: (.*)$", (DOCS / "monitoring.md").read_text(encoding="utf-8"))
    assert len(alerts) >= 8
    for alert in alerts:
        assert series(prometheus, re.sub(r" (>|==) \d+$", "", alert)), alert
    assert series(prometheus, "gdq_up == 0") == []
    # Prometheus refuses what is no query, and has nothing for a metric that does not exist
    with pytest.raises(urllib.error.HTTPError):
        series(prometheus, "rate(gdq_up")
    assert series(prometheus, "gdq_nothing") == []


@pytest.mark.skipif(
    "GDQ_TEST_GRAFANA" not in os.environ, reason="GDQ_TEST_GRAFANA names no Grafana, http://user:password@host:3000"
)
def test_grafana_takes_the_dashboard() -> None:
    """Grafana stores it, gives it back with all panels, and has a plugin for each of them."""
    server, sent = os.environ["GDQ_TEST_GRAFANA"].rstrip("/"), dashboard()
    uid = f"{sent['uid']}-test"
    stored = answer(f"{server}/api/dashboards/db", {"dashboard": sent | {"id": None, "uid": uid}, "overwrite": True})
    try:
        assert stored["status"] == "success"
        got = answer(f"{server}/api/dashboards/uid/{uid}")["dashboard"]
        assert [panel["title"] for panel in got["panels"]] == [panel["title"] for panel in sent["panels"]]
        assert [v["name"] for v in got["templating"]["list"]] == ["datasource", "queue"]
        plugins = {one["id"] for one in answer(f"{server}/api/plugins?embedded=1")}
        assert {panel["type"] for panel in sent["panels"]} <= plugins
    finally:
        answer(f"{server}/api/dashboards/uid/{uid}", method="DELETE")
