"""How queues, consumers, captured tables and views fare: status, the findings of doctor and their repair, and metrics.

Calls SQL functions, gdq.installer and gdq.errors; the command line calls it.
"""
