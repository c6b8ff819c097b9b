// q8_0: w = d * q, q in -128..127. Twin of qgemm/formats/q8_0.py.
#define LEVEL_OFFSET 2
#include "../signed_bytes.h"
