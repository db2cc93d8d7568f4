"""The stage kinds, for all model families. torch is imported when a stage runs, not here."""
