"""Typed reading: the types of JSON, Python, Arrow and Spark for each PostgreSQL type, and reading a SELECT as these.

pgtypes is the table of types and needs nothing; arrow and batch_rows load pyarrow. They call the top modules of gdq;
gdq.batch, gdq.view and consumers call them.
"""
