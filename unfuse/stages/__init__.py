"""What each stage kind does, for all model families. torch is imported when a stage runs, not here."""
