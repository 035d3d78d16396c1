"""TLS: who is refused and why, wrong files, replaced files, silence after a fork, and a connection that is cut."""

import logging
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from raykv.config import TlsConfig
from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, TransientError
from raykv.memory.copying import checksum_of
from raykv.protocol import messages
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import SocketServer
from raykv.transport.stream import Stream
from raykv.transport.tls import Tls
from tests.support.certificates import Authority
from tests.support.nodes import wait_until
from tests.support.transports import SECRET, Warehouse, is_closed, raw_socket, soon


@contextmanager
def serving(tls: Tls | None, service: Warehouse | None = None) -> Iterator[SocketServer]:
    server = SocketServer(service or Warehouse(), "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8, tls=tls)
    server.serve()
    try:
        yield server
    finally:
        server.close()
    assert server.bugs == 0


def ask(server: SocketServer, tls: Tls | None, *, seconds: float = 5.0) -> messages.Answer:
    with closing(Link.connect(server.address, SECRET, deadline_s=soon(seconds), tls=tls)) as link:
        return link.call(messages.GetStats(), deadline_s=soon())


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Tls:
    """A process with a certificate of another CA."""
    return Tls(Authority(tmp_path_factory.mktemp("tls") / "other").issue("stranger"))


@pytest.fixture
def copied(authority, tmp_path) -> TlsConfig:
    """A config whose files the test may change."""
    names = {"certificate": "node.pem", "private_key": "node.key", "ca": "ca.pem"}
    authority.issue("node")
    return TlsConfig(**{field: Path(shutil.copy(authority.folder / name, tmp_path)) for field, name in names.items()})


# -- who is refused ---------------------------------------------------------------------------------------------------


def test_a_server_refuses_the_certificate_of_another_ca_and_says_so_once(tls, stranger, caplog):
    trusting = Tls(stranger._config.model_copy(update={"ca": stranger._config.ca}))
    with serving(tls) as server:
        connection = raw_socket(server.address)
        context = trusting._contexts.client
        context = type(context)(context.protocol)  # accepts any server, as an attacker would
        context.check_hostname, context.verify_mode = False, 0
        context.load_cert_chain(stranger._config.certificate, stranger._config.private_key)
        with context.wrap_socket(connection) as wrapped:
            assert is_closed(wrapped)
        wait_until(lambda: server.refused == 1)
        (record,) = caplog.records
        assert (record.levelno, "certificate is refused" in record.getMessage()) == (logging.WARNING, True)


def test_a_client_refuses_the_certificate_of_another_ca(tls, stranger):
    with serving(stranger) as server, pytest.raises(ProtocolError, match=r"peer's certificate is refused: self-signed"):
        ask(server, tls)


def test_a_client_learns_that_its_certificate_is_refused(tls, stranger, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(tls._config.ca.read_text() + stranger._config.ca.read_text())
    trusting = Tls(stranger._config.model_copy(update={"ca": both}))
    with serving(tls) as server, pytest.raises(TransientError, match="refuses our certificate"):
        ask(server, trusting)


def test_a_client_without_a_certificate_is_refused(tls):
    with serving(tls) as server:
        context = type(tls._contexts.client)(tls._contexts.client.protocol)
        context.check_hostname, context.verify_mode = False, 0
        with context.wrap_socket(raw_socket(server.address)) as wrapped:
            assert is_closed(wrapped)
        wait_until(lambda: server.refused == 1)


def test_older_versions_of_tls_are_refused(tls):
    with serving(tls) as server:
        context = type(tls._contexts.client)(tls._contexts.client.protocol)
        context.check_hostname, context.verify_mode = False, 0
        context.maximum_version = 0x0303  # TLS 1.2
        context.load_cert_chain(tls._config.certificate, tls._config.private_key)
        with raw_socket(server.address) as connection, pytest.raises(OSError, match=r"(?i)protocol.version"):
            context.wrap_socket(connection)
        wait_until(lambda: server.refused == 1)
        assert ask(server, tls) == messages.Stats(b"GetStats")


def test_one_end_without_tls_says_what_to_set(tls, caplog):
    with serving(tls) as server:
        with pytest.raises(PeerUnavailable, match="perhaps the peer requires TLS, and field 'tls' is not set here"):
            ask(server, None)
        wait_until(lambda: server.refused == 1)
        assert "does not speak TLS: set field 'tls' at both ends" in caplog.text
        caplog.clear()
    with serving(None) as server:
        with pytest.raises(ProtocolError, match="does not speak TLS: set field 'tls' at both ends"):
            ask(server, tls)
        wait_until(lambda: server.refused == 1)
        assert "speaks TLS: set field 'tls' at both ends" in caplog.text


def test_a_wrong_secret_inside_tls(tls):
    with serving(tls) as server, pytest.raises(PeerUnavailable, match="another cluster"):
        Link.connect(server.address, b"wrong", deadline_s=soon(), tls=tls)


def test_bytes_of_a_former_connection_are_refused(tls):
    """Somebody records what a member sends over TLS, and sends it again."""
    recorded = bytearray()
    with serving(tls) as server, socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            client, _ = listener.accept()
            with client, raw_socket(server.address) as onward:
                back = threading.Thread(target=pump, args=(onward, client, lambda raw: None))
                back.start()
                pump(client, onward, recorded.extend)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        address = "{}:{}".format(*listener.getsockname())
        with closing(Link.connect(address, SECRET, deadline_s=soon(), tls=tls)) as link:
            assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
        thread.join()
        assert len(recorded) > 500
        with raw_socket(server.address) as replay:
            assert is_closed(replay, after=bytes(recorded))
        wait_until(lambda: server.refused == 1)
        assert len(server._service.sessions) == 1


def pump(source: socket.socket, target: socket.socket, seen: Callable[[bytes], None]) -> None:
    with suppress(OSError):  # one end may close before it has read everything
        while raw := source.recv(1 << 16):
            seen(raw)
            target.sendall(raw)
        target.shutdown(socket.SHUT_WR)


def test_what_travels_is_not_readable(tls):
    secret_bytes = bytes(range(256)) * 40
    seen = bytearray()
    here, there = socket.socketpair()
    with here, there:
        sender = tls.wrap(here)
        receiver, relayed = socket.socketpair()
        receiver = tls.wrap(receiver, server=True)
        threads = [
            threading.Thread(target=pump, args=(there, relayed, seen.extend)),
            threading.Thread(target=pump, args=(relayed, there, seen.extend)),
        ]
        with sender, receiver, relayed:
            stream, other = Stream(sender, tick_s=0.01), Stream(receiver, tick_s=0.01)
            shaking = threading.Thread(target=other.secure, args=(soon(),))
            for thread in (*threads, shaking):
                thread.start()
            stream.secure(soon())
            shaking.join()
            stream.send_runs([[memoryview(secret_bytes)]], soon())
            assert other.exactly(len(secret_bytes), soon()) == secret_bytes
            for end in (sender, receiver):
                socket.socket.shutdown(end, socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    assert len(seen) > len(secret_bytes)
    assert secret_bytes[:16] not in bytes(seen)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_handshake_that_stalls_ends_at_the_deadline(tls):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match="deadline"):
            Link.connect("{}:{}".format(*listener.getsockname()), SECRET, deadline_s=soon(0.2), tls=tls)
        assert 0.2 <= time.monotonic() - began_s < 1.0


def test_a_connection_that_is_cut_is_no_end_of_a_payload(tls):
    """There is no close_notify, so nobody can tell a cut connection from a closed one: lengths must tell."""
    service = Warehouse(bytes(1 << 20))
    with (
        serving(tls, service) as server,
        closing(Link.connect(server.address, SECRET, deadline_s=soon(), tls=tls)) as link,
    ):
        target = bytearray(len(service.stock) + 1)
        link.post(messages.Read(b""), deadline_s=soon())
        timer = threading.Timer(0.1, server.close)
        timer.start()
        with pytest.raises(PeerUnavailable, match=r"closed|lost"):
            link.collect(lambda answer: [[memoryview(target)]], deadline_s=soon())
        timer.join()


def test_many_answers_in_one_record_are_ready_one_by_one(tls):
    """OpenSSL may hold answers that `poll` does not see, because it has taken them from the socket already."""
    here, there = socket.socketpair()
    with tls.wrap(here) as ours, tls.wrap(there, server=True) as theirs:
        stream = Stream(ours, tick_s=0.01)
        shaking = threading.Thread(target=theirs.do_handshake)
        shaking.start()
        stream.secure(soon())
        shaking.join()
        from raykv.protocol.codec import encode

        sent = [messages.Stats(bytes([number]) * 3000) for number in range(5)]
        theirs.sendall(b"".join(encode(message, 0, 1) for message in sent))
        for message in sent:
            assert stream.wait_ready(0.0)
            assert stream.message(soon())[0] == message
        assert not stream.wait_ready(0.0)


def test_a_forked_child_sends_nothing(tls):
    """Not even a close_notify, which would end the parent's connection."""
    with serving(tls) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        seen = bytearray()

        def relay() -> None:
            client, _ = listener.accept()
            with client, raw_socket(server.address) as onward:
                back = threading.Thread(target=pump, args=(onward, client, lambda raw: None))
                back.start()
                pump(client, onward, seen.extend)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        address = "{}:{}".format(*listener.getsockname())
        link = Link.connect(address, SECRET, deadline_s=soon(), tls=tls)
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
        before = len(seen)
        child = os.fork()
        if child == 0:
            closed = link.closed
            del link
            os._exit(0 if closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
        after = len(seen)
        assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
        assert len(seen) - after == after - before  # one request each
        link.close()
        thread.join()


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["certificate", "private_key", "ca"])
def test_a_missing_or_wrong_file_is_named(copied, field):
    path = getattr(copied, field)
    good = path.read_text()
    for content, words in [
        (None, f"cannot read .*{path.name}"),
        ("", f"{path.name} has no '.*' line; convert it to PEM"),
        (good[:-60], f"{path.name} .*damaged"),
    ]:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=rf"field 'tls\.(private_key|{field})'.*{words}"):
            Tls(copied)


def test_files_that_do_not_fit_each_other(authority, copied, stranger):
    other = authority.issue("other")
    wrong_key = copied.model_copy(update={"private_key": other.private_key})
    with pytest.raises(ConfigError, match=r"'tls\.private_key'.*is not the key of .*node\.pem; give the files of one"):
        Tls(wrong_key)
    with pytest.raises(ConfigError, match=r"'tls\.private_key'.*has a passphrase; store it without"):
        Tls(authority.encrypt_key(other))
    with pytest.raises(ConfigError, match=r"'tls\.certificate'.*issuer.*have it signed by a CA in field 'tls\.ca'"):
        Tls(copied.model_copy(update={"ca": stranger._config.ca}))
    with pytest.raises(ConfigError, match=r"'tls\.certificate'.*has expired; renew it"):
        Tls(authority.issue("old", days=-1))
    for usage in ("serverAuth", "clientAuth"):
        with pytest.raises(ConfigError, match=r"'tls\.certificate'.*purpose; .*serverAuth and clientAuth"):
            Tls(authority.issue(usage, extensions=f"extendedKeyUsage={usage}"))
    Tls(authority.issue("both", extensions="extendedKeyUsage=serverAuth,clientAuth"))


def test_new_connections_use_files_that_were_replaced(authority, copied, stranger, caplog):
    used, tls = Tls(copied), Tls(authority.issue("client"))
    with serving(used) as server, closing(Link.connect(server.address, SECRET, deadline_s=soon(), tls=tls)) as link:
        for config in (stranger._config, authority.issue("renewed")):
            for field in ("certificate", "private_key"):
                fresh = copied.ca.with_name("fresh")
                shutil.copy(getattr(config, field), fresh)
                fresh.replace(getattr(copied, field))
            assert ask(server, tls) == messages.Stats(b"GetStats")
            assert link.call(messages.GetStats(), deadline_s=soon()) == messages.Stats(b"GetStats")
            wrong = config is stranger._config
            assert ("new TLS files are not used" in caplog.text) == wrong
            assert len(caplog.records) == wrong
            assert ask(server, tls) == messages.Stats(b"GetStats")  # not logged again
            caplog.clear()
        raw = raw_socket(server.address, tls)
        with raw:
            assert ("commonName", "renewed") in [pair for part in raw.getpeercert()["subject"] for pair in part]


def test_tls_of_a_pool(tls, rng: random.Random):
    service = Warehouse(rng.randbytes(3 << 20))
    with serving(tls, service) as server:
        pool = ConnectionPool(SECRET, breaker_s=60.0, max_idle=2, tls=tls)
        target = bytearray(len(service.stock))

        def read(link: Link) -> messages.Answer:
            return link.call(messages.Read(b""), lambda answer: [[memoryview(target)]], deadline_s=soon())

        for _ in range(2):
            pool.ask(server.address, read, deadline_s=soon())
            assert checksum_of([memoryview(target)]) == checksum_of([memoryview(service.stock)])
        assert len(service.sessions) == 1
        pool.close()
