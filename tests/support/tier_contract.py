"""Tests that every tier must pass. Subclasses open the tier, damage a chunk of it, and make its I/O hang."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from raykv.tier.segments.format import key_array
from tests.support.tiers import Driver, all_keys, content_of, keys_for, wait_for

QUICK_S = 0.5
"""A call of a tier may take at most this long, even if the disk hangs."""


def within(call: Callable[[], object]) -> object:
    began_s = time.monotonic()
    result = call()
    assert time.monotonic() - began_s < QUICK_S
    return result


class TierContract:
    """The contract. A tier must have room for a few megabytes, in chunks of at most 100 000 bytes."""

    def open(self, path: Path) -> Driver:
        """Open and start a tier."""
        raise NotImplementedError

    def damage(self, driver: Driver, key: bytes) -> None:
        """Change a byte of the chunk where the tier stores it."""
        raise NotImplementedError

    def hang(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        """Return a context in which the tier's reads and writes hang."""
        raise NotImplementedError

    @pytest.fixture
    def driver(self, tmp_path: Path):
        with self.open(tmp_path) as driver:
            yield driver

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 100_000])
    def test_a_chunk_is_read_as_it_was_written(self, driver, nbytes):
        parent, key = keys_for(2)
        until_s = time.time() + 1000.0
        chunk = driver.chunk(key, nbytes, group=2, depth=7, parent=parent, reads=3, expires_s=until_s)
        assert driver.write([chunk]) == [True]
        assert driver.has([parent, key]) == [False, True]
        assert driver.tier.find(key_array([parent, key])) == [
            None,
            (nbytes, chunk.checksum, 2, 7, parent, 3, until_s),
        ]
        assert driver.read([key, parent], nbytes) == [content_of(key, nbytes), None]
        assert driver.tier.used_nbytes() == driver.tier.used_nbytes(2) == nbytes
        assert driver.tier.used_nbytes(1) == 0
        assert driver.tier.stats()["state"] == "on"
        assert driver.tier.stats()["chunks"] == 1

    def test_a_chunk_that_is_here_is_not_written_again(self, driver):
        key, other = keys_for(2)
        driver.put([key], 5000)
        driver.tier.take_changes()
        assert driver.write([driver.chunk(key, 5000), driver.chunk(other, 5000)]) == [True, True]
        assert {bytes(each) for each in driver.tier.take_changes()[0]} == {other}

    def test_each_call_is_called_back_once(self, driver):
        calls: list[list[bool]] = []
        keys = keys_for(40)
        taken = 0
        while taken < 40:
            some = [driver.chunk(key, 5000) for key in keys[taken : taken + 7]]
            taken += driver.tier.write(some, lambda chunks, written: calls.append(list(written)))
        wait_for(lambda: sum(map(len, calls)) == 40)
        writes, found = len(calls), driver.tier.find(key_array(keys))
        for first in range(0, 40, 10):
            slots = [driver.arena.slot(5000) for _ in range(10)]
            ten = slice(first, first + 10)
            assert driver.tier.read(key_array(keys[ten]), found[ten], slots, lambda each: calls.append(list(each)))
        wait_for(lambda: len(calls) >= writes + 4)
        time.sleep(0.02)
        assert calls[writes:] == [[True] * 10] * 4

    def test_calls_for_no_chunks_do_nothing(self, driver):
        assert driver.tier.write([], lambda *_: pytest.fail("called back")) == 0
        assert driver.has([]) == []
        assert driver.delete([]) == 0

    def test_deleted_chunks_are_gone_and_may_be_stored_again(self, driver):
        keys = keys_for(6)
        driver.put(keys[:5], 5000)
        assert driver.delete(keys[3:]) == 2
        assert driver.has(keys) == [True] * 3 + [False] * 3
        assert driver.read(keys[3:], 5000) == [None] * 3
        driver.put(keys[4:5], 9000)
        assert driver.read(keys[4:5], 9000) == [content_of(keys[4], 9000)]
        assert all_keys(driver.tier) == {*keys[:3], keys[4]}

    def test_a_chunk_deleted_while_it_is_written_is_not_here(self, driver, monkeypatch):
        (key,) = keys_for(1)
        results: list[bool] = []
        with self.hang(driver, monkeypatch):
            assert driver.tier.write([driver.chunk(key, 5000)], lambda _, written: results.extend(written)) == 1
            driver.delete([key])
        wait_for(lambda: bool(results))
        assert results == [False]
        assert driver.has([key]) == [False]

    def test_a_dropped_group_is_gone_and_others_stay(self, driver):
        keys = keys_for(9)
        for group in range(3):
            driver.put(keys[group::3], 5000, group=group)
        assert driver.tier.drop(1) == 3
        assert driver.has(keys) == [True, False, True] * 3
        assert driver.tier.used_nbytes(1) == 0
        driver.put(keys[1:2], 5000, group=1)
        assert driver.read(keys[1:2], 5000) == [content_of(keys[1], 5000)]

    def test_changes_are_what_was_added_and_removed(self, driver):
        keys = keys_for(4)
        driver.put(keys[:3], 5000)
        added, removed = driver.tier.take_changes()
        assert {bytes(key) for key in added} == set(keys[:3])
        assert not len(removed)
        driver.delete(keys[1:])
        added, removed = driver.tier.take_changes()
        assert not len(added)
        assert {bytes(key) for key in removed} >= set(keys[1:3])
        assert not any(map(len, driver.tier.take_changes()))

    def test_a_quota_does_not_disturb_other_groups(self, driver):
        driver.put(keys_for(20, 1), 9000, group=1)
        driver.tier.set_quota(0, 100_000)
        driver.put(keys_for(20), 4000, group=0)
        assert driver.tier.used_nbytes(1) == 20 * 9000
        driver.tier.set_quota(0, None)
        driver.put(keys_for(20, 2), 9000, group=0)
        assert all(driver.has(keys_for(20, 2)))

    def test_an_expired_chunk_is_not_here(self, driver):
        early, late = keys_for(2)
        driver.write([driver.chunk(early, 5000, expires_s=time.time() + 0.3), driver.chunk(late, 5000)])
        wait_for(lambda: driver.has([early, late]) == [False, True], 5.0)
        assert driver.tier.find(key_array([early])) == [None]
        assert driver.read([early], 5000) == [None]

    def test_wrong_bytes_never_come(self, driver):
        keys = keys_for(3)
        driver.put(keys, 5000)
        self.damage(driver, keys[1])
        assert driver.read(keys, 5000) == [content_of(keys[0], 5000), None, content_of(keys[2], 5000)]
        assert driver.has(keys) == [True, False, True]

    def test_a_chunk_that_was_replaced_is_not_read_into_the_old_one_s_slot(self, driver):
        (key,) = keys_for(1)
        driver.put([key], 5000)
        found = driver.tier.find(key_array([key]))
        assert driver.delete([key]) == 1
        driver.put([key], 20_000)
        slot, arrived = driver.arena.put(b"\xaa" * 32_768), []
        assert driver.tier.read(key_array([key]), found, [slot], arrived.append)
        wait_for(lambda: bool(arrived))
        assert arrived == [[False]]
        assert driver.arena.view[slot : slot + 32_768] == b"\xaa" * 32_768
        assert driver.read([key], 20_000) == [content_of(key, 20_000)]

    def test_no_call_waits_for_a_disk_that_hangs(self, driver, monkeypatch):
        keys = keys_for(6)
        driver.put(keys[:4], 5000)
        results: list[bool] = []
        with self.hang(driver, monkeypatch):
            chunks, found = [driver.chunk(key, 5000) for key in keys[4:]], driver.tier.find(key_array(keys[:2]))
            slots = [driver.arena.slot(5000) for _ in range(2)]
            taken = within(lambda: driver.tier.write(chunks, lambda _, written: results.extend(written)))
            read = within(lambda: driver.tier.read(key_array(keys[:2]), found, slots, results.extend))
            assert within(lambda: driver.has(keys[:4])) == [True] * 4
            within(lambda: driver.tier.find(key_array(keys)))
            within(lambda: driver.delete(keys[3:4]))
            within(lambda: driver.tier.drop(3))
            within(driver.tier.take_changes)
            within(driver.tier.keys)
            within(driver.tier.stats)
        wait_for(lambda: len(results) == taken + 2 * bool(read))
        assert all(results)

    def test_after_close_nothing_is_taken_and_everything_is_called_back(self, tmp_path):
        driver = self.open(tmp_path)
        results: list[bool] = []
        chunks = [driver.chunk(key, 50_000) for key in keys_for(40)]
        taken = driver.tier.write(chunks, lambda _, written: results.extend(written))
        driver.tier.close()
        assert len(results) == taken
        assert driver.tier.write(chunks[:1], lambda *_: pytest.fail("called back")) == 0
        driver.tier.close()

    def test_random_operations_against_a_dictionary(self, driver, rng: random.Random):
        keys, stored, size = keys_for(30), set[bytes](), {}
        for _ in range(150):
            some, action = rng.sample(keys, rng.randrange(1, 5)), rng.random()
            if action < 0.45:
                for key in set(some) - stored:
                    size[key] = rng.choice((100, 5000, 60_000))
                assert all(driver.write([driver.chunk(key, size[key]) for key in some]))
                stored.update(some)
            elif action < 0.6:
                assert driver.delete(some) == len(stored.intersection(some))
                stored.difference_update(some)
            else:
                key = some[0]
                nbytes = size.get(key, 100)
                assert driver.read([key], nbytes) == [content_of(key, nbytes) if key in stored else None]
            assert driver.has(keys) == [key in stored for key in keys]
        assert all_keys(driver.tier) == stored
        assert driver.tier.used_nbytes() == sum(size[key] for key in stored)
        assert np.array_equal(driver.tier.has(driver.tier.keys()), np.ones(len(stored), np.bool_))


class Hanging:
    """While this context is open, calls of the named functions of `module` hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, *names: str) -> None:
        self._patch, self._module, self._names = monkeypatch, module, names
        self._go_on = threading.Event()

    def __enter__(self) -> None:
        for name in self._names:
            self._patch.setattr(self._module, name, self._wrapped(getattr(self._module, name)))

    def _wrapped(self, real: Callable[..., object]) -> Callable[..., object]:
        def slow(*arguments: object) -> object:
            assert self._go_on.wait(20.0)
            return real(*arguments)

        return slow

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
