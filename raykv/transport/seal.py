"""The seal of a session: a tag behind every message, so that nobody between the two ends can change the conversation.

The handshake proves that both ends know the cluster's secret, but not that later bytes come from them. So both ends
derive two keys from the secret and the nonces of the handshake, one key for each direction. The tag of a message is a
keyed BLAKE2b over the number of the message in its direction, the header and the body. A message that was changed,
injected, repeated, left out or sent in another order has a wrong tag, and the receiver ends the connection.

The bytes of chunks have no tag. Their checksums are in sealed messages, but xxh3 is no cryptographic hash: see
docs/security.md.

Source: BLAKE2 as a message authentication code (RFC 7693, section 2.9); numbers of records as in TLS 1.3 (RFC 8446,
section 5.3).
"""

import hashlib
import hmac
import struct
from typing import Final

from raykv.errors import ProtocolError

TAG_NBYTES: Final = 16
_NUMBER: Final = struct.Struct("<Q")


class Seal:
    """Makes the tags of sent messages, and checks the tags of received messages. Not thread-safe."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        """Take the keys of the two directions, 32 bytes each."""
        self._sending, self._receiving = _keyed(sending), _keyed(receiving)
        self._sent = self._received = 0

    @classmethod
    def of_client(cls, secret: bytes, nonces: bytes) -> "Seal":
        """Make the client's seal. `nonces`: the client's nonce, then the server's."""
        return cls(*_keys(secret, nonces))

    @classmethod
    def of_server(cls, secret: bytes, nonces: bytes) -> "Seal":
        """Make the server's seal. `nonces`: the client's nonce, then the server's."""
        to_server, to_client = _keys(secret, nonces)
        return cls(to_client, to_server)

    def tag(self, message: bytes) -> bytes:
        """Return the tag of the next message to send. `message`: header and body."""
        made = self._sending.copy()
        made.update(_NUMBER.pack(self._sent))
        made.update(message)
        self._sent += 1
        return made.digest()

    def check(self, header: bytes, body: memoryview | bytes, tag: memoryview | bytes) -> None:
        """Check the tag of the next received message. Raises ProtocolError if it is wrong."""
        made = self._receiving.copy()
        made.update(_NUMBER.pack(self._received))
        made.update(header)
        made.update(body)
        self._received += 1
        if not hmac.compare_digest(made.digest(), tag):
            raise ProtocolError("the seal of a message is wrong: somebody changed, repeated or reordered messages")


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys for messages to the server and to the client."""
    to_server = hmac.digest(secret, b"seal asking" + nonces, hashlib.sha256)
    return to_server, hmac.digest(secret, b"seal answering" + nonces, hashlib.sha256)


def _keyed(key: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=TAG_NBYTES, key=key)
