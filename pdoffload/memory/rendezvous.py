"""How the processes of one engine meet at the same shared memory, and leave no name behind.

State, announced once. A region is a file in /dev/shm, in one of three states:

    unborn   a file without a name, locked by its creator, until header and size stand
    named    found under a name made from the engine's id; some members are still missing
    private  every member has joined: the name is gone, and the memory goes with the last process

Why nothing leaks. The file is created without a name (O_TMPFILE) and gets one in a single step, so no
half-made file is ever seen. Every member holds a shared lock (flock) on the file for as long as its
mapping lives; the kernel drops it however the process ends. A name whose file nobody locks is dead, and
whoever locks it exclusively may remove it: nobody can join, replace or remove it meanwhile.

Two kinds of lock, because they mean two things: flock says "I live", a record lock on the header's first
byte (OFD: of the open file, not of the process) says "I am changing the list of members".
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pdoffload.clock import Clock
from pdoffload.config.reading import size_text
from pdoffload.errors import ConfigError, DeadlineExceeded, MisuseError, StorageError
from pdoffload.layout import PAGE_BYTES

logger = logging.getLogger(__name__)

_MAGIC = b"PDOREGN1"
_FIELDS = struct.Struct("<8s6Q")  # magic, then the fields of Header in their order
_MEMBERS_AT = 64  # one byte per member, 1 once it has joined; up to the end of the page
MAX_MEMBERS = PAGE_BYTES - _MEMBERS_AT
_PAUSE_S = 0.01


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What all members of a region must agree on; stands in its first page."""

    version: int = 1
    members: int
    num_slots: int
    worker_bytes: int
    num_copies: int
    size_bytes: int
    """Of the whole file."""

    def packed(self) -> bytes:
        return _FIELDS.pack(_MAGIC, *msgspec.structs.astuple(self))


def region_path(directory: str, engine_id: str) -> str:
    """The name under which the members of `engine_id` meet. Of this user, and of any length of id."""
    digest = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
    return os.path.join(directory, f"pdoffload-{os.geteuid()}-{digest}.region")


def join(
    path: str, header: Header, member: int, engine_id: str, *, timeout_s: float, clock: Clock
) -> tuple[int, bool]:
    """Create the region at `path`, or join it: its descriptor, and whether this call created it.

    The descriptor is the caller's, and with it the lock that says "I live". Whoever joins last removes
    the name. Raises `ConfigError` where memory lacks, a member disagrees or is there twice,
    `DeadlineExceeded` when others hold a lock for `timeout_s`, `StorageError` for what the file system
    refuses. After a failure nothing of this call is left.
    """
    if not 0 <= member < header.members <= MAX_MEMBERS:
        raise MisuseError(f"member {member} of {header.members}: wanted 0 <= member < members")
    give_up_s = clock.monotonic_s() + timeout_s
    try:
        while True:
            fd, created = _create_or_open(path, header)
            if fd is not None:
                break
            if clock.monotonic_s() >= give_up_s:
                raise DeadlineExceeded(f"{path}, which others keep changing", timeout_s)
            clock.sleep(_PAUSE_S)
        try:
            _check_header(fd, path, header, engine_id)
            with _members_locked(fd, path, timeout_s, clock):
                _sign_in(fd, path, header.members, member, engine_id)
        except BaseException:
            os.close(fd)
            remove_if_dead(path)
            raise
    except OSError as error:
        raise StorageError.from_os_error(path, error) from error
    return fd, created


def _create_or_open(path: str, header: Header) -> tuple[int | None, bool]:
    """A locked descriptor of the file that stands at `path`; None when the next try may find one."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _create(path, header), True
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise StorageError(path, f"belongs to user {owner}, not to {os.geteuid()}")
    # The name may have gone between the two calls: swept, or dropped by the last member.
    if _lock(fd, fcntl.LOCK_SH) and os.fstat(fd).st_nlink > 0:
        return fd, False
    os.close(fd)
    return None, False


def _create(path: str, header: Header) -> int | None:
    """A new region, named `path`; None when somebody else was faster."""
    directory = os.path.dirname(path)
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # before it has a name, so that nobody takes it for dead
        if room_for(fd) < header.size_bytes:
            raise no_room(directory, header.size_bytes, room_for(fd))
        os.ftruncate(fd, header.size_bytes)
        os.pwrite(fd, header.packed(), 0)
        # Python asks the kernel to follow the link in /proc only if a directory is named as well; for
        # an absolute path the kernel ignores which.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def room_for(fd: int) -> int:
    """How many bytes this file could have: what it has already, and what is free beside it."""
    disk = os.statvfs(fd)
    return os.fstat(fd).st_blocks * 512 + disk.f_bavail * disk.f_frsize


def size_problems(needed_bytes: int, directory: str = "/dev/shm") -> list[str]:
    """Why a pool of this size can never fit into `directory`, however empty; empty if it can."""
    disk = os.statvfs(directory)
    whole_bytes = disk.f_blocks * disk.f_frsize
    return list(no_room(directory, needed_bytes, whole_bytes).problems) * (
        needed_bytes > whole_bytes
    )


def no_room(directory: str, needed_bytes: int, room_bytes: int) -> ConfigError:
    """The error of a pool that does not fit into `directory`."""
    return ConfigError(
        [
            f"cpu_bytes_to_use: the host pool needs {size_text(needed_bytes)} of {directory}, which "
            f"has room for {size_text(room_bytes)}; lower cpu_bytes_to_use, or enlarge {directory} "
            "(docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted there)"
        ]
    )


def _check_header(fd: int, path: str, mine: Header, engine_id: str) -> None:
    raw = os.pread(fd, _FIELDS.size, 0)
    if len(raw) < _FIELDS.size or not raw.startswith(_MAGIC):
        raise StorageError(path, "is not a region of pdoffload")
    theirs = Header(**dict(zip(Header.__struct_fields__, _FIELDS.unpack(raw)[1:], strict=True)))
    problems = [
        f"{field}: {getattr(mine, field)} here, {getattr(theirs, field)} in the region that engine_id "
        f"{engine_id} uses already; all processes of an engine need the same configuration"
        for field in Header.__struct_fields__
        if getattr(mine, field) != getattr(theirs, field)
    ]
    if problems:
        raise ConfigError(problems)


def _sign_in(fd: int, path: str, members: int, member: int, engine_id: str) -> None:
    """Enter the list of members. Only with the list locked, so that exactly one finds itself last."""
    joined = bytearray(os.pread(fd, members, _MEMBERS_AT))
    if joined[member]:
        raise ConfigError(
            [
                f"engine_id: {engine_id} is used by two engines, or a process of it was started twice: "
                f"member {member} of {members} has joined already"
            ]
        )
    joined[member] = 1
    if all(joined):
        # Before the entry, not after: dying in between must not leave a name that nobody removes.
        _drop_name(path, fd)
    os.pwrite(fd, b"\1", _MEMBERS_AT + member)


def _drop_name(path: str, fd: int) -> None:
    try:
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            os.unlink(path)
    except FileNotFoundError:
        logger.warning("%s: somebody has removed this name already", path)


@contextmanager
def _members_locked(fd: int, path: str, timeout_s: float, clock: Clock) -> Iterator[None]:
    give_up_s = clock.monotonic_s() + timeout_s
    while not _record_lock(fd, fcntl.F_WRLCK):
        if clock.monotonic_s() >= give_up_s:
            raise DeadlineExceeded(f"the list of members of {path}", timeout_s)
        clock.sleep(_PAUSE_S)
    try:
        yield
    finally:
        _record_lock(fd, fcntl.F_UNLCK)


def _record_lock(fd: int, kind: int) -> bool:
    """Lock or unlock the first byte; False when another open file holds it."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)  # struct flock
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _lock(fd: int, kind: int) -> bool:
    """Take the lock that says "I live" (or, exclusively, "nobody lives"); False when it is not free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_if_dead(path: str) -> int | None:
    """Remove the region's name if nobody lives in it: bytes given back, or None if nothing was done.

    What the file system refuses is logged, because a leftover must not keep an engine from starting.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: cannot tell whether it is a leftover: %s", path, error)
        return None
    try:
        if not _lock(fd, fcntl.LOCK_EX):
            return None
        status = os.fstat(fd)
        if status.st_nlink == 0 or os.stat(path).st_ino != status.st_ino:
            return None
        os.unlink(path)
        return status.st_blocks * 512
    except OSError as error:
        logger.warning("%s: cannot remove this leftover: %s", path, error)
        return None
    finally:
        os.close(fd)


def sweep_dead(directory: str = "/dev/shm") -> tuple[int, int]:
    """Remove this user's regions of engines that died before all their processes had started.

    Returns (files, bytes) given back. Regions in which any process lives are left alone.
    """
    pattern = os.path.join(glob.escape(directory), f"pdoffload-{os.geteuid()}-*.region")
    freed = [size for size in map(remove_if_dead, glob.glob(pattern)) if size is not None]
    if freed:
        logger.info("%s: removed %d dead regions, %d bytes", directory, len(freed), sum(freed))
    return len(freed), sum(freed)
