"""Looking after queues: status, doctor and metrics."""
