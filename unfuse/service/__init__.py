"""Puts parts together: settings, the plan of what to start, and running it; without any command line."""
