"""The planner of the engine spark."""
