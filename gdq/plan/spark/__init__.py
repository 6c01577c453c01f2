"""The plans of engine spark: views that Spark joins itself (plan.py), and views whose keys the server finds (keys.py).

Calls gdq.plan; gdq.view and the engines in consumers.spark call it.
"""
