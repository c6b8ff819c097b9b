"""The compiled products of the CPU on many threads, in forked children, in processes; the cache of libraries."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest
from harness import compiles_once
from helpers import at_once, forked, random_tensor
from numpy.testing import assert_array_equal

import qgemm
from qgemm import parallel
from qgemm.cpu import native
from qgemm.cpu.native import compiler, libraries, library, pool, sources
from qgemm.cpu.native.calls import POOL
from qgemm.files import compiled
from qgemm.once import Once

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def product(seed: int = 0):
    rng = np.random.default_rng(seed)
    w, x = random_tensor(qgemm.FORMATS["q4_0"], 300, 256, rng), rng.standard_normal((2, 256), np.float32)
    return lambda: qgemm.matmul(x, w, "a8")


def test_many_threads_at_once():
    """Each of 8 threads gets its own products, be the pool busy or not."""
    wrong = []

    def work(seed: int) -> None:
        run = product(seed)
        want = run()
        wrong.extend(i for i in range(1000) if not np.array_equal(run(), want))

    at_once(work, range(8))
    assert not wrong


@pytest.mark.parametrize("asleep", [False, True])
def test_a_forked_child_multiplies(asleep, tmp_path, monkeypatch):
    """Threads do not survive a fork, be they awake or asleep, and are started anew in the child."""
    monkeypatch.setattr(parallel, "_chosen", None)  # a number that another test has set comes first
    monkeypatch.setenv("QGEMM_THREADS", "3")
    run = product()
    want = run()
    if asleep:
        threading.Event().wait(0.02)

    def work() -> None:
        signal.alarm(60)  # ends a child that waits for threads of its parent
        assert len(os.listdir("/proc/self/task")) == 1
        ys = [run().tobytes() for _ in range(50)]
        assert len(os.listdir("/proc/self/task")) == 3
        (tmp_path / "y").write_bytes(b"".join(ys))

    assert os.waitpid(forked(work), 0)[1] == 0
    assert (tmp_path / "y").read_bytes() == want.tobytes() * 50
    assert_array_equal(run(), want)


def test_a_fork_while_another_thread_multiplies(tmp_path):
    run, stop = product(), threading.Event()
    want = run()

    def busy() -> None:
        while not stop.is_set():
            run()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for i in range(10):
            child = forked(lambda i=i: (tmp_path / str(i)).write_bytes(run().tobytes()))
            assert os.waitpid(child, 0)[1] == 0
            assert (tmp_path / str(i)).read_bytes() == want.tobytes()
    finally:
        stop.set()
        thread.join()


PROGRAM = """
import sys, threading, numpy as np, qgemm
w = qgemm.quantize(np.eye(256, dtype=np.float32), "q8_0")
x = np.ones((2, 256), np.float32)
assert np.abs(qgemm.matmul(x, w, "a8") - 1).max() < 0.001
if "daemon" in sys.argv:
    def forever():
        while True:
            qgemm.matmul(x, w)
    threading.Thread(target=forever, daemon=True).start()
print(qgemm.backends()["cpu"].detail)
"""


def program(folder, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with a cache of its own."""
    env = {
        **os.environ,
        "CC": compiles_once(compiler.compiler().command),
        "QGEMM_CACHE_DIR": str(folder / "cache"),
        **environment,
    }
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], env=env, capture_output=True, text=True, timeout=120)


def test_the_end_of_a_process(tmp_path):
    """Also with a product on its way."""
    for words in ((), *[("daemon",)] * 3):
        done = program(tmp_path, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "code compiled by" in done.stdout


def test_two_processes_fill_the_cache_at_once(tmp_path):
    with ThreadPool(2) as pool:
        for done in pool.starmap(program, [(tmp_path,), (tmp_path,)]):
            assert (done.returncode, done.stderr) == (0, "")
    suffixes = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert suffixes == [".so"] * 3  # the pool, a format, activations; NumPy encodes few weights


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    done = program(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_can_only_be_read(tmp_path):
    """Its entries are loaded; each process compiles the missing ones, without a warning."""
    cache = tmp_path / "cache"
    cache.mkdir(0o700)
    cache.chmod(0o500)
    if os.access(cache, os.W_OK):  # an administrator writes to any folder but those of the kernel
        cache = Path("/sys/kernel")
    for _ in range(2):
        done = program(tmp_path, QGEMM_CACHE_DIR=str(cache))
        assert (done.returncode, done.stderr) == (0, "")
        assert "code compiled by" in done.stdout
    assert not list(cache.glob("*.so"))


def test_an_entry_of_another_name_is_never_loaded(tmp_path):
    """Sealed and private, but a library of something else: compiled anew, and put in its place."""
    assert program(tmp_path).returncode == 0
    entries = sorted((tmp_path / "cache").iterdir())
    first = entries[0].read_bytes()
    for path in entries[1:]:
        path.write_bytes(first)
    done = program(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "code compiled by" in done.stdout
    for path in entries:
        assert path.read_bytes().endswith(path.name.encode())


def test_big_endian_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    library.lacking.cache_clear()
    try:
        assert library.reason() == "compiled code needs a little-endian machine"
        assert not native.serves(qgemm.FORMATS["q4_0"])
    finally:
        library.lacking.cache_clear()


def test_a_compiler_that_fails(tmp_path):
    """Its message is shown once, and NumPy multiplies."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: no space left on device' >&2\nexit 3\n")
    broken.chmod(0o755)
    done = program(tmp_path, CC=str(broken))
    assert done.returncode == 0
    assert done.stderr.count("cc: no space left on device") == 1
    assert "products on the CPU stay slow, by NumPy" in done.stderr
    assert "NumPy alone: the C compiler failed" in done.stdout


def stopped(times: int, tmp_path: Path, how: str) -> str:
    """A compiler that is stopped as many times before it works."""
    path = tmp_path / "stopped"
    number = f"n=1; while ! mkdir {path}.run$n 2> /dev/null; do n=$((n + 1)); done"  # two may run at once
    count = f"{number}; if [ $n -le {times} ]; then {how}; fi"
    path.write_text(f'#!/bin/sh\n{count}\nexec {compiles_once(compiler.compiler().command)} "$@"\n')
    path.chmod(0o755)
    return str(path)


MANY_PRODUCTS = """
import warnings, numpy as np, qgemm
w = qgemm.quantize(np.eye(256, dtype=np.float32), "q8_0")
x = np.ones((2, 256), np.float32)
for activation in ("a16", "a8"):
    for _ in range(3):
        assert np.abs(qgemm.matmul(x, w, activation) - 1).max() < 0.001
print(qgemm.backends()["cpu"].detail)
"""


KILLED = "kill -9 $$", "echo 'cc: fatal error: Killed signal terminated cc1' >&2; exit 1"


@pytest.mark.parametrize(("times", "how"), [(2, KILLED[0]), (1, KILLED[1]), (9, KILLED[0])])
def test_a_compiler_that_is_stopped_runs_again(times, how, tmp_path, monkeypatch):
    """Killed for lack of memory, it is no broken compiler unless it is killed each time."""
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", MANY_PRODUCTS)
    done = program(tmp_path, CC=stopped(times, tmp_path, how))
    assert done.returncode == 0
    assert done.stderr.count("the next one compiles again: ") == 1  # Python shows a warning once
    if times < library.ATTEMPTS:
        assert "code compiled by" in done.stdout
        assert "stay slow" not in done.stderr
    else:
        assert "NumPy alone: the C compiler failed" in done.stdout
        assert done.stderr.count("products on the CPU stay slow, by NumPy: ") == 1
        assert len(list(tmp_path.glob("stopped.run*"))) == library.ATTEMPTS


def test_the_first_library_and_the_pool_compile_at_the_same_time(tmp_path, monkeypatch):
    """Half of the time that a first product waits. An error is that of the call that waits for the library."""
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", Once())
    monkeypatch.setattr(library, "_started", {})
    monkeypatch.setattr(library, "_own", lambda by: True)
    monkeypatch.setattr(pool, "pool", lambda: library.library(POOL))
    source, both = libraries.source(qgemm.FORMATS["q4_0"]), threading.Barrier(2, timeout=20)
    compiled_alone = library.compiled

    def meets(by, file, words):
        both.wait()
        return compiled_alone(by, file, words)

    monkeypatch.setattr(library, "compiled", meets)
    assert library.compiles(lambda: pool.pooled(source))
    assert {source, POOL} == set(library._loaded.values)


def test_a_slow_compiler_is_no_broken_one(tmp_path, monkeypatch):
    """One that exceeds the time limit, which is minutes, runs again for the next product."""
    assert compiler.TIMEOUT >= 300
    slow, calls = subprocess.run, []

    def run(*words, timeout, **options):
        calls.append(timeout)
        if len(calls) == 1:
            raise subprocess.TimeoutExpired("cc", timeout)
        return slow(*words, timeout=timeout, **options)

    by = compiler.compiler()
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler.subprocess, "run", run)
    monkeypatch.setattr(library, "_loaded", Once())
    monkeypatch.setattr(library, "_stopped", [])
    monkeypatch.setattr(library, "_own", lambda by: True)
    load = library.Loader(lambda: library.library(POOL))
    rule = f"the next one compiles again: {by.command[0]} was stopped after {compiler.TIMEOUT} s"
    with pytest.warns(RuntimeWarning, match=rule):
        assert load() is None
    assert not library.reason()
    assert load() is load() is not None
    assert calls == [compiler.TIMEOUT] * 2


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM, errno.ENOEXEC, errno.EACCES])
def test_a_compiler_that_cannot_start(error, monkeypatch):
    """For lack of memory or processes it may start the next time; of the wrong kind it never does."""

    def run(*words, **options):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(compiler.subprocess, "run", run)
    with pytest.raises(compiler.CompileError, match=os.strerror(error)) as caught:
        compiler.compiled(compiler.compiler(), POOL.file, POOL.words)
    assert isinstance(caught.value, compiler.CompilerStopped) == (error in (errno.EAGAIN, errno.ENOMEM))


def test_no_compiler(tmp_path):
    done = program(tmp_path, PATH=str(tmp_path), CC="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "NumPy alone: no C compiler (cc) was found" in done.stdout


def test_a_cpu_without_the_instructions(monkeypatch):
    monkeypatch.setattr(library, "cpu", lambda: "flags: sse4_2 avx fma f16c")
    library.lacking.cache_clear()
    try:
        assert "AVX2" in library.reason()
        assert not native.serves(qgemm.FORMATS["q4_0"])
    finally:
        library.lacking.cache_clear()


def test_numpy_by_choice(tmp_path):
    done = program(tmp_path, QGEMM_CPU="numpy")
    assert "NumPy alone: QGEMM_CPU=numpy" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_a_damaged_entry_is_compiled_anew(tmp_path):
    assert program(tmp_path).returncode == 0
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert "code compiled by" in program(tmp_path).stdout
    for path in (tmp_path / "cache").iterdir():
        compiled.unsealed(path.read_bytes())


def test_an_entry_that_others_may_write_is_never_loaded(tmp_path):
    assert program(tmp_path).returncode == 0
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(compiled.sealed(b"not a library"))
        path.chmod(0o666)
    done = program(tmp_path)
    assert done.returncode == 0
    assert "others may write to it" in done.stderr
    assert "code compiled by" in done.stdout


def test_whatever_the_compiler_reads_is_in_the_key(tmp_path, monkeypatch):
    """A change of a source, a macro, a flag, the compiler or the CPU asks for another entry."""
    calls_of_compiler: list[str] = []
    folder = tmp_path / "cpu"
    shutil.copytree(sources.folder(), folder)
    monkeypatch.setattr(sources, "folder", lambda: folder)
    monkeypatch.setattr(library, "load_library", lambda code: None)
    monkeypatch.setattr(library, "load_or_make", lambda name, *how: calls_of_compiler.append(name) or b"")

    def ask(name: str = "products", *words: str) -> None:
        sources.digest.cache_clear()
        library._library(sources.Source(name, words))

    ask()
    ask("pool")
    ask("products", "-DBLOCK_BYTES=18")
    for attribute, value in (
        ("FLAGS", ("-O2",)),
        ("NATIVE", ("-march=x86-64-v3",)),
        ("cpu", lambda: "another"),
        ("compiler", lambda: compiler.Compiler(("cc",), ("/bin/cc", 1, 2))),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(library, attribute, value)
            ask()
    with open(folder / "formats" / "q4_0.h", "a") as file:
        file.write("// more\n")
    ask()
    assert len(set(calls_of_compiler)) == len(calls_of_compiler) == 8
    monkeypatch.undo()
    sources.digest.cache_clear()
