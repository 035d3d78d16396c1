"""Finds the IPv4 addresses of this host's NICs."""

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Sequence
from typing import Final

from raykv.errors import ConfigError

log = logging.getLogger(__name__)

SIOCGIFADDR: Final = 0x8915
MAX_NAME: Final = 15
"""Longest name of an interface on Linux."""


def nic_addresses(names: Sequence[str]) -> list[str]:
    """Return the IPv4 address of each interface. An address among the names is returned unchanged.

    An interface that has no address now, because it is down, gets an empty text and a warning.

    Raises:
        ConfigError: There is no such interface.
    """
    return [name if _is_address(name) else _address_of(name) for name in names]


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(name))
    except ValueError:
        return False


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            request = struct.pack("256s", name.encode()[:MAX_NAME])
            return socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = [each for _, each in socket.if_nameindex()]
            if name.partition(":")[0] not in known:
                raise ConfigError(f"field 'nics': no interface {name!r} here; there are: {', '.join(known)}") from error
            log.warning("the NIC %s is not used, because it has no IPv4 address: %s", name, error.strerror)
            return ""
