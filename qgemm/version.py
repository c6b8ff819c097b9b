"""The version of the package, and its name on the package index."""

__version__ = "0.1.0"
DISTRIBUTION = "gguf-matmul"  # pyproject.toml's; the name qgemm on the package index belongs to another project


def pip_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml.

    >>> pip_install("cuda13")
    "pip install 'gguf-matmul[cuda13]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
