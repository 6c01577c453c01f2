"""The choice of a refresh's engine, by the plan of the view and the place of its target.

This is the only module that knows all engines. What needs Spark or pyarrow is loaded for a view that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.consumers.lake.engine import LakeEngine
from gdq.consumers.lake.table import Lake
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.copy_engine import CopyEngine, folded_columns
from gdq.consumers.views.engine import Committing, Engine, Task
from gdq.consumers.views.postgres_engine import PostgresEngine
from gdq.consumers.views.target import TargetRows, target_types
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.spark.plan import SparkPlan

if TYPE_CHECKING:
    from gdq.consumers.spark.session import SparkRun


class Engines:
    """Makes the engine of each refresh; the Spark session starts at the first view that needs one.

    `beside`: gives an idle session in the tables' database for what is not computed in the target's. `dsn` leads there,
    for Spark's workers; the user gave `given` for it. `driver_bytes`: as of SparkRun.
    """

    def __init__(self, beside: Callable[[], Connection[Any]], dsn: str, given: str, driver_bytes: int) -> None:
        self._stack = ExitStack()
        self._beside = beside
        self._of_spark = (dsn, given, driver_bytes)

    def close(self) -> None:
        """Remove what Spark's workers needed; the session goes on."""
        self._stack.close()

    @cached_property
    def spark_run(self) -> SparkRun:
        """The Spark session with what its tasks need to know."""
        from gdq.consumers.spark.session import start_run  # noqa: PLC0415 (needs Spark)

        return self._stack.enter_context(start_run(*self._of_spark))

    @contextmanager
    def engine(self, task: Task, place: TargetRows | Lake) -> Iterator[Engine | Committing]:
        """The engine for a refresh of a view whose target is at `place`; what the engine holds goes with the block."""
        plan = task.plan
        if not isinstance(place, TargetRows):
            with self._into_lake(task, place) as engine:
                yield engine
        elif isinstance(plan, SparkPlan):
            from gdq.consumers.spark.join_engine import SparkViews  # noqa: PLC0415 (needs Spark)

            yield SparkViews(self.spark_run, task, plan, place)
        else:
            with self._into_postgres(task, plan, place) as inner:
                yield self._by_keys(plan, inner) if isinstance(plan, SparkKeyPlan) else inner
                if task.grouped:
                    inner.clear()

    @contextmanager
    def _into_postgres(
        self, task: Task, plan: PostgresPlan, place: TargetRows
    ) -> Iterator[PostgresEngine | CopyEngine]:
        # in the database of the tables what Spark's tasks stage is computed beside the target's session
        staged = isinstance(plan, SparkKeyPlan) and plan.state is None
        if not task.view.elsewhere and not staged:
            yield PostgresEngine(Computation(place.output, task, plan, place.types), place)
            return
        types = target_types(task.columns, same_database=True)
        folded = folded_columns(task.holder.connection, task.columns)
        with Computation(self._beside(), task, plan, types, folded).beside() as computation:
            yield CopyEngine(computation, place)

    def _by_keys(self, plan: SparkKeyPlan, inner: PostgresEngine | CopyEngine) -> Engine:
        from gdq.consumers.spark.key_engine import SparkKeys  # noqa: PLC0415 (needs Spark)

        return SparkKeys(self.spark_run, plan, inner)

    @contextmanager
    def _into_lake(self, task: Task, lake: Lake) -> Iterator[Committing]:
        from gdq.consumers.lake.types import compared_as_text, lake_columns  # noqa: PLC0415 (pyarrow is slow to load)

        view, plan = task.view, task.plan
        assert view.lake is not None
        with ExitStack() as stack:
            computation: Computation | None = None
            if isinstance(plan, PostgresPlan):
                types = target_types(task.columns, same_database=True)
                folded = folded_columns(task.holder.connection, task.columns) | compared_as_text(task.columns)
                made = Computation(self._beside(), task, plan, types, folded)
                computation = stack.enter_context(made.beside())
            if view.engine == "spark":
                from gdq.consumers.spark.lake_engine import spark_lake_engine  # noqa: PLC0415 (needs Spark)

                yield stack.enter_context(spark_lake_engine(self.spark_run, task, computation))
                return
            assert computation is not None
            yield LakeEngine(computation, lake, lake_columns(task.columns, view.lake.kind))
