// The monokernel for requests that ask for more than greedy or temperature sampling (docs/sampling.md). A build of its own, so that it
// costs the other one nothing.
#define KOG_PROCESSORS 1
#include "decode.cu"
