"""The load finds what it is there to find: wrong bytes, exceptions, and operations that end too late."""

import threading

import numpy as np
import pytest

import raykv
from tests.chaos.load import CHUNKS, LATE_S, SPACE, Load, content, names_of

NBYTES = 64 << 10


def refuse() -> raykv.Client:
    raise raykv.PeerUnavailable("nobody is there")


@pytest.fixture
def load() -> Load:
    return Load(refuse, name="h", seed="1", nbytes=NBYTES, prompts=1, fresh=0.0)


def test_wrong_bytes_are_found(load: Load):
    with raykv.embedded(1, arena_nbytes="4 MiB", extent_nbytes="1 MiB") as cluster:
        client, names = cluster.client(SPACE), names_of("shared-0")
        client.put(names[:2], [content(name, NBYTES) for name in names[:2]])
        load._turn(client)
        assert (load.problems, load.counts["hit"], load.counts["stored"]) == ([], 2, CHUNKS - 2)
        client.delete(names)
        one_bit = content(names[1], NBYTES).copy()
        one_bit[-1] ^= 1
        client.put(names[:2], [content(names[0], NBYTES), one_bit])
        load._turn(client)
        (problem,) = load.problems
        assert f"WRONG BYTES of {names[1]}" in problem


def test_no_two_words_are_equal():
    words = np.concatenate([content(name, NBYTES).view(np.uint64) for name in names_of("a") + names_of("b")])
    assert len(np.unique(words)) == len(words)


def test_what_is_raised_is_found(load: Load):
    assert load._timed("get", 1.0, refuse) is None
    (problem,) = load.problems
    assert "get: PeerUnavailable: nobody is there" in problem


def test_what_ends_too_late_is_found(load: Load):
    sleep = threading.Event().wait  # nothing sets the event: an operation that takes this long
    load._timed("match", 1.0, lambda: sleep(0.01))
    assert (load.problems, load.overruns_s) == ([], [0.0, 0.0])
    load._timed("match", 0.0, lambda: sleep(20 * LATE_S))
    (problem,) = load.problems
    assert "match overran 0.0 s" in problem
    assert load.overruns_s[0] >= load.overruns_s[1] > LATE_S


def test_it_connects_again_and_again_until_it_is_stopped(load: Load):
    thread = threading.Thread(target=load.run)
    thread.start()
    load.stop.set()
    thread.join(5.0)
    assert not thread.is_alive()
    assert load.problems == []
