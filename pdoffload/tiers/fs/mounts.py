"""What kind of file system a path lies on: locks and mapped files do not hold across hosts on all of them."""

from __future__ import annotations

import os

_NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fhgfs",
        "glusterfs",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    ]
)


def network_type(path: str) -> str:
    """The type of the file system that holds `path` where other hosts can mount it too; else empty.

    Anything in user space (`fuse`, `fuse.sshfs`) counts as such. Unknown kinds count as local.
    """
    kind = _type_of(path)
    return kind if kind in _NETWORK or kind.partition(".")[0] in ("fuse", "fuseblk") else ""


def _type_of(path: str) -> str:
    try:
        device = os.stat(path).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # 36 35 98:0 /root /mount options ... - type source options
        left, _, right = line.partition(" - ")
        if left.split(" ", 3)[2] == number:
            return right.split(" ", 1)[0]
    return ""


def host_name() -> str:
    """This host's name as part of a file name."""
    return os.uname().nodename.replace("/", "_") or "host"
