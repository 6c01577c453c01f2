"""The planner of views: canonical SQL and table schemas in, a frozen plan of statements out.

Pure functions without connection, pyarrow or pyspark (only canonical.py asks the server to print a query). They call
gdq.errors and gdq.sql_text; gdq.view and the engines call them. Start reading at plan_postgres() in postgres.py.
"""
