"""A model server on which switching between conversations costs nothing. docs/ARCHITECTURE.md names the parts."""

__version__ = "0.1.0"
