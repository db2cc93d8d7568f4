"""What a machine has, which layout fits, and where workers go."""
