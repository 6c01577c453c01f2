"""Typed reading: what each PostgreSQL type becomes in JSON, Python, Arrow and Spark, and reading a SELECT so."""
