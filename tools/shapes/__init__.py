"""Draws, trains, checks and scores the built-in model `unfuse/shapes`; nothing in `unfuse/` imports it."""
