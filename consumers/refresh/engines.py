"""The choice of a refresh's engine by the view's plan and the place of its target.

Only this module knows all engines. It imports Spark and pyarrow only for a view that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.consumers.lake.table import LakeTable
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.copy_engine import CopyEngine, folded_columns
from gdq.consumers.views.engine import CommittingEngine, Engine, EngineTask
from gdq.consumers.views.postgres_engine import PostgresEngine
from gdq.consumers.views.target import target_types
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.spark.plan import SparkPlan

if TYPE_CHECKING:
    from gdq.consumers.spark.session import SparkRun


class Engines:
    """Makes the engine of each refresh; the Spark session starts with the first view that needs it.

    `beside` gives an idle session in the tables' database, for computations outside the target's session. `dsn`: that
    database's resolved connection string, `given`: as the user gave it. `driver_bytes`: as in SparkRun.
    """

    def __init__(self, beside: Callable[[], Connection[Any]], dsn: str, given: str, driver_bytes: int) -> None:
        self._stack = ExitStack()
        self._beside = beside
        self._of_spark = (dsn, given, driver_bytes)

    def close(self) -> None:
        """Remove the password file of Spark's workers; the Spark session stays."""
        self._stack.close()

    @cached_property
    def spark_run(self) -> SparkRun:
        """The Spark session and its settings for tasks; started on first use."""
        from gdq.consumers.spark.session import start_run  # noqa: PLC0415 (needs Spark)

        return self._stack.enter_context(start_run(*self._of_spark))

    @contextmanager
    def engine(self, task: EngineTask, place: TargetRows | LakeTable) -> Iterator[Engine | CommittingEngine]:
        """The engine for one refresh into the target `place`; its resources are freed after the block."""
        plan = task.plan
        if not isinstance(place, TargetRows):
            with self._into_lake(task, place) as engine:
                yield engine
        elif isinstance(plan, SparkPlan):
            from gdq.consumers.spark.join_engine import SparkJoinEngine  # noqa: PLC0415 (needs Spark)

            yield SparkJoinEngine(lambda: self.spark_run, task, plan, place)
        else:
            with self._into_postgres(task, plan, place) as inner:
                yield self._by_keys(plan, inner) if isinstance(plan, SparkKeyPlan) else inner
                if task.grouped:
                    inner.clear()

    @contextmanager
    def _into_postgres(
        self, task: EngineTask, plan: PostgresPlan, place: TargetRows
    ) -> Iterator[PostgresEngine | CopyEngine]:
        # if Spark's tasks stage rows, the keys are computed beside the target's session, in the tables' database too
        staged = isinstance(plan, SparkKeyPlan) and plan.state is None
        if not task.view.elsewhere and not staged:
            yield PostgresEngine(Computation(place.output, task, plan, place.types), place)
            return
        types = target_types(task.columns, same_database=True)
        folded = folded_columns(task.holder.connection, task.columns)
        with Computation(self._beside(), task, plan, types, folded).beside() as computation:
            yield CopyEngine(computation, place)

    def _by_keys(self, plan: SparkKeyPlan, inner: PostgresEngine | CopyEngine) -> Engine:
        from gdq.consumers.spark.key_engine import SparkKeyEngine  # noqa: PLC0415 (needs Spark)

        return SparkKeyEngine(lambda: self.spark_run, plan, inner)

    @contextmanager
    def _into_lake(self, task: EngineTask, lake: LakeTable) -> Iterator[CommittingEngine]:
        from gdq.consumers.lake.engine import LakeEngine  # noqa: PLC0415 (pyarrow is slow to load)
        from gdq.consumers.lake.types import lake_columns, lake_columns_as_text  # noqa: PLC0415

        view, plan = task.view, task.plan
        assert view.lake is not None
        with ExitStack() as stack:
            computation: Computation | None = None
            if isinstance(plan, PostgresPlan):
                types = target_types(task.columns, same_database=True)
                folded = folded_columns(task.holder.connection, task.columns) | lake_columns_as_text(task.columns)
                made = Computation(self._beside(), task, plan, types, folded)
                computation = stack.enter_context(made.beside())
            if view.engine == "spark":
                from gdq.consumers.spark.lake_engine import spark_lake_engine  # noqa: PLC0415 (needs Spark)

                yield stack.enter_context(spark_lake_engine(self.spark_run, task, computation))
                return
            assert computation is not None
            yield LakeEngine(computation, lake, lake_columns(task.columns, view.lake.kind))
