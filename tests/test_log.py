"""The log: silent by default, one line for a new kind of call, a compilation, a number of threads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import cupy_like
import numpy as np
import pytest
from launches_like import installed

import qgemm
from qgemm.cpu.native import pool
from qgemm.cuda.jit import load


@pytest.fixture
def lines(caplog):
    """The messages at INFO."""
    caplog.set_level(logging.INFO, "qgemm")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "qgemm"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize(("value", "line"), [("1", "qgemm: a line\n"), ("0", ""), (None, "")])
def test_lines_on_stderr_are_asked_for_by_the_environment(backend, value, line):
    environment = {name: text for name, text in os.environ.items() if name != "QGEMM_LOG"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({"QGEMM_LOG": value} if value else {})
    program = f"import qgemm.{backend}, logging; logging.getLogger('qgemm').info('a line')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", line)


def test_threads_of_the_cpu_are_logged_where_their_number_changes(lines, monkeypatch):
    monkeypatch.setattr(pool, "pool", lambda: SimpleNamespace(qgemm_threads=lambda count: 1))
    monkeypatch.setattr(pool, "_threads", 0)
    for count in (1, 1, 2):
        monkeypatch.setattr(pool.parallel, "threads", lambda count=count: count)
        pool.ready()
    assert lines() == [f"{count} threads share a product on the CPU" for count in (1, 2)]


def test_a_new_kind_of_call_is_logged_once(lines, monkeypatch):
    gpus = installed(monkeypatch)
    w = gpus.tensor(np.ones((24, 64)))
    for m in (1, 1, 40, 40, 1):
        qgemm.matmul(cupy_like.zeros((m, 64), np.float16), w)
    assert [line.partition(", config")[0] for line in lines()] == [
        "Q4_0 a16 of half M=1 N=24 K=64 on sm_90: decode",
        "Q4_0 a16 of half M=40 N=24 K=64 on sm_90: prefill_sm90",
    ]


def test_nothing_is_logged_by_default(caplog, monkeypatch):
    gpus = installed(monkeypatch)
    qgemm.matmul(cupy_like.zeros((1, 64), np.float16), gpus.tensor(np.ones((24, 64))))
    assert caplog.records == []


@pytest.mark.parametrize(("new", "how"), [(True, "compiled in"), (False, "read from the cache in")])
def test_a_kernel_is_compiled_or_read_from_the_cache(lines, monkeypatch, new, how):
    monkeypatch.setattr(load, "fetched", lambda *_: (SimpleNamespace(cubin=b""), new))
    monkeypatch.setattr(load, "compose", lambda *_, **__: "")
    load._cubin("decode", qgemm.FORMATS["q4_0"], {"test_log": int(new)}, "sm_90")
    (line,) = lines()
    assert line.startswith(f"decode of Q4_0 for sm_90: {how}")
