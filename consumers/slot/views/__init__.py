"""Views that are refreshed from a logical slot: the change source, the tables as a slot sends them, and waking up.

Calls consumers.slot and the kernel consumers.views; consumers.refresh calls it.
"""
