"""Benchmarks are run from the repository's root and never installed, so their root is put on the path here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
