from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox import isolate
from stretto.sandbox.inside import children
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import Isolation, Level, Limits
from tests.sandbox.conftest import LIMITS


def test_an_honest_program(sandbox: Sandbox) -> None:
    finished = sandbox.run("import sys\nprint(sys.stdin.read()[::-1])\nprint('note', file=sys.stderr)", stdin="äbc")
    assert (finished.outcome, finished.why, finished.exit_code, finished.signal) == (Outcome.OK, "", 0, None)
    assert (finished.stdout.decode(), finished.stderr) == ("cbä\n", b"note\n")
    assert 0 < finished.cpu_s < 5 and finished.wall_s > 0 and finished.max_rss_bytes > 1 << 20


def test_it_runs_as_a_main_program_does(sandbox: Sandbox, tmp_path: Path) -> None:
    """Compares with the reference: the same text run by a new interpreter."""
    source = (
        "import atexit, sys, threading\n"
        "print(__name__, sys.argv[1:], __builtins__ is not None, len(sys.modules) > 10)\n"
        "threading.Thread(target=lambda: print('thread')).start()\n"
        "atexit.register(print, 'the end')\n"
        "def f(x: Later): pass\n"
    )
    (tmp_path / "main.py").write_text(source)
    reference = subprocess.run([sys.executable, "-S", "main.py"], cwd=tmp_path, capture_output=True, check=False)
    ours = sandbox.run(source)
    assert ours.exit_code == reference.returncode == 1  # Later is not defined: no future import leaks in
    assert ours.stdout == reference.stdout
    assert ours.stderr.splitlines()[-1] == reference.stderr.splitlines()[-1]
    assert b"run_source" not in ours.stderr and b'main.py", line 5, in <module>' in ours.stderr


@pytest.mark.parametrize(
    ("source", "code"),
    [("raise SystemExit", 0), ("raise SystemExit(3)", 3), ("import sys; sys.exit('why')", 1), ("1 +", 1), ("1 / 0", 1)],
)
def test_exit_codes(sandbox: Sandbox, source: str, code: int) -> None:
    finished = sandbox.run(source)
    assert finished.exit_code == code
    assert finished.outcome == (Outcome.CRASH if code else Outcome.OK)
    assert b"Traceback" not in finished.stderr or b"sandbox" not in finished.stderr.split(b"main.py")[-1]


def test_the_standard_library_is_there(sandbox: Sandbox) -> None:
    """Modules that the keeper has not imported, also compiled ones; multiprocessing needs /dev/shm."""
    source = "import email, sqlite3, tempfile, xml.dom.minidom\nprint('x'.encode('idna'), tempfile.gettempdir())"
    finished = sandbox.run(source)
    assert finished.outcome == Outcome.OK and finished.stdout.startswith(b"b'x' "), finished
    if sandbox.isolation.level > Level.LIMITS:
        source = "import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))"
        assert sandbox.run(source).stdout == b"[1, 2]\n"


def test_arguments_and_files(sandbox: Sandbox) -> None:
    files = {"tests/data.txt": "seven", "run.py": "import sys; print(sys.argv, open('tests/data.txt').read())"}
    finished = sandbox.run(["python", "run.py", "x"], files=files)
    assert finished.stdout == b"['run.py', 'x'] seven\n", finished
    assert sandbox.run("import os; print(sorted(os.listdir()))").stdout == b"[]\n"  # no file stays
    missing = sandbox.run(["/no/such/program"])
    assert missing.outcome == Outcome.INFRA and "FileNotFoundError" in missing.why
    for name in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="work folder"):
            sandbox.run("pass", files={name: b""})


def test_nothing_of_the_driver_is_visible(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    finished = sandbox.run(
        "import os, sys\nprint(sorted(os.environ), any(n.startswith('stretto') for n in sys.modules))\n"
        "for fd in range(3, 256):\n try: os.fstat(fd); print(fd)\n except OSError: pass"
    )
    names = "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'PATH', 'PYTHONHASHSEED', 'TMPDIR', 'TZ'] False"
    assert finished.stdout.decode().replace("'PWD', ", "").strip() == names


def test_the_view_is_small_and_read_only(sandbox: Sandbox) -> None:
    if sandbox.isolation.level == Level.LIMITS:
        finished = sandbox.run(
            "import os\nfor p in ('/', '/etc', '/proc'):\n try: print(os.listdir(p))\n except OSError: pass"
        )
        assert finished.stdout == (b"" if sandbox.isolation.has_landlock else finished.stdout)
        return
    finished = sandbox.run("import os\nprint(os.path.exists('/etc'), os.path.exists('/proc/self'), os.getuid())")
    assert finished.stdout == b"False False " + (b"1" if os.geteuid() == 0 else b"0") + b"\n"
    finished = sandbox.run(
        "import os\nfor p in ('/x', '/usr/lib/x', '/dev/x', os.__file__):\n try: open(p, 'a')\n except OSError as e: print(e.errno)"
    )
    assert set(finished.stdout.split()) <= {b"30", b"13"} and len(finished.stdout.split()) == 4  # EROFS, EACCES


def test_calls_that_the_filter_refuses_by_their_arguments(sandbox: Sandbox) -> None:
    """The filter returns EPERM; without it the calls succeed or fail with other errors."""
    if not sandbox.isolation.has_filter and sandbox.isolation.level > Level.LIMITS:
        pytest.skip("no filter of system calls on this machine")
    source = (
        "import fcntl, os, socket\n"
        "def number(call, *arguments):\n"
        " try: call(*arguments); return 0\n"
        " except OSError as error: return error.errno\n"
        "read, write = os.pipe()\n"
        "print([number(socket.socketpair, family) for family in (1, 2, 16, 30)], number(fcntl.fcntl, read, 1),\n"
        " [number(fcntl.fcntl, read, command, 0) for command in (8, 10)], number(fcntl.ioctl, read, 0x5412, b'x'))"
    )
    others = "[1, 1]" if sandbox.isolation.level == Level.LIMITS else "[0, 0]"
    assert sandbox.run(source).stdout.decode() == f"[0, 1, 1, 1] 0 {others} 1\n"


def test_limits_end_a_program(sandbox: Sandbox) -> None:
    short = replace(LIMITS, wall_s=0.3)
    finished = sandbox.run("import time; print('begun', flush=True); time.sleep(600)", limits=short)
    assert finished.outcome == Outcome.TIMEOUT and finished.why == "ran longer than 0.3 s"
    assert finished.signal == signal.SIGKILL
    finished = sandbox.run("while True: pass", limits=replace(LIMITS, cpu_s=0.2))
    assert finished.outcome == Outcome.TIMEOUT and "processor" in finished.why
    assert 0.1 < finished.cpu_s < 5
    finished = sandbox.run("x = bytearray(1 << 30)")
    assert finished.outcome == Outcome.CRASH and "MemoryError" in finished.why
    finished = sandbox.run("print('x' * 100_000)")
    assert finished.outcome == Outcome.CRASH and finished.is_stdout_cut and not finished.is_stderr_cut
    assert finished.stdout == b"x" * LIMITS.output_bytes
    finished = sandbox.run("open('f', 'wb').write(bytes(5 << 20))")
    assert finished.outcome == Outcome.CRASH
    finished = sandbox.run("import os\nfor _ in range(40):\n if not os.fork(): os.read(0, 1); os._exit(0)", stdin=b"")
    assert finished.outcome in (Outcome.CRASH, Outcome.OK)  # forks that end at once may stay under the limit


@contextmanager
def busy(sandbox: Sandbox, num: int) -> Iterator[None]:
    """Make the sandbox's keeper share its processor with other processes of the same priority."""
    (pid,) = sandbox.idle_pids
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-S", "-c", spin], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(num)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        os.sched_setaffinity(pid, {cpu})
        yield
    finally:
        os.sched_setaffinity(pid, allowed)
        for other in others:
            other.kill()
            other.communicate()


SPIN = "import time\nwhile time.process_time() < {}: pass\nprint('done')"


@pytest.mark.slow
def test_a_busy_machine_is_not_the_programs_fault() -> None:
    short = replace(LIMITS, wall_s=0.3, cpu_s=0.3)
    with Sandbox(LIMITS) as sandbox, busy(sandbox, 10):
        right = sandbox.run(SPIN.format(0.06), limits=short)
        starved = sandbox.run("while True: pass", limits=short)
        longer = replace(LIMITS, wall_s=0.6, cpu_s=0.6)  # it sleeps before the limit
        asleep = sandbox.run("import time; time.sleep(600)", limits=longer)
        many = sandbox.run("import os, time\nfor _ in range(3): os.fork()\ntime.sleep(600)", limits=longer)
    assert right.wall_s > short.wall_s, "the machine was not busy"
    assert right.outcome is Outcome.OK or (right.outcome is Outcome.INFRA and "too busy" in right.why), right
    assert starved.outcome is Outcome.INFRA and "too busy" in starved.why, starved
    for sleeper in (asleep, many):
        assert (sleeper.outcome, sleeper.why) == (Outcome.TIMEOUT, "ran longer than 0.6 s"), sleeper


def test_memory_of_a_whole_tree(sandbox: Sandbox) -> None:
    """Each process is below the limit; together they exceed it. Pages that forks share count once."""
    grow = "import os, time\nfor _ in range(5):\n if not os.fork(): x = bytearray(b'x') * (80 << 20); time.sleep(60)\ntime.sleep(60)"
    hide = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # not dumpable: its pages cannot be read
    for source in (grow, hide + grow):
        finished = sandbox.run(source)
        assert finished.outcome == Outcome.CRASH and "bytes of memory" in finished.why
    share = "import os, time\nx = bytearray(b'x') * (80 << 20)\nfor _ in range(5):\n if not os.fork(): time.sleep(0.5); os._exit(0)\n"
    share += "for _ in range(5): os.wait()"
    assert sandbox.run(share).outcome == Outcome.OK


def test_signals(sandbox: Sandbox) -> None:
    finished = sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (finished.outcome, finished.signal) == (Outcome.CRASH, signal.SIGTERM)
    finished = sandbox.run("import os; os.abort()")
    assert (finished.outcome, finished.signal) == (Outcome.CRASH, signal.SIGABRT)


def test_no_process_is_left(sandbox: Sandbox) -> None:
    for source in (
        "import os\nif os.fork(): os._exit(0)\nimport time; time.sleep(600)",
        "import os\nfor _ in range(9): os.fork()",
    ):
        sandbox.run(source)
        (pid,) = sandbox.idle_pids
        assert children(pid) == []


def test_a_program_that_reads_nothing(sandbox: Sandbox) -> None:
    assert sandbox.run("print(1)", stdin=b"x" * 1_000_000).outcome == Outcome.OK
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", stdin=b"x" * 1_000_000).stdout == b"1000000\n"


def test_a_keeper_that_dies_is_our_fault_and_is_replaced(sandbox: Sandbox) -> None:
    (pid,) = sandbox.idle_pids
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    finished = sandbox.run("import time; time.sleep(10)")
    killer.join()
    assert finished.outcome == Outcome.INFRA and finished.exit_code is None
    assert sandbox.run("print(1)").stdout == b"1\n"
    assert not Path(f"/proc/{pid}").exists()


def _reply(nonce: str = "", **changes: object) -> bytes:
    """A keeper's message, written without knowledge of the nonce."""
    used = {"wall_s": 0.1, "cpu_s": 0.1, "max_rss_bytes": 1, "is_stdout_cut": False, "is_stderr_cut": False}
    reply = {"nonce": nonce, "broken": None, "error": "", "code": 0, "used": used, "sizes": [3, 0], **changes}
    text = json.dumps(reply).encode()
    return len(text).to_bytes(4, "big") + text + b"yes"


FORGED = {
    "right but for the nonce": _reply(),
    "a negative size": _reply(sizes=[3, -1]),
    "more output than allowed": _reply(sizes=[1 << 40, 0]),
    "sizes of another type": _reply(sizes=[[], "x"]),
    "a code that is text": _reply(code="0"),
    "a code that nothing ends with": _reply(code=1 << 70),
    "endless seconds": _reply(used={"cpu_s": float("inf")}),
    "an unknown break": _reply(broken="ok"),
    "no fields": b"\0\0\0\2{}",
    "no text": b"\0\0\0\2\xff\xff",
    "deep": b"\0\0\x20\0" + b"[" * 0x2000,
    "a long header": b"\xff\xff\xff\xff",
    "half a message": b"\0\0\x10\0{",
}
"""Invalid messages on a keeper's socket."""


@pytest.mark.slow
def test_a_reply_that_no_keeper_writes_is_a_lost_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that answers with the text of the program stands for a program that reached the socket."""
    code = tmp_path / "stretto" / "sandbox"
    shutil.copytree(isolate._CODE, code)
    text = (code / "inside.py").read_text()
    honest = "            send(control, *run(keeper, *message))\n"
    assert honest in text
    taken = honest.replace("send(", "control.sendall(message[1][1]) if 'x' in message[0]['files'] else send(")
    (code / "inside.py").write_text(text.replace(honest, taken))
    monkeypatch.setattr(isolate, "_CODE", code)
    monkeypatch.setattr(isolate, "LATE_S", 1.0)
    with Sandbox(LIMITS) as sandbox:
        for name, forged in FORGED.items():
            finished = sandbox.run(forged, files={"x": b""}, limits=replace(LIMITS, wall_s=0.1, cpu_s=0.1))
            assert finished.outcome is Outcome.INFRA and "keeper is gone" in finished.why, (name, finished)
            assert (finished.stdout, finished.exit_code) == (b"", None), name
            assert sandbox.run("print(1)").stdout == b"1\n", name


def test_no_program_holds_the_word_that_its_reply_is_known_by(sandbox: Sandbox) -> None:
    """The program searches its copy of the keeper's memory for texts in the form of a nonce."""
    source = (
        "import gc, re\n"
        "def texts(o, depth=4):\n"
        " if isinstance(o, str): yield o\n"
        " elif depth and isinstance(o, dict): yield from (t for v in list(o.values()) for t in texts(v, depth - 1))\n"
        " elif depth and isinstance(o, (list, tuple)): yield from (t for v in o for t in texts(v, depth - 1))\n"
        "import sys\nf = sys._getframe()\nframes = []\n"
        "while f: frames.append(dict(f.f_locals)); f = f.f_back\n"
        "print({t for t in texts(frames) if re.fullmatch('[0-9a-f]{32}', t)}, len(frames) > 3)"
    )
    sandbox.run("print(1)")
    assert sandbox.run(source).stdout == b"set() True\n"


@pytest.mark.parametrize("has_call", [True, False])
def test_high_descriptors_are_closed(has_call: bool, tmp_path: Path) -> None:
    """With the system call close_range and without it, as before Linux 5.9."""
    script = (
        "import os, sys\nfrom stretto.sandbox import walls\n"
        f"walls._SYS_CLOSE_RANGE = walls._SYS_CLOSE_RANGE if {has_call} else 9999\n"
        "for _ in range(300): os.open('/dev/null', 0)\nos.dup2(0, 1000)\nwalls.close_from(5)\n"
        "print(sorted(int(name) for name in os.listdir('/proc/self/fd'))[-3:])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 4, 5]\n"  # 5: the descriptor of the listing


@pytest.mark.slow
def test_the_end_of_the_driver_ends_everything() -> None:
    """The driver is killed while a program runs."""
    script = (
        "import threading, time\nfrom stretto.sandbox.isolate import Sandbox, descendants\n"
        "import os\nsandbox = Sandbox()\nthreading.Thread(target=sandbox.run, args=('import time; time.sleep(600)',)).start()\n"
        "time.sleep(0.5)\nprint(*descendants(os.getpid()), flush=True)\ntime.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = driver.stdout.readline().split()
    assert len(pids) >= 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "processes outlive their driver"
        time.sleep(0.05)


def test_many_at_once() -> None:
    with Sandbox(LIMITS, workers=3) as sandbox, ThreadPoolExecutor(12) as threads:
        finished = list(threads.map(lambda n: sandbox.run(f"print({n})"), range(12)))
        assert [each.stdout for each in finished] == [b"%d\n" % n for n in range(12)]
        assert 1 <= len(sandbox.idle_pids) <= 3


def test_isolation_is_said_and_strict_is_strict() -> None:
    with Sandbox() as sandbox:
        found = sandbox.isolation
    weak = Isolation(Level.LIMITS, has_filter=True, has_landlock=True, own_uid=True, missing=("no namespaces: EPERM",))
    assert str(weak).startswith("process limits only, NOT full isolation; ") and "no namespaces: EPERM" in str(weak)
    assert not weak.is_full
    if found.is_full:
        Sandbox(strict=True).close()
        assert "namespaces" in str(found)
        with pytest.raises(UserError, match=r"sandbox: strict: .*NOT full isolation.*install bubblewrap"):
            Sandbox(level=Level.LIMITS, strict=True, python="/usr/bin/python3")


def test_limits_of_a_recipe() -> None:
    class Table:
        wall_s, cpu_s, memory_bytes, output_bytes, processes, strict = 1.0, 2.0, 3, 4, 5, True

    assert Limits.of(Table()) == Limits(wall_s=1.0, cpu_s=2.0, memory_bytes=3, output_bytes=4, processes=5)
    with pytest.raises(AssertionError, match="wall_s"):
        Limits(wall_s=0)
