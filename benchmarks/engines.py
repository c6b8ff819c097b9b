"""Tokens a second of vLLM by random models: qgemm beside vllm-gguf-plugin's own kernels, bfloat16 and Marlin.

    python -m benchmarks.engines --out tools/results/engines.json      with vLLM, vllm-gguf-plugin and qgemm installed

A case is MODEL:TYPES:ROAD. Its engine has a process of its own. Engines of one batch start together, since starting
takes a minute of compiling on the host, and are measured in turns: while one generates, the others sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from qgemm.cli.common import counts
from qgemm.cli.random_models import MODELS, write_file

from . import results
from .results import Row

ROADS = QGEMM, PLUGIN, DENSE, MARLIN = "qgemm", "plugin", "bf16", "awq_marlin"
CASES = (
    "llama-3-8b:q4_k_m:qgemm", "llama-3-8b:q4_k_m:plugin", "llama-3-8b:bf16:bf16", "llama-3-8b:awq:awq_marlin",
    "llama-3-8b:q4_0:qgemm", "llama-3-8b:q4_0:plugin", "llama-3-8b:q8_0:qgemm", "llama-3-8b:q8_0:plugin",
    "qwen3-30b-a3b:q4_k_m:qgemm", "qwen3-30b-a3b:q4_k_m:plugin",
)  # fmt: skip
PROGRAM = (sys.executable, "-m", "benchmarks.engines")
SHIM = Path(__file__).with_name("torch_2_13.c")  # functions that the plugin's library needs beside torch 2.11
KEY = ("model", "types", "road", "streams", "prompt")  # identifies a row of the file
STREAMS, PROMPT, OUTPUT = (1, 8, 32, 64, 128), 128, 256  # sequences at a time; tokens of each
LONG_PROMPT, LONG_PROMPTS = 4096, 8  # tokens of a prompt, of which one token follows; prompts at a time
REPEATS, SOON = 2, 5  # runs of a measurement; seconds after which none follows
KV_BYTES = 25 << 28  # holds the tokens of all streams of the largest model
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


class Case(NamedTuple):
    """A model in a mixture of types, multiplied on a road."""

    model: str
    types: str
    road: str

    @property
    def packed(self) -> bool:
        """Whether the engine reads a .gguf file."""
        return self.road in (QGEMM, PLUGIN)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of a command line, MODEL:TYPES:ROAD."""
        model, _, rest = text.partition(":")
        types, _, road = rest.partition(":")
        if model not in MODELS or not types or road not in ROADS:
            models, roads = ", ".join(MODELS), ", ".join(ROADS)
            raise argparse.ArgumentTypeError(f"{text!r}: expected MODEL:TYPES:ROAD; models: {models}; roads: {roads}")
        return cls(model, types, road)


# ---------------------------------------------------------------- the process of an engine


def serve(case: Case, folder: Path) -> None:
    """Start an engine, then measure what each line of standard input asks for: streams, tokens of a prompt, output."""
    out = os.fdopen(os.dup(1), "w")  # the answers
    os.dup2(2, 1)  # the engine prints to the log
    start = time.monotonic()
    engine = started(case, folder)
    import torch
    import vllm

    versions = f"vLLM {vllm.__version__}, vllm-gguf-plugin {version('vllm-gguf-plugin')}, torch {torch.__version__}"
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"ready_s": seconds, "versions": versions}), file=out, flush=True)
    for line in sys.stdin:
        streams, prompt, output = map(int, line.split())
        print(json.dumps(tokens_a_second(engine, streams, prompt, output)), file=out, flush=True)


def started(case: Case, folder: Path) -> Any:
    """vLLM's engine of a case."""
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1")
    os.environ["QGEMM_VLLM"] = str(int(case.road == QGEMM))
    import gguf
    from vllm import LLM

    if case.road == PLUGIN and MODELS[case.model].num_experts:  # its own lacks the names of transformers 5
        from qgemm.vllm.loader import name_map

        vars(gguf)["get_tensor_name_map"] = name_map
    options: dict[str, Any] = {"model": str(folder), "load_format": "dummy"}
    if case.packed:
        options = {"model": str(folder / "model.gguf"), "hf_config_path": str(folder)}
    engine = LLM(
        **options, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONG_PROMPT + OUTPUT,
        max_num_seqs=max(STREAMS), kv_cache_memory_bytes=KV_BYTES, gpu_memory_utilization=0.05,
        enable_prefix_caching=False, seed=0, compilation_config={"cudagraph_capture_sizes": list(STREAMS)},
    )  # fmt: skip
    if case.road == MARLIN:
        engine.apply_model(randomize_codes)
    return engine


def randomize_codes(model: Any) -> None:
    """Fill the packed weights, which vLLM's dummy loader leaves as they are: zeros would need less power."""
    import torch

    for parameter in model.parameters():
        if parameter.dtype == torch.int32:
            parameter.data.random_(-(2**31), 2**31 - 1)


def tokens_a_second(engine: Any, streams: int, prompt: int, output: int) -> Row:
    """Generate for some sequences at once, twice if that is soon done -> tokens a second of the better time.

    Tokens of the output, or of the prompts where the output is one token.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=output, temperature=0, detokenize=False, ignore_eos=True)
    rng, seconds = np.random.default_rng(prompt), list[float]()
    while len(seconds) < REPEATS and sum(seconds) < SOON:
        prompts = [{"prompt_token_ids": rng.integers(0, 32000, prompt).tolist()} for _ in range(streams)]
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    tokens = streams * (output if output > 1 else prompt)
    return {"tokens_s": round(tokens / min(seconds), 1), "seconds": [round(value, 3) for value in seconds]}


# ---------------------------------------------------------------- all engines


class Engine:
    """The process of a case."""

    def __init__(self, case: Case, folder: Path, log: IO[bytes]) -> None:
        self.case = case
        command = [*PROGRAM, "--serve", ":".join(case), "--folder", str(folder)]
        environment = {**os.environ, "LD_PRELOAD": str(shim(folder))} if case.road == PLUGIN else None
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip

    def answer(self) -> Row | None:
        """The next line of the process, or None after its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def measure(self, streams: int, prompt: int, output: int) -> Row | None:
        """The answer to a request, or None if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{streams} {prompt} {output}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def memory(self) -> int:
        """Bytes on the GPU of the processes of this engine; 0 where the driver does not tell."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        except FileNotFoundError:
            return 0
        used = (line.split(",") for line in lines if line.count(",") == 1)
        return sum(
            int(mib) << 20 for pid, mib in used if session(int(pid)) == self.process.pid and mib.strip().isdigit()
        )

    def stop(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def shim(folder: Path) -> Path:
    """SHIM, compiled into a folder."""
    library = folder / f"{SHIM.stem}.so"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, SHIM], check=True)
    return library


def session(pid: int) -> int:
    """The session of a process, -1 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def requests(streams: Sequence[int]) -> list[tuple[int, int, int]]:
    """What to measure: streams, tokens of a prompt, tokens of the output."""
    return [(LONG_PROMPTS, LONG_PROMPT, 1), *((count, PROMPT, OUTPUT) for count in streams)]


def folder_of(case: Case, work: Path) -> Path:
    """A folder with the model's configuration and, for a road of packed weights, its .gguf file."""
    folder = work / f"{case.model}-{case.types}"
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    sizes = MODELS[case.model]
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "rope_theta",
    )  # fmt: skip
    config: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    config |= {"architectures": [ARCHITECTURES[sizes.architecture]], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config |= {"model_type": sizes.architecture.replace("moe", "_moe"), "max_position_embeddings": 8192}
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    if sizes.num_experts:
        config |= {"moe_intermediate_size": sizes.intermediate_size, "num_experts": sizes.num_experts}
        config |= {"num_experts_per_tok": sizes.num_experts_per_tok, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if case.road == MARLIN:
        config["quantization_config"] = AWQ
    (folder / "config.json").write_text(json.dumps(config))
    if case.packed:
        write_file(folder / "model.gguf", sizes, case.types)
    return folder


def measure(cases: Sequence[Case], streams: Sequence[int], work: Path, logs: Path) -> Iterator[Row]:
    """The rows of engines that run beside each other, in turns; a row with an error for each that does not start."""
    folders = [folder_of(case, work) for case in cases]  # before an engine starts
    with ExitStack() as stack:
        engines, alive = [], []
        for case, folder in zip(cases, folders, strict=True):
            log = stack.enter_context((logs / f"{'-'.join(case)}.log").open("wb"))
            engines.append(Engine(case, folder, log))
            stack.callback(engines[-1].stop)
        for engine, folder in zip(engines, folders, strict=True):
            row = {**engine.case._asdict(), "streams": 0, "prompt": 0}
            if (ready := engine.answer()) is None:
                yield {**row, "error": "the engine did not start, see its log"}
                continue
            alive.append(engine)
            path = folder / "model.gguf"
            size = path.stat().st_size if path.exists() else 0
            yield {**row, **ready, "gpu_bytes": engine.memory(), "file_bytes": size, "kv_bytes": KV_BYTES}
        for engine in alive:
            engine.measure(max(streams), PROMPT, 8)  # warm-up
        for count, prompt, output in requests(streams):
            for engine in alive:
                if speed := engine.measure(count, prompt, output):
                    request = {"streams": count, "prompt": prompt, "output": output}
                    yield {**engine.case._asdict(), **request, **speed}


def main() -> int:
    """Measure the cases, or be the process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = f"MODEL:TYPES:ROAD (default: {' '.join(CASES)})"
    parser.add_argument("cases", nargs="*", type=Case.parse, default=list(map(Case.parse, CASES)), help=cases)
    parser.add_argument("--beside", type=int, default=4, help="engines that run beside each other (default 4)")
    parser.add_argument("--streams", type=counts, default=STREAMS, help="sequences at a time (default 1,8,32,64,128)")
    parser.add_argument("--out", type=Path, help="write or merge the results file")
    parser.add_argument("--work", type=Path, help="keep the models in this folder (default: a temporary one)")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the engines' logs")
    parser.add_argument("--serve", type=Case.parse, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder)
        return 0
    import torch

    device = torch.cuda.get_device_name()
    stamp = {"kernels_sha256": results.sources_sha256(), "date": time.strftime("%Y-%m-%d")}
    old = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    rows = {tuple(row[name] for name in KEY): row for row in old.get("rows", ()) if old["device"] == device}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        for first in range(0, len(args.cases), args.beside):
            for row in measure(args.cases[first : first + args.beside], args.streams, work, args.logs):
                rows[tuple(row[name] for name in KEY)] = {**row, **stamp}
                print(json.dumps(row), flush=True)
                if args.out:
                    results.write(args.out, {"device": device, "rows": list(rows.values())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
