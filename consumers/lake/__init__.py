"""Lake tables as targets of views, without Spark."""
