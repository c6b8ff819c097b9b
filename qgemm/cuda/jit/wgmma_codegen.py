"""C++ for the wgmma of every size: each has its own instruction, with N / 2 registers for the accumulators."""

from __future__ import annotations

from functools import cache

WGMMA_N = range(8, 257, 8)  # N of wgmma of halves and of e4m3
WGMMA_S8_N = (*range(8, 33, 8), *range(48, 257, 16))  # N of wgmma of signed bytes


@cache
def wgmma_header() -> str:
    """C++ for the wgmma of every size: each has its own instruction, with N / 2 registers for the accumulators."""
    return f"#pragma once\nnamespace qgemm {{\n{''.join(map(_wgmma, WGMMA_N))}}}  // namespace qgemm\n"


@cache
def wgmma_s8_header() -> str:
    """C++ for the wgmma of signed bytes of every size that it has."""
    adds = (0, 1)
    shapes = [_wgmma_s8(n, add) for n in WGMMA_S8_N for add in adds]
    shapes += [_wgmma_shared("int", "r", "s32.s8.s8", "p", n, add) for n in WGMMA_S8_N for add in adds]
    return f"#pragma once\nnamespace qgemm {{\n{''.join(shapes)}}}  // namespace qgemm\n"


@cache
def wgmma_e4m3_header() -> str:
    """C++ for the wgmma of e4m3 of every size, with both operands in shared memory."""
    shapes = (_wgmma_shared("float", "f", "f32.e4m3.e4m3", "p, 1, 1", n, add) for n in WGMMA_N for add in (0, 1))
    return f"#pragma once\nnamespace qgemm {{\n{''.join(shapes)}}}  // namespace qgemm\n"


def _wgmma_s8(n: int, add: int) -> str:
    """C++ for m64nNk32 with operand A in registers."""
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+r"(acc[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma_s8<{n}, {add}>(int (&acc)[{count}], const u32 (&a)[4], unsigned long long b) {{
    asm volatile("{{ .reg .pred p; setp.ne.u32 p, {add}, 0; wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 "
                 "{{{d}}}, {{{a}}}, %{count + 4}, p; }}"
                 : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def _wgmma_shared(c_type: str, register: str, kind: str, modifiers: str, n: int, add: int) -> str:
    """C++ for m64nNk32 of bytes with both operands in shared memory; modifiers: the predicate, and signs of floats."""
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"(acc[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma_shared<{n}, {add}>(
    {c_type} (&acc)[{count}], unsigned long long a, unsigned long long b) {{
    asm volatile("{{ .reg .pred p; setp.ne.u32 p, {add}, 0; wgmma.mma_async.sync.aligned.m64n{n}k32.{kind} "
                 "{{{d}}}, %{count}, %{count + 1}, {modifiers}; }}"
                 : {outputs} : "l"(a), "l"(b));
}}
"""


def _wgmma(n: int) -> str:
    """C++ for m64nNk16 with operand A in registers."""
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma<{n}>(float (&acc)[{count}], const u32 (&a)[4], unsigned long long b) {{
    asm volatile("{{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 "
                 "{{{d}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0; }}"
                 : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""
