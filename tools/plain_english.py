"""Refuse comments and names that a reader stumbles over: `python tools/plain_english.py [PATH ...]`.

Comments, docstrings and Markdown are held to PHRASES, bindings to VAGUE, titles of commits to 72 characters. A line
that is right all the same ends in `plain: ok` with its reason. `--count` prints rates by folder instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON, C_LIKE = {".py"}, {".cu", ".cuh", ".c", ".h", ".cpp"}
SHELL = {".sh", ".toml", ".yml", ".yaml"}
SHELL_NAMES = {"Makefile", "run"}
FIRST_TITLE = "b768674"  # titles of commits after this one are checked
MAX_TITLE = 72
ALLOWED = "plain: ok"

VERB = r"(?:is|are|was|were|has|have|had|it|they|he|a|an|the|no|does|do|makes|takes|gives|can|may|must|will|would|lies)"
PHRASES = {
    "begins with 'of'": re.compile(r"^(?:of\b)", re.IGNORECASE),
    "'what ...' as a noun": re.compile(rf"\b[Ww]hat {VERB}\b(?![^.;:]*\?)"),
    "'which it ...' as a noun": re.compile(r"\b[Ww]hich (?:it|they)\b(?![^.;:]*\?)"),
    "'so many' for a number": re.compile(r"\bso many\b", re.IGNORECASE),
    "'behind' for after": re.compile(r"\bbehind (?:its?|them|the|that|those|these|this|each|one|all)\b", re.I),
    "'A for B' for 'A instead of B'": re.compile(r"\d(?: ?(?:us|ms|s|%|x|KB|bytes))? for \d"),
    "'takes' for costs": re.compile(r"\btakes? (?:[\d.]+|as long|as many|longer|less)\b"),
    "sentence without a subject": re.compile(
        r"^(?:By (?:whom|what|how|which)|In (?:which|how|what)|To (?:which|whom|what)|From (?:which|what|how)"
        r"|On which|At which|Up to which|With (?:which|what)|Behind|For whom|How many|As many)\b(?![^.]*\?)"
    ),
}  # fmt: skip
# Beginnings of comments and docstrings that need the code or the docstring before them.
NEIGHBOUR = "begins in the middle of a sentence"
DEPENDENT = re.compile(
    r"(?:which|whose|that|or|and|but|else|otherwise|than|so that|also|because|since|as below|as above|now|then)\b"
    r"|(?i:the same\b|ditto\b|likewise\b|see [`A-Z])"
)
VAGUE = {
    "found", "made", "given", "asked", "each", "what", "at", "of", "of_x", "of_y", "of_launch", "one", "some", "again",
    "most", "they", "whose", "which", "taken", "told", "said", "known", "wanted", "kept",
}  # fmt: skip
C_BINDING = re.compile(
    r"^\s*(?:(?:const|constexpr|static|inline|auto|struct|unsigned|signed|__device__|__shared__|void|bool|int|long|u8|u16"
    r"|u32|u64|i8|i16|i32|i64|half2?|half|float2?|float|double|char|size_t|u?int(?:8|16|32|64)_t)[\s*&]+)+"
    rf"({'|'.join(sorted(VAGUE))})\s*(?:=[^=]|;|,|\(|\[|\{{)"
)


class Line(NamedTuple):
    """A line of prose: its number, its words without comment signs, whether a comment or docstring begins there."""

    number: int
    text: str
    first: bool = False


class Complaint(NamedTuple):
    """A place, and the reason why it is refused."""

    path: Path
    number: int
    reason: str
    text: str


def python_prose(source: str) -> Iterator[Line]:
    """Comments and docstrings of Python."""
    last = 0  # line of the last comment without code before it
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, alone = token.start[0], not token.line[: token.start[1]].strip()
            yield Line(number, token.string.lstrip("#!: "), not alone or last < number - 1)
            last = number if alone else last
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines = source.splitlines()[first.lineno - 1 : first.end_lineno]
                for number, text in enumerate(lines, first.lineno):
                    yield Line(number, text.strip().strip('"').strip(), number == first.lineno)


def c_prose(source: str) -> Iterator[Line]:
    """Comments of C and CUDA, // and /* */."""
    inside = False
    last = 0  # line of the last comment without code before it
    for number, line in enumerate(source.splitlines(), 1):
        if inside:
            yield Line(number, line.strip().lstrip("*").removesuffix("*/").strip())
            inside = "*/" not in line
        elif "//" in line:
            code, text = line.split("//", 1)
            yield Line(number, text.lstrip("/! "), bool(code.strip()) or last < number - 1)
            last = last if code.strip() else number
        elif "/*" in line:
            yield Line(number, line.split("/*", 1)[1].removesuffix("*/").strip(), True)
            inside = "*/" not in line.split("/*", 1)[1]


def markdown_prose(source: str) -> Iterator[Line]:
    """Lines of Markdown outside of code."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and line.strip() and not line.startswith("    "):
            yield Line(number, line.strip().lstrip("-*>|#0123456789. "))


def shell_prose(source: str) -> Iterator[Line]:
    """Comments of shell scripts, Makefiles, TOML and YAML."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#+ ?(.*)", line):
            yield Line(number, match[1])


def python_bindings(source: str) -> Iterator[Line]:
    """Names that Python code binds: variables, parameters, functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Line(node.lineno, node.id)
        elif isinstance(node, ast.arg):
            yield Line(node.lineno, node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield Line(node.lineno, node.name)


def prose(path: Path, source: str) -> list[Line]:
    """Lines of prose of a file, by its kind."""
    if path.suffix in PYTHON:
        return list(python_prose(source))
    if path.suffix in C_LIKE:
        return list(c_prose(source))
    return list(markdown_prose(source) if path.suffix == ".md" else shell_prose(source))


def check(path: Path) -> tuple[list[Complaint], int, int]:
    """Complaints about a file, and how many lines of prose and bindings it has."""
    source = path.read_text()
    lines, text = prose(path, source), source.splitlines()
    complaints = [
        Complaint(path, line.number, reason, line.text)
        for line in lines
        for reason, pattern in PHRASES.items()
        if pattern.search(line.text)
    ]
    dependent = [line for line in lines if line.first and DEPENDENT.match(line.text)]
    complaints += [Complaint(path, line.number, NEIGHBOUR, line.text) for line in dependent]
    bindings = 0
    if path.suffix in PYTHON:
        names = list(python_bindings(source))
        bindings = len(names)
        complaints += [Complaint(path, n.number, "vague name", n.text) for n in names if n.text.lstrip("_") in VAGUE]
    elif path.suffix in C_LIKE:
        for number, line in enumerate(text, 1):
            if match := C_BINDING.match(line):
                complaints.append(Complaint(path, number, "vague name", match[1]))
    return [c for c in complaints if ALLOWED not in text[c.number - 1]], len(lines), bindings


def titles() -> Iterator[str]:
    """Titles of commits that are too long or join two ideas; none where the history is not here."""
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", f"{FIRST_TITLE}..HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    for title in log.stdout.splitlines() if log.returncode == 0 else ():
        if len(title) > MAX_TITLE:
            yield f"{len(title)} characters, {MAX_TITLE} fit: {title}"
        elif ";" in title:
            yield f"two ideas: {title}"


def files(paths: list[Path]) -> list[Path]:
    """The tracked and new files below these paths that hold prose; data and results are none of ours to word."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    kinds = PYTHON | C_LIKE | SHELL | {".md"}
    chosen = [ROOT / name for name in listed if Path(name).suffix in kinds or Path(name).name in SHELL_NAMES]
    return [path for path in chosen if path.is_file() and path != Path(__file__).resolve()]


def main() -> int:
    """Exit status 1 where something is refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--count", action="store_true", help="rates by folder and reason, exit 0")
    arguments = parser.parse_args()
    complaints: list[Complaint] = []
    lines, bindings, by_folder = 0, 0, Counter[tuple[str, str]]()
    for path in files([p.resolve() for p in arguments.paths]):
        more, new_lines, new_bindings = check(path)
        complaints += more
        lines, bindings = lines + new_lines, bindings + new_bindings
        folder = "/".join(path.relative_to(ROOT).parts[:2][: -1 if len(path.relative_to(ROOT).parts) < 3 else None])
        by_folder.update((folder or ".", c.reason) for c in more)
    if arguments.count:
        for (folder, reason), count in sorted(by_folder.items()):
            print(f"{count:5} {folder:24} {reason}")
    else:
        for c in complaints:
            print(f"{c.path.relative_to(ROOT)}:{c.number}: {c.reason}: {c.text[:90]}")
    vague = sum(c.reason == "vague name" for c in complaints)
    print(f"{len(complaints) - vague} of {lines} lines of prose, {vague} of {bindings} bindings of Python")
    long_titles = list(titles())
    print(*(f"commit title: {title}" for title in long_titles), sep="\n", end="\n" if long_titles else "")
    return int(not arguments.count and bool(complaints or long_titles))


if __name__ == "__main__":
    sys.exit(main())
