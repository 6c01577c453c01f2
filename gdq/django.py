"""For Django: migrations that capture follows without event triggers.

INSTALLED_APPS = [..., "gdq.django.FollowDdl"]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.apps import AppConfig
from django.db import connections, transaction
from django.db.models.signals import post_migrate, pre_migrate

from gdq.ddl import Follower


class FollowDdl(AppConfig):  # type: ignore[misc]  # Django has no types
    """An app that has capture follow each DDL statement of `manage.py migrate`, as gdq.apply_ddl() does.

    It does nothing where gdq is not installed, its event triggers follow DDL, or the database is no PostgreSQL. Of
    several databases it follows the one that `migrate --database` names. Statements outside of a transaction
    (`atomic = False`) are not followed, which is a warning; the next tick finds those that concern capture. The role
    needs gdq_admin; an error of gdq is a warning.
    """

    name = "gdq.django"
    label = "gdq"
    verbose_name = "gdq"

    def ready(self) -> None:
        """Follow from the beginning of `migrate` to its end."""
        pre_migrate.connect(_begin, dispatch_uid="gdq")
        post_migrate.connect(_end, dispatch_uid="gdq")


def _begin(using: str, **_: Any) -> None:
    wrappers = connections[using].execute_wrappers
    if connections[using].vendor == "postgresql" and _follow not in wrappers:  # once for each app
        wrappers.append(_follow)


def _end(using: str, **_: Any) -> None:
    wrappers = connections[using].execute_wrappers
    if _follow in wrappers:
        wrappers.remove(_follow)


def _follow(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    connection = context["connection"]

    def run(query: str, value: str | None) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(query.format("%s"), None if value is None else [value])
            return cursor.fetchone()

    follower = Follower(run, partial(transaction.atomic, using=connection.alias))
    statement = str(sql)
    followed = connection.in_atomic_block and follower.begin(statement)
    if not connection.in_atomic_block:
        follower.leave(statement)
    done = execute(sql, params, many, context)
    if followed:
        follower.end(statement)
    return done
