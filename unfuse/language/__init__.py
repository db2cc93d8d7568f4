"""Language models: tokenizers, chat templates, tool calls, grammars, sampling, and the paged KV cache."""
