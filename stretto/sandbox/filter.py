"""The system calls that no sandboxed program gets, as a seccomp filter in BPF.

A list of what is refused, not of what is allowed: the walls are the namespaces, and this closes what is known to lead
around them (new namespaces, mounts, tracing, keys, kernel interfaces with a history) or hides memory from the limits
(memfd, System V segments). Refused calls fail with EPERM, and the program goes on.
"""

from __future__ import annotations

import errno
import os
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Audit numbers (linux/audit.h) of the machines whose call numbers are below."""

# name: (number on x86_64, on aarch64); None: there is no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "fanotify_init": (300, 262),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
# Without a pid namespace: what would leave the process group, or reach processes that are not the program's.
REFUSED_AMONG_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_NEW_NAMESPACES = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, time
_AF_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: put words into a terminal's mouth
_X32_CALLS = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half comes first
_REFUSE = _ERRNO | errno.EPERM

Line = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


def is_supported() -> bool:
    return os.uname().machine in ARCHITECTURES


def build(is_alone: bool, own_pid: int) -> bytes:
    """The filter's program.

    Args:
        is_alone: nothing but the program and its keeper is in the pid namespace; if not, it may signal its process
            group and itself only.
        own_pid: of the process that will install the filter; not used if it is alone.
    """
    machine = os.uname().machine
    column = list(ARCHITECTURES).index(machine)
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]

    def add(number: int | None, *body: Line) -> None:
        if number is not None:
            lines.extend([(_EQUAL, 0, len(body), number), *body])

    def add_test(number: int, argument: int, *values: int) -> None:
        """Allow the call where the argument is one of the values."""
        tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        add(number, (_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW))

    refused = REFUSED if is_alone else REFUSED | REFUSED_AMONG_OTHERS
    for numbers in refused.values():
        add(numbers[column], (_RETURN, 0, 0, _REFUSE))
    add(
        _CLONE3[column], (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    )  # its flags lie in memory; the C library uses clone then
    add(
        _CLONE[column],
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    add(
        _IOCTL[column],
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_EQUAL, 1, 0, _TERMINAL_INPUT[0]),
        (_EQUAL, 0, 1, _TERMINAL_INPUT[1]),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    if is_alone:
        add_test(_SOCKET[column], 0, _AF_UNIX)
    else:
        add(_SOCKET[column], (_RETURN, 0, 0, _REFUSE))
        add_test(_KILL[column], 0, 0, own_pid)
        add_test(_TGKILL[column], 0, own_pid)
    add_test(_PRLIMIT[column], 0, 0)  # its own only: the keeper may be of the same user
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
