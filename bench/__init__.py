"""What capture costs the writer: gdq beside PgQ's C triggers, as ratios of medians on one server (`make bench`)."""
