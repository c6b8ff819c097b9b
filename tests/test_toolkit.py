"""Where libraries of the CUDA toolkit and their headers are found: wheels of both layouts, folders, the linker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qgemm.cuda import toolkit


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a toolkit, whose driver runs CUDA 13.1, and the folder of its wheels."""
    wheels = tmp_path / "site-packages" / "nvidia"
    wheels.mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(toolkit, "find_spec", lambda name: spec)
    monkeypatch.setattr(toolkit, "driver_cuda", lambda: (13, 1))
    monkeypatch.setattr(toolkit, "DEFAULT_ROOT", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolkit, "library", toolkit.library.__wrapped__)
    for name in toolkit.ROOTS:
        monkeypatch.delenv(name, raising=False)
    linked, libraries = set(), []

    def opened(name):
        libraries.append(name)
        if "/" not in name and name not in linked:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr(toolkit, "ctypes", SimpleNamespace(CDLL=opened))
    return SimpleNamespace(wheels=wheels, root=tmp_path / "cuda", linked=linked, libraries=libraries)


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_wheels_of_both_layouts(machine, monkeypatch):
    """CUDA 13's, in one folder, and CUDA 12's, in a folder each: the newest that the driver runs, with its headers."""
    new, old = machine.wheels / "cu13", machine.wheels / "cuda_nvrtc"
    touch(new / "lib" / "libnvrtc.so.13", new / "lib" / "libnvrtc-builtins.so.13.1", new / "include" / toolkit.HEADER)
    touch(old / "lib" / "libnvrtc.so.12", machine.wheels / "cuda_runtime" / "include" / toolkit.HEADER)
    for version, folder, include in ((13, new, new), (14, new, new), (12, old, machine.wheels / "cuda_runtime")):
        monkeypatch.setattr(toolkit, "driver_cuda", lambda version=version: (version, 0))
        library, place = toolkit.library("nvrtc")
        assert (library, place) == (str(folder / "lib" / f"libnvrtc.so.{min(version, 13)}"), folder / "lib")
        assert toolkit.headers(place) == str(include / "include")
    monkeypatch.setattr(toolkit, "driver_cuda", lambda: None)
    assert toolkit.library("nvrtc")[1] == new / "lib"


def test_the_builtins_of_nvrtc_are_opened_first(machine):
    """The wheel nvidia-cuda-nvrtc 13.0.88, which torch 2.11 brings, looks for them by their name alone."""
    names = ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13")
    paths = [machine.wheels / "cu13" / "lib" / name for name in names]
    touch(*paths, machine.wheels / "cu13" / "lib" / "libnvrtc-builtins.alt.so.13.0")
    toolkit.library("nvrtc")
    assert machine.libraries == list(map(str, paths))


@pytest.mark.parametrize("folder", ["lib64", "lib", "targets/x86_64-linux/lib"])
def test_a_toolkit_by_its_variable_or_in_its_usual_place(machine, monkeypatch, tmp_path, folder):
    for root in (machine.root, tmp_path / "other"):
        touch(root / folder / "libcublas.so.12", root / "targets" / "x86_64-linux" / "include" / toolkit.HEADER)
        place = toolkit.library("cublas")[1]
        assert place == root / folder
        assert toolkit.headers(place).startswith(str(root))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))


def test_the_linker_is_asked_last(machine):
    machine.linked.add("libnvrtc.so.12")
    assert toolkit.library("nvrtc") == ("libnvrtc.so.12", None)
    assert toolkit.headers(None) is None
    touch(machine.wheels / "cu13" / "lib" / "libnvrtc.so.13")
    assert toolkit.library("nvrtc")[0].endswith("libnvrtc.so.13")


def test_a_missing_library_is_named(machine, monkeypatch):
    with pytest.raises(OSError, match=r"there is no libnvrtc\.so\.13 or libnvrtc\.so\.12"):
        toolkit.library("nvrtc")
    monkeypatch.setattr(toolkit, "driver_cuda", lambda: (11, 8))
    with pytest.raises(OSError, match=r"there is no libnvrtc$"):
        toolkit.library("nvrtc")
