"""Metrics: names and values, what outlives a restart, and that documentation and dashboard name what there is."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import psycopg
import pytest

from tests.support.waiting import SECONDS

pytest.importorskip("prometheus_client")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gdq.embedded.server import EmbeddedServer
from gdq.installer import install
from gdq.monitor.metrics import FAILURES_METRIC, MEASURES, SCRAPE_METRIC, UP_METRIC, StatusCollector, metrics_registry
from tests.support.events import Tap
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database, chosen_binaries

DOCS = Path(__file__).parent.parent.parent / "docs"
OWN = (UP_METRIC[0], SCRAPE_METRIC[0], FAILURES_METRIC[0])
LABELS = {measure.name: set(measure.labels) for measure in MEASURES} | {name: set() for name in OWN}

Samples = dict[tuple[str, ...], float]


def samples(text: str) -> Samples:
    """Name and label values of each sample, and its value."""
    return {
        (
            sample.name,
            *(
                sample.labels[label]
                for label in ("queue", "consumer", "table", "view", "kind")
                if label in sample.labels
            ),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(collector: StatusCollector) -> Samples:
    return samples(generate_latest(metrics_registry(collector)).decode())


def test_values(tap: Tap) -> None:
    tap.write("create table item (id int primary key)")
    tap.add("shop.item")
    tap.write("insert into item values (1), (2), (3)", "truncate item")
    collector = StatusCollector(tap.db.connect)
    seen = scrape(collector)
    assert seen["gdq_up",] == 1
    assert seen["gdq_queue_events_total", "q"] == 4
    assert seen["gdq_consumer_unread_events", "q", "c"] == 4
    assert seen["gdq_consumer_unread_bytes", "q", "c"] == 2 * 8192
    assert seen["gdq_consumer_lag_seconds", "q", "c"] > 0
    assert seen["gdq_queue_tables", "q"] == seen["gdq_queue_consumers", "q"] == 1
    assert seen["gdq_table_log_bytes", "q", "shop.item"] > 8192
    assert seen["gdq_table_resync", "q", "shop.item"] == 0
    tap.write("alter table item add column more int default 1")
    tap.batch()
    tap.owner.execute(
        "select gdq.create_view('v', 'q', 'select id from shop.item', 'shop.v', '{shop.item}'::regclass[])"
    )
    assert scrape(collector)["gdq_view_failed", "q", "v"] == 0
    tap.owner.execute(
        "select gdq.finish_view_run(gdq.start_view_run('v'), 'full', rows_changed => 3, kind => 'by-key',"
        " delta_rows => 7)"
    )
    tap.owner.execute("update gdq.view_run set started_at = started_at - interval '1 hour'")
    seen = scrape(collector)
    assert 3600 < seen["gdq_view_age_seconds", "q", "v"] < 3700
    assert (seen["gdq_view_rows_changed", "q", "v"], seen["gdq_view_failed", "q", "v"]) == (3, 0)
    assert (seen["gdq_view_kind", "q", "v", "by-key"], seen["gdq_view_delta_rows", "q", "v"]) == (1, 7)
    assert (seen["gdq_consumer_unread_events", "q", "c"], seen["gdq_consumer_lag_seconds", "q", "c"]) == (0, 0)
    assert {name for name, *_ in seen} == LABELS.keys()
    collector.close()


def test_names_are_prometheus_ones(db: Database) -> None:
    text = gdq("metrics", "--once", dsn=db.dsn).stdout
    for name, labels in LABELS.items():
        assert re.fullmatch(r"gdq_[a-z_]+", name)
        assert labels <= {"queue", "consumer", "table", "view", "kind"}
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}" in text


def test_connection_that_is_cut_off_and_database_that_is_away(db: Database) -> None:
    """As in a restart: the first is not seen at all, the second as gdq_up 0 until it is back."""
    collector = StatusCollector(db.connect)
    assert scrape(collector)["gdq_up",] == 1
    with psycopg.connect(db.server.conninfo(), autocommit=True) as su:
        cut = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = %s"
        su.execute(cut, [db.name])
        assert scrape(collector)["gdq_up",] == 1
        su.execute(f"alter database {db.name} allow_connections false".encode())
        su.execute(cut, [db.name])
        away = scrape(collector)
        assert away["gdq_up",] == 0
        assert {name for name, *_ in away} == set(OWN)
        su.execute(f"alter database {db.name} allow_connections true".encode())
    assert scrape(collector)["gdq_up",] == 1
    collector.close()


@pytest.mark.long
def test_restarts_of_the_server(pytestconfig: pytest.Config) -> None:
    """A restart between two scrapes is a lost connection, one under way gdq_up 0; both are counted."""
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg"))) as server:
        install.install(server.conninfo())
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute("select gdq.create_queue('q')")
        serving = start_gdq("metrics", "--listen", "127.0.0.1:0", dsn=server.conninfo())
        assert serving.stderr
        url = serving.stderr.readline().split()[-1]

        def look() -> tuple[float, float, bool]:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                seen = samples(answer.read().decode())
            return seen["gdq_up",], seen["gdq_scrape_failures_total",], ("gdq_queue_tables", "q") in seen

        assert look() == (1, 0, True)
        server.restart()
        assert look() == (1, 1, True)
        server.crash()
        assert look() == (0, 3, False)  # the connection was lost, and none was made
        assert look() == (0, 4, False)
        server.start()
        assert look() == (1, 4, True)
        serving.send_signal(signal.SIGTERM)
        _, err = serving.communicate(timeout=SECONDS)
    assert serving.returncode == 0
    assert err.count("no metrics: ") == 2


def test_older_gdq_in_the_database(db: Database) -> None:
    with db.connect() as owner:
        owner.execute("comment on schema gdq is 'as an older gdq left it'")
    done = gdq("metrics", "--once", dsn=db.dsn)
    assert done.returncode == 1
    assert "gdq_up 0.0" in done.stdout
    assert "the database has an older gdq" in done.stderr


def test_endpoint(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('q')")
    serving = start_gdq("metrics", "--listen", "127.0.0.1:0", dsn=db.dsn)
    assert serving.stderr
    url = serving.stderr.readline().split()[-1]
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        seen = samples(answer.read().decode())
    assert (seen["gdq_up",], seen["gdq_queue_consumers", "q"]) == (1, 0)
    serving.send_signal(signal.SIGTERM)
    assert serving.communicate(timeout=SECONDS) == ("", "")
    assert serving.returncode == 0


def test_once_fails_without_gdq(empty_db: Database) -> None:
    done = gdq("metrics", "--once", dsn=empty_db.dsn)
    assert done.returncode == 1
    assert "gdq_up 0.0" in done.stdout
    assert "does not exist" in done.stderr
    assert gdq("metrics", "--listen", "9748x", dsn=empty_db.dsn).returncode == 2


def promql_names(expression: str) -> dict[str, set[str]]:
    """The metrics of an expression, and the labels that it selects or groups them by."""
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
    found = re.findall(r"\b(gdq_[a-z_]+)(?:\{([^}]*)\})?", expression)
    return {name: grouped | set(re.findall(r"(\w+)\s*=~?", labels)) for name, labels in found}


@pytest.mark.skipif(not DOCS.exists(), reason="an sdist has no documentation")
def test_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked: dict[str, set[str]] = {}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = promql_names(target["expr"])
            assert names, panel["title"]
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name, labels in names.items():
                assert labels | legend <= LABELS[name], panel["title"]
            asked |= names
    for variable in dashboard["templating"]["list"]:
        assert promql_names(variable["query"]).keys() <= LABELS.keys()
    assert LABELS.keys() - asked.keys() == {
        "gdq_queue_tables",
        "gdq_queue_consumers",
        "gdq_consumer_tables_resync",
        "gdq_view_kind",
    }


@pytest.mark.skipif(not DOCS.exists(), reason="an sdist has no documentation")
def test_documentation_lists_every_metric_with_its_labels() -> None:
    page = (DOCS / "monitoring.md").read_text()
    listed = {
        name: set(re.findall(r"\w+", labels)) for name, labels in re.findall(r"(?m)^\| `(gdq_\w+)` \| ([^|]*) \|", page)
    }
    assert listed == LABELS
    for expression in re.findall(r"(?m)^\s*expr: (.*)$", page):
        assert promql_names(expression).keys() <= LABELS.keys()
