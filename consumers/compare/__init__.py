"""Queue and slot beside each other on a user's own tables: what `gdq compare` does."""
