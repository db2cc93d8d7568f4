"""What language models need around a forward: tokenizers, templates, parsers, grammars, sampling, paged KV."""
