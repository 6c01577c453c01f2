"""All commands: the sections of the list that `gdq --help` shows, and the module of each command."""

from __future__ import annotations

# The sections of the list of commands, and the module of each command: the function create_queue_command of
# gdq/cli/queue.py is `gdq create-queue`.
SECTIONS = {
    "Try": {"demo": ["demo"]},
    "Install": {"install": ["install", "create-event-triggers", "uninstall"]},
    "Queues and tables": {
        "queue": ["create-queue", "set-queue", "queues", "pause", "resume", "drop-queue"],
        "table": ["add-table", "alter-table", "tables", "remove-table", "apply-ddl"],
        "sequence": ["add-sequence", "sequences", "remove-sequence"],
        "message": ["insert-event"],
    },
    "Consumers": {
        "run": ["ticker", "tick", "consume", "peek"],
        "relay": ["relay"],
        "spool": ["spool"],
        "consumer": [
            "register-consumer",
            "consumers",
            "members",
            "set-tables",
            "seek",
            "resynced",
            "unregister-consumer",
        ],
        "retry": ["retries", "set-retry-limit", "dead-letters", "replay-dead-letters", "purge-dead-letters"],
    },
    "Views": {
        "view": ["create-view", "alter-view", "views", "explain-view", "view-history", "drop-view"],
        "refresh": ["refresh", "verify-view"],
        "group": ["create-group", "alter-group", "groups", "drop-group"],
    },
    "Copies and replicas": {
        "snapshot": ["snapshot"],
        "replicate": [
            "replicate",
            "replicas",
            "replica-conflicts",
            "skip-replica-changes",
            "replica-skips",
            "drop-replica",
        ],
        "mirror": ["mirror", "mirrors", "drop-mirror"],
        "replica_dead_letter": ["replica-dead-letters", "replay-replica-dead-letters", "purge-replica-dead-letters"],
        "table_compare": ["compare-tables", "repair-tables"],
        "switchover": ["switchover"],
    },
    "Slots": {"slot": ["create-slot", "slots", "drop-slot"], "compare": ["compare"]},
    "Operations": {
        "status": ["status"],
        "top": ["top"],
        "monitor": ["doctor", "metrics"],
        "era": ["position", "check-position", "rebase"],
        "docs": ["docs"],
    },
}

COMMANDS = {name for modules in SECTIONS.values() for names in modules.values() for name in names}

# Where click's `meta` holds the context of the command that runs.
COMMAND_CONTEXT = "gdq.command"
