"""The kernel of a refresh: snapshot holder, change source, computation, difference and target, with two engines.

It calls gdq.view, gdq.plan, gdq.typed and the ground floor; it knows no lake, no Spark, no slot and no refresh loop.
"""
