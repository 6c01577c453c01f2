"""Events in the envelope of Debezium."""
