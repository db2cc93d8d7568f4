"""Background work that goes on, whatever it raises."""
