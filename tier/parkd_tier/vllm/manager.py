"""vLLM's SecondaryTierManager over a tier. vLLM calls it from its scheduler, so nothing here waits for a file."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from vllm.config import get_current_vllm_config
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from parkd.store.budget import mib
from parkd.store.chunks import Chunk
from parkd_tier.files import put_file
from parkd_tier.opening import FACTS_NAME, PROOF_SUFFIX, canary_token, open_tier, proof_of
from parkd_tier.tier import Loaded
from parkd_tier.vllm.counters import Counted, definitions
from parkd_tier.vllm.facts import identity_of
from parkd_tier.vllm.gate import Gate, Place, Role, encoded
from parkd_tier.vllm.settings import TierSettings

log = logging.getLogger(__name__)


class ParkdTier(SecondaryTierManager):
    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        full_groups: Collection[int] = (),
        **values: Any,
    ) -> None:
        """`full_groups`: the groups of layers that keep every position; the connector adds them. `values`: those of
        `TierSettings`. Raises ConfigError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.of(values)
        self._full_groups = frozenset(full_groups)
        config = get_current_vllm_config()
        self._rows: np.ndarray[Any, np.dtype[np.uint8]] | None = np.asarray(primary_kv_view).view(np.uint8)
        """`[chunks, chunk_bytes]`: vLLM's tier in memory, which all workers share."""
        identity = identity_of(config, offloading_spec, self.block_size_bytes, settings.cache_directory, None)
        self._tier = open_tier(
            settings.replica_directory(offloading_spec.config.parallel),
            settings.options(self._rows.nbytes),
            self.block_size_bytes,
            identity,
        )
        self._gate = Gate(
            canary_token(self._tier.fs),
            proof_of(self._tier.fs, identity.fingerprint),
            lambda verdict: self._tier.put(identity.fingerprint.hex() + PROOF_SUFFIX, encoded(verdict, time.time())),
            is_needed=settings.needs_canary,
        )
        tokens = max(group.tokens_per_block for group in offloading_spec.config.groups)
        put_file(
            self._tier.fs,
            FACTS_NAME,
            json.dumps({"chunk_tokens": tokens * offloading_spec.config.cache.blocks_per_chunk}).encode(),
        )
        self._not_kept: list[JobResult] = []
        self._counted = Counted(self._tier.store)
        there = self._tier.store.table.on_disk()
        log.info(
            "%s holds %d conversations (%s of %s)",
            settings.directory,
            sum(not each.is_foreign for each, _ in there),
            mib(self._tier.store.disk.bytes_in_use),
            mib(settings.disk_bytes),
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        return definitions()

    def get_stats(self) -> Any:
        return self._counted.take()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        role = self._gate.role(req_context.kv_transfer_params)
        if role is not None:
            req_context.set_state(role)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        role = req_context.get_state(Role)
        if role is not None and role.replay:
            stand_in = self._gate.stand_in(role, _place(key, req_context))
            if stand_in is not None and self._tier.has(stand_in):
                return LookupResult.HIT
            is_coming = not self._gate.knows(role) or (stand_in is not None and self._tier.is_busy)
            return LookupResult.RETRY if is_coming and self._gate.waits(role) else LookupResult.MISS
        return LookupResult.HIT if self._gate.is_open and self._tier.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        context = job_metadata.req_context
        role = context.get_state(Role)
        if role is not None and role.replay:  # what follows a replay was computed from it, right or not
            self._not_kept.append(JobResult(job_metadata.job_id, True, transfer_bytes=0))
            return
        self._tier.follow(context.req_id, self._chain(context, job_metadata.keys))
        self._tier.offer(job_metadata.job_id, context.req_id, self._chunks(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        chunks, context = self._chunks(job_metadata), job_metadata.req_context
        role = context.get_state(Role)
        if role is not None and role.replay:
            stand_ins = [self._gate.stand_in(role, _place(key, context)) for key in job_metadata.keys]
            chunks = [Chunk(key or b"", chunk.buffer) for key, chunk in zip(stand_ins, chunks, strict=True)]
            self._gate.note_replayed(len(chunks))
        self._tier.load(job_metadata.job_id, chunks)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._not_kept = self._not_kept, []
        for outcome in self._tier.poll():
            if isinstance(outcome, Loaded):
                results.append(
                    JobResult(
                        outcome.load,
                        outcome.is_right,
                        transfer_time=outcome.seconds,
                        transfer_bytes=outcome.bytes,
                    )
                )
            else:
                results.append(JobResult(outcome.offer, not outcome.why_not, transfer_bytes=outcome.bytes))
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        role = req_context.get_state(Role)
        if role is not None and role.record:
            self._gate.record(role, {_place(key, req_context): key for key in _positions(req_context)})
        self._tier.follow(req_context.req_id, self._chain(req_context, ()))
        self._tier.ended(req_context.req_id)

    def has_pending_work(self) -> bool:
        return self._tier.is_busy

    def drain_jobs(self) -> None:
        self._tier.drain()

    def shutdown(self) -> None:
        self._tier.close()
        self._rows = None  # vLLM gives its memory back after this, which views of it would prevent

    def _chunks(self, job: TransferJob) -> list[Chunk]:
        assert self._rows is not None
        return [Chunk(bytes(key), self._rows[at]) for key, at in zip(job.keys, job.chunk_ids.tolist(), strict=True)]

    def _chain(self, context: ReqContext, keys: Collection[OffloadKey]) -> list[bytes]:
        """All keys of a request that vLLM knows so far, by the position of their end: also those of state that the
        device still had, which vLLM asks nobody for. Where no group of layers keeps all positions, only those of state
        that is here or comes here: what left a window is offered by nobody."""
        places = {key: context.get_offload_key_position(key) or 0 for key in (*_positions(context), *keys)}
        if not self._full_groups:
            places = {key: at for key, at in places.items() if key in keys or self._tier.has(key)}
        whole = self._full_groups
        return sorted(places, key=lambda key: (places[key], get_offload_group_idx(key) not in whole, key[-4:]))


def _positions(context: ReqContext) -> Mapping[OffloadKey, int]:
    """The end of each chunk of a request, by its key. vLLM tells the end of one key, and all keys only like this."""
    known: Mapping[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
    return known


def _place(key: OffloadKey, context: ReqContext) -> Place:
    return context.get_offload_key_position(key) or 0, get_offload_group_idx(key)
