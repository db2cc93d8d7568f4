"""Texts by transformers itself. Each line it reads is JSON: {"ids": prompts, "tokens": N, "how": "generate_batch" or
"generate"}; it answers with the tokens that it made, the seconds and the CPU seconds. Prompts are there at once:
`generate_batch` batches them as they come and go, `generate` has them one after the other.

Runs without unfuse: `python bench/peers/with_transformers.py FOLDER_OR_GGUF THREADS TOKENS_OF_KV`.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 256


def batched(model, ids, how, kv):
    room = ContinuousBatchingConfig(num_blocks=-(-kv // PAGE), max_batch_tokens=256, page_size=PAGE)
    made = model.generate_batch(ids, generation_config=how, continuous_batching_config=room, progress_bar=False)
    return sum(len(one.generated_tokens) for one in made.values())


def alone(model, ids, how):
    return sum(model.generate(torch.tensor([prompt]), generation_config=how).shape[1] - len(prompt) for prompt in ids)


def main():
    path, threads, kv = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    file = {"gguf_file": path.name} if path.is_file() else {}
    model = AutoModelForCausalLM.from_pretrained(path.parent if file else path, dtype=torch.float32, **file).eval()
    end = model.generation_config.eos_token_id
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        how = GenerationConfig(max_new_tokens=asked["tokens"], do_sample=False, eos_token_id=end, pad_token_id=0)
        began, spent = time.perf_counter(), time.process_time()
        with torch.no_grad():
            tokens = (
                alone(model, asked["ids"], how) if asked["how"] == "generate" else batched(model, asked["ids"], how, kv)
            )
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu": spent}), flush=True)


if __name__ == "__main__":
    main()
