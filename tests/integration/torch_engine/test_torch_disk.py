"""The torch engine's state through a park directory: another process, the same tokens."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import BLOCK_TOKENS
from parkd.store.files.disk_jobs import RemoveJob, read, write
from parkd.store.files.fs import FileSystem
from parkd.store.files.park_directory import open_directory
from parkd.store.flights import Promotion
from parkd.store.opening import DiskOptions, open_tiered
from parkd.store.records import Capture, CaptureRequest, StoreConfig, Tier
from parkd.store.store import ConversationStore
from tests.integration.torch_engine.test_torch_engine import NEVER, answer, tiny

KEY = b"k" * 16
PROMPT = np.random.default_rng(3).integers(0, 200, 2 * BLOCK_TOKENS + 77).astype(np.int64)
HASHES = (b"a" * 16, b"b" * 16)


def open_store(files: FileSystem, engine: TorchEngine) -> ConversationStore:
    return open_tiered(
        files,
        StoreConfig(64 << 20, BLOCK_TOKENS),
        DiskOptions(64 << 20, 1 << 40),
        engine.info.layout,
        engine.info.fingerprint,
        clock=time.monotonic,
        wall=time.time,
    )


def test_a_restarted_engine_goes_on_with_the_same_tokens(model_cache: Path, tmp_path: Path) -> None:
    engine, files = tiny(model_cache), open_directory(tmp_path / "park")
    store = open_store(files, engine)
    engine.extend(PROMPT, cancel=NEVER)
    units = PROMPT.astype(np.uint64)
    capture = store.begin_capture(CaptureRequest(KEY, units, HASHES, (), engine.info.layout.digest))
    assert isinstance(capture, Capture)
    parked = store.commit(capture, engine.capture(capture.transfer))
    job = store.next_job()
    assert job is not None
    assert not isinstance(job, RemoveJob)
    write(files, job)
    store.finished(job, None)
    question = np.append(PROMPT, [5, 6, 7])
    stayed = answer(engine, question, 12)
    engine.close()
    files.close()

    engine, files = tiny(model_cache), open_directory(tmp_path / "park")
    store = open_store(files, engine)
    found, shared = store.candidates(KEY, HASHES)[0]
    assert (found.id, found.tier, shared) == (parked.id, Tier.DISK, 2)
    promotion = store.promote(found.id, found.position)
    assert isinstance(promotion, Promotion)
    read(files, promotion.job)
    assert store.promoted(promotion, None) is not None
    with store.lease(found.id, found.position) as lease:
        engine.restore(lease.transfer)
    assert engine.position == len(PROMPT)
    assert answer(engine, question, 12) == stayed
    engine.close()
    files.close()
