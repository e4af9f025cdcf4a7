// Kernels that are queued to begin while the one before them ends.
#pragma once

namespace kog {

// The next kernel's thread blocks may take free places; what they read, they wait for. Nothing happens if it was not queued so.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until all that was queued before has ended, and its results can be seen.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace kog
