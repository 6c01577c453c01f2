"""python -m gdq.embedded MAJOR...: find or fetch PostgreSQLs of these majors and print their folders."""

import sys

from gdq.embedded.server import main

sys.exit(main(sys.argv[1:]))
