"""The commands of `qgemm`, a module each; the tuple COMMANDS in qgemm/cli/main.py lists them."""
