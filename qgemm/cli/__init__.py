"""The commands of `qgemm`, a module each; the table COMMANDS in qgemm/cli/main.py lists them."""
