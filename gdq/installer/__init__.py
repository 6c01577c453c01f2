"""Installs, upgrades and removes schemas gdq and gdq_log, and compares the schema of a database with this gdq.

Runs the revisions of migrations/, the functions of sql/ and its own installer/sql/. Calls gdq.conninfo and gdq.errors.
"""
