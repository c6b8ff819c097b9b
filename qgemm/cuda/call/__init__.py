"""A product from its arguments to its launches, and the replay of a call like an earlier one."""
