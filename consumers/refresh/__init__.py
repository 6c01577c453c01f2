"""Refreshing views: `gdq refresh`."""
