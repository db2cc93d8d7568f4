"""The scheduler: admission control, task dispatch and request lifecycle.

Decisions are pure functions of the state.
"""
