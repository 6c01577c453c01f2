"""Refreshing views: the class Refresher, the refresh loop, the choice of an engine, following and verifying.

It calls the kernel consumers.views and the engines and sources in consumers.{lake,spark,slot}; gdq.cli calls it.
"""
