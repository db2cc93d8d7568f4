"""What each stage kind does, whatever the model family. torch is imported by whoever runs a stage, not here."""
