"""The list of what the planner may take as incremental, by the server's own tree of a query.

What is not listed here is loaded in full: a kind of node, a field that is set, a value of such a field, an aggregate.
docs/views.md shows these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gdq.plan.query_tree import RTE_RELATION, TreeNode, TreeValue, walk_tree

# Each kind of node with what it is in SQL, and the fields that may be set.
NODES: dict[str, tuple[str, str]] = {
    "QUERY": (
        "SELECT, GROUP BY, HAVING, DISTINCT, DISTINCT ON, ORDER BY, OFFSET",
        (
            "commandType querySource canSetTag hasAggs hasWindowFuncs hasTargetSRFs hasSubLinks hasDistinctOn "
            "hasGroupRTE cteList rtable rteperminfos jointree targetList groupClause havingQual windowClause "
            "distinctClause sortClause limitOffset limitCount limitOption setOperations groupingSets "
            "constraintDeps stmt_location stmt_len"
        ),
    ),
    "TARGETENTRY": ("an item of the select list", "expr resno resname ressortgroupref resorigtbl resorigcol resjunk"),
    "SORTGROUPCLAUSE": (
        "an expression of GROUP BY, DISTINCT, ORDER BY or PARTITION BY",
        "tleSortGroupRef eqop sortop reverse_sort nulls_first hashable",
    ),
    "GROUPINGSET": ("GROUPING SETS, ROLLUP, CUBE", "kind content location"),
    "GROUPINGFUNC": ("GROUPING()", "args refs agglevelsup location"),
    "FROMEXPR": ("FROM and WHERE", "fromlist quals"),
    "RANGETBLREF": ("an item of FROM", "rtindex"),
    "RANGETBLENTRY": (
        "in FROM",
        (
            "alias eref rtekind relid inh relkind rellockmode perminfoindex lateral inFromCl requiredPerms "
            "selectedCols subquery jointype joinmergedcols joinaliasvars joinleftcols joinrightcols join_using_alias "
            "functions funcordinality values_lists ctename ctelevelsup coltypes coltypmods colcollations groupexprs"
        ),
    ),
    "RTEPERMISSIONINFO": ("the right to read a column", "relid inh requiredPerms selectedCols"),
    "RANGETBLFUNCTION": (
        "a function in FROM",
        "funcexpr funccolcount funccolnames funccoltypes funccoltypmods funccolcollations funcparams",
    ),
    "ALIAS": ("names", "aliasname colnames"),
    "JOINEXPR": (
        "with ON or USING",
        "jointype isNatural larg rarg usingClause join_using_alias quals alias rtindex",
    ),
    "SETOPERATIONSTMT": (
        "with and without ALL",
        "op all larg rarg colTypes colTypmods colCollations groupClauses",
    ),
    "COMMONTABLEEXPR": (
        "WITH",
        (
            "ctename aliascolnames ctematerialized ctequery location cterefcount ctecolnames ctecoltypes ctecoltypmods "
            "ctecolcollations"
        ),
    ),
    "WINDOWCLAUSE": (
        "OVER and WINDOW",
        (
            "name refname partitionClause orderClause frameOptions startOffset endOffset startInRangeFunc "
            "endInRangeFunc inRangeColl inRangeAsc inRangeNullsFirst winref copiedOrder"
        ),
    ),
    "WINDOWFUNC": (
        "a window function of PostgreSQL",
        "winfnoid wintype wincollid inputcollid args aggfilter winref winstar winagg location",
    ),
    "AGGREF": (
        "an aggregate of PostgreSQL, with DISTINCT, ORDER BY, FILTER, WITHIN GROUP",
        (
            "aggfnoid aggtype aggcollid inputcollid aggtranstype aggargtypes aggdirectargs args aggorder aggdistinct "
            "aggfilter aggstar aggkind aggno aggtransno location"
        ),
    ),
    "VAR": (
        "a column",
        "varno varattno vartype vartypmod varcollid varnullingrels varlevelsup varnosyn varattnosyn location",
    ),
    "CONST": (
        "a constant",
        "consttype consttypmod constcollid constlen constbyval constisnull location constvalue",
    ),
    "PARAM": ("a value of a subquery", "paramkind paramid paramtype paramtypmod paramcollid location"),
    "FUNCEXPR": (
        "an immutable function",
        "funcid funcresulttype funcretset funcvariadic funcformat funccollid inputcollid args location",
    ),
    "NAMEDARGEXPR": ("a named argument", "arg name argnumber location"),
    "OPEXPR": ("an operator", "opno opfuncid opresulttype opcollid inputcollid args location"),
    "DISTINCTEXPR": ("IS DISTINCT FROM", "opno opfuncid opresulttype opcollid inputcollid args location"),
    "NULLIFEXPR": ("NULLIF", "opno opfuncid opresulttype opcollid inputcollid args location"),
    "SCALARARRAYOPEXPR": ("IN over values, ANY and ALL over an array", "opno opfuncid useOr inputcollid args location"),
    "BOOLEXPR": ("AND, OR, NOT", "boolop args location"),
    "SUBLINK": (
        "a subquery",
        "subLinkType subLinkId testexpr operName subselect location",
    ),
    "SUBSCRIPTINGREF": (
        "an element of an array or of jsonb",
        "refcontainertype refelemtype refrestype reftypmod refcollid refupperindexpr reflowerindexpr refexpr",
    ),
    "FIELDSELECT": ("a field of a composite value", "arg fieldnum resulttype resulttypmod resultcollid"),
    "RELABELTYPE": ("a cast", "arg resulttype resulttypmod resultcollid relabelformat location"),
    "COERCEVIAIO": ("a cast by text", "arg resulttype resultcollid coerceformat location"),
    "ARRAYCOERCEEXPR": (
        "a cast of an array",
        "arg elemexpr resulttype resulttypmod resultcollid coerceformat location",
    ),
    "COERCETODOMAIN": (
        "a cast to a domain",
        "arg resulttype resulttypmod resultcollid coercionformat location",
    ),
    "CASEEXPR": ("CASE", "casetype casecollid arg args defresult location"),
    "CASEWHEN": ("WHEN", "expr result location"),
    "CASETESTEXPR": ("the value that CASE compares", "typeId typeMod collation"),
    "ARRAYEXPR": (
        "ARRAY[...]",
        "array_typeid array_collid element_typeid elements multidims list_start list_end location",
    ),
    "ROWEXPR": ("ROW(...)", "args row_typeid row_format colnames location"),
    "ROWCOMPAREEXPR": (
        "rows compared",
        "rctype cmptype opnos opfamilies inputcollids largs rargs",
    ),
    "COALESCEEXPR": ("COALESCE", "coalescetype coalescecollid args location"),
    "MINMAXEXPR": ("GREATEST, LEAST", "minmaxtype minmaxcollid inputcollid op args location"),
    "NULLTEST": ("IS NULL", "arg nulltesttype argisrow location"),
    "BOOLEANTEST": ("IS TRUE, IS FALSE, IS UNKNOWN", "arg booltesttype location"),
}

# The values that a field may have, each with what it is in SQL where the node alone does not say it.
VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("QUERY", "commandType"): {"1": ""},
    ("QUERY", "limitOption"): {"0": "LIMIT, FETCH ... ROWS ONLY"},
    ("RANGETBLENTRY", "rtekind"): {
        "0": "a table",
        "1": "a query",
        "2": "",
        "3": "a function",
        "5": "VALUES",
        "6": "a name of WITH",
        "9": "",
    },
    ("RANGETBLENTRY", "relkind"): {"": "", "r": "", "p": "", "v": ""},
    ("JOINEXPR", "jointype"): {"0": "JOIN", "1": "LEFT JOIN", "2": "FULL JOIN", "3": "RIGHT JOIN"},
    ("AGGREF", "aggkind"): {"n": "", "o": ""},
    ("AGGREF", "agglevelsup"): {"0": "of its own SELECT"},
    ("GROUPINGFUNC", "agglevelsup"): {"0": ""},
    ("SETOPERATIONSTMT", "op"): {"1": "UNION", "2": "INTERSECT", "3": "EXCEPT"},
    ("SUBLINK", "subLinkType"): {
        "0": "EXISTS",
        "1": "ALL",
        "2": "ANY, IN",
        "3": "a row compared with a subquery",
        "4": "a subquery as a value",
        "6": "ARRAY(subquery)",
    },
    ("PARAM", "paramkind"): {"2": ""},
}

# Aggregates of PostgreSQL; test_whitelist.py holds that the planner takes each for an aggregate.
AGGREGATES = frozenset(
    {
        "any_value", "array_agg", "avg", "bit_and", "bit_or", "bit_xor", "bool_and", "bool_or", "corr", "count",
        "covar_pop", "covar_samp", "every", "json_agg", "json_object_agg", "jsonb_agg", "jsonb_object_agg", "max",
        "min", "mode", "percentile_cont", "percentile_disc", "range_agg", "range_intersect_agg", "regr_avgx",
        "regr_avgy", "regr_count", "regr_intercept", "regr_r2", "regr_slope", "regr_sxx", "regr_sxy", "regr_syy",
        "stddev", "stddev_pop", "stddev_samp", "string_agg", "sum", "var_pop", "var_samp", "variance",
    }
)  # fmt: skip

# The numbers of base types of PostgreSQL, and of arrays of them.
BASE_TYPES = {
    "boolean": (16, 1000), "bytea": (17, 1001), "name": (19, 1003), "bigint": (20, 1016), "smallint": (21, 1005),
    "integer": (23, 1007), "text": (25, 1009), "json": (114, 199), "real": (700, 1021), "double precision": (701, 1022),
    "unknown": (705,), "character": (1042, 1014), "character varying": (1043, 1015), "date": (1082, 1182),
    "time": (1083, 1183), "timestamp": (1114, 1115), "interval": (1186, 1187), "numeric": (1700, 1231),
    "uuid": (2950, 2951), "jsonb": (3802, 3807),
}  # fmt: skip

_EMPTY: tuple[TreeValue, ...] = (None, "", "0", "-1", "false", [], ["b"])
# The field of a node that has the type of its value.
_TYPE_FIELDS = {
    "VAR": "vartype", "CONST": "consttype", "PARAM": "paramtype", "AGGREF": "aggtype", "WINDOWFUNC": "wintype",
    "FUNCEXPR": "funcresulttype", "OPEXPR": "opresulttype", "NULLIFEXPR": "opresulttype", "RELABELTYPE": "resulttype",
    "COERCEVIAIO": "resulttype", "ARRAYCOERCEEXPR": "resulttype", "FIELDSELECT": "resulttype", "CASEEXPR": "casetype",
    "COALESCEEXPR": "coalescetype", "MINMAXEXPR": "minmaxtype", "ARRAYEXPR": "array_typeid",
    "SUBSCRIPTINGREF": "refrestype", "CASETESTEXPR": "typeId", "ROWEXPR": "row_typeid", "COERCETODOMAIN": "resulttype",
}  # fmt: skip
# Functions whose second argument is a format. The locale decides what some formats give.
_FORMATTED = {"to_char", "to_date", "to_number", "to_timestamp"}
_NUMBERS = ("smallint", "integer", "bigint", "numeric", "real", "double precision")
# The type of rows that have no type of their own.
_RECORD = 2249
_BOOLEAN_KINDS = {"BOOLEXPR", "NULLTEST", "BOOLEANTEST", "SCALARARRAYOPEXPR", "DISTINCTEXPR", "ROWCOMPAREEXPR"}
_BOOLEAN = 16
# The fields with the number of a function that a node calls.
FUNCTION_FIELDS = ("funcid", "opfuncid", "aggfnoid", "winfnoid")


@dataclass(frozen=True, slots=True)
class ServerFunction:
    """A function as the server has it. `volatility`: i, s or v.

    A function of PostgreSQL that is STABLE may give the same in every refresh all the same. `by_settings`: it depends
    on settings that a refresh pins. `writes`: it writes its arguments as text, which depends on their types.
    """

    signature: str
    schema: str
    name: str
    volatility: str
    by_settings: bool = False
    writes: bool = False

    @property
    def own(self) -> bool:
        """True for a function of PostgreSQL itself."""
        return self.schema == "pg_catalog"


@dataclass(frozen=True, slots=True)
class Settled:
    """What of a view's rows its query alone decides.

    `reason`: why the same tables may give other rows, None if they may not. `open_columns`: numbers, from 0, of the
    columns whose values are not decided. `loose`: rows are grouped by values that can be written in several ways.
    """

    reason: str | None = None
    open_columns: frozenset[int] = frozenset()
    loose: bool = False

    def lines(self, columns: Sequence[str]) -> list[str]:
        """What audits leave out of a view with these columns, a line each."""
        found = [] if self.reason is None else [f"not audited: {self.reason}"]
        names = [columns[number] for number in sorted(self.open_columns) if number < len(columns)]
        return found + ([f"audited without {', '.join(names)}: the query leaves these values open"] if names else [])


# No server was asked.
UNSETTLED = Settled("the query was not looked at")


@dataclass(frozen=True, slots=True)
class QueryReading:
    """What the server says of a view's query.

    `refused`: why the planner may not take the query apart, with the code; None if it may. `functions`: changes with
    the definitions of the functions outside of pg_catalog that the query calls, and with the functions that users'
    operators and casts stand for; empty if the query names nothing that a user defined.
    `settled`: what of the rows the query alone decides. `is_own`: the query names only what PostgreSQL itself defines,
    beside its tables.
    """

    refused: str | None = None
    functions: str = ""
    settled: Settled = UNSETTLED
    is_own: bool = False


# The reading of a query that no server was asked for.
UNREAD = QueryReading()


def called_function(node: TreeNode) -> int:
    """The number of the function that a node calls; 0 if it calls none."""
    return next((int(node.text(name)) for name in FUNCTION_FIELDS if node.text(name)), 0)


def equality_operators(tree: TreeNode) -> set[int]:
    """The operators by which a tree's rows are grouped or taken for one."""
    return {int(node.text("eqop")) for node in walk_tree(tree) if node.kind == "SORTGROUPCLAUSE"}


def compared_operators(tree: TreeNode) -> set[int]:
    """The operators that a tree applies to values."""
    return {int(node.text("opno")) for node in walk_tree(tree) if node.kind == "OPEXPR"}


def why_not_listed(
    tree: TreeNode, functions: Mapping[int, ServerFunction], strange: Mapping[int, str], named: Collection[int]
) -> str | None:
    """What the list lacks of a query's tree; None if all of it is listed.

    `strange`: operators that are not. `named`: as for is_fixed().
    """
    for node in walk_tree(tree):
        reason = _why_not_node(node) or _why_not_call(node, functions, named) or _why_not_place(node)
        operator = strange.get(int(node.text("eqop") or node.text("opno") or 0))
        if reason is not None or operator is not None:
            return reason or f"operator {operator} is not listed"
    return None


def is_fixed(node: TreeNode, function: ServerFunction, named: Collection[int]) -> bool:
    """True if a node's call gives the same in every refresh of a view, whenever its arguments are the same.

    `named`: types whose text is the name of an object.
    """
    if function.volatility == "i":
        return True
    if not function.own or function.volatility != "s":
        return False
    if function.name in _FORMATTED:
        return _is_fixed_format(function.name, node.nodes("args"))
    return function.by_settings or (function.writes and not set(argument_types(node)) & {*named})


def _is_fixed_format(name: str, arguments: Sequence[TreeNode]) -> bool:
    """True if the format among the arguments of to_char() or its inverses asks for nothing that a locale decides."""
    value = arguments[-1].get("constvalue") if len(arguments) == 2 else None
    if not isinstance(value, tuple):
        return False
    # "7 [ 28 0 0 0 97 34 37 ]": the length, then the bytes; four of them are the value's own length
    letters = bytes(int(str(one)) % 256 for one in value[6:-1]).upper()
    numbers = {oid for name in _NUMBERS for oid in BASE_TYPES[name]}
    # TM: names of months and days; D, G, L, S: signs of numbers
    if name == "to_number" or type_of(arguments[0]) in numbers:
        return not set(b"DGLS") & set(letters)
    return b"TM" not in letters


def type_of(node: TreeNode) -> int:
    """The type of an expression's value; 0 if unknown."""
    if node.kind in _BOOLEAN_KINDS:
        return _BOOLEAN
    if node.kind == "TARGETENTRY":
        return type_of(node.nodes("expr")[0])
    if node.kind == "SUBLINK":
        query = node.nodes("subselect")[0]
        value = query.nodes("targetList")[0].node("expr") if node.text("subLinkType") == "4" else None
        return type_of(value) if value is not None else _BOOLEAN * (node.text("subLinkType") in ("0", "1", "2"))
    return int(node.text(_TYPE_FIELDS.get(node.kind, "")) or 0)


def argument_types(call: TreeNode) -> list[int]:
    """The types of a call's or a cast's arguments.

    Where the tree does not have the type, or only that it is a row, those of all that is in the argument.
    """
    found = []
    for argument in [*call.nodes("args"), *call.nodes("arg")]:
        kind = type_of(argument)
        found += [kind] if kind not in (0, _RECORD) else [type_of(one) for one in walk_tree(argument)]
    return found


def _why_not_node(node: TreeNode) -> str | None:
    if node.kind not in NODES:
        return f"{node.kind} is not listed"
    listed = NODES[node.kind][1].split()
    for name, value in node.fields.items():
        if value not in _EMPTY and name not in listed:
            return f"{node.kind} with {name} is not listed"
        allowed = VALUES.get((node.kind, name))
        if allowed is not None and str(value or "") not in allowed:
            return f"{node.kind} with {name} {value} is not listed"
    return None


def _why_not_call(node: TreeNode, functions: Mapping[int, ServerFunction], named: Collection[int]) -> str | None:
    number = called_function(node)
    if not number:
        return None
    function = functions.get(number)
    if function is None:
        return f"function {number} is unknown"
    if node.kind in ("AGGREF", "WINDOWFUNC") and not function.own:
        return f"{function.signature} is no {'aggregate' if node.kind == 'AGGREF' else 'window function'} of PostgreSQL"
    if node.kind == "AGGREF" and function.name not in AGGREGATES:
        return f"aggregate {function.signature} is not listed"
    if not is_fixed(node, function, named):
        return f"{function.signature} is not immutable"
    return None


def _why_not_place(node: TreeNode) -> str | None:
    """Why a listed node stands where the planner does not take it."""
    if node.kind == "VAR" and int(node.text("varattno")) < 1:
        return "a whole row or a system column is not listed"
    if node.kind == "RANGETBLENTRY" and node.text("rtekind") == RTE_RELATION:
        inherits = node.flag("inh") or node.text("relkind") == "v"
        return None if inherits or node.text("relkind") == "r" else "ONLY of a partitioned table is not listed"
    if node.kind == "QUERY" and node.flag("hasTargetSRFs"):
        together = ("hasAggs", "hasWindowFuncs", "groupClause", "distinctClause", "limitCount", "limitOffset")
        if any(node.get(name) not in _EMPTY for name in together):
            return "a set-returning function beside groups, windows, DISTINCT or LIMIT is not listed"
        hidden = [one.get("expr") for one in node.nodes("targetList") if one.flag("resjunk")]
        if any(inner.flag("funcretset") or inner.flag("opretset") for inner in walk_tree(hidden)):
            return "a set-returning function in ORDER BY is not listed"
    return None
