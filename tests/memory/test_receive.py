"""The compiled receive loop. tests/transport/test_stream.py tests it again, together with the loop in Python."""

import socket
import struct
import threading
import time
from itertools import pairwise

import pytest
import xxhash

from raykv.memory import native

pytestmark = pytest.mark.skipif(native.loops is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")

FULL, LATE, CLOSED = 0, 1, 2


@pytest.fixture
def pair():
    """Two connected sockets. A blocked receive on the second one ends after 50 ms."""
    near, far = socket.socketpair()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    yield near, far
    near.close()
    far.close()


def targets(rng, sizes: list[int]) -> list[list[bytearray]]:
    """Buffers for chunks of these sizes, each in one to three pieces."""
    chunks = []
    for size in sizes:
        cuts = [0, *sorted(rng.randrange(size + 1) for _ in range(rng.randrange(3))), size]
        chunks.append([bytearray(end - first) for first, end in pairwise(cuts)])
    return chunks


def test_chunks_arrive_with_their_checksums(rng, pair):
    near, far = pair
    for _ in range(20):
        values = [rng.randbytes(rng.choice([241, 5000, 300_000])) for _ in range(rng.randrange(1, 6))]
        whole, chunks = b"".join(values), targets(rng, [len(value) for value in values])
        ahead = rng.randrange(len(whole) + 1)
        sender = threading.Thread(target=near.sendall, args=(whole[ahead:],))
        sender.start()
        sums = bytearray(8 * len(values))
        end = native.loops.receive(far.fileno(), whole[:ahead], chunks, sums, time.monotonic() + 20.0)
        sender.join()
        assert end == (FULL, len(values))
        assert [b"".join(chunk) for chunk in chunks] == values
        assert list(struct.unpack(f"<{len(values)}Q", sums)) == [xxhash.xxh3_64_intdigest(value) for value in values]


def test_a_deadline_ends_every_wait(pair):
    near, far = pair
    near.sendall(b"x" * 400)
    began_s = time.monotonic()
    end = native.loops.receive(far.fileno(), b"", [[bytearray(300)], [bytearray(300)]], None, began_s + 0.2)
    assert end == (LATE, 1)
    assert 0.2 <= time.monotonic() - began_s < 5.0


def test_the_end_of_a_connection_and_errors_differ(pair):
    near, far = pair
    near.sendall(b"x" * 400)
    near.close()
    deadline_s = time.monotonic() + 20.0
    assert native.loops.receive(far.fileno(), b"", [[bytearray(500)]], None, deadline_s) == (CLOSED, 0)
    with open("/dev/null", "rb") as no_socket:
        assert native.loops.receive(no_socket.fileno(), b"", [[bytearray(500)]], None, deadline_s) == (-88, 0)
    for wrong in ([[bytearray(240)]], [[b"read-only" * 100]], [[None]]):
        with pytest.raises((ValueError, BufferError, TypeError)):
            native.loops.receive(far.fileno(), b"", wrong, None, deadline_s)
    with pytest.raises(ValueError, match="checksums"):
        native.loops.receive(far.fileno(), b"", [[bytearray(500)]], bytearray(7), deadline_s)
