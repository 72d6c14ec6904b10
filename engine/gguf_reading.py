"""Reads a GGUF file's header in seconds where the `gguf` package's reader takes minutes for a large vocabulary.

That reader slices the mapped file once or more for each element of each list, and the library reads a file twice, for
the configuration and for the weights. This one gives the same fields, with one look at the file a list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock, get_ident
from typing import Any

import gguf
import numpy as np

from engine.errors import ModelLoadError

_LENGTH = struct.Struct("<Q")
_ONE_LOAD = RLock()
"""Two that each put back what they found would leave the other's behind."""
_ARRAY_HEAD_BYTES = 4 + 8
"""Element type and length."""


class QuickReader(gguf.GGUFReader):  # type: ignore[misc]
    """Has the fields and tensors of the class it stands for."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count, offset = gguf.GGUFValueType(head[0][0]), int(head[1][0]), orig_offs + _ARRAY_HEAD_BYTES
        if kind == gguf.GGUFValueType.ARRAY or count == 0:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            size, parts = self._texts(offset, count)
            # Each text is two parts, its length and its bytes, of which the second is the value.
            return _ARRAY_HEAD_BYTES + size, head + parts, list(range(3, 3 + 2 * count, 2)), types
        # Plain views: a slice of a mapped array costs ten times as much.
        whole = np.asarray(self._get(offset, self.gguf_scalar_to_np[kind], count))
        parts = [whole[place : place + 1] for place in range(count)]
        return _ARRAY_HEAD_BYTES + whole.nbytes, head + parts, list(range(2, 2 + count)), types

    def _texts(self, offset: int, count: int) -> tuple[int, list[Any]]:
        """Bytes that `count` texts take from `offset` on, and their parts. Raises ModelLoadError."""
        blob, at = memoryview(self.data), offset
        parts: list[Any] = []
        for _ in range(count):
            start = at + _LENGTH.size
            if start > len(blob) or start + _LENGTH.unpack_from(blob, at)[0] > len(blob):
                raise ModelLoadError("A text in its header passes the end of the file.")
            length = np.frombuffer(blob, dtype=np.uint64, count=1, offset=at)
            at = start + int(length[0])
            parts += (length, np.frombuffer(blob, dtype=np.uint8, count=at - start, offset=start))
        return at - offset, parts


@contextmanager
def quick_library_reader() -> Iterator[None]:
    """The library reads GGUF files through `QuickReader`, and makes a model's tensor names once, not once a module.

    The library takes no reader as an argument, so the package's names are changed while this lasts, one load at a time.
    They answer so to this thread alone: to any other they are what they were.
    """
    with _ONE_LOAD:
        reader, names, owner = gguf.GGUFReader, gguf.get_tensor_name_map, get_ident()
        kept_names = lru_cache(maxsize=4)(names)

        class ReaderHere(QuickReader):
            def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
                kind = QuickReader if get_ident() == owner else reader
                return kind._get_field_parts(self, orig_offs, raw_type)

        gguf.GGUFReader = ReaderHere
        gguf.get_tensor_name_map = lambda *given: (kept_names if get_ident() == owner else names)(*given)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
