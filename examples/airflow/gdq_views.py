"""Refreshes all views of gdq every ten minutes, and then verifies those that GDQ_VERIFIED_VIEWS names.

The database is that of Airflow's connection `gdq`. GDQ_COMMAND is the command gdq in an environment of its own, since
Airflow pins its libraries.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

GDQ = os.environ.get("GDQ_COMMAND", "/opt/gdq/bin/gdq")
VERIFIED = [name for name in os.environ.get("GDQ_VERIFIED_VIEWS", "").split(",") if name]

# The password is Airflow's: it is shown in no log and in no rendered template.
DATABASE = {"GDQ_DSN": "{{ conn.gdq.get_uri() }}"}

with DAG(
    dag_id="gdq_views",
    description="Views of gdq: refreshed, and verified",
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # a second refresh of a view is refused while the first one runs
    max_active_runs=1,
    tags=["gdq"],
) as dag:
    refresh = BashOperator(
        task_id="refresh",
        bash_command=f"exec {GDQ} refresh",
        env=DATABASE,
        append_env=True,
        # a refresh that is cut off is rolled back, and the next one goes on from there
        execution_timeout=timedelta(hours=1),
        retries=3,
        retry_delay=timedelta(minutes=1),
        retry_exponential_backoff=True,
    )
    for name in VERIFIED:
        verify = BashOperator(
            task_id=f"verify_{name}",
            bash_command=f"exec {GDQ} verify-view {name}",
            env=DATABASE,
            append_env=True,
            execution_timeout=timedelta(hours=1),
            # rows that differ do so again: somebody is to look at them
            retries=0,
        )
        refresh.set_downstream(verify)
