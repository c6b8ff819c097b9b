"""The errors that qgemm raises on purpose. Each is a ValueError and says what came, what fits, and who asked."""

from collections.abc import Iterable

from .text import close_to, printable


class QgemmError(ValueError):
    """Base of every error below; `except qgemm.QgemmError` catches what qgemm refuses."""


class GGUFError(QgemmError):
    """A file that is not well-formed GGUF, or changed under its reader. Names the file, the tensor or key, the rule."""


class GGUFNotFoundError(GGUFError, FileNotFoundError):
    """There is no file at the path that was to be opened."""


class GGUFAccessError(GGUFError, OSError):
    """The system would not open, read or write a file. Names the file; `errno` says why."""


class NameNotFoundError(QgemmError, KeyError):
    """A name that a file or the registry of formats does not have. Names those that are close.

    problem: such as "model.gguf: there is no tensor". names: all that exist. rest: the end of the message if none of
    them is close.
    """

    def __init__(self, problem: str, name: object, names: Iterable[str], rest: str) -> None:
        super().__init__(problem, name, tuple(names), rest)

    def __str__(self) -> str:
        """Close names are searched here, when somebody reads: `get` and `in` drop these errors by the thousand."""
        problem, name, names, rest = self.args
        return f"{problem} {printable(repr(name))}{close_to(name, names) or rest}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class QuantizeError(QgemmError):
    """Values that a format cannot hold: NaN, infinity, or a scale beyond float16 (E4M4). Names format and block."""


class CodebookError(QgemmError):
    """A codebook of the wrong length, or with a number that is not finite. Names the format."""


class ShapeError(QgemmError):
    """A shape that does not fit: x and weights, weights of one layer, a bias, a residual, an output. Names both."""


class UnsupportedError(QgemmError):
    """A format without the codec, or a problem without the kernel, that a call needs."""


class CheckpointError(QgemmError):
    """A checkpoint (safetensors, .npy, .npz, their config) that is not well-formed, or of a layout that is not read."""


class RankError(QgemmError):
    """Another rank of a group of processes failed, or holds something else. Names the rank and gives its message."""


def not_pickled(file: object) -> TypeError:
    """The error of an open file that is pickled or copied: it has descriptors and a mapping of this process."""
    return TypeError(f"{file!r} cannot be pickled or copied; pickle its tensors, or open its path again")
