"""Measurements. Each file stands for one claim, prints JSON, and compares within one run."""
