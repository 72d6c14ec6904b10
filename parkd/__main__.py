"""`python -m parkd`."""

from __future__ import annotations

import sys

from parkd.cli import main

sys.exit(main())
