"""Views as objects of a database: made, listed, dropped and grouped; their plans and what their refreshes cost.

Calls gdq.plan, gdq.typed and the ground floor of gdq; gdq.monitor, consumers and gdq.cli call it. Refreshing them is in
consumers.refresh.
"""
