"""Programs built on gdq: handlers for `gdq consume` (printer), jobs that keep views fresh (refresh), and the demo.

Each package says whom it may call; none of them is called by the library in gdq, but by gdq.cli.
"""
