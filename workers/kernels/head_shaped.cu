// The same for shaped requests.
#define KOG_HEAD_ONLY true
#include "decode_shaped.cu"
