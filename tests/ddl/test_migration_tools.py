"""Migrations of Alembic and Django where no event triggers follow DDL, with the files that docs/managed.md shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, create_engine, inspect

from gdq.alembic import follow_ddl
from gdq.installer.install import install
from tests.support.events import Event
from tests.support.managed import ManagedDatabase, superuser_for_a_moment
from tests.support.page import blocks
from tests.support.programs import gdq

pytestmark = pytest.mark.server

ALEMBIC = {
    "one": """
        op.create_table("item", Column("id", Integer, primary_key=True), Column("name", String(10)),
                        Column("qty", Integer))
        op.create_table("gone", Column("id", Integer, primary_key=True))""",
    "two": """
        op.add_column("item", Column("note", Text))
        op.execute("update item set note = 'added'")
        op.alter_column("item", "name", new_column_name="label")
        op.alter_column("item", "label", type_=String(50))
        op.drop_column("item", "qty")
        op.execute("insert into item (id, label, note) values (2, 'longer than ten', 'b')")
        op.create_table("extra", Column("id", Integer, primary_key=True))
        op.drop_table("gone")
        op.rename_table("item", "thing")
        op.execute("insert into thing (id) values (3)")""",
    "three": """
        op.alter_column("thing", "id", type_=BigInteger)
        with op.get_context().autocommit_block():
            op.create_index("thing_label", "thing", ["label"], postgresql_concurrently=True)""",
    "four": """
        op.execute("alter table thing drop constraint item_pkey")
        op.add_column("thing", Column("late", Text))""",
}

DJANGO = {
    "one": """
        migrations.CreateModel("Item", [("id", models.IntegerField(primary_key=True)),
            ("name", models.CharField(max_length=10, null=True)), ("qty", models.IntegerField(null=True))],
            options={"db_table": "item"}),
        migrations.CreateModel("Gone", [("id", models.IntegerField(primary_key=True))], options={"db_table": "gone"}),
        """,
    "two": """
        migrations.AddField("Item", "note", models.TextField(null=True)),
        migrations.RunPython(set_notes),
        migrations.RenameField("Item", "name", "label"),
        migrations.AlterField("Item", "label", models.CharField(max_length=50, null=True)),
        migrations.RemoveField("Item", "qty"),
        migrations.RunSQL("insert into item (id, label, note) values (2, 'longer than ten', 'b')"),
        migrations.CreateModel("Extra", [("id", models.IntegerField(primary_key=True))], options={"db_table": "extra"}),
        migrations.DeleteModel("Gone"),
        migrations.AlterModelTable("Item", "thing"),
        migrations.RunSQL("insert into thing (id) values (3)"),""",
    "three": """
        migrations.AlterField("Item", "id", models.BigIntegerField(primary_key=True)),""",
    "loose": """
        migrations.RunSQL("create index concurrently thing_label on thing (label)"),
        migrations.RunPython(in_transaction),
        migrations.RunSQL("alter table thing add late text"),""",
}

# The functions of RunPython. The second one opens a transaction itself, as a migration without one may.
RUN_PYTHON = """
def set_notes(apps, editor):
    apps.get_model("store", "Item").objects.using(editor.connection.alias).update(note="added")

def in_transaction(apps, editor):
    with transaction.atomic(using=editor.connection.alias):
        editor.execute("alter table thing rename note to remark")
        editor.execute("insert into thing (id, remark) values (7, 'kept')")
"""


class Project:
    """A project with migrations in a folder, and its database."""

    def __init__(self, db: ManagedDatabase, folder: Path) -> None:
        self.db = db
        self.folder = folder
        for block in blocks("docs/managed.md"):
            if block.file in ("env.py", "installed_apps.py"):
                (folder / block.file).write_text(block.text)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"DATABASE_URL": self.db.dsn, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def migrate(self, name: str) -> str:
        """Run the migrations up to this one; gives what is said on stderr."""
        raise NotImplementedError


class AlembicProject(Project):
    def __init__(self, db: ManagedDatabase, folder: Path) -> None:
        super().__init__(db, folder)
        url = conninfo_to_dict(db.dsn)
        names = {"username": "user", "password": "password", "host": "host", "port": "port", "database": "dbname"}
        parts: dict[str, Any] = {name: url[key] for name, key in names.items()}
        address = URL.create("postgresql+psycopg", **parts)
        (folder / "alembic.ini").write_text(
            "[alembic]\nscript_location = .\npath_separator = os\nsqlalchemy.url = "
            + address.render_as_string(hide_password=False).replace("%", "%%")
        )
        (folder / "versions").mkdir()
        before = None
        for name, text in ALEMBIC.items():
            self.add(name, before, text)
            before = name

    def add(self, name: str, before: str | tuple[str, ...] | None, text: str) -> None:
        """Write a revision; `before`: the one or ones that it follows."""
        (self.folder / "versions" / f"{name}.py").write_text(
            f"from alembic import op\nfrom sqlalchemy import *\nrevision, down_revision = {name!r}, {before!r}\n"
            f"def upgrade():\n{indent(dedent(text), '    ')}\n"
        )

    def migrate(self, name: str) -> str:
        return self.run("-m", "alembic", "upgrade", name).stderr


class DjangoProject(Project):
    """The database is named shop, and the project's default is a file of SQLite."""

    def __init__(self, db: ManagedDatabase, folder: Path) -> None:
        super().__init__(db, folder)
        url = conninfo_to_dict(db.dsn)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url["dbname"],
            **{name.upper(): url[name] for name in ("user", "password", "host", "port")},
        }
        (folder / "settings.py").write_text(
            "from installed_apps import INSTALLED_APPS\nUSE_TZ = True\n"
            f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.sqlite3', 'NAME': {str(folder / 'other')!r}}},"
            f" 'shop': {database!r}}}\n"
            "DEFAULT_AUTO_FIELD = 'django.db.models.BigAutoField'\n"
        )
        migrations = folder / "store" / "migrations"
        migrations.mkdir(parents=True)
        for file in (folder / "store" / "__init__.py", folder / "store" / "models.py", migrations / "__init__.py"):
            file.touch()
        before: list[tuple[str, str]] = []
        for name, text in DJANGO.items():
            (migrations / f"{name}.py").write_text(
                f"from django.db import migrations, models, transaction\n{RUN_PYTHON}"
                "class Migration(migrations.Migration):\n"
                f"    dependencies = {before!r}\n    operations = [{text}]\n    atomic = {name != 'loose'}\n"
            )
            before = [("store", name)]

    def migrate(self, name: str, database: str = "shop") -> str:
        command = ("-m", "django", "migrate", "--settings", "settings", "--database", database, "store", name)
        return self.run(*command).stderr


def events(db: ManagedDatabase) -> list[Event]:
    """Everything up to a tick, as one batch; typed rows are read too, and belong to the same events."""
    with db.connect() as admin:
        admin.execute("select gdq.force_tick('shop')")
        found = admin.execute("select batch_id, token from gdq.next_batch('shop', 'c', 1000000)").fetchone()
        assert found
        rows = admin.execute("select op, tbl, key, old, new from gdq.get_batch(%s, %s)", found).fetchall()
        admin.execute("select gdq.finish_batch(%s, %s)", found)
        return [Event(*row) for row in rows]


def maintain(db: ManagedDatabase) -> None:
    while db.run("select gdq.maintain()") == [(True,)]:
        pass


@pytest.mark.parametrize("kind", [AlembicProject, DjangoProject])
def test_migrations_are_followed(kind: type[Project], managed_db: ManagedDatabase, tmp_path: Path) -> None:
    db = managed_db
    project = kind(db, tmp_path)
    # without gdq the tool works as ever
    assert "gdq" not in project.migrate("one")
    install(db.dsn)
    db.run(
        "select gdq.create_queue('shop'), gdq.add_table('shop', 'item'), gdq.add_table('shop', 'gone')",
        "select gdq.register_consumer('shop', 'c')",
        "insert into item values (1, 'Ann', 5)",
        "insert into gone values (1)",
    )
    project.migrate("two")
    db.run("insert into thing (id, label, note) values (4, 'after', 'd')")
    seen = events(db)
    assert [e for e in seen if e.op == "resync"] == []
    assert [(e.op, e.tbl, e.new) for e in seen if e.op != "ddl"] == [
        ("insert", "public.item", {"id": 1, "name": "Ann", "qty": 5}),
        ("insert", "public.gone", {"id": 1}),
        ("update", "public.item", {"id": 1, "name": "Ann", "qty": 5, "note": "added"}),
        ("insert", "public.item", {"id": 2, "label": "longer than ten", "note": "b"}),
        ("insert", "public.thing", {"id": 3, "label": None, "note": None}),
        ("insert", "public.thing", {"id": 4, "label": "after", "note": "d"}),
    ]
    ddl = [e.new or {} for e in seen if e.op == "ddl"]
    assert {e["tag"] for e in ddl} == {"APPLY DDL"}, ddl
    assert [e["table"] for e in ddl if e.get("dropped")] == ["public.gone"]
    assert any("ADD COLUMN" in e["statement"] for e in ddl)
    maintain(db)
    assert events(db) == []
    # the values are written anew: that is a gap under event triggers too
    project.migrate("three")
    db.run("insert into thing (id) values (5)")
    assert {e.op for e in events(db)} == {"ddl", "resync", "insert"}
    maintain(db)
    db.run("delete from thing where id = 5")
    assert [(e.op, e.old) for e in events(db)] == [("delete", {"id": "5", "label": None, "note": None})]
    assert db.run("select state from gdq.table_info('shop')") == [("ok",)]


@pytest.mark.long
def test_branches_and_scripts_of_alembic(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    """Two heads, their merge, and a script of the offline mode, which gdq apply-ddl runs."""
    db = managed_db
    project = AlembicProject(db, tmp_path)
    project.migrate("one")
    install(db.dsn)
    db.run("select gdq.create_queue('shop'), gdq.add_table('shop', 'item')")
    db.run("select gdq.register_consumer('shop', 'c')")
    for name in ("two", "three", "four"):
        (tmp_path / "versions" / f"{name}.py").unlink()
    project.add("left", "one", "op.add_column('item', Column('a', Text))\nop.execute(\"insert into item values (1)\")")
    project.add("right", "one", "op.add_column('item', Column('b', Text))")
    project.migrate("heads")
    project.add("merge", ("left", "right"), "op.alter_column('item', 'b', new_column_name='c')")
    project.migrate("head")
    project.add("last", "merge", "op.drop_column('item', 'qty')\nop.execute(\"insert into item (id) values (2)\")")
    script = project.run("-m", "alembic", "upgrade", "merge:last", "--sql").stdout
    assert {"BEGIN;", "COMMIT;"} <= set(script.splitlines())
    (tmp_path / "last.sql").write_text(script.replace("BEGIN;", "").replace("COMMIT;", ""))
    done = gdq("apply-ddl", "shop", "-f", str(tmp_path / "last.sql"), dsn=db.dsn)
    assert done.returncode == 0, done.stderr
    seen = events(db)
    assert [(e.new or {})["id"] for e in seen if e.op == "insert"] == [1]
    # the row that the script writes into the table which it has altered
    assert [(e.new or {})["reason"] for e in seen if e.op == "resync"] == [
        "written after an ALTER that capture had not followed"
    ]
    maintain(db)
    db.run("insert into item (id) values (3)")
    assert [e.new for e in events(db)] == [{"id": 3, "name": None, "a": None, "c": None}]
    assert db.run("select version_num from alembic_version") == [("last",)]


@pytest.mark.long
def test_what_django_runs_outside_of_a_transaction(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    """It is said, and is a resync at the next tick; a transaction that RunPython opens is followed."""
    db = managed_db
    project = DjangoProject(db, tmp_path)
    project.migrate("one", database="default")
    project.migrate("three")
    install(db.dsn)
    db.run("select gdq.create_queue('shop'), gdq.add_table('shop', 'thing')")
    db.run("select gdq.register_consumer('shop', 'c')")
    said = project.migrate("loose")
    assert said.count("capture does not follow") == 1, said
    assert "capture does not follow 'alter table thing add late text': it is outside of a transaction" in said
    seen = events(db)
    statements = [(e.new or {})["statement"] for e in seen if e.op == "ddl"]
    assert statements[0] == "alter table thing rename note to remark"
    assert [(e.new or {})["remark"] for e in seen if e.op == "insert"] == ["kept"]
    assert "resync" in {e.op for e in seen}


@pytest.mark.long
def test_no_migration_fails_because_of_gdq(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    """What capture cannot follow is a warning, and a resync."""
    db = managed_db
    project = AlembicProject(db, tmp_path)
    project.migrate("one")
    install(db.dsn)
    db.run(
        "select gdq.create_queue('shop'), gdq.add_table('shop', 'item', mode => 'pk')",
        "select gdq.register_consumer('shop', 'c')",
    )
    said = project.migrate("four")
    assert "capture does not follow 'alter table thing drop constraint item_pkey': " in said
    assert "no primary key" in said
    db.run("insert into thing (id, late) values (1, 'x')", "select gdq.force_tick('shop')")
    assert "resync" in [e.op for e in events(db)]
    found = db.run("select state, reason from gdq.table_info('shop')")
    assert [state for state, _reason in found] == ["resync"], found


@pytest.mark.long
def test_event_triggers_follow_by_themselves(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    db = managed_db
    project = AlembicProject(db, tmp_path)
    project.migrate("one")
    install(db.dsn)
    with superuser_for_a_moment(db):
        db.run("select gdq.create_event_triggers()")
    db.run("select gdq.create_queue('shop'), gdq.add_table('shop', 'item')")
    db.run("select gdq.register_consumer('shop', 'c')")
    project.migrate("two")
    seen = events(db)
    assert {(e.new or {})["tag"] for e in seen if e.op == "ddl"} == {"ALTER TABLE"}
    assert [(e.new or {}).get("id") for e in seen if e.op == "insert"] == [2, 3]


def test_migrations_of_other_databases_are_left_alone() -> None:
    """As in a project with several databases, of which one is no PostgreSQL."""
    with create_engine("sqlite://").connect() as connection:
        follow_ddl(connection)
        connection.exec_driver_sql("create table t (id int)")
        assert inspect(connection).get_table_names() == ["t"]
