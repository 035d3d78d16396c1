"""A node that stops is no member afterwards."""

import threading

import raykv
from raykv.protocol.messages import Heartbeat, HeartbeatAnswer

WAIT_S = 20.0


def test_a_heartbeat_under_way_does_not_make_a_stopped_node_a_member_again(monkeypatch):
    with raykv.embedded(2, arena_nbytes="32 MiB") as running:
        membership, leaving = running.membership, running.nodes[1].config.node_id
        beat, under_way, stopped = membership.beat, threading.Event(), threading.Event()

        def slow_beat(heartbeat: Heartbeat) -> HeartbeatAnswer:
            if heartbeat.member.node_id == leaving and not stopped.is_set():
                under_way.set()
                stopped.wait(1.0)
            return beat(heartbeat)

        monkeypatch.setattr(membership, "beat", slow_beat)
        assert under_way.wait(WAIT_S)
        running.nodes[1].stop(unlink=True)
        stopped.set()
        assert [member.node_id for member in membership.logic.view.members] == [running.nodes[0].config.node_id]
