"""Material of other projects as a test of gdq: their view queries, and PostgreSQL's own suites under capture.

Nothing of that material is kept here: `make test-foreign FOREIGN=FOLDER` reads it from a folder.
"""
