// q8_1: w = d * q, q in -127..127. Twin of qgemm/formats/q8_1.py. Products do not need the sum that a block also
// stores.
#define LEVEL_OFFSET 4
#include "../signed_bytes.h"
