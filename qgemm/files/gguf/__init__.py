"""GGUF: the layout, a strict lazy reader, an atomic writer, and formats stored in parts."""
