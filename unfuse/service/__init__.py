"""Compose a service from settings: its options, its plan, and running it. No command line."""
