"""Parses node addresses, listens on them, and sets socket options."""

import os
import socket
from typing import Final

from raykv.errors import ConfigError

BACKLOG: Final = 128
MAX_DIGITS: Final = 5


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Convert "host:port" or "unix:..." to a socket family and a socket address. Raises ConfigError for other text."""
    if address.startswith("unix:"):
        name = address.removeprefix("unix:")
        return socket.AF_UNIX, "\0" + name[1:] if name.startswith("@") else name
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) <= MAX_DIGITS) or "\0" in host:
        raise ConfigError(f"field 'address': {address!r} is neither 'host:port' nor 'unix:/path'")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen on an address, or raise ConfigError. Returns the socket, and the address with the actual port."""
    family, where = parse_address(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(where, str):
            if not where.startswith("\0") and os.path.exists(where):
                os.unlink(where)  # left by a killed node; names are unique, so no live node uses the file
            old = os.umask(0o177)
            try:
                listener.bind(where)
            finally:
                os.umask(old)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            address = "{}:{}".format(*listener.getsockname()[:2])
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"field 'bind': cannot listen on {address}: {error.strerror}") from error
    return listener, address


def tune(connection: socket.socket) -> None:
    """Disable Nagle's algorithm. Enable TCP keepalive, so that leases of clients on a dead host end within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
