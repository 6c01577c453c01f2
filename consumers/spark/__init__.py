"""Apache Spark: the data source gdq, and the engines that compute views with it."""
