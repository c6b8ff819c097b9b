"""The converter: checkpoints of other formats and types into .gguf files, exactly where that is possible.

    source --open_source--> Weights --planned--> Steps --piece, on all cores--> blocks --checked target--> file

weight    one tensor of a source, read in ranges; codes that move to another format as they are
sources   what is read: .gguf, NumPy's files
checkpoints/
          safetensors: what its configs say, and a module for the matrices of each method
load      tensors as they are, for products
names     other names and shapes
views     weights made of others: rows in another order, stacked
like      a checkpoint made like a .gguf file of the same model
rules     which type each tensor gets
encode    a range of weights into blocks, and the error
searching the search for better scales in such a range
device    the same on a GPU
targets   what is written, whole or not at all
metadata  the keys of what is written
job       all of it
report    the table and the JSON document
api       the public function
"""

from .api import Conversion, convert
from .checkpoint_reader import Checkpoint, load
from .rules import Options
from .source_readers import open_source

__all__ = ["Checkpoint", "Conversion", "Options", "convert", "load", "open_source"]
