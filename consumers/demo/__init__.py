"""The demo, `gdq demo`: gdq at work on a server of its own, with changes as events and views in PostgreSQL and Delta.

Calls consumers/refresh and below, gdq/embedded, and no other program.
"""
