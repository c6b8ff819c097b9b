"""A plugin of vLLM: .gguf models run on qgemm; `pip install 'gguf-matmul[vllm]'`, then `vllm serve model.gguf`.

vllm-gguf-plugin reads the file: loader, names, tokenizer and configuration are its own. This plugin replaces its
quantization methods: linear layers, embedding and head, experts.

QGEMM_VLLM=0 turns the plugin off. The kind of activations is an option of vLLM, part of the key of its compile cache:
additional_config={"qgemm": {"activation": "a8_g256"}}.
"""

from __future__ import annotations

from qgemm.system.process import switch


def register() -> None:
    """The entry point, which vLLM calls in every process, in no fixed order with other plugins; calls may repeat."""
    if not switch("QGEMM_VLLM"):
        return
    from .plugin import install

    install()
