"""Hatchling's hook for wheels: pure Python for `pip install .`, with compiled libraries for tools/build_wheel.py."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "QGEMM_PREBUILT"  # the folder of libraries; without it the wheel is pure Python
TAG = "QGEMM_WHEEL_TAG"  # tag of the wheel: py3-none-PLATFORM


class PrebuiltHook(BuildHookInterface[Any]):
    """Puts the folder of libraries into the wheel, and the wheel's platform into its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files of the wheel are collected."""
        if os.environ.get(FOLDER) and version == "standard":
            build_data["force_include"][os.environ[FOLDER]] = "qgemm/prebuilt"
            build_data["pure_python"] = False
            build_data["tag"] = os.environ[TAG]
