"""tools/plain_english.py refuses the habits that it names, in every kind of file, and nothing else."""

from __future__ import annotations

import plain_english
import pytest

REFUSED = {
    "begins with 'of'": "Of the rows of a tile, the last.",
    "'what ...' as a noun": "The launch, and what it needs.",
    "'which it ...' as a noun": "The tile of which it is part.",
    "'so many' for a number": "A warp for so many rows.",
    "'behind' for after": "The scales lie behind them.",
    "'A for B' for 'A instead of B'": "It needs 76.8 us for 78.5.",
    "'takes' for costs": "A launch takes 3 us.",
    "sentence without a subject": "By which the rows are ordered.",
}
PLAIN = (
    "A producer warp loads W by cp.async.bulk.",
    "What is a tile? A block of 64 rows.",
    "The number of rows, which is a multiple of 64.",
    "Hidden behind a flag.",
    "It takes x and returns y.",
    "0.5 for the first row.",
)


def complaints(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [complaint.reason for complaint in plain_english.check(path)[0]]


def test_every_phrase_has_an_example():
    assert set(REFUSED) == set(plain_english.PHRASES)


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.py", '"""{}"""\n'),
        ("b.py", "x = 1  # {}\n"),
        ("a.cu", "int x;  // {}\n"),
        ("a.h", "/* {} */\n"),
        ("a.md", "- {}\n"),
        ("Makefile", "all:  # {}\n"),
    ],
)
def test_a_habit_is_refused_in_every_kind_of_file(reason, name, form, tmp_path):
    assert complaints(tmp_path, name, form.format(REFUSED[reason])) == [reason]


@pytest.mark.parametrize("text", ["which is shared", "or in place", "otherwise 0", "The same for bytes.", "See `run`."])
def test_a_comment_does_not_begin_in_the_middle_of_a_sentence(text, tmp_path):
    """Lines of a paragraph after its first one may."""
    for name, form in (("a.py", '"""{}"""'), ("b.py", "x = 1  # {}"), ("c.h", "int x;  // {}"), ("d.cu", "/* {} */")):
        assert complaints(tmp_path, name, form.format(text)) == [plain_english.NEIGHBOUR]
    assert complaints(tmp_path, "e.py", f"# The address of a row,\n# {text}\n") == []
    assert complaints(tmp_path, "f.h", f"// The address of a row,\n// {text}\n") == []
    assert complaints(tmp_path, "g.py", f'"""The address of a row,\n{text}\n"""\n') == []


@pytest.mark.parametrize("text", PLAIN)
def test_plain_sentences_pass(text, tmp_path):
    assert complaints(tmp_path, "a.py", f"# {text}\n") == []
    assert complaints(tmp_path, "a.md", f"{text}\n") == []


def test_code_is_no_prose(tmp_path):
    assert complaints(tmp_path, "a.md", "```\nof what it is\n```\n") == []
    assert complaints(tmp_path, "a.py", 'x = "of what it is"\n') == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "found = 1\n"),
        ("a.py", "def f(given): pass\n"),
        ("a.py", "def again(): pass\n"),
        ("a.py", "[each for each in ()]\n"),
        ("a.cu", "const int at = 3;\n"),
        ("a.h", "static u32 found[4];\n"),
    ],
)
def test_vague_names_are_refused(name, text, tmp_path):
    assert complaints(tmp_path, name, text) == ["vague name"]


def test_names_of_others_and_marked_lines_pass(tmp_path):
    text = "from hypothesis import given\nfound = 1  # plain: ok, the name of a field of JSON\n"
    assert complaints(tmp_path, "a.py", text) == []


def test_titles_of_commits(monkeypatch):
    log = type("Log", (), {"returncode": 0, "stdout": f"Add a tool\n{'x' * 73}\nAdd this; drop that\n"})
    monkeypatch.setattr(plain_english.subprocess, "run", lambda *args, **options: log)
    assert list(plain_english.titles()) == [f"73 characters, 72 fit: {'x' * 73}", "two ideas: Add this; drop that"]
