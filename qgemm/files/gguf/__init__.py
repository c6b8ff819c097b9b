"""GGUF: the layout, a strict and lazy reader, an atomic writer, and formats stored in parts."""
