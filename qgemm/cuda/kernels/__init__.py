"""One module a kernel source: its records, configs, templates and launches; routes.py has the problems they serve."""
