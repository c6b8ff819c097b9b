"""A tiny Llama, from text to packed weights: train, convert, load by transformers, measure, generate.

    pip install '.[transformers]'
    python examples/tiny_llama.py [--steps 1000] [--folder tiny-llama]

1. Train a Llama of 1.9 million weights on this repository's own text, byte by byte: two minutes on two cores.
2. Save it as a Hugging Face folder, and convert that to .gguf files of several types.
3. Load each file by transformers with `qgemm.torch.transformers`: weights stay packed, and qgemm computes the products.
4. Print the perplexity of each on held-out text, beside that of the float32 weights, and a sample of generated text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import qgemm
import qgemm.torch.transformers

ROOT = Path(__file__).parents[1]
TYPES = "q8_0", "q4_0", "q4_k_m"
CONTEXT, BATCH = 128, 8  # tokens and sequences of a training step
SEED = 0


# ---------------------------------------------------------------- text


def texts() -> tuple[str, str]:
    """Training text and held-out text: the documents and Python sources, of which every tenth file is held out."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("qgemm/**/*.py"))]
    parts = [path.read_text() for path in files]
    held_out = parts[5::10]
    return "\n".join(part for part in parts if part not in held_out), "\n".join(held_out)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte in GPT-2's spelling (a BPE without merges), and one for the end of a text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({symbol: number for number, symbol in enumerate([*symbols, "<|end|>"])}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's, which llama.cpp supports
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<|end|>", eos_token="<|end|>")


# ---------------------------------------------------------------- training


def trained(ids: torch.Tensor, vocabulary: int, steps: int) -> LlamaForCausalLM:
    """Train a Llama on `steps` batches of ids [tokens]. Its rows of weights are multiples of 256, the largest block."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    start = time.perf_counter()
    for step in range(steps):
        places = torch.randint(len(ids) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)
        loss = model(input_ids=ids[places], labels=ids[places]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval()


# ---------------------------------------------------------------- evaluation


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """exp of the mean loss of a token of ids [tokens] after up to 255 tokens, over 64 evenly spread windows."""
    windows = ids[: len(ids) // 256 * 256].reshape(-1, 256)
    losses = [model(input_ids=batch, labels=batch).loss for batch in windows[:: max(1, len(windows) // 64)].split(8)]
    return float(torch.stack(losses).mean().exp())


def sample(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, start: str) -> str:
    """`start` and 200 generated tokens, with the same random seed for every model."""
    torch.manual_seed(SEED)
    ids = torch.tensor([words.encode(start)])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=True, temperature=0.5
    )
    return words.decode(tokens[0])


# ---------------------------------------------------------------- main


def main() -> None:
    """Train, save, convert, load, measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="training steps, default 1000")
    parser.add_argument("--folder", type=Path, default=Path("tiny-llama"), help="output folder, default tiny-llama")
    args = parser.parse_args()

    disable_progress_bar()
    words = tokenizer()
    ids, held_out = (torch.tensor(words.encode(text)) for text in texts())
    model = trained(ids, len(words), args.steps)
    model.save_pretrained(args.folder)
    words.save_pretrained(args.folder)

    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{'type':8} {'MiB':>5} {'bpw':>5}  perplexity of {weights} weights")
    print(f"{'float32':8} {weights / 2**18:5.2f} {32:5.2f}  {perplexity(model, held_out):.4f}")
    start = "def matmul("
    samples = {"float32": sample(model, words, start)}
    qgemm.torch.transformers.patch()
    for kind in TYPES:
        path = args.folder / f"{kind}.gguf"
        qgemm.convert(args.folder, path, kind, force=True)  # in a shell: qgemm convert tiny-llama q4_0.gguf q4_0
        packed = AutoModelForCausalLM.from_pretrained(args.folder, gguf_file=path.name)
        size = sum(parameter.nbytes for parameter in packed.parameters())
        print(f"{kind:8} {size / 2**20:5.2f} {8 * size / weights:5.2f}  {perplexity(packed, held_out):.4f}")
        samples[kind] = sample(packed, words, start)
    for kind, text in samples.items():
        print(f"\n--- {kind}\n{text}")


if __name__ == "__main__":
    main()
