"""Relays: the events of a queue sent on to a web hook, NATS JetStream or Kafka, in the order of each key.

Calls gdq's consumers and their retries, the printer and the Debezium envelope; the command line calls it, for
`gdq relay`. A sink is found by the scheme of its address; only its own module loads the client library.
"""
