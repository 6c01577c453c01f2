"""Slots on a standby: the commands say what it is, instead of the server's refusal of the first write."""

from __future__ import annotations

import psycopg
import pytest

from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.server import EmbeddedServer
from gdq.errors import GdqError
from tests.support.programs import gdq
from tests.support.server import chosen_binaries

pytestmark = pytest.mark.server


@pytest.mark.long
def test_commands_say_that_the_server_is_a_standby(pytestconfig: pytest.Config) -> None:
    settings: dict[str, str | float | bool] = {"wal_level": "logical", "hot_standby": True}
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings=settings) as server:
        dsn = server.conninfo()
        with psycopg.connect(dsn, autocommit=True) as su:
            su.execute("create table item (id int primary key)")
        query = ("--queue", "q", "--sql", "-", "--target", "public.ids")
        for words in (["install"], ["create-queue", "q"], ["add-table", "q", "item"], ["create-view", "ids", *query]):
            assert gdq(*words, dsn=dsn, stdin="select id from item").returncode == 0
        server.account.write(server.data / "standby.signal", "")
        server.crash()
        server.start()
        with psycopg.connect(dsn, autocommit=True) as su:
            assert slot_info(su) == []
            needs = "needs the primary server, this is a standby"
            with pytest.raises(GdqError, match=f"a reader of a slot {needs}"):
                SlotSource(su, "q", "c")
            with pytest.raises(GdqError, match=f"a new slot {needs}"):
                create_slot(su, "q", "c", ["public.item"])
            with pytest.raises(GdqError, match=f"dropping a slot {needs}"):
                drop_slot(su, "q", "c")
        listed = gdq("slots", dsn=dsn)
        assert (listed.returncode, "this server is a standby" in listed.stderr) == (0, True)
        for source in ("slot", "queue"):
            read = gdq("consume", "q", "c", "--source", source, "--once", dsn=dsn)
            assert (read.returncode, "this is a standby" in read.stderr) == (1, True), read.stderr
        for command in ("refresh", "verify-view"):
            told = "Error: a refresh needs the primary server, this is a standby\nHint: Connect to the primary.\n"
            read = gdq(command, "ids", dsn=dsn)
            assert (read.returncode, read.stderr) == (1, told)
        server.account.run("rm", server.data / "standby.signal")
