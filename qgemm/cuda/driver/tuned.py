"""The times of this machine's GPUs: what `qgemm tune` measured, kept beside the compiled kernels.

A file is for one GPU name, driver and digest of the kernels. A file that is damaged, of other kernels, or that someone
else may have written is passed over; qgemm/files/compiled.py has the rules of the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qgemm.cuda.configs import shipped
from qgemm.cuda.devices import driver_cuda, facts
from qgemm.cuda.jit import sources
from qgemm.cuda.times import Row, Times, as_json, merged, rows_of, worth
from qgemm.errors import QgemmError
from qgemm.files.compiled import load, store
from qgemm.files.json_parser import parse_object
from qgemm.once import Once
from qgemm.version import __version__

DRIVER_VERSION = Path("/sys/module/nvidia/version")
PASSED_OVER = "the times of `qgemm tune` are passed over"
_times: Once[Times | None] = Once()  # by device


class Machine(NamedTuple):
    """A GPU as measured times depend on it: its name and the driver's version."""

    gpu: str
    driver: str

    @property
    def file(self) -> str:
        """The name of its file in the cache."""
        return f"{hashlib.sha256(f'{self.gpu}|{self.driver}'.encode()).hexdigest()}.times"


def times_of(device: int) -> Times | None:
    """The times of a device, read at the first product on it; None if it has none."""
    return _times.get(device, lambda: times(machine(device)) or None)


def times(machine: Machine) -> Times:
    """The times of a machine, and of products without any those that qgemm ships for its GPU."""
    return Times(read(machine), rows_of(shipped(machine.gpu)))


def read(machine: Machine) -> list[Row]:
    """The rows of the machine's file; none if it has no file, or one to pass over."""
    data = load(machine.file, PASSED_OVER)
    if data is None:
        return []
    try:
        document = parse_object(data, QgemmError)
        facts = heading(machine)
        return list(rows_of(document.get("rows"))) if facts == {name: document.get(name) for name in facts} else []
    except (ValueError, QgemmError):
        return []


def write(machine: Machine, rows: Iterable[Row]) -> bool:
    """Add rows to the machine's file; whether that was possible. Products on its GPUs use them from their next plan."""
    all_rows = merged(read(machine), rows)
    data = json.dumps({**heading(machine), "rows": list(map(as_json, all_rows))}, separators=(",", ":")).encode()
    _times.values.clear()
    return store(machine.file, data)


def report(machine: Machine) -> dict[str, Any]:
    """The times of a machine for others who own its GPU, without the configs that are never chosen."""
    rows = [as_json(row._replace(us=worth(row.us))) for row in read(machine)]
    return {**heading(machine), "qgemm": __version__, "rows": rows}


def heading(machine: Machine) -> dict[str, str]:
    """All that the times of a file depend on; the kernels are digested only if there is a file."""
    return {**machine._asdict(), "kernels": sources.digest()}


@cache
def machine(device: int) -> Machine:
    """The facts of a device that its times depend on."""
    return Machine(facts(device).name, _driver())


def _driver() -> str:
    """The version of the driver; where the system has no file of it, the newest CUDA that it runs."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return f"CUDA {driver_cuda()}"
