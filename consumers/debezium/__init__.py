"""Events in the form of Debezium: the envelope, and the values as Kafka Connect writes them.

Calls only events and types of gdq; the command line calls it, for `gdq consume --format debezium`.
"""
