"""Views as objects of a database: create, list, drop and group them; their plans and the cost of their refreshes.

Calls gdq.plan, gdq.typed and the top modules of gdq; gdq.monitor, consumers and gdq.cli call it. Code that refreshes
views is in consumers.refresh.
"""
