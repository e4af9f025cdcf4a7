// The same for requests with processors.
#define KOG_HEAD_ONLY true
#include "decode_processors.cu"
