"""python -m gdq: the command without its script."""

from gdq.cli import main

main(prog_name="gdq")
