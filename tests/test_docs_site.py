"""The documentation site without mkdocs: links of documents as the site needs them, and names of reference pages."""

from __future__ import annotations

import api_pages
import docs_site
import pytest

LINKS = {
    ("README.md", "docs/torch.md"): "torch.md",
    ("README.md", "docs/api/index.md#x"): "api/index.md#x",
    ("README.md", "CONTRIBUTING.md"): "CONTRIBUTING.md",
    ("README.md", "tools/results/h200_speedup.svg"): "plots/h200_speedup.svg",
    ("CONTRIBUTING.md", "docs/kernels/README.md"): "kernels/README.md",
    ("docs/performance.md", "../tools/results/h200_speedup.svg"): "plots/h200_speedup.svg",
    ("docs/kernels/decode.md", "../../README.md"): "../index.md",
    ("docs/kernels/decode.md", "../glossary.md"): "../glossary.md",
    ("docs/kernels/decode.md", "kbit.md#speed"): "kbit.md#speed",
    ("docs/kernels/decode.md", "#here"): "#here",
    ("docs/kernels/decode.md", "https://example.org/a.md"): "https://example.org/a.md",
}


@pytest.mark.parametrize(("document", "target"), LINKS)
def test_links_lead_to_the_same_page_in_the_site(document, target):
    assert docs_site.relinked(f"[text]({target})", document) == f"[text]({LINKS[document, target]})"


def test_names_have_the_page_of_their_kind():
    pages = {name.path: name.page for name in api_pages.names()}
    assert pages["qgemm.matmul"] == "functions.md"
    assert pages["qgemm.Tensor"] == "classes.md"
    assert pages["qgemm.GGUFError"] == "errors.md"
    assert pages["qgemm.FORMATS"] == "data.md"
    assert pages["qgemm.torch.QLinear"] == pages["qgemm.torch.replace_linear"] == "torch.md"


def test_every_name_has_a_summary():
    """Overloaded functions too, whose first definitions have no docstring."""
    assert not [name.path for name in api_pages.names() if not name.summary]
