"""The results files of one job, which share rows: a row is measured once and stands in every file that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from . import plan
from .results import KEYS, Results, Row, file_stem, key, load, merge, write
from .stale import DIGEST, HOST_TIMES, digest_of, is_stale, stamped

Named = tuple[str, tuple[Any, ...]]  # the list of a row and the row's key in it
Item = tuple[str, Row] | str  # a row with the name of its list, or a line on a failure
PARTS_OF_LISTS = (*HOST_TIMES, "planes")  # lists that are measured as a whole


class Files:
    """The files of a GPU in a folder.

    facts: of this run. ends: each row that a file may have -> the ends of the names of its files. merging: whether
    rows that the files have stay until they are measured again.
    """

    def __init__(self, out: Path, facts: Results, ends: Mapping[Named, Sequence[str]], merging: bool) -> None:
        self._facts, self._ends = facts, ends
        self._paths = {end: out / f"{file_stem(facts['device'])}{end}.json" for end in plan.FILES}
        self._lists: dict[str, dict[str, dict[tuple[Any, ...], Row]]] = {}
        self._rest: dict[str, Results] = {}
        self._fresh: set[Named] = set()
        self._changed: set[str] = set()
        self._saved = perf_counter()
        for end, path in self._paths.items():
            old = load(path) if merging and path.exists() else {}
            merged = merge(old, {**facts, "rows": []})
            self._rest[end] = {name: value for name, value in merged.items() if name not in KEYS}
            self._lists[end] = {
                name: {k: row for row in merged.get(name, []) if self._keeps(end, name, k := key(row, fields))}
                for name, fields in KEYS.items()
            }
        self._share()

    def _keeps(self, end: str, name: str, row_key: tuple[Any, ...]) -> bool:
        return name in PARTS_OF_LISTS or end in self._ends.get((name, row_key), ())

    def _share(self) -> None:
        """Copy rows of the present kernels to every file that shows them."""
        for end, lists in list(self._lists.items()):
            for name, rows in lists.items():
                if name not in PARTS_OF_LISTS:
                    fresh = [row for row in rows.values() if not is_stale(name, row, self._rest[end])]
                    for row in fresh:
                        self._place(name, row)

    def _place(self, name: str, row: Row) -> None:
        named = name, key(row, KEYS[name])
        self._fresh.add(named)
        for end in self._ends[named]:
            self._lists[end][name][named[1]] = row
            self._changed.add(end)

    def current(self, named: Named) -> bool:
        """Whether the files have a row, by the present kernels."""
        return named in self._fresh

    def add_all(self, items: Iterable[Item], say: Callable[[str], None]) -> list[str]:
        """Add rows with the digests of their kernels -> the lines on failures, which are also said."""
        failures = []
        for item in items:
            if isinstance(item, str):
                failures.append(item)
                say(item)
            else:
                name, row = item
                self._place(name, {**row, DIGEST: digest_of(name, row, self._facts)})
        return failures

    def has_part(self, name: str) -> bool:
        """Whether the first file has a part by the present sources: host times, a rate, or a sweep by its name."""
        part = self._lists[plan.PRODUCTS].get(name)
        if part is not None:
            return bool(part) and not any("kernels_sha256" in row for row in part.values())
        rest = self._rest[plan.PRODUCTS]
        return bool(rest.get(name)) or name in rest.get("sweep", {})

    def add_part(self, part: Results) -> None:
        """Add results that are no rows of the plan to the first file: dictionaries are merged, lists replaced."""
        for name, value in stamped({**self._facts, **part}).items():
            if name not in part:
                continue
            if name in KEYS:
                self._lists[plan.PRODUCTS][name] = {key(row, KEYS[name]): row for row in value}
            else:
                self._rest[plan.PRODUCTS][name] = {**self._rest[plan.PRODUCTS].get(name, {}), **value}
        self._changed.add(plan.PRODUCTS)

    def save(self, seconds: float = 0) -> None:
        """Write the files that have changed, unless the last write was less than `seconds` ago."""
        if perf_counter() - self._saved < seconds:
            return
        for end in sorted(self._changed):
            lists = {name: [rows[k] for k in sorted(rows)] for name, rows in self._lists[end].items()}
            rest = {name: value for name, value in self._rest[end].items() if value != {}}
            write(self._paths[end], {**rest, **{name: rows for name, rows in lists.items() if rows or name == "rows"}})
        self._changed.clear()
        self._saved = perf_counter()
