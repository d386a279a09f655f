"""The same offline load through Hugging Face transformers' batched `generate`, for comparison.

Needs an interpreter with torch, transformers, accelerate and gguf, and none of this project's packages (`-I` keeps our modules
out of its way): `python -I nanoflow_jax/bench_transformers.py MODEL --input 64 --output 64 --requests 16`. `nanoflow_jax.bench`
calls it with `--peer-python`. Float32 on the CPU, greedy, one batch, every output runs to its length. The last line is one JSON
object.
"""

import argparse
import json
import time
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--input", type=int, required=True)
    parser.add_argument("--output", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = {"gguf_file": args.model.name} if args.model.suffix == ".gguf" else {}
    folder = args.model.parent if source else args.model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(model.config.vocab_size, (args.requests, args.input), generator=generator)

    def generate(new_tokens: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    generate(4)
    start = time.perf_counter()
    generate(args.output)
    elapsed_s = time.perf_counter() - start
    print(json.dumps({
        "peer": f"transformers {transformers.__version__}, torch {torch.__version__}, {args.threads} threads",
        "elapsed_s": elapsed_s,
        "output_tokens_per_s": args.requests * args.output / elapsed_s,
        "total_tokens_per_s": args.requests * (args.input + args.output) / elapsed_s,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
