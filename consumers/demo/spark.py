"""Spark for the demo, with the connector of Delta Lake: started beside other work, and ended with all that it left."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gdq.consumers.spark.session import spark_session
from gdq.embedded.files import cache_folder, fill_folder_once
from gdq.embedded.java import java_home
from gdq.errors import GdqError

_CONNECTOR = "4.3.1"
_SUBMIT = "PYSPARK_SUBMIT_ARGS"
_JARS_HINT = "Fetch them by hand as `gdq docs spark` says, or leave Spark out: gdq demo --no-spark"
_END_SECONDS = 10


def connector_jars(say: Callable[[str], None]) -> list[Path]:
    """The jars of Delta Lake for this Spark, fetched once from Maven Central by the Ivy that comes with Spark.

    None are fetched if the user's own PYSPARK_SUBMIT_ARGS say what Spark starts with. GdqError if they are not there.
    """
    if _SUBMIT in os.environ:
        return []
    import pyspark  # noqa: PLC0415 (half a gigabyte of package)

    spark = ".".join(pyspark.__version__.split(".")[:2])
    names = (f"delta-spark_{spark}_2.13", "delta-storage")
    kept = [Path.home() / ".m2/repository/io/delta" / name / _CONNECTOR / f"{name}-{_CONNECTOR}.jar" for name in names]
    if all(path.exists() for path in kept):
        return kept
    folder = cache_folder() / "jars" / f"delta-{_CONNECTOR}-spark-{spark}"
    if not folder.exists():
        say(f"  fetching the connector of Delta Lake {_CONNECTOR} for Spark {spark}, once (9 MB)")
        (ivy,) = (Path(pyspark.__path__[0]) / "jars").glob("ivy-*.jar")

        def fill(fresh: Path) -> None:
            for name in names:
                _fetch(ivy, name, fresh)
            shutil.rmtree(fresh / "ivy")

        fill_folder_once(folder, fill)
    return [folder / f"{name}.jar" for name in names]


def _fetch(ivy: Path, name: str, folder: Path) -> None:
    command: list[str | Path] = [
        *(java_home() / "bin" / "java", "-jar", ivy, "-error", "-cache", folder / "ivy", "-confs", "default"),
        *("-dependency", "io.delta", name, _CONNECTOR, "-notransitive", "-types", "jar"),
        *("-retrieve", f"{folder}/[artifact].[ext]"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or not (folder / f"{name}.jar").exists():
        raise GdqError(f"Maven Central gives no io.delta:{name}:{_CONNECTOR}", hint=_JARS_HINT)


class DemoSpark:
    """A Spark session that starts in a thread. `folder`: for all that Spark writes, removed by the caller."""

    def __init__(self, jars: list[Path], folder: Path) -> None:
        self._jars = jars
        self._folder = folder
        self._error: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._start)

    def start(self) -> None:
        """Begin to start Spark."""
        self._thread.start()

    def wait(self) -> float:
        """Wait until Spark has started; returns the seconds that its start took."""
        self._thread.join()
        if self._error is not None:
            raise GdqError(f"Spark does not start: {self._said() or self._error}") from self._error
        return self._seconds

    def stop(self) -> None:
        """End Spark and its Java, also in the middle of a job."""
        if self._thread.ident is not None:
            self._thread.join()
        from pyspark import SparkContext  # noqa: PLC0415 (half a gigabyte of package)

        context, gateway = SparkContext._active_spark_context, SparkContext._gateway
        if context is not None:
            with suppress(Exception):  # whatever its last job came to
                context.stop()
        if gateway is None:
            return
        with suppress(Exception):
            gateway.shutdown()
        java = gateway.proc
        java.stdin.close()
        try:
            java.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            java.kill()
            java.wait()

    def _start(self) -> None:
        began = time.monotonic()
        try:
            with self._surroundings():
                spark_session()
        except BaseException as error:
            self._error = error
        self._seconds = time.monotonic() - began

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Options and folders of Spark, and a log that takes what Java says on stderr, until it ends."""
        before = dict(os.environ)
        if _SUBMIT not in os.environ:
            jars = ",".join(map(str, self._jars))
            os.environ[_SUBMIT] = shlex.join(["--jars", jars, "--driver-memory", "2g", "pyspark-shell"])
        os.environ["SPARK_LOCAL_DIRS"] = str(self._folder)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT, 0o600)
        stderr = os.dup(2)
        os.dup2(log, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(log)
            for name in (_SUBMIT, "SPARK_LOCAL_DIRS"):
                os.environ.pop(name)
                if name in before:
                    os.environ[name] = before[name]

    @property
    def _log(self) -> Path:
        return self._folder / "spark.log"

    def _said(self) -> str:
        """The last line that Java said."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
