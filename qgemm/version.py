"""The version of the package, and the name of its distribution."""

__version__ = "0.2.0"
DISTRIBUTION = "gguf-matmul"  # pyproject.toml's; the name qgemm on the package index belongs to another project


def pip_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml.

    >>> pip_install("cuda13")
    "pip install 'gguf-matmul[cuda13]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
