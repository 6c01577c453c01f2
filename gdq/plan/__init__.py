"""The planner: which statements bring a view up to date. Pure functions of SQL text and table schemas."""
