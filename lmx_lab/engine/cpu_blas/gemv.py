"""A ``cblas_sgemm`` that calls ``cblas_sgemv`` for products with a single row, in x86-64 machine code.

Decoding one token of one request multiplies a single row by each weight matrix. OpenBLAS' gemm packs the matrix first,
which costs more than it gains for a single row. On arm64 OpenBLAS calls gemv itself (its pull request 4814), on x86-64
it does not. sgemm against sgemv in microseconds on two cores (Zen 4), weights stored as (N, K): K 576, N 1,536: 231
and 127; K 1,536, N 576: 170 and 96; K 576, N 49,152: 7,991 and 3,929. With two rows or more, gemm is at least as fast
over all layers of a model.
"""

from __future__ import annotations

from lmx_lab.engine.cpu_blas import machine_code


def code(sgemm: int, sgemv: int) -> bytes:
    """The instructions of the function, for the given addresses of sgemm and sgemv.

    Both functions take their first integers in registers and the rest in the caller's argument area on the stack. The
    System V ABI lets the callee overwrite this area; sgemv needs less of it, so it is rewritten in place and the jump
    is a tail call, with the stack aligned by the caller. alpha and beta stay in xmm0 and xmm1.

    sgemm(edi order, esi transA, edx transB, ecx M, r8d N, r9d K, [8] A, [16] lda, [24] B, [32] ldb, [40] C, [48] ldc)
    sgemv(edi order, esi trans,  edx rows,   ecx columns, r8 A, r9d lda, [8] x, [16] incx, [24] y, [32] incy)
    """
    forward = (
        b"\xb8\xdf\x00\x00\x00"  # mov  eax, 223             NoTrans is 111, Trans 112: the one of B gives
        b"\x29\xd0"  # sub  eax, edx             the opposite one of sgemv's matrix
        b"\x89\xc6"  # mov  esi, eax
        b"\x44\x89\xc9"  # mov  ecx, r9d             columns = K
        b"\x83\xfa\x70"  # cmp  edx, 112
        b"\x44\x89\xc2"  # mov  edx, r8d             rows = N
        b"\x74\x02"  # je   +2                   B is stored as (N, K)
        b"\x87\xca"  # xchg edx, ecx             B is stored as (K, N)
        b"\x4c\x8b\x44\x24\x18"  # mov  r8, [rsp+24]         the matrix = B
        b"\x44\x8b\x4c\x24\x20"  # mov  r9d, [rsp+32]        its row length = ldb
        b"\x48\x8b\x44\x24\x28"  # mov  rax, [rsp+40]        y = C; x = A is in place
        b"\x48\x89\x44\x24\x18"  # mov  [rsp+24], rax
        b"\xc7\x44\x24\x20\x01\x00\x00\x00" + _jump(sgemv)  # mov  dword [rsp+32], 1    incy
    )
    row = (  # Reached with eax = transA - 111. A transposed A with one row is a column with stride lda.
        b"\x85\xc0"  # test eax, eax
        b"\x75\x08"  # jne  +8
        b"\xc7\x44\x24\x10\x01\x00\x00\x00"  # mov  dword [rsp+16], 1    incx
    )
    body = row + forward
    conditions = (  # Each is followed by a jump to sgemm, which also reports invalid arguments.
        (b"\x83\xff\x65", b"\x0f\x85"),  # cmp  edi, 101 (RowMajor);  jne
        (b"\x83\xf9\x01", b"\x0f\x85"),  # cmp  ecx, 1;               jne
        (b"\x45\x85\xc0", b"\x0f\x8e"),  # test r8d, r8d;             jle
        (b"\x45\x85\xc9", b"\x0f\x8e"),  # test r9d, r9d;             jle
        (b"\x8d\x42\x91\x83\xf8\x01", b"\x0f\x87"),  # lea eax, [rdx-111]; cmp eax, 1;  ja
        (b"\x8d\x46\x91\x83\xf8\x01", b"\x0f\x87"),  # lea eax, [rsi-111]; cmp eax, 1;  ja
    )
    for test, jump in reversed(conditions):
        body = test + jump + len(body).to_bytes(4, "little") + body
    return b"\xf3\x0f\x1e\xfa" + body + _jump(sgemm)  # endbr64


def _jump(target: int) -> bytes:
    return b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # movabs rax, target; jmp rax


def build(sgemm: int, sgemv: int) -> int:
    """Write the instructions to a new executable page and return their address.

    Raises:
        OSError: the system does not allow executable pages (SELinux), or the processor is not x86-64.
    """
    return machine_code.place(code(sgemm, sgemv))
