"""Views refreshed from a logical slot: the change source, the published tables, and the watch that starts a refresh.

Calls consumers.slot and the kernel consumers.views; consumers.refresh calls it.
"""
