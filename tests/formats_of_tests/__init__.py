"""Formats beyond those that the registry lists, which run through the tests of the registry's formats.

Every FORMAT that a module of this folder defines, as the registry collects them, with its header in
tests/data/kernels/formats/; and some of the family of group formats. q3_0 is docs/adding-a-format.md, followed.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from qgemm.formats import format_of

# Group formats whose codes, scales and zeros lie as in no listed format; tests/test_groups.py has others that stand for
# the family.
FEW_GROUPS = [format_of(name) for name in ("u4z_g128", "u8_g256", "u3f_g64", "u7_g128_bf16")]
OWN_FORMATS = {name: import_module(f"{__name__}.{name}").FORMAT for _, name, _ in iter_modules(__path__)}
TEST_FORMATS = [*FEW_GROUPS, *OWN_FORMATS.values()]
