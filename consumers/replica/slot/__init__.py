"""Replicas that a logical slot feeds: their loop, the published tables, and the netting of a slot's changes.

Calls consumers.slot and the modules of consumers.replica, which apply what is netted; only the command line calls it.
Start reading at slot_replica.py.
"""
