"""Matrix products on the packed tensors of .gguf files: quantize, open, matmul.

Importing qgemm touches no device, no folder and no environment variable, and imports nothing: the names of
qgemm/api.py come at the first use of one. So the command `qgemm` can be interrupted before NumPy is there.
"""

TYPE_CHECKING = False  # for type checkers it is true, by its name; typing's own would cost a third of a bare start

if TYPE_CHECKING:
    from .api import *  # noqa: F403  the list is there
else:

    def __getattr__(name):
        """A name of qgemm.api, or a module that it imports."""
        import qgemm.api as api

        globals().update({each: getattr(api, each) for each in (*api.__all__, "__all__")})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
