"""vLLM's SecondaryTierManager over a tier. vLLM calls it from its scheduler, so nothing here waits for a file."""

from __future__ import annotations

import logging
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
from parkd_tier.opening import open_tier
from parkd_tier.tier import Loaded
from parkd_tier.vllm.facts import identity_of
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
        there = self._tier.store.table.on_disk()
        log.info(
            "%s holds %d conversations (%s of %s)",
            settings.directory,
            sum(not each.is_foreign for each, _ in there),
            mib(self._tier.store.disk.bytes_in_use),
            mib(settings.disk_bytes),
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002
        return LookupResult.HIT if self._tier.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        context = job_metadata.req_context
        self._tier.follow(context.req_id, self._chain(context, job_metadata.keys))
        self._tier.offer(job_metadata.job_id, context.req_id, self._chunks(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._tier.load(job_metadata.job_id, self._chunks(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
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
        known: Mapping[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        places = {key: context.get_offload_key_position(key) or 0 for key in (*known, *keys)}
        if not self._full_groups:
            places = {key: at for key, at in places.items() if key in keys or self._tier.has(key)}
        whole = self._full_groups
        return sorted(places, key=lambda key: (places[key], get_offload_group_idx(key) not in whole, key[-4:]))
