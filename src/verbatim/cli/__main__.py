"""`python -m verbatim.cli`: the command without its script."""

import sys

from verbatim.cli.main import main

sys.exit(main())
