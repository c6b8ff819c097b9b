"""The converter: checkpoints of other formats and types into .gguf files, exactly where that is possible.

    source --open_source--> Weights --plan--> Steps --encode_range, on all cores--> blocks --verified_file--> target

weight            one tensor of a source, read in ranges; codes that move to another format unchanged
source_readers    opens .gguf files and NumPy's files
array_weights     plain arrays of safetensors, .npy and .npz as Weights
checkpoints/      safetensors: the configs, and one module for the matrices of each quantization method
checkpoint_reader tensors in the format that holds them exactly, for products
tensor_names      other names and shapes
weight_views      weights derived from others: rows in another order, matrices stacked
gguf_template     lays a checkpoint out like a .gguf file of the same model
hf_folder         turns a Hugging Face folder into a .gguf model; hf_names, architectures, hyperparameters, tokenizer
gguf_to_folder    turns a .gguf model into a Hugging Face folder
lora              turns the folder of a LoRA adapter into a .gguf adapter
rules             the type of each tensor; mixture has the file types of llama-quantize
range_encoding    encodes a range of weights into blocks, and measures the error
scale_search      searches for better scales in such a range
device            encodes a range on a GPU
targets           writes files, whole or not at all; checkpoint_target writes a folder
metadata          the keys of the new file
file_metadata     sets and removes keys of a .gguf file
job               the whole conversion
report, plot      the table, the JSON document and the picture
comparison        compares a converted tensor with its source
api               the public function
"""

from .api import Conversion, convert
from .checkpoint_reader import Checkpoint, load
from .file_metadata import set_metadata
from .rules import Options
from .source_readers import open_source

__all__ = ["Checkpoint", "Conversion", "Options", "convert", "load", "open_source", "set_metadata"]
