// Launches that may begin before what is queued before them has ended (`early` of compiled.launch).
#pragma once

namespace kog {

// Until all that was queued before has ended and can be read. A kernel that may begin early reads and writes nothing before it but what no
// other one writes.
__device__ __forceinline__ void await_predecessors() {
#ifdef __CUDA_ARCH__
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch may begin as soon as thread blocks of this one leave room, if it is one that may begin early.
__device__ __forceinline__ void let_successors_begin() {
#ifdef __CUDA_ARCH__
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace kog
