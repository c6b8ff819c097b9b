"""Run every kernel family under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

CuPy's memory pool is off, so that every array has its own allocation and an access beside it is seen. Needs a GPU and
the CUDA toolkit's compute-sanitizer; exit 1 if a tool finds anything.
"""

from __future__ import annotations

import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
M = (1, 8, 9, 16, 20)  # both token tiles of every kernel, and the panels for cuBLAS


def work(tool: str) -> None:
    """Products that reach every kernel, on ragged shapes: every format, type of x, activation and token tile.

    Without cuBLAS under initcheck, which does not see the stores of its kernels, and under racecheck, which reports
    hazards inside them (nvjet_sm90, cuBLAS 13.0).
    """
    import cupy
    import numpy as np

    import qgemm

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    tiled = [fmt for fmt in qgemm.FORMATS.values() if fmt.slots]
    for fmt in tiled:
        n, k = 72, 5 * max(32, fmt.weights)
        raw = np.frombuffer(rng.bytes(n * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(n, -1)
        w = qgemm.Tensor(fmt, (n, k), raw).to_device()
        w.dequantize("float16")
        for m in M[:-1] if tool in ("initcheck", "racecheck") else M:
            for dtype in ("float16", "float32"):
                x = cupy.asarray(rng.standard_normal((m, k)).astype(dtype))
                for activation in ("a16", "a8"):
                    y = cupy.empty((m, n), np.float32)
                    qgemm.matmul(x, w, activation, out=y)
                    qgemm.matmul(x, w, activation, out=y)  # the short way
                    y.get()
        print(f"{fmt}: done", flush=True)


def main() -> int:
    """Run the tools one after the other."""
    failed = 0
    for tool in sys.argv[1:] or TOOLS:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "3",
            sys.executable,
            __file__,
            "--work",
            tool,
        ]
        status = subprocess.run(command).returncode
        print(f"{tool}: {'clean' if status == 0 else f'FAILED ({status})'}", flush=True)
        failed += status != 0
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        sys.exit(main())
