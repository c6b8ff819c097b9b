"""Matrix products on the packed tensors of .gguf files: quantize, open, matmul.

Importing qgemm touches no device, no folder and no environment variable, and imports nothing: the names of
qgemm/api.py come at the first use of one, so that the command `qgemm` can be interrupted before NumPy is imported.
Those of _ON_DEVICE come at their own first use: their package would add a quarter to the start of every program.
"""

TYPE_CHECKING = False  # type checkers know this name as true; importing typing would cost a third of a bare start

if TYPE_CHECKING:
    from .api import *  # noqa: F403  the list is there
    from .cuda import DeviceExperts as DeviceExperts
    from .cuda import DeviceTensor as DeviceTensor
    from .cuda import Planes as Planes
else:
    _ON_DEVICE = ("DeviceExperts", "DeviceTensor", "Planes")  # classes of qgemm.cuda, which imports no CuPy

    def __getattr__(name):
        """A name of qgemm.api or _ON_DEVICE, or a module that they import."""
        if name in _ON_DEVICE:
            import qgemm.cuda as module

            names = _ON_DEVICE
        else:
            import qgemm.api as module

            names = module.__all__
            globals()["__all__"] = sorted([*names, *_ON_DEVICE])
        for key in names:
            globals().setdefault(key, getattr(module, key))  # a program may have replaced a name
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
