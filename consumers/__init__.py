"""Programs built on gdq's public functions: handlers for `gdq consume`, and jobs that keep views fresh."""
