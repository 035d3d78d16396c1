"""The handshake: each end of a new connection verifies that its peer belongs to the cluster.

Over TCP each end proves that it knows the cluster's secret. The proof is an HMAC over fresh nonces of both ends. From
the end of the handshake on, every message has a tag (`raykv.transport.seal`). Over a Unix socket the kernel reports the
peer's user. Each end accepts only its own user, the secret is empty, and messages have no tag. With TLS, all of this
runs inside TLS.

    client: "raykv", version, nonce, key id
    server: "raykv", version, nonce, proof
    client: proof
    server: 1

While a secret is rotated, a server accepts several. The key id says which of them the client uses. Nobody needs to
trust it: the client accepts a proof by its own secret only, so a changed key id ends the handshake.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from raykv.errors import PeerUnavailable, ProtocolError
from raykv.protocol.codec import VERSION
from raykv.protocol.keyring import KEY_ID_NBYTES, key_id
from raykv.transport.seal import Seal
from raykv.transport.stream import Stream

GREETING: Final = struct.Struct("<5sH32s")
GREETING_MAGIC: Final = b"raykv"
PROOF_NBYTES: Final = 32
_ACCEPTED: Final = b"\x01"
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a connection with TLS."""


class WrongSecret(PeerUnavailable):
    """The peer does not know the secret. It may have been rotated; otherwise the peer belongs to another cluster."""


def greet_server(stream: Stream, secret: bytes, deadline_s: float) -> None:
    """Do the client's part of the handshake.

    Raises:
        WrongSecret: The server does not know the secret.
        PeerUnavailable: The server does not answer, or refuses the connection.
        ProtocolError: The server speaks another protocol or version, or one end refuses the other's certificate.
    """
    stream.secure(deadline_s)
    nonce = secrets.token_bytes(32)
    try:
        stream.send(greeting(nonce) + key_id(secret), deadline_s)
        hello = stream.exactly(GREETING.size, deadline_s)
    except PeerUnavailable as error:
        if stream.socket.family == socket.AF_UNIX or time.monotonic() >= deadline_s:
            raise
        cause = "refuses our certificate" if stream.has_tls else "requires TLS, and field 'tls' is not set here"
        raise PeerUnavailable(f"{error}; perhaps the peer {cause}") from error
    theirs = read_greeting(hello)
    if not hmac.compare_digest(stream.exactly(PROOF_NBYTES, deadline_s), proof(secret, "answering", nonce, theirs)):
        raise WrongSecret("the peer does not know this cluster's secret: it belongs to another cluster")
    stream.send(proof(secret, "asking", nonce, theirs), deadline_s)
    if stream.exactly(1, deadline_s) != _ACCEPTED:
        raise PeerUnavailable("the peer refused the connection")
    if stream.socket.family != socket.AF_UNIX:
        stream.seal = Seal.of_client(secret, nonce + theirs)


def greet_client(stream: Stream, accepted: Sequence[bytes], admit: Callable[[bytes], None], deadline_s: float) -> None:
    """Do the server's part of the handshake.

    Args:
        stream: The connection.
        accepted: The secrets that a client may use, at least one.
        admit: Called with the client's secret when the client has proved that it knows it. It may raise
            PeerUnavailable to refuse the client.
        deadline_s: When to give up.

    Raises:
        PeerUnavailable: The client does not answer, or `admit` refused the client.
        ProtocolError: The client speaks another protocol or version, knows none of the secrets, or one end refuses the
            other's certificate.
    """
    stream.secure(deadline_s)
    nonce = secrets.token_bytes(32)
    hello = stream.exactly(GREETING.size, deadline_s)
    stream.send(greeting(nonce), deadline_s)  # before any check, so that a client of another version learns our version
    theirs = read_greeting(hello)
    wanted = stream.exactly(KEY_ID_NBYTES, deadline_s)
    secret = next((each for each in accepted if key_id(each) == wanted), accepted[0])
    stream.send(proof(secret, "answering", theirs, nonce), deadline_s)
    if not hmac.compare_digest(stream.exactly(PROOF_NBYTES, deadline_s), proof(secret, "asking", theirs, nonce)):
        raise ProtocolError("the peer does not know this cluster's secret")
    admit(secret)
    stream.send(_ACCEPTED, deadline_s)
    if stream.socket.family != socket.AF_UNIX:
        stream.seal = Seal.of_server(secret, theirs + nonce)


def greeting(nonce: bytes) -> bytes:
    """Return the greeting of one end: the first bytes that it sends."""
    return GREETING.pack(GREETING_MAGIC, VERSION, nonce)


def read_greeting(raw: bytes) -> bytes:
    """Return the nonce in the peer's greeting. Raises ProtocolError if the peer speaks another protocol or version."""
    magic, version, nonce = GREETING.unpack(raw)
    if magic.startswith(_TLS_HANDSHAKE):
        raise ProtocolError("the peer speaks TLS: set field 'tls' at both ends, or at none")
    if magic != GREETING_MAGIC:
        raise ProtocolError(f"the peer does not speak raykv (it begins with {magic!r})")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, we speak {VERSION}: upgrade the older one")
    return bytes(nonce)


def proof(secret: bytes, role: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that the sender knows the secret. A proof is valid for one connection and one role only."""
    return hmac.digest(secret, role.encode() + client_nonce + server_nonce, hashlib.sha256)


def require_same_user(connection: socket.socket) -> None:
    """Raise PeerUnavailable if the peer of a Unix socket runs as another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", raw)[1]
    if user != os.getuid():
        raise PeerUnavailable(f"the other end of this Unix socket is user {user}, we are {os.getuid()}")
