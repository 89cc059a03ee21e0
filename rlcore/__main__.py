"""`python -m rlcore` is `rlcore`."""

import sys

from rlcore.cli import main

sys.exit(main())
