"""Views that are refreshed from a logical slot."""
