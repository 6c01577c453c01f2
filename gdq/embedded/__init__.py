"""An embedded PostgreSQL server and a Java for Spark, for the demo, the benchmarks and the tests."""
