"""Programs built on gdq: handlers for `gdq consume` (printer), jobs that keep views fresh (refresh), and the demo.

Each package says which others it may call. The library in gdq calls none of them; gdq.cli does.
"""
