"""The converter: checkpoints of other formats and types into .gguf files, exactly where that is possible.

    source --open_source--> Weights --planned--> Steps --piece, on all cores--> blocks --checked target--> file

weight    one tensor of a source, read in ranges; codes that move to another format as they are
sources   what is read
rules     which type each tensor gets
encode    a range of weights into blocks, and the error
device    the same on a GPU
targets   what is written, whole or not at all
job       all of it
report    the table and the JSON document
"""

from .job import convert
from .rules import Options
from .sources import open_source

__all__ = ["Options", "convert", "open_source"]
