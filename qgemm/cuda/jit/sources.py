"""Where the CUDA sources are."""

from __future__ import annotations

from pathlib import Path


def kernels_dir() -> Path:
    """Where the CUDA sources are: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[2]
    inside = package / "kernels"
    return inside if inside.is_dir() else package.parent / "kernels"
