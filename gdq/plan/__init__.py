"""The planner of views: canonical SQL and the schemas of its tables in, a frozen plan of statements out.

Pure functions: no connection, no pyarrow, no pyspark (canonical.py alone asks the server to print a query). They call
gdq.errors and gdq.sql_text; gdq.view and the engines call them. plan_postgres() in postgres.py is the door.
"""
