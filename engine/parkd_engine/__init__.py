"""A library that runs one causal language model over several devices and lets its whole state be moved.

Layers are split in stages, each with one arena in which a token's state is one row. What `transformers` loads, this
runs; what it keeps of a conversation can be captured into plain bytes and restored, all stages or none:

>>> session = open_session(model, EngineConfig(devices=("cpu", "cpu"), context_tokens=512))
>>> position = session.extend(prompt[:-1])
>>> token = int(session.step(prompt[-1]).argmax())
>>> parked = host_transfer(session, stop=session.position)
>>> checksums = capture(session, parked)
>>> session.reset()
>>> position = session.extend(another_prompt)
>>> restore(session, replace(parked, checksums=checksums.rows))
>>> session.position == len(prompt)
True
>>> following = int(session.step(token).argmax())

`model` is any `transformers` model of a supported architecture, prompts are token ids, `replace` is that of
`dataclasses`. Errors are those of `parkd.errors`.
"""

from parkd.state import EngineConfig
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.moves.snapshot import capture, host_transfer, restore, restore_and_read
from parkd_engine.opening import open_seats, open_session
from parkd_engine.session import Session

__all__ = [
    "EngineConfig",
    "LoadConfig",
    "LoadedModel",
    "Session",
    "capture",
    "host_transfer",
    "load_model",
    "open_seats",
    "open_session",
    "restore",
    "restore_and_read",
]
