"""The kernel of a refresh: snapshot holder, change source, computation, difference and target, with two engines.

It calls gdq.view, gdq.plan, gdq.typed and the top modules of gdq; it knows no lake, Spark, slot or refresh loop.
"""
