"""The converter: checkpoints of other formats and types into .gguf files, exactly where that is possible.

    source --open_source--> Weights --planned--> Steps --piece, on all cores--> blocks --checked target--> file

weight    one tensor of a source, read in ranges; codes that move to another format as they are
sources   what is read: .gguf, NumPy's files
checkpoint, quantization, packed, eight_bits, four_bits
          safetensors: what its configs say, matrices of AWQ and GPTQ, FP8, MXFP4
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
from .rules import Options
from .sources import open_source

__all__ = ["Conversion", "Options", "convert", "open_source"]
