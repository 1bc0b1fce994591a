"""`python -m mdas.cli`."""

import sys

from mdas.cli import main

sys.exit(main())
