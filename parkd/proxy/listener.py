"""The server's socket, bound before the model is loaded."""

from __future__ import annotations

import socket

from parkd.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Binds the port at once, so that a port in use is reported within a second and not after the model is loaded.

    The socket does not listen yet: connections are refused until the server starts. Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: not an address of this machine ({error.strerror})") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port (0 takes any free one) "
            "or another --host"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
