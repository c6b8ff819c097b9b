"""The compiled products of the CPU: against the formulas that NumPy computes, on any thread, in any process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
from helpers import assert_a8_formula, exact, extreme, forked, random_tensor
from numpy.testing import assert_array_equal
from strategies import each

import qgemm
from qgemm.codec.error_bound import a16_bound, excess, magnitudes
from qgemm.cpu import native
from qgemm.cpu.native import compiler, library, products
from qgemm.files import compiled
from qgemm.once import Once

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
SERVED = [fmt for fmt in qgemm.FORMATS.values() if (library.folder() / "formats" / f"{fmt.name}.h").is_file()]
M = (1, 2, 3, 4, 5, 8, 16, 17, 100, 300)  # about the sizes of tiles, and more than are packed at a time


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def test_every_integer_format_that_files_have():
    assert {fmt.name for fmt in SERVED} == {fmt.name for fmt in qgemm.FORMATS.values() if fmt.integer} - {"q8_1"}
    assert all(native.serves(fmt) for fmt in SERVED)
    assert not native.serves(qgemm.FORMATS["kbit4"])


@each(SERVED)
@pytest.mark.parametrize("m", M)
@pytest.mark.parametrize("blocks", [1, 3, 11])
def test_products(fmt, m, blocks):
    """K of any number of blocks, N that no chunk divides: within the bounds that hold for NumPy."""
    rng = np.random.default_rng(m)
    w = random_tensor(fmt, 37, blocks * fmt.weights, rng)
    x = rng.standard_normal((m, w.shape[1]), np.float32)
    assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w)
    assert excess(qgemm.matmul(x, w), exact(x, w), a16_bound(x, magnitudes(fmt, w.blocks))) <= 1


@each(SERVED)
def test_levels_and_scales_are_the_formats(fmt):
    """With the identity as x a product is the decoded matrix, bit for bit: raw blocks, each code and scale."""
    rng = np.random.default_rng(1)
    w = random_tensor(fmt, 64, 2 * max(256, fmt.weights), rng)
    y = qgemm.matmul(np.eye(w.shape[1], dtype=np.float32)[:128], w)
    want = w.dequantize().T[:128]
    scale = np.abs(magnitudes(fmt, w.blocks)).T[:128]
    assert (np.abs(y - want) <= 2.0**-23 * scale).all()  # of a minimum and a scale each is rounded once


@each(SERVED)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_types_of_x_and_y(fmt, dtype):
    from helpers import float_dtype

    rng = np.random.default_rng(2)
    w = random_tensor(fmt, 40, 2 * fmt.weights, rng)
    x = rng.standard_normal((5, w.shape[1])).astype(float_dtype(dtype))
    for activation in ("a16", "a8"):
        y = qgemm.matmul(x.astype(np.float32), w, activation)
        assert_array_equal(qgemm.matmul(x, w, activation), y)
        assert_array_equal(qgemm.matmul(x, w, activation, dtype=dtype), y.astype(float_dtype(dtype)))
        out = np.full((5, 80), np.nan, np.float32)[:, ::2]
        qgemm.matmul(x, w, activation, out=out)
        assert_array_equal(out, y)
    bias, residual = rng.standard_normal(40, np.float32), rng.standard_normal((5, 40), np.float32)
    plain = qgemm.matmul(x, w)
    assert_array_equal(qgemm.matmul(x, w, bias=bias, residual=residual), plain + bias + residual)


@each(SERVED)
def test_x_of_any_magnitude(fmt):
    w = random_tensor(fmt, 40, 768, np.random.default_rng(3))
    x = np.resize(extreme(768), (7, 768))
    assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w)
    assert np.isfinite(qgemm.matmul(x, w)).all()


@each(SERVED)
@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(fmt, activation, value):
    rng = np.random.default_rng(4)
    w = random_tensor(fmt, 40, 512, rng)
    x = rng.standard_normal((6, 512), np.float32)
    want = qgemm.matmul(x, w, activation)
    x[4, 77] = value
    y = qgemm.matmul(x, w, activation)
    assert_array_equal(np.delete(y, 4, axis=0), np.delete(want, 4, axis=0))
    assert not np.isfinite(y[4]).all()


@pytest.mark.parametrize("count", [0, 1, 300, 5000])
def test_activations_are_numpys(count, monkeypatch):
    """Bit for bit, of any magnitude, rounding ties, NaN and infinity among them."""
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((count, 32)) * 10.0 ** rng.integers(-42, 37, (count, 1))).astype(np.float32)
    if count > 100:
        x[10], x[11, 3], x[12, 4], x[13, 5], x[14] = 0, np.nan, np.inf, -np.inf, -0.0
        x[15:60] = np.arange(-16, 16) + np.float32(0.5)
        x[15:60, 0] = 127 * 2.0 ** np.arange(-22, 23)
        x[60:90] = rng.integers(0, 2**32, (30, 32), np.uint32).view(np.float32)
    found = qgemm.quantize_activations(x.reshape(1, -1)).blocks if count else qgemm.quantize_activations(x).blocks
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    want = qgemm.quantize_activations(x.reshape(1, -1)).blocks if count else qgemm.quantize_activations(x).blocks
    for name in ("d", "s", "qs"):
        assert_array_equal(found[name], want[name])


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_bits_do_not_depend_on_threads(threads, monkeypatch):
    rng = np.random.default_rng(5)
    w, x = random_tensor(qgemm.FORMATS["q4_k"], 515, 1024, rng), rng.standard_normal((21, 1024), np.float32)
    monkeypatch.setenv("QGEMM_THREADS", "1")
    want = [qgemm.matmul(x, w, activation) for activation in ("a16", "a8")]
    monkeypatch.setenv("QGEMM_THREADS", str(threads))
    for _ in range(20):
        for activation, y in zip(("a16", "a8"), want, strict=True):
            assert_array_equal(qgemm.matmul(x, w, activation), y)


def test_a_number_of_threads():
    before = qgemm.threads()
    try:
        assert qgemm.threads(3) == qgemm.threads() == 3
        with pytest.raises(ValueError, match="a thread at least"):
            qgemm.threads(0)
    finally:
        qgemm.threads(before)


# ---------------------------------------------------------------- many threads and processes


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

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("asleep", [False, True])
def test_a_forked_child_multiplies(asleep, tmp_path):
    """Threads do not survive a fork, be they awake or asleep, and are started anew in the child."""
    run = product()
    want = run()
    if asleep:
        threading.Event().wait(0.02)
    child = forked(lambda: (tmp_path / "y").write_bytes(b"".join(run().tobytes() for _ in range(50))))
    assert os.waitpid(child, 0)[1] == 0
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
assert np.abs(qgemm.matmul(x, w, "a8") - 1).max() < 0.01
if "daemon" in sys.argv:
    def forever():
        while True:
            qgemm.matmul(x, w)
    threading.Thread(target=forever, daemon=True).start()
print(qgemm.backends()["cpu"].detail)
"""


def program(folder, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with a cache of its own."""
    env = {**os.environ, "QGEMM_CACHE_DIR": str(folder / "cache"), **environment}
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], env=env, capture_output=True, text=True, timeout=120)


def test_the_end_of_a_process(tmp_path):
    """Also with a product on its way."""
    for words in ((), ("daemon",)):
        done = program(tmp_path, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("compiled code\n")


def test_two_processes_fill_the_cache_at_once(tmp_path):
    with ThreadPool(2) as pool:
        for done in pool.starmap(program, [(tmp_path,), (tmp_path,)]):
            assert (done.returncode, done.stderr) == (0, "")
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == [".so"] * 3  # the pool, a format, activations


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    done = program(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


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
    assert program(tmp_path).stdout.endswith("compiled code\n")
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
    assert done.stdout.endswith("compiled code\n")


def test_whatever_the_compiler_reads_is_in_the_key(tmp_path, monkeypatch):
    """A change of a source, a macro, a flag, the compiler or the CPU asks for another entry."""
    asked: list[str] = []
    folder = tmp_path / "cpu"
    shutil.copytree(library.folder(), folder)
    monkeypatch.setattr(library, "folder", lambda: folder)
    monkeypatch.setattr(library, "_load", lambda code: None)
    monkeypatch.setattr(library, "kept", lambda name, make: asked.append(name) or b"")

    def ask(name: str = "products", **macros: str) -> None:
        library._sources.cache_clear()
        library._library(name, macros)

    ask()
    ask("pool")
    ask(BLOCK_BYTES="18")
    with monkeypatch.context() as patched:
        patched.setattr(library, "FLAGS", ("-O2",))
        ask()
    with monkeypatch.context() as patched:
        patched.setattr(library, "cpu", lambda: "another")
        ask()
    with monkeypatch.context() as patched:
        patched.setattr(library, "compiler", lambda: compiler.Compiler(("cc",), ("/bin/cc", 1, 2)))
        ask()
    with open(folder / "formats" / "q4_0.h", "a") as file:
        file.write("// more\n")
    ask()
    assert len(set(asked)) == len(asked) == 7
    library._sources.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()


@each(SERVED)
@pytest.mark.parametrize("narrow", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avxvnni")], ids=["avxvnni", "avx2"])
def test_bits_do_not_depend_on_the_instructions(fmt, narrow, monkeypatch, tmp_path):
    """The same sources for other CPUs: the same numbers, also of the codes and activations that saturate most."""
    rng = np.random.default_rng(6)
    w, x = random_tensor(fmt, 33, 3 * max(256, fmt.weights), rng), rng.standard_normal((21, 1), np.float32)
    x = x * rng.standard_normal((1, w.shape[1]), np.float32)
    want = [qgemm.matmul(x, w, activation) for activation in ("a16", "a8")]
    flags = (*compiler.FLAGS, *narrow)
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(tmp_path))
    for module in (compiler, library):
        monkeypatch.setattr(module, "FLAGS", flags)
    monkeypatch.setattr(library, "_loaded", Once())
    products._loaded.cache_clear()
    try:
        for activation, y in zip(("a16", "a8"), want, strict=True):
            assert_array_equal(qgemm.matmul(x, w, activation), y)
    finally:
        products._loaded.cache_clear()
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
