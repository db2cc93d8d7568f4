"""Puts parts together: what is set, what to start for it, and the running of it; without any command line."""
