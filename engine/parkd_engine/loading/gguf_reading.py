"""Reads a GGUF file's header in seconds. For a large vocabulary the `gguf` package's reader takes minutes.

That reader slices the mapped file at least once per list element, and the library reads a file twice, for configuration
and for weights. This reader gives the same fields, with one pass over each list.
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

from parkd.errors import ModelError

_LENGTH = struct.Struct("<Q")
_ONE_LOAD = RLock()
"""Allows one replacement at a time; concurrent ones could restore each other's."""
_ARRAY_HEAD_BYTES = 4 + 8
"""Element type and length."""


class QuickReader(gguf.GGUFReader):  # type: ignore[misc]
    """Gives the same fields and tensors as the class it replaces."""

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
            # Each string has two parts, length and bytes; the second is the value.
            return _ARRAY_HEAD_BYTES + size, head + parts, list(range(3, 3 + 2 * count, 2)), types
        # Slices of a plain array: those of a `memmap` cost ten times as much.
        whole = np.asarray(self._get(offset, self.gguf_scalar_to_np[kind], count))
        parts = [whole[place : place + 1] for place in range(count)]
        return _ARRAY_HEAD_BYTES + whole.nbytes, head + parts, list(range(2, 2 + count)), types

    def _texts(self, offset: int, count: int) -> tuple[int, list[Any]]:
        """The size in bytes of `count` strings at `offset`, and their parts. Raises ModelError."""
        blob, at = memoryview(self.data), offset
        parts: list[Any] = []
        for _ in range(count):
            start = at + _LENGTH.size
            if start > len(blob) or start + _LENGTH.unpack_from(blob, at)[0] > len(blob):
                raise ModelError("A text in its header passes the end of the file.")
            length = np.frombuffer(blob, dtype=np.uint64, count=1, offset=at)
            at = start + int(length[0])
            parts += (length, np.frombuffer(blob, dtype=np.uint8, count=at - start, offset=start))
        return at - offset, parts


@contextmanager
def quick_library_reader() -> Iterator[None]:
    """Makes the library read GGUF files with `QuickReader`, and build a model's tensor names once, not once per module.

    The library takes no reader as an argument, so names of the package are replaced inside this context, for one load
    at a time. Only this thread gets the new behaviour; other threads get the original.
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
