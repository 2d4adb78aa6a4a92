/* The functions that are not hooked: a jump to the driver's, with all arguments as they are. */
#include "forwarded.h"

#if defined(__x86_64__)

.macro forward name, index
    .globl \name
    .type \name, @function
\name:
    endbr64
    movq driver_functions+8*\index(%rip), %r11
    testq %r11, %r11
    jz 1f
    jmp *%r11
1:  movl $\index, %r11d
    jmp load_and_jump
    .size \name, . - \name
.endm

.text
.type load_and_jump, @function
load_and_jump:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    andq $-16, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movups %xmm0, 48(%rsp)
    movups %xmm1, 64(%rsp)
    movups %xmm2, 80(%rsp)
    movups %xmm3, 96(%rsp)
    movl %r11d, %edi
    call load_driver
    movq %rax, %r11
    movq 0(%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movups 48(%rsp), %xmm0
    movups 64(%rsp), %xmm1
    movups 80(%rsp), %xmm2
    movups 96(%rsp), %xmm3
    leave
    .cfi_def_cfa %rsp, 8
    jmp *%r11
    .cfi_endproc
    .size load_and_jump, . - load_and_jump

#elif defined(__aarch64__)

.macro forward name, index
    .globl \name
    .type \name, %function
\name:
    adrp x16, driver_functions+8*\index
    add x16, x16, :lo12:driver_functions+8*\index
    /* Acquired: the jump alone does not keep loads of the driver's function from being done before this one. */
    ldar x16, [x16]
    cbz x16, 1f
    br x16
1:  mov w16, #\index
    b load_and_jump
    .size \name, . - \name
.endm

.text
.type load_and_jump, %function
load_and_jump:
    .cfi_startproc
    stp x29, x30, [sp, #-160]!
    .cfi_def_cfa_offset 160
    .cfi_offset x29, -160
    .cfi_offset x30, -152
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    stp x8, xzr, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    mov w0, w16
    bl load_driver
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldr x8, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp x29, x30, [sp], #160
    .cfi_restore x29
    .cfi_restore x30
    .cfi_def_cfa_offset 0
    br x16
    .cfi_endproc
    .size load_and_jump, . - load_and_jump

#else
#error "no forwarding for this processor"
#endif

    FORWARDED

.section .note.GNU-stack, "", %progbits
