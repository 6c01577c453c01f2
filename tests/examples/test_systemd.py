"""The units of examples/systemd: systemd finds no fault with them, and what they start works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, command_folder, libpq_variables, make_shop, program_environment, running
from tests.support.server import Database
from tests.support.waiting import until

UNITS = EXAMPLES / "systemd"
INSTALLED = "/opt/gdq/bin/gdq"


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    program = command_folder(tmp_path / "bin") / "gdq"
    names = []
    for path in [*UNITS.glob("*.service"), *UNITS.glob("*.timer")]:
        names.append(path.name)
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8").replace(INSTALLED, str(program)))
    assert len(names) == 5
    units = [tmp_path / name.replace("@.", "@mirror.") for name in names]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    # of the machine's own units it may find fault with
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "gdq" in line]
    assert (ours, done.returncode) == ([], 0)


class Unit:
    """A unit as systemd reads it: its command, and the variables that it sets, for an instance and credentials."""

    def __init__(self, name: str, credentials: Path, program: Path) -> None:
        stem, _, instance = name.removesuffix(".service").partition("@")
        parser = ConfigParser(interpolation=None, strict=True)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        template = f"{stem}@.service" if instance else f"{stem}.service"
        parser.read_string((UNITS / template).read_text(encoding="utf-8"))
        self.service = parser["Service"]
        self.credentials = dict([self.service["LoadCredential"].split(":")])

        def expanded(text: str) -> str:
            return text.replace("%i", instance).replace("%d", str(credentials))

        variables = dict(word.split("=", 1) for word in shlex.split(expanded(self.service["Environment"])))
        if "EnvironmentFile" in self.service:
            path = Path(expanded(self.service["EnvironmentFile"]))
            assert path.parent == Path("/etc/gdq")
            lines = (UNITS / path.name).read_text(encoding="utf-8").splitlines()
            variables |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        self.variables = variables
        command = shlex.split(expanded(self.service["ExecStart"]))
        assert command[0] == INSTALLED
        words = [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word) for word in command[1:]]
        self.command = [str(program), *words]


@pytest.mark.long
@pytest.mark.server
def test_what_the_units_start(empty_db: Database, tmp_path: Path) -> None:
    """Ticker, consumer and views at work together, then the health check; SIGTERM ends each with exit code 0."""
    folder = command_folder(tmp_path / "bin")
    make_shop(empty_db, folder)
    connection = libpq_variables(empty_db)
    listed = "".join(f"{name.removeprefix('PG').lower()}={value}\n" for name, value in connection.items())
    listed = listed.replace("database=", "dbname=")
    (tmp_path / "pg_service.conf").write_text(f"[shop]\n{listed}")
    (tmp_path / "pg_service.conf").chmod(0o440)  # as systemd makes a credential for a service's own user

    def unit(name: str) -> tuple[list[str], dict[str, str]]:
        found = Unit(name, tmp_path, folder / "gdq")
        assert found.credentials == {"pg_service.conf": "/etc/gdq/pg_service.conf"}
        handlers = {"PYTHONPATH": str(EXAMPLES / "shop")} if "PYTHONPATH" in found.variables else {}
        return found.command, program_environment(folder, found.variables | handlers)

    with empty_db.connect("su") as su, ExitStack() as services:
        program = str(folder / "gdq")
        (tmp_path / "totals.sql").write_text("select customer, sum(amount) as amount from public.orders group by 1")
        made = [program, "create-view", "totals", "--sql", str(tmp_path / "totals.sql"), "--target", "public.totals"]
        subprocess.run(made, env=program_environment(folder, connection), check=True, capture_output=True)
        for name in ("gdq-ticker.service", "gdq-consumer@mirror.service", "gdq-refresh.service"):
            services.enter_context(running(*unit(name)))
        su.execute("insert into orders (customer, amount) values ('Ann', 9.90), ('Bob', 1)")
        su.execute("update orders set id = default, amount = 12.50 where customer = 'Ann'")
        su.execute("delete from orders where customer = 'Bob'")
        rows = su.execute("table orders").fetchall()
        assert len(rows) == 1
        until(lambda: su.execute("table mirror").fetchall() == rows)
        until(lambda: su.execute("select to_regclass('public.totals') is not null").fetchone() == (True,))
        until(lambda: su.execute("select customer, amount::text from totals").fetchall() == [("Ann", "12.50")])
        command, env = unit("gdq-doctor.service")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
