"""`/parkd/conversations/ID/export` and `/parkd/conversations/import`: a conversation goes, or comes, in one file.

    export   found -> held -> copied to a spool file, compared with its sums -> released -> sent
    import   received in a spool file -> read, compared, fitted -> room reserved -> copied -> committed

A key exports what is its own, and imports into its own namespace; an operator's key does both for all keys. Where
several keys share a namespace, only an operator imports: what one of them brought would answer the others, and nobody
can tell from bytes whether they are the state of the tokens beside them. For the same reason only an operator imports
states that are more than numbers: places in memory, or what another program parses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from parkd.errors import (
    Conflict,
    ConversationDamaged,
    ConversationRefused,
    Forbidden,
    InvalidRequest,
    NotFound,
    ParkdError,
)
from parkd.identity.chain import prefix_hashes
from parkd.lane.reports.turn_log import requests_log
from parkd.portable.fitting import is_plain, recut_for
from parkd.portable.header import FIXED_BYTES, HEADER_LIMIT_BYTES, DamagedFile, PortableHeader, lengths
from parkd.portable.landing import fill, request_for
from parkd.portable.parts import read_header, verify
from parkd.portable.source import export, header_of
from parkd.proxy.access import Caller, check_deliberate, namespace_of, namespaces_of
from parkd.proxy.guard import Handler
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import body_pieces, check_body, id_headers
from parkd.proxy.spool import Spool, Spools
from parkd.state import Checksums, Recut
from parkd.store.records import (
    Capture,
    CaptureRequest,
    ConversationGone,
    Held,
    Parked,
    RefusalReason,
    Refused,
    Tier,
    name_of,
)
from parkd.store.store import ConversationStore
from parkd.types import ConversationKey

LEAST_BYTES_A_S = 16 * 1024
"""The lowest average rate at which a conversation may arrive or be taken."""
SENT_BYTES = 128 << 10
"""What is read from a spool file and sent at a time: a connection whose client takes nothing holds no more."""
ROOM_WAIT_S = 10.0
"""Longest wait for writes under way to free the room that an import needs."""
CONTENT_TYPE = "application/vnd.parkd.conversation"
_WAITING = (RefusalReason.BUDGET, RefusalReason.SLOTS, RefusalReason.BUSY)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")

T = TypeVar("T")
log = logging.getLogger(__name__)


class PortableEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        config, store = proxy.config, proxy.services.store
        self._proxy = proxy
        self._store = store
        self._info = proxy.services.engine.info
        budget_bytes = 0 if store is None else store.config.budget_bytes
        self._limit_bytes = budget_bytes + HEADER_LIMIT_BYTES
        self._spools = Spools(
            self._limit_bytes,
            proxy.lane.retry_after_s,
            owners=config.owners,
            directory=proxy.services.spool_directory,
        )
        self._landing = anyio.Lock()
        """One import at a time is read into memory, and takes room in the store."""

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        return [
            ("GET", "/parkd/conversations/{id}/export", self.export),
            ("POST", "/parkd/conversations/import", self.land),
        ]

    # Out

    async def export(self, request: Request, request_id: str) -> ASGIApp:
        caller = self._proxy.caller_of(request)
        store = self._parks()
        parked, key = self._own(store, caller, request.path_params["id"])
        with self._spools.open(caller.owner) as spool:
            parked = await self._in_ram(parked)
            try:
                held = store.hold(parked.id)
            except ConversationGone:
                raise _not_found(parked.id) from None
            try:
                header = header_of(
                    held,
                    store.layout,
                    store.layout.block_tokens,
                    fingerprint=self._info.fingerprint,
                    steering=key.steering,
                    model=self._info.model_name,
                )
                spool.reach(header.file_bytes)
                await _in_thread(_exported, held, header, spool.file)
            finally:
                held.release()
            requests_log.info(
                "key=%s exported=%s tokens=%d bytes=%d", caller.shown, parked.id, header.tokens, header.state_bytes
            )
            name = f"{_UNSAFE.sub('_', parked.id)[:64]}.parkd"
            headers = {
                **id_headers(request_id),
                "content-type": CONTENT_TYPE,
                "content-length": str(header.file_bytes),
                "content-disposition": f'attachment; filename="{name}"',
            }
            return _Sent(spool.keep(), header.file_bytes, headers, self._proxy.config.body_silence_s)

    def _own(self, store: ConversationStore, caller: Caller, asked: str) -> tuple[Parked, ConversationKey]:
        """The longest row of the conversation of that name or id which is the caller's, and its key. Raises NotFound,
        and Conflict if it cannot be exported."""
        exact = store.get(asked)
        for parked in store.named(name_of(asked)) if exact is None else [exact]:
            if not self._is_own(caller, parked):
                continue
            if parked.layout_digest != store.layout.digest:
                raise Conflict(
                    "This conversation is on disk and of other weights or another layer split, so only its files know "
                    "it. Stop the server and export it with --park-dir."
                )
            key = self._key_of(parked)
            if key is None:
                raise Conflict(
                    "This conversation was steered by control vectors that its request chose, and what is parked does "
                    "not tell which, so it cannot be exported."
                )
            return parked, key
        raise _not_found(asked)

    def _is_own(self, caller: Caller, parked: Parked) -> bool:
        if caller.is_operator:
            return True
        if parked.namespace.partition("/")[0] != caller.namespace:
            return False
        requests = self._proxy.requests
        return not caller.shares_namespace or requests.said_whole(caller.owner, parked.key_digest, parked.units)

    def _key_of(self, parked: Parked) -> ConversationKey | None:
        """The key of a conversation: not steered, or by the vectors that steer by default; None: by others."""
        engine = self._proxy.services.engine
        for steering in (engine.steering_digest(None), b""):
            key = ConversationKey(parked.namespace, self._info.fingerprint, steering)
            if key.digest == parked.key_digest:
                return key
        return None

    async def _in_ram(self, parked: Parked) -> Parked:
        """The conversation, read from disk if it is there alone. Raises ConversationRefused."""
        if parked.tier is not Tier.DISK:
            return parked
        disk = self._proxy.disk
        read = None if disk is None else await disk.promote(parked.id, parked.position)
        if read is None or read.position < parked.position:
            raise ConversationRefused(
                "This conversation is on disk, and memory has no room to read it now, or it could not be read. Try "
                "again later, or stop the server and export it with --park-dir."
            )
        return read

    # In

    async def land(self, request: Request, request_id: str) -> ASGIApp:
        if request.headers.get("content-type", "") != CONTENT_TYPE:
            check_deliberate(request.headers)
        caller = self._proxy.caller_of(request)
        store = self._parks()
        namespace = self._namespace(caller, request.query_params.get("into"))
        if not is_plain(store.layout) and not caller.is_operator:
            raise Forbidden(
                "The state of this model is more than numbers to calculate with, so importing it could harm the "
                "server: it asks for an operator's key."
            )
        with self._spools.open(caller.owner) as spool:
            await self._receive(request, spool)
            async with self._landing:
                header, recut = await _in_thread(self._examined, store, spool)
                key = ConversationKey(namespace, self._info.fingerprint, header.steering)
                hashes = await _in_thread(prefix_hashes, header.units, key.digest, store.layout.block_tokens)
                wanted = request_for(header, store.layout, key.digest, namespace, hashes)
                parked = await self._commit(store, wanted, partial(self._filled, store, spool, header, recut))
        requests_log.info(
            "key=%s imported=%s tokens=%d bytes=%d", caller.shown, parked.id, parked.position, header.state_bytes
        )
        body = {
            "id": parked.id,
            "tokens": parked.position,
            "bytes": header.state_bytes,
            "checkpoints": len(header.positions),
            "recut": recut is not None,
        }
        return JSONResponse(body, headers=id_headers(request_id))

    def _namespace(self, caller: Caller, into: str | None) -> str:
        """Where an import goes. Raises Forbidden, and InvalidRequest for a key that is not known."""
        config = self._proxy.config
        if into is None:
            if caller.has_company and not caller.is_operator:
                raise Forbidden(
                    "This key shares its namespace with others, which would be answered from what it imports. Ask the "
                    "operator to import it."
                )
            return caller.namespace
        if not caller.is_operator:
            raise Forbidden("Only an operator's key imports for other keys. Leave `into` out to import for your own.")
        known = namespaces_of(config.api_keys, config.named_keys, config.operator_keys)
        named = {key.name: key for key in config.named_keys}
        asked = {into, f"={into}"}
        if into in named:
            own = named[into]
            asked = {namespace_of(own.key) if own.namespace is None else f"={own.namespace}"}
        found = sorted(known & asked)
        if not found:
            raise InvalidRequest("No key and no namespace of that name is known here.", param="into")
        return found[0]

    async def _receive(self, request: Request, spool: Spool) -> None:
        """Takes the body. What is too long, or no conversation, is refused as soon as that is seen."""
        spool.check(check_body(request, self._limit_bytes, "it is"))
        head, size = b"", 0
        silence_s = self._proxy.config.body_silence_s
        async for piece in body_pieces(request, self._limit_bytes, silence_s, LEAST_BYTES_A_S):
            if len(head) < FIXED_BYTES:
                head += piece[: FIXED_BYTES - len(head)]
                if len(head) == FIXED_BYTES:
                    _undamaged(lengths, head)
            size += len(piece)
            spool.reach(size)
            await _in_thread(spool.file.write, piece)

    def _examined(self, store: ConversationStore, spool: Spool) -> tuple[PortableHeader, Recut | None]:
        """What arrived, all of it compared, and how it is cut for this server. Runs in a worker thread."""
        header = _undamaged(read_header, spool.file, spool.bytes)
        recut = recut_for(header, store.layout, self._info.fingerprint, store.layout.block_tokens)
        _undamaged(verify, spool.file, header)
        return header, recut

    def _filled(
        self, store: ConversationStore, spool: Spool, header: PortableHeader, recut: Recut | None, capture: Capture
    ) -> Checksums:
        return _undamaged(fill, spool.file, header, capture.transfer, store.layout, recut)

    async def _commit(
        self, store: ConversationStore, wanted: CaptureRequest, filled: Callable[[Capture], Checksums]
    ) -> Parked:
        """Reserves room, fills and commits it: all of it or nothing. Raises ConversationRefused."""
        capture = await self._reserved(store, wanted)
        try:
            sums = await _in_thread(filled, capture)
            return store.commit(capture, sums)
        except BaseException:  # no thread writes to the room any more
            store.abort(capture)
            raise

    async def _reserved(self, store: ConversationStore, wanted: CaptureRequest) -> Capture:
        disk, monotonic = self._proxy.disk, self._proxy.services.monotonic
        deadline_s = monotonic() + ROOM_WAIT_S
        while True:
            outcome = store.begin_capture(wanted)
            if isinstance(outcome, Capture):
                return outcome
            left_s = deadline_s - monotonic()
            may_wait = disk is not None and outcome.reason in _WAITING and left_s > 0
            if not may_wait or disk is None or not await disk.room(left_s):
                raise _no_room(outcome)

    def _parks(self) -> ConversationStore:
        if self._store is None:
            raise NotFound("This server parks nothing: start it with --conversation-cache-mib.")
        return self._store


class _Sent:
    """A spool file as an answer."""

    def __init__(self, spool: Spool, size: int, headers: dict[str, str], silence_s: float) -> None:
        self._spool = spool
        self._size = size
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._silence_s = silence_s

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """A client that takes nothing for long is left, and sees that the length is not what was said."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._spool.file.seek(0)
            left = self._size
            while left:
                piece = await _in_thread(self._spool.file.read, min(SENT_BYTES, left))
                left -= len(piece)
                with anyio.move_on_after(self._silence_s) as waited:
                    await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
                if waited.cancelled_caught:
                    log.info("an export was not taken for %g s, and its connection is closed", self._silence_s)
                    return
        finally:
            self._spool.close()


async def _in_thread(function: Callable[..., T], *given: object) -> T:
    """Runs to its end even if its client leaves: what it reads or writes must stay until then."""
    outcome: list[T] = []
    with anyio.CancelScope(shield=True):
        outcome.append(await anyio.to_thread.run_sync(partial(function, *given)))
    return outcome[0]


def _exported(held: Held, header: PortableHeader, file: BinaryIO) -> None:
    """Raises Conflict if what is parked cannot be exported, and ConversationRefused where the machine fails."""
    try:
        export(held, header, file)
    except DamagedFile as error:
        raise Conflict(f"This conversation cannot be exported: {error}. Its next turn parks it anew.") from None
    except OSError as error:
        raise ConversationRefused(f"The machine could not take it: {error}. Try again later.") from error


def _undamaged(function: Callable[..., T], *given: object) -> T:
    """Raises ConversationDamaged where `function` finds damage, and ConversationRefused where the machine fails."""
    try:
        return function(*given)
    except DamagedFile as error:
        raise ConversationDamaged(f"The file cannot be imported: {error}. Export the conversation again.") from None
    except (OSError, MemoryError) as error:
        raise ConversationRefused(f"The machine could not take it: {error}. Try again later.") from error


def _no_room(refused: Refused) -> ParkdError:
    return ConversationRefused(
        f"There is no room for it: {refused.message}. Forget other conversations, or start parkd with a larger "
        "--conversation-cache-mib."
    )


def _not_found(asked: str) -> NotFound:
    return NotFound(f"No conversation {asked[:64]!r} of this key is parked.", param="id")
