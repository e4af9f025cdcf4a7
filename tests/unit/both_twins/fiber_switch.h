// How fibers take turns on one thread of a CPU, without the system: swapcontext asks it for its mask of signals each time.
#pragma once
#include "system.h"

// Saves the callee's registers on the stack, and goes on with another stack.
asm(R"(
.globl twin_switch
twin_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void twin_switch(void** save, void* load);

// What a fiber's first turn finds at the top of its stack, to begin with `enter`, which never returns.
inline void* twin_stack_pointer(char* stack_end, void (*enter)()) {
    // Where `ret` finds the entry; the stack is aligned as after a call.
    void** at = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_end) / 16 * 16) - 2;
    *at = reinterpret_cast<void*>(enter);
    return at - 6;
}
