"""A plugin of SGLang: .gguf models run on qgemm; `pip install 'gguf-matmul[sglang]'`, then SGLang as ever.

SGLang reads .gguf files itself. This plugin hooks its GGUF methods by SGLang's own registry: weights become tiles once
after loading, and the functions of products, experts and rows multiply by them. QGEMM_SGLANG=0 turns it off.
"""

from __future__ import annotations

from qgemm.system.process import switch


def register() -> None:
    """The entry point, which SGLang calls in every process before it applies hooks; calls may repeat."""
    if not switch("QGEMM_SGLANG"):
        return
    from .hooks import install

    install()
