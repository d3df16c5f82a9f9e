"""The few Linux calls that Python 3.11 lacks: namespaces, mounts, capabilities, Landlock.

Numbers are those of the kernel's user headers; calls without a C wrapper have one number on every architecture here.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MS_RDONLY = 1
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ_FILES = 0b101  # execute, read
_LANDLOCK_READ_FOLDERS = _LANDLOCK_READ_FILES | 0b1000
_LANDLOCK_DEVICE = 0b110  # read, write
_LANDLOCK_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
"""By ABI version: rights known; the later ones have 16."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_libc.syscall.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def setns(fd: int, flags: int) -> None:
    _checked("setns", _libc.setns(fd, flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(f"mount {target}", result)


def make_read_only(target: str, recursive: bool, devices: bool = False) -> None:
    """No writing and no set-uid below ``target``; no device files either unless ``devices``. Needs Linux 5.12."""
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    data = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), flags, data, ctypes.c_size_t(len(data)))
    _checked(f"mount_setattr {target}", result)


def pivot_root(new: str, old: str) -> None:
    _checked("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()))


def detach(target: str) -> None:
    _checked(f"umount {target}", _libc.umount2(target.encode(), _MNT_DETACH))


def set_death_signal(number: int) -> None:
    """Get this signal when the thread that forked us ends. Cleared by a change of user id: call it after."""
    _checked("PR_SET_PDEATHSIG", _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def become_subreaper() -> None:
    """Orphans among our descendants become our children."""
    _checked("PR_SET_CHILD_SUBREAPER", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def set_readable(is_readable: bool) -> None:
    """Whether processes of the same user may look into our memory, and at /proc's account of it."""
    _checked("PR_SET_DUMPABLE", _libc.prctl(_PR_SET_DUMPABLE, int(is_readable), 0, 0, 0))


def drop_bounding_set() -> None:
    """No later execve can give a capability back. Does nothing where we may not, which is where we have none."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, bytes(24)))


def forbid_new_privileges() -> None:
    _checked("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def install_filter(program: bytes) -> None:
    """Filter this process's system calls from now on by a BPF program; needs `forbid_new_privileges` before."""
    code = ctypes.create_string_buffer(program, len(program))
    argument = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(argument), 0, 0))


def landlock_version() -> int:
    """ABI version; 0 where the kernel has no Landlock or it is switched off."""
    return max(0, int(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(readable: Iterable[str], devices: Iterable[str], writable: str) -> None:
    """Keep this process and its children from all files but these, from TCP, and from signalling others.

    TCP needs ABI 4 and signals ABI 6; earlier kernels leave them open. Needs `forbid_new_privileges` before.
    """
    version = landlock_version()
    all_files = (1 << _LANDLOCK_FS_BITS.get(version, 16)) - 1
    rules = struct.pack("=QQQ", all_files, 0b11, 0b11)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    created = _libc.syscall(_SYS_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    ruleset = _checked("landlock_create_ruleset", created)
    for path in readable:
        _allow(ruleset, path, _LANDLOCK_READ_FOLDERS if os.path.isdir(path) else _LANDLOCK_READ_FILES)
    for path in devices:
        _allow(ruleset, path, _LANDLOCK_DEVICE)
    _allow(ruleset, writable, all_files & ~1)  # nothing there is to be executed
    _checked("landlock_restrict_self", _libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, fd)
    _checked(f"landlock_add_rule {path}", _libc.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0))
    os.close(fd)
