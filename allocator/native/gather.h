// The kernel that gathers small spans in HBM, and what it is given. As PTX, which the driver compiles for whatever GPU
// is there: no toolkit is needed to build or to run it.

#pragma once

#include <cstdint>

namespace {

struct GatherSpan {
    uint64_t source;  // aligned to 16 bytes, as are all of `GatherBatch::target` plus `offset`
    uint32_t offset;
    uint32_t nbytes;
};

constexpr int kBatch = 128;    // spans a launch
constexpr int kBlocks = 128;   // a span, at most: one of 4 MiB takes eight turns then
constexpr int kThreads = 256;  // a block

struct GatherBatch {
    uint64_t target;
    GatherSpan spans[kBatch];
};

static_assert(sizeof(GatherBatch) == 2056, "as the kernel's parameter below");

// Blocks (x, k) copy span k, 16 bytes a thread and turn; what is left of them at its end, the one thread that meets it.
constexpr char kGather[] = R"ptx(
.version 7.0
.target sm_70
.address_size 64

.visible .entry tiers_gather(.param .align 8 .b8 batch[2056])
{
    .reg .pred  %done, %part;
    .reg .b16   %byte;
    .reg .b32   %k, %threads, %block, %thread, %blocks, %offset, %nbytes, %w0, %w1, %w2, %w3;
    .reg .b64   %span, %source, %target, %from, %to, %at, %step, %size, %end, %wide;

    mov.b64         %span, batch;
    mov.u32         %k, %ctaid.y;
    mul.wide.u32    %wide, %k, 16;
    add.s64         %span, %span, %wide;
    ld.param.u64    %target, [batch];
    ld.param.u64    %source, [%span+8];
    ld.param.u32    %offset, [%span+16];
    ld.param.u32    %nbytes, [%span+20];
    cvta.to.global.u64 %target, %target;
    cvta.to.global.u64 %source, %source;
    cvt.u64.u32     %wide, %offset;
    add.s64         %target, %target, %wide;
    cvt.u64.u32     %size, %nbytes;

    mov.u32         %threads, %ntid.x;
    mov.u32         %block, %ctaid.x;
    mov.u32         %thread, %tid.x;
    mov.u32         %blocks, %nctaid.x;
    mad.lo.u32      %thread, %block, %threads, %thread;
    mul.wide.u32    %at, %thread, 16;
    mul.lo.u32      %blocks, %blocks, %threads;
    mul.wide.u32    %step, %blocks, 16;

next:
    setp.ge.u64     %done, %at, %size;
    @%done ret;
    add.s64         %from, %source, %at;
    add.s64         %to, %target, %at;
    add.s64         %end, %at, 16;
    setp.gt.u64     %part, %end, %size;
    @%part bra      tail;
    ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%from];
    st.global.v4.u32 [%to], {%w0, %w1, %w2, %w3};
    add.s64         %at, %at, %step;
    bra             next;

tail:
    ld.global.u8    %byte, [%from];
    st.global.u8    [%to], %byte;
    add.s64         %from, %from, 1;
    add.s64         %to, %to, 1;
    add.s64         %at, %at, 1;
    setp.lt.u64     %part, %at, %size;
    @%part bra      tail;
    ret;
}
)ptx";

}  // namespace
