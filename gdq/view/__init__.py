"""Views: making, listing and dropping them, their targets and their plans on the server."""
