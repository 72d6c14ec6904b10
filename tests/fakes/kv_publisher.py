"""Publishes KV events on sockets as vLLM does: three frames a batch, numbers from 0, repeated on request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Any

import msgspec
import zmq

BLOCK = 4
"""Tokens of a block in tests."""


def stored(
    ids: Sequence[int], hashes: Sequence[int | bytes], parent: int | bytes | None = None, salt: str = "", **more: Any
) -> dict[str, Any]:
    """Blocks of `ids`, the first under a salt, as vLLM 0.32 writes them."""
    extra: list[list[str] | None] = [None] * len(hashes)
    if salt and parent is None:
        extra[0] = [salt]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(ids),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
        **more,
    }


def removed(*hashes: int | bytes, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


class FakePublisher:
    """`keeps`: how many batches it can repeat; None: it repeats none."""

    def __init__(self, keeps: int | None = None, *, topics: tuple[bytes, ...] = (b"",)) -> None:
        """`topics` are the frames before the number of what is repeated: one since vLLM 0.32, none before."""
        self._topics = topics
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self.endpoint = self._bound(self._pub)
        self._keeps = keeps
        self._kept: list[tuple[int, bytes]] = []
        self._numbers = count()
        self._ends = threading.Event()
        self._router = self._context.socket(zmq.ROUTER)
        self.replay_endpoint = None if keeps is None else self._bound(self._router)
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self.clock = count(1)

    @staticmethod
    def _bound(socket: Any) -> str:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def __enter__(self) -> FakePublisher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def publish(self, *events: dict[str, Any], loses: bool = False) -> None:
        """One batch; `loses`: it never arrives, and can only be repeated."""
        number, batch = next(self._numbers), msgspec.msgpack.encode([float(next(self.clock)), list(events), 0])
        if self._keeps is not None:
            self._kept = [*self._kept, (number, batch)][-self._keeps :]
        if not loses:
            self.send(number, batch)

    def send(self, number: int, batch: bytes) -> None:
        self._pub.send_multipart([b"", number.to_bytes(8, "big"), batch])

    def _repeat(self) -> None:
        while not self._ends.is_set():
            if self.replay_endpoint is None or not self._router.poll(5):
                self._ends.wait(0.005)
                continue
            who, _, first = self._router.recv_multipart()
            for number, batch in self._kept:
                if number >= int.from_bytes(first, "big"):
                    self._router.send_multipart([who, b"", *self._topics, number.to_bytes(8, "big"), batch])
            self._router.send_multipart([who, b"", *self._topics, (-1).to_bytes(8, "big", signed=True), b""])
