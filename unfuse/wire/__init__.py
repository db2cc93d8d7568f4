"""Control messages between processes. Tensors never travel here."""
