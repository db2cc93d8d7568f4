"""Run as a program: what transformers makes of chats and texts, given as JSON, in a process of its own."""

import json
import sys

from transformers import AutoTokenizer
from transformers.utils import logging


def main() -> None:
    logging.set_verbosity_error()
    made = []
    for job in json.load(sys.stdin):
        tokenizer = AutoTokenizer.from_pretrained(job["folder"], **({"gguf_file": job["gguf"]} if job["gguf"] else {}))
        prompts = [
            tokenizer.apply_chat_template(
                chat["messages"], chat.get("tools"), add_generation_prompt=True, **chat["more"]
            )
            for chat in job["chats"]
        ]
        texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in job["texts"]]
        made.append(
            {
                "prompts": [prompt["input_ids"] for prompt in prompts],
                "texts": texts,
                "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts],
            }
        )
    json.dump(made, sys.stdout)


main()
