"""The benchmarks' results are kept, and told with goals that are missed, losses and what is missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

pytest.importorskip("bench.results", reason="an sdist has no benchmarks")

from bench import beside, reading
from bench.contenders import CONTENDERS
from bench.figures import Goal, Ratio, ratio
from bench.packages import BenchError
from bench.plot import bars
from bench.processes import seconds_below
from bench.report import goals, losses, page, plots
from bench.results import Results
from bench.spark_reader import PARTITIONS, batch_options, missing
from tests.support.server import Database

OPERATIONS = ("insert", "update", "delete")
# Microseconds a row of a statement; WAL is a hundred times that.
COSTS = {
    "no trigger": 2.0,
    "gdq full": 6.8,
    "gdq pk": 5.4,
    "gdq statement": 4.5,
    "PgQ with backup": 12.0,
    "PgQ": 11.0,
    "slot consumed, identity full": 2.5,
}
RATES = {
    "gdq Arrow": 300.0,
    "gdq events": 50.0,
    "gdq Spark, 1 partition": 80.0,
    "gdq Spark, 2 partitions": 120.0,
    "pg_recvlogical": 100.0,
}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Three rounds; Slony could not be had."""
    kept = Results(tmp_path / "kept" / "bench.jsonl", "usual")
    kept.tell(size="usual", machine="two processors", missing={"Slony": "slony1-2-bin missing in /"})
    for number in (1, 2, 3):
        for who, us in COSTS.items():
            for operation in OPERATIONS:
                kept.add("capture", operation, who, number, {"us": us + number, "wal": us * 100})
            kept.add("capture", "one-row 16 on", who, number, {"rate": 10_000 / us})
        for path, p50 in (("queue", 7.0), ("slot", 3.0)):
            kept.add("latency", "200/s", path, number, {"p50": p50, "p99": 2.0 * number, "made": 199.0})
        for way, rate in RATES.items():
            values = {"rate": rate + number, "client_us": 1e6 / rate, "server_us": 3.0}
            kept.add("reading", "1 consumer", way, number, values)
    return kept


def test_a_run_goes_on_where_it_was(results: Results) -> None:
    with results.path.open("a") as file:
        file.write('{"part": "capture", "ca')  # the machine went down here
    again = Results.read(results.path, "usual")
    assert (again.samples, again.about) == (results.samples, results.about)
    assert again.has("capture", "insert", "gdq full", 3)
    assert not again.has("capture", "insert", "gdq full", 4)
    again.add("capture", "insert", "gdq full", 4, {"us": 1.0})
    assert Results.read(results.path, "usual").samples == again.samples


def test_results_of_another_size_are_not_mixed(results: Results) -> None:
    with pytest.raises(BenchError, match="holds a run of size usual"):
        Results.read(results.path, "quick")


def test_goals(results: Results) -> None:
    found = {goal.what.removeprefix("capture in bulk: "): goal for goal in goals(results)}
    full = found["gdq full beside PgQ with backup"]
    assert full.ratio is not None
    assert full.ratio.mid == pytest.approx(0.48)
    assert full.verdict == "required met, goal missed"
    assert found["gdq pk beside PgQ"].verdict == "required met, goal missed"
    assert found["gdq statement beside PgQ with backup"].verdict == "required met, goal missed"
    assert found["gdq full beside Slony"].verdict == "not measured"
    assert found["latency at 200/s: p50 of the queue beside the slot's and half a tick"].verdict == "met"
    arrow = found["events/s: gdq Arrow beside pg_recvlogical, one consumer"]
    assert arrow.ratio is not None
    assert arrow.ratio.mid == pytest.approx(302 / 102)
    assert arrow.verdict == "required met, goal missed"
    assert found["server's processor time: 16 of gdq Arrow beside 16 slots"].verdict == "not measured"
    spark = found["events/s: gdq Spark, 2 partitions, beside gdq Spark, 1 partition"]
    assert spark.ratio is not None
    assert spark.ratio.mid == pytest.approx(122 / 82)
    assert spark.verdict == "met"
    assert Goal("", Ratio(2.4, 2, 3), 3, 2.5, least=True).verdict == "MISSED"
    assert Goal("", Ratio(3.0, 2, 3), 3, 2.5, least=True).verdict == "met"


def test_missed_goals_have_reasons(results: Results) -> None:
    text = page(results)
    assert "- events/s: gdq Arrow beside pg_recvlogical, one consumer: a consumer gets typed columns" in text
    assert "on two processors" not in text  # that goal is met


def test_many_consumers_are_judged_by_the_most_that_were_measured(results: Results) -> None:
    for case, server in (("4 consumers", 0.6), ("16 consumers", 0.9)):
        for way, one in (("gdq Arrow", server), ("pg_recvlogical", 3.0)):
            results.add("reading", case, way, 1, {"rate": 1.0, "client_us": 1.0, "server_us": one})
        found = {goal.what: goal.verdict for goal in goals(results)}
        many = case.split()[0]
        verdict = found[f"server's processor time: {many} of gdq Arrow beside {many} slots"]
        assert verdict == {"4": "met", "16": "MISSED"}[many]


def test_each_size_reads_with_one_consumer_and_with_many() -> None:
    for size in ("quick", "usual", "long"):
        assert 1 in reading.SIZES[size].consumers
        assert max(reading.SIZES[size].consumers) >= 4
    assert 16 in reading.SIZES["long"].consumers
    assert set(reading.SIZES["usual"].partitions) == {1, 2, 4}


def test_spark_reads_as_one_consumer_and_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = reading.SIZES["long"]
    assert set(PARTITIONS) < set(work.ways(1, {}))
    assert not set(PARTITIONS) & set(work.ways(16, {}))
    assert set(work.ways(1, {"Spark"})) == set(work.ways(1, {})) - set(PARTITIONS)
    assert "wal2json" not in work.ways(1, {"wal2json"})
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert missing() == {"Spark": "pyspark missing: pip install 'gdq[spark]'"}


def test_processor_time_of_what_was_started_further_down() -> None:
    """The child starts another one, which starts one that works for a while, and all stay."""
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    for _ in range(2):
        program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        # it counts in ticks of 10 ms
        assert seconds_below(child.pid) >= 0.28
        child.communicate("\n")


def test_a_slow_contender_is_given_fewer_rows() -> None:
    slow = replace(CONTENDERS[0], share=50)
    assert (slow.rows(100_000), slow.rows(3)) == (2000, 1)
    assert {one.name for one in CONTENDERS if one.share > 1} == {"PgQ PL", "PgQ PL with backup"}


@pytest.mark.server
def test_partitions_of_spark_share_the_batch(db: Database) -> None:
    spark_source = pytest.importorskip("gdq.consumers.spark.source")
    with db.connect() as connection:
        for statement in (
            "create table public.t (id int primary key, note text)",
            "select gdq.create_queue('q')",
            "select gdq.add_table('q', 'public.t')",
            "select gdq.register_consumer('q', 'c')",
            "insert into public.t select i, repeat('x', 200) from generate_series(1, 900) i",
            "select gdq.force_tick('q')",
        ):
            connection.execute(statement.encode())
        for partitions in PARTITIONS.values():
            options = batch_options(db.dsn_of("owner"), "q", "c", "public.t", partitions)
            parts = spark_source.GdqReader(options, ["_change_type", "note"]).partitions()
            queries = (f"select count(*) from ({part.query}) as part".encode() for part in parts)
            counts = [row[0] for query in queries for row in connection.execute(query)]
            assert (len(counts), sum(counts)) == (partitions, 900)
            assert max(counts) < 1.5 * 900 / partitions


def test_losses(results: Results) -> None:
    found = {(loss.what, loss.mine, loss.its) for loss in losses(results)}
    slot = "slot consumed, identity full"
    assert ("update: time a row", "gdq full", slot) in found
    assert ("update: WAL a row", "gdq full", slot) in found
    assert ("16 clients, synchronous_commit on: transactions/s", "gdq full", slot) in found
    assert ("latency at 200/s: p50", "queue", "slot") in found
    assert ("latency at 200/s: p99", "queue", "slot") not in found
    assert ("reading, 1 consumer: events/s", "gdq events", "pg_recvlogical") in found
    assert ("reading, 1 consumer: events/s", "gdq Arrow", "pg_recvlogical") not in found
    assert not {one for one in found if one[2].startswith("PgQ")}


def test_the_page_names_what_is_missing(results: Results) -> None:
    text = page(results)
    assert "- Slony: slony1-2-bin missing in /" in text
    assert "| gdq full | 0.48 (0.48 to 0.48) |" in text
    assert "| machine | two processors |" in text
    assert "MISSED" not in text


def test_what_has_no_peer_is_told_in_its_own_lines(results: Results) -> None:
    assert "Endurance" not in page(results)
    results.add("alone", "many tables", "bench.many_tables", 1, {"lines": ["tick: 1.09 x"], "missed": True})
    assert "many tables (`python -m bench.many_tables`, a limit of its own MISSED):\n\n```\ntick: 1.09 x\n```" in page(
        results
    )


def test_plots(results: Results) -> None:
    drawn = plots(results)
    assert set(drawn) == {"capture", "reading-1"}
    root = ET.fromstring(drawn["capture"])
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[words.index("gdq full") + 1] == "0.48"
    assert "no trigger" not in words


def test_long_bars_are_cut_off() -> None:
    drawn = bars(
        "costs", [("gdq full", Ratio(-0.001, -0.001, 0)), ("PgQ PL", Ratio(70, 60, 80)), ("PgQ", Ratio(1, 1, 1))]
    )
    root = ET.fromstring(drawn)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[1:] == ["gdq full", "0.00", "PgQ PL", "\u2192 70", "PgQ", "1.00"]
    widths = [float(element.attrib["width"]) for element in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[2] == widths[3] > widths[1]


@pytest.mark.long
def test_a_tiny_run(tmp_path: Path) -> None:
    """All parts on a server of their own, with the peers that are installed; the second run only writes the page."""
    if not Path("/usr/lib/postgresql/15/bin/pgbench").exists():
        pytest.skip("no PostgreSQL 15 of Debian's")
    kept, written = tmp_path / "kept.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-m", "bench", "--tiny", "--no-install", "--json", str(kept), "--write", str(written)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in {0, 3}, done.stderr  # figures of a run as short as this may be anything
    results = Results.read(kept, "tiny")
    assert {key[0] for key in results.samples} == {"capture", "reading", "latency", "endurance"}
    for who in ("gdq full", "gdq json", "slot consumed, identity full"):
        assert results.has("capture", "large value untouched", who, 1)
    assert ("PgQ PL" in results.about["missing"]) != results.has("capture", "insert", "PgQ PL", 1)
    for way in ("gdq events", "gdq Arrow", "slot events", "slot Arrow", "pg_recvlogical"):
        assert results.has("reading", "2 consumers", way, 1)
    assert ("Spark" in results.about["missing"]) != results.has("reading", "1 consumer", "gdq Spark, 2 partitions", 1)
    text = written.read_text()
    for peer, why in results.about["missing"].items():
        assert f"- {peer}: {why}" in text
    before = len(kept.read_text().splitlines())
    again = subprocess.run([*command, "--only-write"], check=False, capture_output=True, text=True)
    assert again.returncode == done.returncode, again.stderr
    assert (written.read_text(), len(kept.read_text().splitlines())) == (text, before)


def test_two_states_are_compared_by_their_medians() -> None:
    runs = [{"rate": 10, "p50": 2.0, "p99": 8.0}, {"rate": 100, "p50": 3.0, "p99": 9.0}]
    batch = {"tick": 0.3, "all statements": 2.0, "Consumer, one batch": 1.5}
    found = beside.small_batch(batch) | beside.latency(runs)
    assert found["10/s, p99, ms"] == 8.0
    there = [{name: value * factor for name, value in found.items()} for factor in (9, 2, 4)]
    assert beside.compare([found, found], there)["100/s, p50, ms"] == (3.0, 12.0, 0.25)


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(beside.main, [str(tmp_path)])
    assert done.exit_code == 1
    assert done.output == f"Error: {tmp_path} has no bench/small_batch.py: name a checkout of gdq\n"


def test_a_ratio_to_noise_is_none() -> None:
    assert ratio({1: 1.0, 2: 1.0, 3: 1.0}, {1: -0.1, 2: -0.2, 3: 0.1}) is None
    assert ratio({1: 1.0}, {2: 1.0}) is None
