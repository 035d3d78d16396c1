"""TLS 1.3 with certificates at both ends, for connections between hosts; see `raykv.config.TlsConfig`.

A peer needs a certificate of the cluster's CA. Its name is not checked, because addresses change. The handshake of
`raykv.transport.handshake` runs inside.
"""

import logging
import select
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from raykv.config import TlsConfig
from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError
from raykv.transport.base import ChunkRun
from raykv.transport.channel import CLOSED, lost, wait_for

log = logging.getLogger(__name__)

_MARKS: Final = {"certificate": "BEGIN CERTIFICATE", "private_key": "PRIVATE KEY", "ca": "BEGIN CERTIFICATE"}
_REMEDIES: Final = {
    "expired": "renew it",
    "not yet valid": "check the clock of this host",
    "issuer": "have it signed by a CA in field 'tls.ca', and append the certificates of intermediate CAs",
    "self-signed": "have it signed by a CA in field 'tls.ca'",
    "purpose": "its extendedKeyUsage must allow serverAuth and clientAuth",
}
"""Maps a part of OpenSSL's text about a certificate to what the operator can do."""
_REFUSALS: Final = ("certificate", "unknown ca")
"""Parts of OpenSSL's texts for alerts by which a peer refuses our certificate."""


class TlsChannel:
    """A `raykv.transport.channel.Channel` over an `ssl.SSLSocket`. The socket does not block.

    One call of OpenSSL moves at most one record, which is 16 KiB. Nothing is sent at the end: messages have a length
    and a tag, so the peer notices a connection that was cut, and a forked child must send nothing.
    """

    def __init__(self, connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        self._socket, self._tick_s = connection, 0.0
        connection.setblocking(False)

    def set_tick(self, tick_s: float) -> None:
        self._tick_s = tick_s

    def begin(self) -> bool:
        try:
            self._socket.do_handshake()
        except OSError as error:
            self._wait(error)
            return False
        return True

    def send(self, pieces: Sequence[memoryview]) -> int:
        sent = 0
        try:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    step = self._socket.send(piece[at:])
                    at, sent = at + step, sent + step
        except OSError as error:
            self._wait(error, wait=not sent)
        return sent

    def receive(self, views: Sequence[memoryview], *, fill: bool = False, wait: bool = True) -> int:
        got = 0
        try:
            for view in views:
                at = 0
                while at < len(view):
                    step = self._socket.recv_into(view[at:])
                    if not step:
                        raise PeerUnavailable(CLOSED)
                    at, got = at + step, got + step
                    if not fill:
                        return got
        except OSError as error:
            self._wait(error, wait=wait and not got)
        return got

    def poll(self, timeout_s: float) -> None:
        # `receive` has just returned 0, so OpenSSL holds no bytes that it could give.
        wait_for(self._socket, select.POLLIN, timeout_s)

    def fill_chunks(self, ahead: memoryview, run: ChunkRun, deadline_s: float) -> bool:
        return False

    def _wait(self, error: OSError, *, wait: bool = True) -> None:
        """Wait for a tick if OpenSSL has to wait for the socket. Raise RayKVError for any other error."""
        if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
            if wait:
                event = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
                wait_for(self._socket, event, self._tick_s)
            return
        raise _problem(error) from error


def _problem(error: OSError) -> RayKVError:
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLSyscallError):
        return lost(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return PeerUnavailable(CLOSED)
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProtocolError(f"TLS: the peer's certificate is refused: {error.verify_message}")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in reason:
        return ProtocolError("TLS: the peer does not speak TLS: set field 'tls' at both ends, or at none")
    if "alert" in reason:  # the peer has ended the connection, and says why
        refused = any(word in reason for word in _REFUSALS)
        return ProtocolError(f"TLS: the peer refuses our certificate ({reason})") if refused else lost(error)
    return ProtocolError(f"TLS: {reason}")


class _Contexts(NamedTuple):
    client: ssl.SSLContext
    server: ssl.SSLContext


class Tls:
    """The certificates of this process. Thread-safe. New connections use files that were replaced."""

    def __init__(self, config: TlsConfig) -> None:
        """Load the files.

        Raises:
            ConfigError: A file is missing or wrong, or the CAs do not accept the certificate. The message names the
                field and the remedy.
        """
        self._config = config
        self._versions, self._contexts = _versions(config), _load(config)

    def wrap(self, connection: socket.socket, *, server: bool = False) -> ssl.SSLSocket:
        """Return a socket with TLS in place of `connection`, which cannot be used any more. Nothing is sent yet.

        Raises:
            OSError: The connection has ended.
        """
        self._renew()
        context = self._contexts.server if server else self._contexts.client
        return context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)

    def _renew(self) -> None:
        """Load the files again if they have changed. If they are wrong, the earlier ones stay in use."""
        versions = _versions(self._config)
        if versions == self._versions:
            return
        self._versions = versions  # before the attempt, so that there is one attempt for each change
        try:
            self._contexts = _load(self._config)
        except ConfigError as error:
            log.error("new TLS files are not used, the earlier ones are: %s", error)


def _files(config: TlsConfig) -> dict[str, Path]:
    return {"certificate": config.certificate, "private_key": config.private_key, "ca": config.ca}


def _versions(config: TlsConfig) -> tuple[tuple[int, int], ...]:
    """Return numbers that change when a file is replaced or changed."""
    try:
        found = [path.stat() for path in _files(config).values()]
    except OSError:
        return ()
    return tuple((each.st_mtime_ns, each.st_ino) for each in found)


def _load(config: TlsConfig) -> _Contexts:
    for field, path in _files(config).items():
        try:
            text = path.read_text(encoding="latin-1")
        except OSError as error:
            raise ConfigError(f"field 'tls.{field}': cannot read {path} ({error.strerror}); put it there") from None
        if _MARKS[field] not in text:
            raise ConfigError(f"field 'tls.{field}': {path} has no '{_MARKS[field]}' line; convert it to PEM")
    contexts = _Contexts(*(_context(config, kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)))
    contexts.server.num_tickets = 0  # sessions are not resumed
    try:
        _meet(contexts)
    except ssl.SSLError as error:
        text = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error.reason)
        remedy = next((remedy for part, remedy in _REMEDIES.items() if part in text), "replace it")
        raise ConfigError(f"field 'tls.certificate': {config.certificate} is not accepted: {text}; {remedy}") from None
    return contexts


def _context(config: TlsConfig, kind: int) -> ssl.SSLContext:
    def refuse() -> str:
        raise ConfigError(f"field 'tls.private_key': {config.private_key} has a passphrase; store it without one")

    made = ssl.SSLContext(kind)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(config.certificate, config.private_key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"is not the key of {config.certificate}; give the files of one pair"
        else:
            problem = f"or {config.certificate} is damaged ({error.reason or error}); replace it"
        raise ConfigError(f"field 'tls.private_key': {config.private_key} {problem}") from None
    try:
        made.load_verify_locations(config.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"field 'tls.ca': {config.ca} is damaged ({error.reason or error}); replace it") from None
    return made


def _meet(contexts: _Contexts) -> None:
    """Let the two contexts do a handshake with each other, in memory. So a wrong certificate is noticed at the start.

    Raises:
        ssl.SSLError: One of them does not accept the certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(to_client, to_server)
    server = contexts.server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
