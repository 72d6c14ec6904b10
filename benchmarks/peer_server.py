"""llama.cpp's own HTTP server, from the prebuilt `xllamacpp` wheel, as a process of its own.

python -m benchmarks.peer_server MODEL.gguf PORT CONTEXT_TOKENS CACHE_RAM_MIB [SLOT_DIR SLOTS]
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    import xllamacpp

    model, port, context_tokens, cache_ram_mib, *slots = sys.argv[1:]
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = int(port)
    parameters.n_ctx = int(context_tokens)
    parameters.n_parallel = int(slots[1]) if slots else 1
    if slots:
        parameters.slot_save_path = slots[0].rstrip("/") + "/"
        parameters.endpoint_slots = True
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.cache_ram_mib = int(cache_ram_mib)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    server = xllamacpp.Server(parameters)
    ended.wait()
    del server
    # The server's worker threads do not end by themselves, and there is nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
