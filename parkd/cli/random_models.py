"""Refuses a mistyped random model (`random:NAME`) before torch is imported, which takes tens of seconds on a busy
machine.

The names are looked for in the text of the module that defines them, since to import it is to import torch.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from parkd.config import nearest
from parkd.errors import ConfigError

PREFIX = "random:"
_SHAPES = Path("families", "presets", "shapes.py")
_NAME = re.compile(r'^\s*"([a-z0-9.-]+)": ', re.MULTILINE)
_WITH_HEAD = re.compile(r"-mtp(-echo)?$")


def check_name(model: str) -> None:
    """Raises ConfigError for a random model that there is not. One that cannot be told from others here passes: loading
    refuses it."""
    if not model.startswith(PREFIX):
        return
    name, spec = _WITH_HEAD.sub("", model.removeprefix(PREFIX)), importlib.util.find_spec("parkd_engine")
    places = spec.submodule_search_locations if spec is not None else None
    path = next((Path(place) / _SHAPES for place in places or ()), None)
    if path is None or not path.is_file():
        return
    source = path.read_text(encoding="utf-8")
    if f'"{name}"' not in source:
        near = nearest(name, _NAME.findall(source)) or " (docs/MODELS.md names them)"
        raise ConfigError(f"--model {model}: there is no random model of that name{near}")
