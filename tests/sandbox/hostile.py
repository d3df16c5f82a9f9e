"""More than forty kinds of hostile programs: each tries to leave its sandbox, or to stay in it for ever.

A program prints ``ESCAPED`` and what it got when something worked that must not. It is told of bait on the host, as
``BAIT``: a secret file, a folder, a listening port, a process. What happens to the bait is the proof that no print is
needed for. ``ends`` says how a sandbox may report the program: most give up by themselves, others must be ended.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.trajectory import Outcome
from stretto.sandbox.walls import ARCHITECTURES, REFUSED

PREAMBLE = """
import ctypes, errno, json, os, signal, socket, struct, sys, threading, time
BAIT = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
CALLS = BAIT['calls']
def attempt(action, *arguments):
    try:
        got = action(*arguments)
    except (OSError, ValueError, RuntimeError, MemoryError, AttributeError) as error:
        return None
    print("ESCAPED", repr(got)[:200])
def call(name, *arguments):
    number = CALLS[name]
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno())
    return name
"""

OTHER_CALLS = {"clone": (56, 220), "clone3": (435, 435), "capset": (126, 91)}

ENDED = (Outcome.TIMEOUT, Outcome.CRASH)
"""Outcomes of a program that was ended or exceeded a limit."""
ANY = (Outcome.OK, *ENDED)


@dataclass(frozen=True, slots=True)
class Hostile:
    """One kind of hostile program."""

    source: str
    ends: tuple[Outcome, ...] = ANY


HOSTILE: Mapping[str, Hostile] = {
    # Processes
    "fork bomb": Hostile("while True:\n try: os.fork()\n except OSError: pass", ENDED),
    "fork bomb that leaves its group": Hostile(
        "while True:\n try:\n  if not os.fork(): os.setsid()\n except OSError: pass", ENDED
    ),
    "thread bomb": Hostile("while True: threading.Thread(target=time.sleep, args=(60,)).start()", ENDED),
    "daemon": Hostile(
        "for _ in range(3):\n if os.fork(): os._exit(0)\n try: os.setsid()\n except OSError: pass\ntime.sleep(600)"
    ),
    "zombies": Hostile(
        "for _ in range(1000):\n try:\n  if not os.fork(): os._exit(0)\n except OSError: pass\ntime.sleep(600)", ENDED
    ),
    "child that holds the output open": Hostile("if not os.fork(): time.sleep(600)"),
    "sleep": Hostile("time.sleep(600)", ENDED),
    "busy loop": Hostile("while True: pass", ENDED),
    "busy children": Hostile(
        "for _ in range(8):\n try:\n  if not os.fork():\n   while True: pass\n except OSError: pass\ntime.sleep(600)",
        ENDED,
    ),
    "stops itself": Hostile("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)", ENDED),
    # Signals
    "ignores all signals": Hostile(
        "for n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile True: pass",
        ENDED,
    ),
    "kills everybody": Hostile(
        "for n in (15, 9):\n try: os.kill(-1, n)\n except OSError: pass\ntime.sleep(600)", ENDED
    ),
    "kills its parent": Hostile(
        "for p in (os.getppid(), 1, BAIT['pid'], *range(2, 50)):\n if p not in (0, os.getpid()):\n  for n in (15, 2, 19, 9):\n"
        "   try: os.kill(p, n)\n   except OSError: pass"
    ),
    "kills the bait": Hostile("attempt(os.kill, BAIT['pid'], 9); attempt(os.kill, BAIT['pid'], 0)"),
    # Memory
    "memory": Hostile("x = []\nwhile True: x.append(bytearray(1 << 24))", ENDED),
    "memory of many": Hostile(
        "for _ in range(6):\n try:\n  if not os.fork():\n   x = bytearray(b'x') * (90 << 20)\n   time.sleep(600)\n except OSError: pass\ntime.sleep(600)",
        ENDED,
    ),
    "memory files": Hostile("attempt(os.memfd_create, 'x')"),
    "deep recursion": Hostile("sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ENDED),
    "large int": Hostile("print(len(str(10 ** 10 ** 9)))", ENDED),
    # Output and files
    "output flood": Hostile("while True: os.write(1, b'x' * 65536)", ENDED),
    "error flood": Hostile("while True: os.write(2, b'x' * 65536)", ENDED),
    "large file": Hostile("f = open('x', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()", ENDED),
    "many files": Hostile("for n in range(10**9):\n try: open(str(n), 'w').close()\n except OSError: break"),
    "deep folders": Hostile("for n in range(3000):\n os.mkdir('d'); os.chdir('d')"),
    "locked folders": Hostile("os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)"),
    "reads the host": Hostile(
        "for p in (BAIT['secret'], '/etc/passwd', '/etc/shadow', '/root/.bash_history', '/proc/1/environ', '/proc/self/mem'):\n"
        " attempt(lambda: open(p, 'rb').read(100))"
    ),
    "writes to the host": Hostile(
        "for p in (BAIT['folder'] + '/x', '/etc/x', '/usr/lib/x', '/x', os.__file__, sys.executable):\n attempt(open, p, 'ab')\n"
        "attempt(os.chmod, os.__file__, 0o777); attempt(os.unlink, os.__file__)"
    ),
    "symlink": Hostile(
        "os.symlink(BAIT['secret'], 'link'); attempt(lambda: open('link').read())\n"
        "os.symlink('/', 'root'); attempt(lambda: open('root' + BAIT['secret']).read())\nos.symlink(BAIT['folder'], 'main.py')"
    ),
    "hard link": Hostile("attempt(os.link, BAIT['secret'], 'link'); attempt(os.rename, BAIT['secret'], 'mine')"),
    "dot dot": Hostile("attempt(lambda: open('../' * 40 + BAIT['secret'][1:]).read())"),
    "leftover descriptors": Hostile("for fd in range(3, 10_000):\n attempt(os.fstat, fd)"),
    "forged replies": Hostile(
        "used = dict(wall_s=0.1, cpu_s=0.1, max_rss_bytes=1, is_stdout_cut=False, is_stderr_cut=False)\n"
        "reply = dict(nonce='0' * 32, broken=None, error='', code=0, used=used, sizes=[8, 0])\n"
        "for text in (b'[' * 9000, b'{}', b'\\xff', json.dumps(reply).encode()):\n"
        " for fd in range(3, 10_000): attempt(os.write, fd, len(text).to_bytes(4, 'big') + text + b'ESCAPED\\n')"
    ),
    "devices": Hostile(
        "attempt(os.mknod, 'd', 0o660 | 0o060000, os.makedev(8, 0))\n"
        "for p in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/dev/kvm', '/dev/tty'): attempt(open, p, 'rb')"
    ),
    # Network
    "network": Hostile(
        "for a in (('127.0.0.1', BAIT['port']), ('1.1.1.1', 53)):\n attempt(lambda: socket.create_connection(a, 0.3))\n"
        "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', BAIT['port'])))"
    ),
    "odd sockets": Hostile(
        "for family in (2, 10, 16, 17, 31, 38, 40, 44):\n for kind in (1, 2, 3, 5): attempt(socket.socket, family, kind)\n"
        "s = lambda p: socket.socket(socket.AF_UNIX).connect(p)\n"
        "for p in ('/run/docker.sock', '/var/run/docker.sock', BAIT['unix'], '\\0' + BAIT['unix']): attempt(s, p)"
    ),
    # The kernel
    "ptrace": Hostile(
        "for n, *a in (('ptrace', 0, 0, 0, 0), ('ptrace', 16, os.getppid(), 0, 0), ('ptrace', 16, BAIT['pid'], 0, 0),"
        " ('process_vm_readv', 1, 0, 0, 0, 0, 0)):\n"
        " attempt(call, n, *a)"
    ),
    "new namespaces": Hostile(
        "for flag in (0x20000, 0x10000000, 0x10000000 | 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000):\n"
        " attempt(call, 'unshare', flag)\n"
        "for n in ('clone', 'clone3'): attempt(call, n, 0x10000000 | 17, 0, 0, 0, 0)"
    ),
    "mounts": Hostile(
        "for n, *a in (('mount', b'none', b'/tmp', b'tmpfs', 0, 0), ('umount2', b'/tmp', 2), ('pivot_root', b'/tmp', b'/tmp'),"
        " ('chroot', b'/tmp'), ('open_tree', -100, b'/', 1)):\n"
        " attempt(call, n, *a)"
    ),
    "becomes root": Hostile(
        "for id in (0, 1000, 65534):\n if id != os.getuid(): attempt(os.setuid, id); attempt(os.setgid, id)\n"
        "attempt(os.setgroups, [0]); attempt(call, 'capset', struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24)"
    ),
    "keys, bpf, io_uring, reboot": Hostile(
        "for n in ('kexec_load', 'add_key', 'request_key', 'keyctl', 'perf_event_open', 'open_by_handle_at', 'bpf', 'userfaultfd', 'io_uring_setup',"
        " 'reboot', 'init_module', 'swapon'): attempt(call, n, 1, 0, 0, 0, 0)"
    ),
    "clock": Hostile(
        "attempt(time.clock_settime, time.CLOCK_REALTIME, 0.0); attempt(call, 'settimeofday', struct.pack('qq', 0, 0), 0)\n"
        "time.monotonic = time.time = lambda: 0.0; time.sleep(600)",
        ENDED,
    ),
    "/proc": Hostile(
        "for p in ('/proc/1/root', '/proc/%d/root' % BAIT['pid'], '/proc/self/root/..', '/sys/kernel'): attempt(os.listdir, p + BAIT['folder'])\n"
        "for p in ('/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', '/proc/self/uid_map', '/proc/self/oom_score_adj'): attempt(open, p, 'w')"
    ),
    "import hooks": Hostile(
        "class Hook:\n def find_spec(self, *a):\n  while True: pass\nsys.meta_path.insert(0, Hook())\n"
        "sys.excepthook = lambda *a: os.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])\n"
        "import atexit\natexit.register(time.sleep, 600)\n1 / 0",
        ENDED,
    ),
    "limits raised": Hostile(
        "import resource\nfor kind in range(16):\n if resource.getrlimit(kind)[1] != -1 and kind != 9:\n"
        "  attempt(resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "attempt(resource.prlimit, BAIT['pid'], 7); attempt(resource.prlimit, os.getppid() or 1, 7, (3, 3)); attempt(os.nice, -5)\n"
    ),
}


@dataclass(slots=True)
class Bait:
    """Targets for hostile programs on the host; `damage` reports which were reached."""

    folder: Path
    secret: str
    victim: subprocess.Popen[bytes]
    listeners: tuple[socket.socket, socket.socket]

    def line(self) -> bytes:
        """Standard input of a program: the addresses of the targets."""
        tcp, unix = self.listeners
        fields = {"secret": str(self.folder / "secret"), "folder": str(self.folder), "pid": self.victim.pid}
        column = list(ARCHITECTURES).index(os.uname().machine)
        calls = {name: numbers[column] for name, numbers in {**REFUSED, **OTHER_CALLS}.items()}
        return (
            json.dumps({**fields, "calls": calls, "port": tcp.getsockname()[1], "unix": unix.getsockname()}).encode()
            + b"\n"
        )

    def damage(self, output: bytes) -> list[str]:
        """Evidence that a program left its sandbox."""
        found = []
        if b"ESCAPED" in output:
            found.append(output[output.index(b"ESCAPED") :][:200].decode("utf-8", "replace"))
        if self.secret.encode() in output:
            found.append("printed the secret")
        if self.victim.poll() is not None:
            found.append("the bait process died")
        if sorted(os.listdir(self.folder)) != ["secret", "unix"] or (self.folder / "secret").read_text() != self.secret:
            found.append("the bait folder changed")
        for listener in self.listeners:
            try:
                listener.accept()
                found.append("a connection came")
            except BlockingIOError:
                continue
        return found


@contextmanager
def many_descriptors(num: int) -> Iterator[None]:
    """Open further descriptors in this process, which programs inherit if they can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, num + 1024)), hard))
    held: list[int] = []
    try:
        for _ in range(num):
            held.append(os.open(os.devnull, os.O_RDWR))
            os.set_inheritable(held[-1], True)
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def bait() -> Iterator[Bait]:
    """Create the targets, readable and reachable by everyone on the host."""
    with tempfile.TemporaryDirectory(prefix="bait-") as temporary:
        folder = Path(temporary)
        folder.chmod(0o777)
        secret = secrets.token_hex(16)
        (folder / "secret").write_text(secret)
        (folder / "secret").chmod(0o666)
        tcp, unix = socket.socket(), socket.socket(socket.AF_UNIX)
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "unix"))
        (folder / "unix").chmod(0o777)
        for listener in (tcp, unix):
            listener.listen()
            listener.setblocking(False)
        victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(86400)"])
        try:
            with tcp, unix:
                yield Bait(folder, secret, victim, (tcp, unix))
        finally:
            victim.kill()
            victim.wait()
