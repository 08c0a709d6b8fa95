"""Where chunks lie under a root directory, and whether the directory is really ours.

    <root_dir>/<model>_<digest>/config.json              the run configuration, written once
    <root_dir>/<model>_<digest>_r<rank>/                 `base`
        <hhh>/<hh>_g<group>/<hash>.bin                   chunk files
        .tmp/<host>-<pid>-<random>/                      files being written, one folder per process

The directory's name carries a digest of `RunConfig.fields`, so processes that differ there never meet.
`RunConfig.guards` are compared inside `config.json`: a difference would mean a hit rate of zero (keys
made in another way) or worse, and the name cannot tell.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid

from pdoffload.errors import ConfigError
from pdoffload.layout import BlockKey, RunConfig, block_hash, group_index
from pdoffload.tiers.run_config import compare_config, config_text

CONFIG_NAME = "config.json"
TEMP_NAME = ".tmp"
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def dir_mode(file_mode: int) -> int:
    """Directory bits for `file_mode`: who may read files may search, and the owner may do all."""
    return 0o700 | file_mode | (file_mode & 0o444) >> 2


class Namespace:
    """Paths of one run configuration and rank under one root. Immutable; any thread."""

    __slots__ = ("base", "chmod_needed", "config_dir", "dir_mode", "file_mode", "root_dir")

    def __init__(self, root_dir: str, run_config: RunConfig, rank: int, file_mode: int) -> None:
        self.root_dir = os.path.abspath(root_dir)
        self.config_dir = f"{self.root_dir}/{run_config.namespace}"
        self.base = f"{self.config_dir}_r{rank}"
        self.file_mode = file_mode
        self.dir_mode = dir_mode(file_mode)
        self.chmod_needed = bool(self.dir_mode & _umask())
        """The process's umask would take bits away that the operator asked for."""

    @classmethod
    def found(cls, base: str, file_mode: int) -> Namespace:
        """The one whose folder is `base`, `<root>/<model>_<digest>_r<rank>`, whatever its configuration."""
        space = cls.__new__(cls)
        space.root_dir = os.path.dirname(base)
        space.config_dir, space.base = base.rpartition("_r")[0], base
        space.file_mode, space.dir_mode = file_mode, dir_mode(file_mode)
        space.chmod_needed = bool(space.dir_mode & _umask())
        return space

    def __repr__(self) -> str:
        return f"<Namespace {self.base}>"

    def path(self, key: BlockKey) -> str:
        """The final name of the chunk `key`."""
        name = block_hash(key).hex()
        return f"{self.base}/{name[:3]}/{name[3:5]}_g{group_index(key)}/{name}.bin"

    def make_parents(self, path: str) -> None:
        """Create the folders `path` lies in, from the root down. `OSError` as the system says."""
        self.make_dir(os.path.dirname(path))

    def make_dir(self, path: str) -> None:
        """Create `path` and what is missing above it. `OSError` as the system says."""
        if len(path) > len(self.root_dir) and not os.path.isdir(os.path.dirname(path)):
            self.make_dir(os.path.dirname(path))
        try:
            os.mkdir(path, self.dir_mode)
        except FileExistsError:
            return
        if self.chmod_needed:
            os.chmod(path, self.dir_mode)


def root_problems(root_dir: str) -> list[str]:
    """Why `root_dir` could not be used, as far as looking tells; nothing is made. Empty if it can."""
    root = os.path.abspath(root_dir)
    if not os.path.lexists(root):
        parent = os.path.dirname(root)
        if not os.path.isdir(parent):
            return [f"root_dir: neither {root!r} nor the folder above it exists; create it"]
        if not os.access(parent, os.W_OK | os.X_OK):
            return [
                f"root_dir: {root!r} does not exist and cannot be made in {parent!r}; create it"
            ]
        return []
    if not os.path.isdir(root):
        return [f"root_dir: {root!r} is not a folder; name one this process may write to"]
    if not os.access(root, os.W_OK | os.X_OK):
        return [f"root_dir: {root!r} is not writable for this process; name a folder that is"]
    return []


def open_namespace(root_dir: str, run_config: RunConfig, rank: int, file_mode: int) -> Namespace:
    """Make the folders of a namespace and write or compare its `config.json`.

    Raises `ConfigError`, naming value and remedy, if the root cannot be used or the stored
    configuration is not ours. Nothing is deleted or overwritten; guards are added to a `config.json`
    that carries none, as stock vLLM writes it.
    """
    space = Namespace(root_dir, run_config, rank, file_mode)
    if problems := root_problems(root_dir):
        raise ConfigError(problems)
    try:
        for folder in (space.root_dir, space.config_dir, space.base, f"{space.base}/{TEMP_NAME}"):
            space.make_dir(folder)
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        _settle_config(space, run_config)
    except OSError as error:
        raise ConfigError(
            [
                f"root_dir: {space.root_dir!r} cannot be used: {error.filename}: {error.strerror}; "
                "name a folder this process may write to"
            ]
        ) from error
    return space


def _settle_config(space: Namespace, run_config: RunConfig) -> None:
    path = f"{space.config_dir}/{CONFIG_NAME}"
    text = config_text(run_config)
    if not os.path.exists(path) and _publish(space, path, text, replace=False):
        return
    with open(path, "rb") as file:
        stored = file.read()
    guarded = compare_config("root_dir", path, stored, run_config)
    if not guarded and os.access(space.config_dir, os.W_OK):
        _publish(space, path, text, replace=True)


def _publish(space: Namespace, path: str, text: str, *, replace: bool) -> bool:
    """Put a whole file under `path`. False if another process was first and `replace` is False."""
    temp = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, space.file_mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            os.fchmod(fd, space.file_mode)
        if replace:
            os.replace(temp, path)
            return True
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            # A file system without hard links: two first starters may both write, the same text
            # unless their guards differ.
            os.replace(temp, path)
        return True
    finally:
        if os.path.lexists(temp):
            os.unlink(temp)


def is_chunk_file(status: os.stat_result, sizes_bytes: tuple[int, ...]) -> bool:
    """Whether `status` is of a regular file of one of `sizes_bytes`."""
    return stat.S_ISREG(status.st_mode) and status.st_size in sizes_bytes


def _umask() -> int:
    """The process's umask. Asking the system means setting it, for all threads: read it instead."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o777
