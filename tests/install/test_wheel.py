"""What is published is complete: sdist, wheel from the sdist, and the command from that wheel alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.page import run_page
from tests.support.server import Database

ROOT = Path(__file__).parent.parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout and return its output; its errors are part of a failure's message."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the unpacked sdist, as an installer without wheels builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def sources(folder: str, *patterns: str) -> set[str]:
    """The files of a folder of the checkout that match, as the wheel should name them."""
    return {f"gdq/{path.relative_to(ROOT)}" for pattern in patterns for path in (ROOT / folder).rglob(pattern)}


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    library = {str(path.relative_to(ROOT)) for end in ("py", "sql") for path in (ROOT / "gdq").rglob(f"*.{end}")}
    assert "gdq/installer/sql/uninstall.sql" in library
    linked = sources("sql", "*.sql") | sources("migrations", "*.py", "*.sql", "*.mako") | sources("consumers", "*.py")
    linked |= sources("docs", "*.*")
    assert {name.split("/")[1] for name in linked} == {"sql", "migrations", "consumers", "docs"}
    assert library | linked | {"gdq/py.typed", "pyspark_gdq/__init__.py"} <= names
    assert not [name for name in names if not name.startswith(("gdq", "pyspark_gdq/")) or "__pycache__" in name]


def test_the_page_of_a_package_index_has_absolute_links(sdist: Path, wheel: Path) -> None:
    """Also in the sdist, whose own README has the files that it links to beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = archive.read(name).decode()
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = (name for name in archive.getnames() if name.endswith("PKG-INFO"))
        packed = archive.extractfile(info)
        assert packed is not None
        assert packed.read().decode() == metadata
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 15
    assert set(links) <= files
    (repository,) = re.findall(r"(?m)^Project-URL: Repository, (https://\S+)$", metadata)
    assert re.findall(r"\]\(([^)]*)\)", metadata) == [f"{repository}/blob/main/{link}" for link in links]


def test_links_are_relative() -> None:
    for name in ("sql", "migrations", "consumers", "docs"):
        assert (ROOT / "gdq" / name).readlink() == Path("..") / name


@pytest.mark.long
@pytest.mark.server
def test_readme_from_the_wheel(wheel: Path, empty_db: Database, tmp_path: Path) -> None:
    """README and docs/consumers.md work as they stand in an environment with the wheel and nothing of the checkout."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    run(
        environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--constraint", ROOT / "constraints.txt", f"{wheel}[views,arrow]", cwd=tmp_path,
    )  # fmt: skip
    for page in ("README.md", "docs/consumers.md"):
        run_page(page, empty_db, tmp_path, environment / "bin")


@pytest.mark.long
def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the core dependencies only, away from the checkout, the command prints its SQL."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    bin_folder = environment / "bin"
    run(
        bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path,
    )  # fmt: skip
    version = wheel.name.split("-")[1]
    assert version in run(bin_folder / "gdq", "--version", cwd=tmp_path)
    script = run(bin_folder / "gdq", "install", "--sql", cwd=tmp_path)
    assert "create schema gdq" in script.lower()
    assert "function gdq.next_batch" in script.lower()
    listed = dict(line.split() for line in run(bin_folder / "gdq", "docs", cwd=tmp_path).splitlines())
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert Path(listed["operations"]).read_text(encoding="utf-8") == page
    assert run(bin_folder / "gdq", "docs", "operations", cwd=tmp_path).rstrip() == page.rstrip()
