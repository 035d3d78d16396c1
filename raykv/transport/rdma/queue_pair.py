"""A reliable connection of RDMA (queue pair, RC) between two ports.

Source: InfiniBand Architecture Specification, volume 1, chapters 9 to 11; ibv_wr_post(3) of rdma-core.
"""

import random
import select
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from raykv.protocol.rdma import QueuePairEnd
from raykv.transport.one_sided.base import Broken, Late
from raykv.transport.rdma import neighbours, verbs
from raykv.transport.rdma.device import Device

DEPTH: Final = 1024
"""At most this many requests of one queue pair are in flight."""
SIGNAL_EVERY: Final = 64
"""The device reports a completion after this number of requests, and after the last of a batch."""
SEGMENT_NBYTES: Final = 64 << 10
"""A request moves at most this many bytes. With 0.8 us to post a request, this allows 80 GB/s."""
READS_AT_ONCE: Final = 16
"""The number of reads of one queue pair that are on the network at once."""
RETRY_TIMEOUT: Final = 14
"""The device sends a lost packet again after 4.096 us * 2 ** RETRY_TIMEOUT: 67 ms."""
RETRIES: Final = 5
SPIN_S: Final = 100e-6
"""`wait` polls for this long before it sleeps until an event."""


class Piece(NamedTuple):
    """A part of a transfer. `lkey` and `rkey` are the keys of the two registrations."""

    local: int
    lkey: int
    remote: int
    rkey: int
    nbytes: int


class QueuePair:
    """One end of a connection. Not thread-safe."""

    def __init__(self, device: Device) -> None:
        """Make the queue pair. Raises Broken if the device has no room for another one."""
        self.device = device
        enums = verbs.enums
        try:
            self._channel, fd = verbs.open_channel(device.context)
            self._events = select.poll()  # `select.select` fails for descriptors above 1023
            self._events.register(fd, select.POLLIN)
            self._completions = verbs.CQ(device.context, 2 * DEPTH, None, self._channel, 0)
            capacity = verbs.QPCap(max_send_wr=DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            init = verbs.QPInitAttrEx(
                qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=capacity, pd=device.pd,
                sq_sig_all=0, comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_READ | enums.IBV_QP_EX_WITH_RDMA_WRITE,
            )  # fmt: skip
            self._pair: Any = verbs.QPEx(device.context, init)
        except verbs.PyverbsError as error:
            raise Broken(f"{device.name} has no room for another queue pair: {error}") from error
        self._psn = random.getrandbits(23)
        self._posted = self._completed = 0

    @property
    def end(self) -> QueuePairEnd:
        """What the other end must know to connect."""
        device = self.device
        return QueuePairEnd(device.gid, device.lid, int(self._pair.qp_num), self._psn, device.mtu)

    def connect(self, peer: QueuePairEnd, *, remote: int) -> None:
        """Connect to the other end. Raises Broken if the device refuses the address, or nobody answers there.

        Args:
            peer: The other end.
            remote: What the peer may do with registered memory over this queue pair: see `device.WRITABLE`.
        """
        device, attributes = self.device, verbs.QPAttr(port_num=self.device.port)
        attributes.qp_access_flags = remote
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.number, peer.psn, self._psn
        attributes.path_mtu = min(device.mtu, peer.mtu)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = READS_AT_ONCE
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 7
        attributes.timeout, attributes.retry_cnt = RETRY_TIMEOUT, RETRIES
        try:
            if not neighbours.answers(device.gid, peer.gid, device.interface):
                raise Broken(f"{device.name} cannot connect to {peer.gid}: it does not answer on the local network")
            route = verbs.GlobalRoute(dgid=verbs.GID(peer.gid), sgid_index=device.gid_index)
            attributes.ah_attr = verbs.AHAttr(port_num=device.port, is_global=1, gr=route, dlid=peer.lid)
            self._pair.to_rts(attributes)
        except (verbs.PyverbsError, ValueError) as error:
            raise Broken(f"{device.name} cannot connect to {peer.gid}: {error}") from error

    # -- requests -----------------------------------------------------------------------------------------------------

    def read(self, pieces: Iterable[Piece], *, deadline_s: float) -> int:
        """Read from the peer's memory. Returns a number for `wait`. Raises Broken, as `wait` does."""
        return self._post(self._pair.wr_rdma_read, pieces, deadline_s)

    def write(self, pieces: Iterable[Piece], *, deadline_s: float) -> int:
        """Write to the peer's memory. Returns a number for `wait`. Raises Broken, as `wait` does."""
        return self._post(self._pair.wr_rdma_write, pieces, deadline_s)

    def _post(self, operation: Any, pieces: Iterable[Piece], deadline_s: float) -> int:
        batch: list[tuple[int, int, int, int, int]] = []
        for piece in pieces:
            local, lkey, remote, rkey, nbytes = piece
            if nbytes <= SEGMENT_NBYTES:
                if nbytes:
                    batch.append(piece)
            else:
                batch.extend(  # plain tuples: making a Piece takes 0.3 us
                    (local + start, lkey, remote + start, rkey, min(SEGMENT_NBYTES, nbytes - start))
                    for start in range(0, nbytes, SEGMENT_NBYTES)
                )
            while len(batch) >= SIGNAL_EVERY:
                self._post_batch(operation, batch[:SIGNAL_EVERY], deadline_s)
                del batch[:SIGNAL_EVERY]
        if batch:
            self._post_batch(operation, batch, deadline_s)
        return self._posted

    def _post_batch(self, operation: Any, batch: list[tuple[int, int, int, int, int]], deadline_s: float) -> None:
        """Post at most SIGNAL_EVERY requests. The device reports the completion of the last one."""
        self.wait(self._posted + len(batch) - DEPTH, deadline_s=deadline_s)
        pair, number = self._pair, self._posted + len(batch)
        entry = verbs.SGE(0, 0, 0)  # the device copies it, so that one object serves all requests
        set_entry, key = pair.wr_set_sge, 0
        try:
            pair.wr_start()
            pair.wr_id = number
            for part, flags in ((batch[:-1], 0), (batch[-1:], verbs.enums.IBV_SEND_SIGNALED)):
                pair.wr_flags = flags
                for local, lkey, remote, rkey, nbytes in part:
                    operation(rkey, remote)
                    entry.addr, entry.length = local, nbytes
                    if lkey != key:
                        entry.lkey = key = lkey
                    set_entry(entry)
            pair.wr_complete()
        except verbs.PyverbsError as error:
            raise Broken(f"{self.device.name} takes no request: {error}") from error
        self._posted = number

    def wait(self, number: int, *, deadline_s: float) -> None:
        """Wait until all requests up to `number` are done. The GIL is free while this thread sleeps.

        Raises:
            Late: The deadline has passed. The device may write to the buffers until `close`.
            Broken: A request failed. The device may write to the buffers until `close`.
        """
        if self._completed >= number:
            return
        spin_until_s = time.perf_counter() + SPIN_S
        while True:
            self._poll()
            if self._completed >= number:
                return
            if time.perf_counter() < spin_until_s:
                time.sleep(0)
                continue
            self._completions.req_notify()
            self._poll()  # a completion before `req_notify` makes no event
            if self._completed >= number:
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise Late(f"{self.device.name}: no answer by the deadline")
            if self._events.poll(1e3 * min(left_s, 1.0)):
                self._channel.get_cq_event(self._completions)
                self._completions.ack_events(1)

    def _poll(self) -> None:
        count, completions = self._completions.poll(16)
        for each in completions if count else ():
            if each.status != verbs.enums.IBV_WC_SUCCESS:
                raise Broken(f"{self.device.name}: a request failed with status {each.status}")
            self._completed = int(each.wr_id)

    def close(self) -> None:
        """Destroy the queue pair. When this has returned, the device does not write to any buffer any more."""
        with suppress(verbs.PyverbsError):
            self._pair.close()
            self._completions.close()
            verbs.close_channel(self._channel)
