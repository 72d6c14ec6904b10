"""What goes wrong between a model's files and an answer's text.

EngineError
├── ModelLoadError    files that are missing, damaged, refused, or too large for the machine
├── TemplateRefused   the chat template does not take these messages
└── BadLogits         the model's numbers leave nothing to sample from
"""

from __future__ import annotations

from engine.errors import EngineError


class ModelLoadError(EngineError):
    """The message says what to do."""


class TemplateRefused(EngineError):
    """The message carries the template's own words."""


class BadLogits(EngineError):
    """No token has a finite score: the weights are broken, or a mask allows nothing."""
