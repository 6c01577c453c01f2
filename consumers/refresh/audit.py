"""Audits: a refresh computes the rows of a few keys anew by the view's query, and compares them with the target's.

    sample:  keys of changed rows, of random rows of the target and of random rows of a table
    compare: query and target, each `where key in (sample)`, at the refresh's snapshot and before its commit

An audit that would take longer than it may is skipped, and counted. DivergedView ends a refresh whose audit found other
rows; the next one is a full load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.refresh.audit_rows import TooDear, differing_rows
from gdq.consumers.refresh.audit_sample import KeySampler, Probe
from gdq.consumers.refresh.comparison import IN_ORDER
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.engine import CommittingEngine, Engine
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import DivergedView, UnsupportedValue
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

if TYPE_CHECKING:
    from gdq.view.view import Plan

# An audit may take twice the time that it is expected to take, at least and at most these seconds.
_SECONDS_MIN, _SECONDS_MAX = 0.02, 5.0

# A view that is expected to be computed in this time is compared as a whole, if its target is small.
_SECONDS_WHOLE = 0.005

# What Arrow raises for values or types that it cannot convert or compare, and for files.
_ARROW_FAILURES = (OSError, ValueError, TypeError, NotImplementedError, LookupError)

# The random choices of audits.
choices = random.Random()


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Outcome of one audit: passed, failed or skipped, the keys compared, and why or what."""

    outcome: str
    keys: int
    reason: str | None = None


def is_due(work: ViewRefresh) -> bool:
    """True if a refresh is to be audited: rows came from changes, the query decides them, and there is time for it."""
    view = work.view
    if work.s0 is None or not is_auditable(work.plan):
        return False
    if view.audit_share is None:
        return view.audit_credit >= view.audit_need
    return choices.random() < view.audit_share


def is_auditable(plan: Plan) -> bool:
    """True if the view's rows come from changes, and the query decides them."""
    loads = getattr(plan, "full", None) is not None and not getattr(plan, "checked", False)
    return not loads and plan.settled.reason is None


def audit_refresh(
    control: Connection[Any], work: ViewRefresh, engine: Engine | CommittingEngine, holder: SnapshotHolder
) -> None:
    """Audit a refresh and note the outcome in the view's history; DivergedView if rows differ."""
    started, view = time.monotonic(), work.view
    allowed = _SECONDS_MAX
    if view.audit_share is None:
        allowed = min(max(2 * view.audit_need, _SECONDS_MIN), _SECONDS_MAX)
    result = _audit(work, engine, holder, allowed)
    seconds = time.monotonic() - started
    need = min(max(2 * allowed, seconds), _SECONDS_MAX) if result.outcome == "skipped" else seconds
    note = "select gdq.note_audit(%s, %s, %s, %s, %s, %s)"
    scalar(control, note, work.run, result.outcome, result.keys, seconds, need, result.reason)
    if result.outcome == "failed":
        raise DivergedView(
            f"view {view.view_name} differs from its query: {result.reason}",
            hint="The next refresh loads it in full. If nobody else writes into the target, this is a fault of gdq: "
            "please report the view's query.",
        )


def _audit(work: ViewRefresh, engine: Engine | CommittingEngine, holder: SnapshotHolder, seconds: float) -> AuditResult:
    keys = 0
    try:
        with _limited(work, holder, seconds):
            sampler = KeySampler(work, engine.computation, holder, choices)
            if not sampler.kinds or sampler.is_small():
                allowed = min(seconds, _SECONDS_WHOLE) if sampler.kinds else seconds
                with suppress(TooDear) if sampler.kinds else nullcontext():
                    return _compare(work, holder, Probe({}, {}), allowed)
            for probe in sampler.probes():
                result = _compare(work, holder, probe, seconds)
                keys += result.keys
                if result.outcome == "failed":
                    return replace(result, keys=keys)
    except (TooDear, Diverged, UnsupportedValue) as why:
        return AuditResult("skipped", keys, str(why))
    except psycopg.Error as error:
        if holder.connection.closed or (work.lake is None and work.output.closed):
            raise
        slow = isinstance(error, psycopg.errors.QueryCanceled | psycopg.errors.LockNotAvailable)
        return AuditResult("skipped", keys, ("it took too long: " if slow else "") + str(error).splitlines()[0])
    except Exception as error:
        # the commit of a lake table stands, whatever its libraries fail at now
        failures: tuple[type[Exception], ...] = (
            (UnicodeError,) if work.lake is None else (*_ARROW_FAILURES, *work.lake.library_errors)
        )
        if not isinstance(error, failures):
            raise
        return AuditResult("skipped", keys, str(error).partition("\n")[0])
    return AuditResult("passed", keys)


def _compare(work: ViewRefresh, holder: SnapshotHolder, probe: Probe, seconds: float) -> AuditResult:
    if work.lake is None:
        keys, differs = differing_rows(work, holder, probe, seconds)
    else:
        from gdq.consumers.refresh.audit_lake import differing_lake  # noqa: PLC0415 (pyarrow is slow to load)

        keys, differs = differing_lake(work, holder, probe, seconds)
    return AuditResult("passed" if differs is None else "failed", keys, differs)


@contextmanager
def _limited(work: ViewRefresh, holder: SnapshotHolder, seconds: float) -> Iterator[None]:
    """Both sessions under the view's settings and with limits of time; all of it is undone."""
    limits = {"statement_timeout": f"{max(1, round(seconds * 1000))}ms", "lock_timeout": "100ms", "jit": "off"}
    with ExitStack() as stack:
        stack.enter_context(holder.connection.transaction(force_rollback=True))
        apply_view_settings(holder.connection, READ_SETTINGS | work.view.settings | IN_ORDER | limits)
        if work.lake is None:
            stack.enter_context(work.output.transaction(force_rollback=True))
            apply_view_settings(work.output, READ_SETTINGS | work.view.target_settings | limits)
        yield
