"""Statements of foreign scripts as gdq's test takes them: queries of views, changed statements, ones to leave out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.foreign.scripts import Statement

Kind = Literal["query", "run", "end", "leave"]


@dataclass(frozen=True, slots=True)
class Step:
    """What to do for a statement. `query`: a view's query; `text`: what is run, if anything.

    kind query: `query` is tried as a view; run: run `text`; end: try the queries so far first, then run `text`; leave:
    do nothing. A query may have a `text` too: the view that later queries read.
    """

    kind: Kind
    text: str = ""
    query: str = ""


_FLAGS = re.IGNORECASE | re.DOTALL
# CREATE VIEW, CREATE MATERIALIZED VIEW
_VIEW = re.compile(
    r"""create\s+(?:or\s+replace\s+)?(?:(?:temp|temporary|local|global|incremental|materialized|recursive)\s+)*view\s+
        (?:if\s+not\s+exists\s+)?(?P<name>(?:"[^"]+"|[\w.$])+)\s*(?P<columns>\([^)]*\))?\s*
        (?:using\s+\w+\s+)?(?:with\s*\([^)]*\)\s*)?(?:tablespace\s+\w+\s+)?as\b\s*(?P<query>.*?)
        (?:\bwith\s+(?:no\s+data|data|(?:local\s+|cascaded\s+)?check\s+option))?\s*(?:emit\s+on\s+window\s+close)?\s*$""",
    _FLAGS | re.VERBOSE,
)
_SINK = re.compile(
    r"create\s+sink\s+\S+\s+(?:into\s+\S+\s+)?as\s+(?P<query>(?:select|with)\b.*?)(?:\bwith\s*\(.*)?$", _FLAGS
)
_TABLE_AS = re.compile(r"create\s+(?:temp|temporary|unlogged)?\s*table\b.*?\bas\s+(?P<query>select\b.*)$", _FLAGS)
# create_immv('name', 'query') and create_stream_table('name', $$query$$)
_CALL = re.compile(
    r"""select\s+(?:\w+\.)?create_(?:immv|stream_table)\s*\(\s*(?:name\s*=>\s*)?'(?P<name>[^']+)'\s*,\s*
        (?:query\s*=>\s*)?(?:\$(?P<tag>\w*)\$(?P<dollar>.*?)\$(?P=tag)\$|'(?P<plain>(?:[^']|'')*)')""",
    _FLAGS | re.VERBOSE,
)
_QUERY = re.compile(r"\(*\s*(select|with|values|table)\b", _FLAGS)
_WRITES = re.compile(r"\b(insert\s+into|update\s+\S+\s+set|delete\s+from|merge\s+into)\b", _FLAGS)
_EXPLAIN = re.compile(
    r"explain\s*(?:\((?P<options>[^)]*)\)|(?:analyze\s+|verbose\s+)*)\s*(?P<query>\(*\s*(?:select|with)\b.*)$", _FLAGS
)
_TEMPORARY = re.compile(
    r"^create\s+(?:(?:local|global)\s+)?(?:temp|temporary)\s+(?=table|view|sequence|recursive)", _FLAGS
)
_UNLOGGED = re.compile(r"^create\s+unlogged\s+table", _FLAGS)
_ON_COMMIT = re.compile(r"\bon\s+commit\s+(?:drop|delete\s+rows|preserve\s+rows)", _FLAGS)
_LEAVE = re.compile(
    r"""(begin|start|commit|end|rollback|abort|savepoint|release|prepare\s+transaction|flush|refresh|vacuum|analyze|reindex
        |cluster|checkpoint|discard|listen|notify|unlisten|lock|declare|fetch|move|close|wait|recover|subscribe
        |create\s+(?:source|sink|connection|subscription|publication|secret|database|tablespace|role|user|group|extension)
        |drop\s+(?:source|sink|connection|subscription|publication|secret|database|tablespace|extension|role|user)
        |alter\s+(?:system|database|role|user)|show|use|load|copy\s+.*\bto\b
        |set\s+(?:local\s+)?(?:session\s+)?(?:authorization|role|transaction|constraints|client_encoding
           |enable_\w+|work_mem|parallel_\w+|min_parallel\w*|max_parallel\w*|jit\w*|statement_timeout|lock_timeout
           |session_replication_role|default_transaction\w*|debug_\w+|force_parallel_mode|client_min_messages
           |streaming_\w+|rw_\w+|query_mode|visibility_mode|default_table_access_method|default_tablespace)
        |reset\s+(?:session|role|enable_\w+|work_mem))\b""",
    _FLAGS | re.VERBOSE,
)
_COPY_WITHOUT_ROWS = re.compile(r"copy\b.*\b(?:from|to)\s+(?:std(?:in|out)|program)\b", _FLAGS)
_STOPS = re.compile(r"\bpg_(?:terminate_backend|cancel_backend|sleep\w*|reload_conf|promote)\s*\(", _FLAGS)
_END = re.compile(r"(drop|alter|set|reset|create\s+or\s+replace)\b", _FLAGS)


def step_of(statement: Statement) -> Step:
    """What the test does for a statement."""
    text = statement.text.strip().rstrip(";")
    if statement.data is not None:
        return Step("run", text)
    if _COPY_WITHOUT_ROWS.match(text):
        return Step("leave")  # its rows would have to come from a client
    view, call, sink = _VIEW.match(text), _CALL.match(text), _SINK.match(text)
    if view:
        columns = view.group("columns") or ""
        query = view.group("query").strip()
        return Step("query", f"create view {view.group('name')} {columns} as {query}", _with_names(query, columns))
    if call:
        query = call.group("dollar") or (call.group("plain") or "").replace("''", "'")
        return Step("query", f"create view {call.group('name')} as {query}", query)
    if sink:
        return Step("query", "", sink.group("query").strip())
    if _LEAVE.match(text) or _STOPS.search(text):
        return Step("leave")
    explained = _EXPLAIN.match(text)
    if explained or (_QUERY.match(text) and not _WRITES.search(text)):
        return Step("query", "", explained.group("query") if explained else text)
    if _END.match(text):
        return Step("end", text)
    made = _TABLE_AS.match(text)
    return Step("query" if made else "run", _stays(text), made.group("query") if made else "")


def _with_names(query: str, columns: str) -> str:
    return f"with named {columns} as ({query}\n) select * from named" if columns else query


def _stays(text: str) -> str:
    """A table that is neither temporary nor unlogged, so that it can be captured."""
    return _ON_COMMIT.sub("", _UNLOGGED.sub("create table", _TEMPORARY.sub("create ", text)))
