"""What block formats are made of: the Format record, packing of bits, scales, codebooks, the scale search."""
