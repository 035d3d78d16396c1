"""The secrets of a cluster, and the steps by which one secret is replaced by another without an interruption."""

import hashlib
import hmac
from enum import StrEnum
from typing import Final

import msgspec

KEY_ID_NBYTES: Final = 8
SECRET_NBYTES: Final = 32


class Stage(StrEnum):
    """How far the rotation of a secret is. The next step may begin when all nodes have finished the last one."""

    STEADY = "steady"  # one secret
    ADDED = "added"  # a new secret is accepted, but not used yet
    USED = "used"  # the new secret is used, and the former one is still accepted


class Keyring(msgspec.Struct, frozen=True, omit_defaults=True):
    """The secrets of a cluster at one step of a rotation.

    Nodes whose keyrings are one step apart accept each other's secret.

    Attributes:
        version: Grows by 1 with each step.
        cluster: Identity of the cluster: the id of its first secret. Rotations do not change it.
        current: The secret for connections that a node or a client opens.
        added: A new secret that is accepted already, or empty.
        former: The last secret, which is still accepted, or empty.
    """

    version: int
    cluster: bytes
    current: bytes
    added: bytes = b""
    former: bytes = b""

    @classmethod
    def first(cls, secret: bytes) -> "Keyring":
        """Return the keyring of a new cluster."""
        return cls(1, key_id(secret), secret)

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The secrets that a peer may use, newest first."""
        return *filter(None, [self.added]), self.current, *filter(None, [self.former])

    @property
    def stage(self) -> Stage:
        return Stage.ADDED if self.added else Stage.USED if self.former else Stage.STEADY

    def next_step(self, secret: bytes) -> "Keyring":
        """Return the keyring after one more step of a rotation. `secret`: new and random; the first step adds it."""
        fields: dict[Stage, dict[str, bytes]] = {
            Stage.STEADY: {"added": secret},
            Stage.ADDED: {"current": self.added, "added": b"", "former": self.current},
            Stage.USED: {"former": b""},
        }
        return msgspec.structs.replace(self, version=self.version + 1, **fields[self.stage])

    def __repr__(self) -> str:
        """Show no secret: this text may be logged."""
        return f"Keyring(version={self.version}, stage={self.stage})"


def key_id(secret: bytes) -> bytes:
    """Return a name of a secret, from which nobody can compute the secret or a proof."""
    return hmac.digest(secret, b"raykv key id", hashlib.sha256)[:KEY_ID_NBYTES]
