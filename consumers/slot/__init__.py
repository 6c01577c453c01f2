"""The other path: changes read from a logical replication slot, with the same batches and events as the queue's."""
