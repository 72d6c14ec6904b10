"""A server process over the fake engine and a park directory, which prints its URL.

python -m tests.fault.fake_server DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    from parkd.proxy import server
    from parkd.store.files.park_directory import open_directory
    from tests.fakes.engine import FakeEngine
    from tests.integration.api.disk_harness import disk_services

    files = open_directory(Path(sys.argv[1]))
    services, _ = disk_services(FakeEngine(), files, ram_bytes=2 << 20, disk_bytes=8 << 20, slots=3)
    return server.serve(services, on_started=lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
