"""Monitoring of queues, consumers, captured tables and views: status, metrics, doctor's findings and their repair.

Calls SQL functions, gdq.installer and gdq.errors; the command line calls it.
"""
