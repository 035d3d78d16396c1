"""A node under a preloaded socket library: one of our own, which counts the calls and passes them on."""

import mmap
import shutil
import struct
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import raykv
from raykv.config import NodeConfig, environment_of_child
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError
from raykv.supervisor.handle import NodeHandle
from raykv.tools import doctor
from raykv.transport import socket_library
from tests.supervisor.test_handle import Supervised
from tests.support.nodes import SECRET, names, wait_until

CHUNKS, NBYTES = 8, 1 << 20
COUNTERS = ("listen", "accept", "sent_nbytes", "received_nbytes")
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>

static long *counts; /* in a file that parent and forked children share */

__attribute__((constructor)) static void start(void) {
    int file = open(getenv("COUNTS"), O_RDWR);
    counts = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}

static long add(int place, long value) {
    if (value > 0) __atomic_fetch_add(counts + place, value, __ATOMIC_SEQ_CST);
    return value;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int listen(int fd, int backlog) { add(0, 1); return REAL(listen)(fd, backlog); }
int accept4(int fd, struct sockaddr *from, socklen_t *length, int flags) {
    add(1, 1);
    return REAL(accept4)(fd, from, length, flags);
}
ssize_t send(int fd, const void *from, size_t nbytes, int flags) { return add(2, REAL(send)(fd, from, nbytes, flags)); }
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) { return add(2, REAL(sendmsg)(fd, message, flags)); }
ssize_t recv(int fd, void *into, size_t nbytes, int flags) { return add(3, REAL(recv)(fd, into, nbytes, flags)); }
ssize_t recvmsg(int fd, struct msghdr *message, int flags) { return add(3, REAL(recvmsg)(fd, message, flags)); }
"""


@pytest.fixture
def counting(tmp_path, monkeypatch) -> Path:
    """Return the path of the library that counts. Its counters are in the file named by COUNTS."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library, counts = (tmp_path / name for name in ("count.c", "libcount.so", "counts"))
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    counts.write_bytes(bytes(4096))
    monkeypatch.setenv("COUNTS", str(counts))
    return library


def counters(library: Path) -> dict[str, int]:
    with open(library.parent / "counts", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as counts:
        return dict(zip(COUNTERS, struct.unpack_from(f"{len(COUNTERS)}q", counts), strict=True))


def supervised(shm_dir: Path, library: Path) -> Supervised:
    one = Supervised.__new__(Supervised)
    memory = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
    one.fields = {"node_id": "n", "cluster": "p", "host": "elsewhere", "storage": memory, "heartbeat_s": 0.05}
    one.fields["socket_library"] = str(library)
    one.shm_dir, one.membership = shm_dir, InProcessMembership(member_timeout_s=5.0)
    one.node = NodeHandle(NodeConfig.load(one.fields), secret=bytes.fromhex(SECRET), membership=one.membership)
    return one


def read(client: raykv.Client, chunks: list[str]) -> list[bytes]:
    into = [bytearray(NBYTES) for _ in chunks]
    assert all(client.get(chunks, into).hits)
    return [bytes(each) for each in into]


def test_chunks_of_a_node_go_through_the_preloaded_library_and_arrive_whole(shm_dir, counting, rng):
    made = supervised(shm_dir, counting)
    try:
        with closing(made.client(local=False)) as client:
            chunks, values = names(CHUNKS), [rng.randbytes(NBYTES) for _ in range(CHUNKS)]
            client.put(chunks, values)
            assert read(client, chunks) == values
            wait_until(lambda: counters(counting)["sent_nbytes"] >= CHUNKS * NBYTES)
            found = counters(counting)  # a call is counted when it returns: its bytes may have arrived before
            assert found["listen"] > 0
            assert found["accept"] > 0
            assert found["received_nbytes"] >= CHUNKS * NBYTES, found
            assert made.node.stats()["socket_library"] == str(counting)
            says = doctor.sockets(Path("/")).says
            assert f"supervisor {made.node.supervisor.pid}: LD_PRELOAD {counting}" in says.splitlines()
            made.kill()  # the next node is a fork of the same supervisor
            assert made.node.stats()["socket_library"] == str(counting)
            assert read(client, chunks) == values
            wait_until(lambda: counters(counting)["sent_nbytes"] >= 2 * CHUNKS * NBYTES)
    finally:
        made.node.stop(unlink=True)


@pytest.mark.parametrize("library", ["libraykv-absent.so", "/nowhere/libvma.so"])
def test_a_library_that_is_not_there_is_refused_at_the_start(shm_dir, library):
    with pytest.raises(ConfigError, match=r"'socket_library'.*" + library + r".*install it"):
        supervised(shm_dir, Path(library))
    assert not list(shm_dir.iterdir())


def test_a_file_that_is_no_library_is_refused(tmp_path, shm_dir):
    (tmp_path / "libtext.so").write_text("text")
    with pytest.raises(ConfigError, match=r"'socket_library'.*libtext.so.*cannot be preloaded"):
        supervised(shm_dir, tmp_path / "libtext.so")


def test_a_library_that_ends_its_process_is_refused(tmp_path, shm_dir):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = "#include <unistd.h>\n__attribute__((constructor)) static void start(void) { _exit(3); }\n"
    (tmp_path / "ends.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libends.so", tmp_path / "ends.c"], check=True)
    with pytest.raises(ConfigError, match=r"'socket_library'.*status 3"):
        supervised(shm_dir, tmp_path / "libends.so")


@pytest.mark.parametrize("library", ["", "two names", "a.so:b.so"])
def test_the_field_is_one_name(library):
    with pytest.raises(ConfigError, match="socket_library"):
        NodeConfig.load({"node_id": "n", "socket_library": library})


def test_a_library_that_is_preloaded_already_stays(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libfirst.so")
    assert environment_of_child()["LD_PRELOAD"] == "libfirst.so"
    assert environment_of_child(preload="libvma.so")["LD_PRELOAD"] == "libfirst.so libvma.so"


def test_what_is_installed_and_mapped(tmp_path):
    place = tmp_path / "usr/lib/x86_64-linux-gnu"
    place.mkdir(parents=True)
    (place / "libvma.so").touch()
    assert socket_library.installed_libraries(tmp_path) == ["/usr/lib/x86_64-linux-gnu/libvma.so"]
    process = tmp_path / "proc/7"
    process.mkdir(parents=True)
    (process / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libvma.so.9.8.60\n7f02-7f03 rw-p 0 0:0 0\n"
    )
    assert socket_library.loaded_libraries(process) == ["/usr/lib/libvma.so.9.8.60"]
    assert socket_library.loaded("libxlio.so", process) is None
    (process / "cmdline").write_bytes(b"python\0-P\0-m\0raykv.supervisor.process\0")
    (process / "environ").write_bytes(b"A=1\0LD_PRELOAD=libvma.so\0")
    assert socket_library.supervisors(tmp_path) == [(7, "libvma.so")]
    says = doctor.sockets(tmp_path).says
    assert "installed: /usr/lib/x86_64-linux-gnu/libvma.so" in says
    assert "supervisor 7: LD_PRELOAD libvma.so" in says
