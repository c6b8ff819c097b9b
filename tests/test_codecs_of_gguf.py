"""The ggml types that the gguf package decodes: each has its codec here, and files of all of them are converted."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from helpers import EXCERPT, converted

import qgemm


def test_every_codec_of_the_package_is_there():
    codecs = {kind.name.lower() for kind in GGML_QUANT_SIZES if hasattr(gguf.quants, kind.name)}
    assert codecs <= set(qgemm.FORMATS)


@pytest.mark.parametrize("target", ["f16", "f32"])
def test_conversion(target, tmp_path):
    """Every tensor of the excerpt, the values rounded once."""
    dtype = qgemm.FORMATS[target].dtype
    lines = converted(EXCERPT, tmp_path / "x.gguf", target)
    with qgemm.open(EXCERPT) as file, qgemm.open(tmp_path / "x.gguf") as target_file:
        names = [name for name in file if not file[name].format.plain]
        assert len(names) > 10
        for name in names:
            assert target_file[name].format.name == lines[name].new.lower() == target
            np.testing.assert_array_equal(
                target_file[name].dequantize(), file[name].dequantize(dtype).astype(np.float32)
            )
