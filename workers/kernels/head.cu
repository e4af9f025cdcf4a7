// The monokernel's first step of a request whose prompt prefill has run through all layers: the LM head alone. A build of its own, so that
// it costs the other one nothing.
#define KOG_HEAD_ONLY true
#include "decode.cu"
