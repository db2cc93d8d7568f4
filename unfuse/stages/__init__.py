"""The stage kinds, for all model families.

torch is imported when a stage is loaded or runs, not here.
"""
