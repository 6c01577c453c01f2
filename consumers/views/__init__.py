"""The kernel of a refresh: what every engine and every target shares."""
