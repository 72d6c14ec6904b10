"""vLLM's spec of tiers, which also runs where the model runs on processors: vLLM's own worker needs a card."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class ParkdSpec(TieringOffloadingSpec):
    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu() or self.config.canonical_layout:
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
            except BaseException:
                region.cleanup()
                raise
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies blocks between a cache in host memory and vLLM's tier there, at once: vLLM submits a store when the step
    that computes it is over, and a load before the step that needs it.

    chunk | block 0 of tensor 0, block 1 of tensor 0, ... | block 0 of tensor 1, ... |
    """

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        """`region` belongs to it from now on."""
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._groups = caches.group_data_refs
        self._pages = [each.page_size_bytes for each in caches.tensors]
        self._blocks = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        """`[blocks, page_bytes]` of each tensor."""
        self._chunks = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        """`[chunks, blocks_per_chunk * page_bytes]` of each tensor."""
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._move(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._move(job_id, dst_spec, src_spec, stores=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        self._blocks, self._chunks = [], []
        self._region.cleanup()

    def _move(self, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, *, stores: bool) -> bool:
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        moved = 0
        for refs, size, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            chunk = -1
            for at in range(size):
                block, place = next(blocks), (first + at) % self._per_chunk
                if at == 0 or place == 0:
                    chunk = next(chunks)
                for ref in refs:
                    page = self._pages[ref.tensor_idx]
                    live = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
                    start = place * page
                    kept = self._chunks[ref.tensor_idx][chunk, start : start + ref.page_size_bytes]
                    (kept if stores else live).copy_(live if stores else kept)
                    moved += ref.page_size_bytes
        self._finished.append(TransferResult(job_id, True, moved, 0.0))
        return True
