"""Files and directories that another user could have made or changed are never used."""

import os
import stat
from pathlib import Path

import pytest

from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory
from raykv.memory.reader import ShmReader
from raykv.storage.files import store_files
from raykv.tier.segments.volume import make_directory
from tests.support.nodes import make_node

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


def node_in(shm_dir: Path):
    return make_node(storage={"arena_nbytes": "1 MiB", "shm_dir": shm_dir})


@pytest.fixture
def files(shm_dir: Path) -> tuple[Path, Path]:
    """Table and arena of a node that has ended."""
    node = node_in(shm_dir)
    node.store.close()
    return store_files(node.config.file_prefix)


def chunks_after_restart(shm_dir: Path) -> int:
    node = node_in(shm_dir)
    incarnation = int(node.store.table.header["incarnation"])
    node.store.close()
    return incarnation


def test_files_are_made_for_this_user_alone(files):
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]


def test_own_files_are_taken_over(shm_dir, files):
    assert chunks_after_restart(shm_dir) == 2


@pytest.mark.parametrize("which", [0, 1], ids=["table", "arena"])
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda path: path.chmod(0o666), id="others may write"),
        pytest.param(lambda path: path.chmod(0o620), id="the group may write"),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), id="of another user", marks=as_root),
        pytest.param(lambda path: path.rename(path.with_name("real")) and path.symlink_to("real"), id="a link"),
    ],
)
def test_a_planted_file_is_replaced_and_never_read(shm_dir, files, which, plant):
    path = files[which]
    plant(path)
    planted = os.lstat(path)
    with pytest.raises(LostError):
        SharedMemory.attach(path, writable=True)
    with pytest.raises(LostError):
        ShmReader(*map(str, files), writable=True)
    assert chunks_after_restart(shm_dir) == 1, "the node starts empty"
    found = os.lstat(path)
    assert found.st_ino != planted.st_ino
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o600)


def test_a_pipe_or_a_directory_does_not_stop_a_node(shm_dir, files):
    files[0].unlink()
    os.mkfifo(files[0])
    assert chunks_after_restart(shm_dir) == 1
    files[0].unlink()
    files[0].mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        node_in(shm_dir)


def test_what_a_link_names_stays_as_it_is(shm_dir, tmp_path, files):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for path in files:
        path.unlink()
        path.symlink_to(precious)
    node = node_in(shm_dir)
    namespaces = node.config.file_prefix.with_name(node.config.file_prefix.name + ".namespaces")
    for path in (namespaces, namespaces.with_name(namespaces.name + ".new")):
        path.unlink(missing_ok=True)
        path.symlink_to(precious)
    node.reconciler._save()
    node.store.close()
    assert precious.read_bytes() == b"precious"
    assert not namespaces.is_symlink()


def test_directories_of_tiers_are_for_this_user_alone(tmp_path):
    make_directory(tmp_path / "made" / "here")
    assert stat.S_IMODE((tmp_path / "made" / "here").stat().st_mode) == 0o700
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(ConfigError, match="may not write"):
        make_directory(loose)
    (tmp_path / "link").symlink_to(tmp_path / "made")
    with pytest.raises(ConfigError):
        make_directory(tmp_path / "link")


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"user {NOBODY}"):
        make_directory(tmp_path / "theirs")
