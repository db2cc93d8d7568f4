"""Nouns and rules: no I/O, no torch, no asyncio."""
