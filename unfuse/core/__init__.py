"""Types and rules that all folders share: no I/O, no torch, no asyncio."""
