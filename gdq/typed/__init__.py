"""Typed reading: what each PostgreSQL type becomes in JSON, Python, Arrow and Spark, and reading a SELECT so.

pgtypes is the table of types and needs nothing; arrow and batch_rows load pyarrow. They call the ground floor of gdq;
gdq.batch, gdq.view and consumers call them.
"""
