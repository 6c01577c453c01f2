"""The site of the documentation: `make docs` builds it of docs/ and of pages that are made from the code."""
