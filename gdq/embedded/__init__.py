"""A PostgreSQL server and a Java that come as wheels, for the demo, the benchmarks and the tests.

Calls no other part of gdq but its errors and connection strings.
"""
