"""Decides: pure transitions, and one loop around them."""
