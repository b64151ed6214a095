/* The allocator's core: a plain C interface, used by Python (ctypes) and by the adapter under PyTorch.
 *
 * A core serves one device. Every call may be made from any thread. Calls that return `int` return 0, or one of the
 * codes below; `tn_last_error` then tells why, per thread. Nothing exits, aborts or throws. In a process that is forked
 * a core is the parent's: to free its memory or to close it does nothing, and of what returns `int` the rest fails.
 */
#ifndef TIERS_CORE_H
#define TIERS_CORE_H

#include <stdint.h>

#define TN_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* TN_BUSY: a stream is being captured into a graph, and nobody may wait for it; nothing was done. */
enum { TN_OK = 0, TN_FULL = 1, TN_DRIVER = 2, TN_INVALID = 3, TN_BUSY = 4 };
enum { TN_HBM = 0, TN_DRAM = 1 };
enum { TN_UNIT_BYTES = 1 << 21 }; /* what a region is counted in: a part of a page, or a whole one */
enum { TN_VOID = 0, TN_FREE = 1, TN_USED = 2, TN_PENDING_FREE = 3 }; /* kinds of blocks; void ones are never listed */
/* Lifetime classes a program can tell us about: where requests go while nothing is known of their deaths. */
enum { TN_ANY = 0, TN_STATE = 1 };

typedef struct tn_core tn_core;

/* `backend` is "cuda" or "memfd"; limits in bytes, rounded down to pages. */
TN_API int tn_open(const char *backend, int device, uint64_t hbm_limit, uint64_t dram_limit, tn_core **core);
/* Unmap and release everything. No address of the core may be in use, and no work on its streams under way. */
TN_API int tn_close(tn_core *core);
TN_API const char *tn_last_error(void);
/* Bytes of a page, of which there are some thousands in HBM: 2 to 16 MiB, a power of two. */
TN_API uint64_t tn_page_bytes(const tn_core *core);

/* Memory for work on `stream`, aligned to 512 bytes. TN_FULL when every tier that the device can address is full. */
TN_API int tn_allocate(tn_core *core, uint64_t bytes, uint64_t stream, uint64_t pool, uint64_t *address);
/* TN_INVALID if no block in use begins there. May be called while work of the block's stream is under way; while
 * another stream uses the block (`tn_used_on`), it is TN_PENDING_FREE. */
TN_API int tn_free(tn_core *core, uint64_t address);
/* The block is used on `stream`, too: once freed, it is handed out again when that stream has done all that it was
 * given by then. */
TN_API int tn_used_on(tn_core *core, uint64_t address, uint64_t stream);
/* Begin and bytes of the block in use that holds `address`. */
TN_API int tn_block_of(tn_core *core, uint64_t address, uint64_t *begin, uint64_t *bytes);
/* Never waits for a stream, as other calls may while one of them does. */
TN_API int tn_owns(tn_core *core, uint64_t address);

/* Pools other than 0 are private, such as a CUDA graph's: their memory stays mapped until they are retired. */
TN_API int tn_pool_retire(tn_core *core, uint64_t pool);
/* Bytes in use in a pool. */
TN_API uint64_t tn_pool_used(tn_core *core, uint64_t pool);
/* Free all blocks of a private pool at once; then put one at a given address (a graph's checkpointed state). */
TN_API int tn_pool_clear(tn_core *core, uint64_t pool);
TN_API int tn_allocate_at(tn_core *core, uint64_t address, uint64_t bytes, uint64_t requested);
/* A graph may be captured from now on (1), or no more (0); calls nest. Meanwhile the core never waits for all streams:
 * that would break a capture, also on a stream that has not asked for memory yet. */
TN_API void tn_capture(tn_core *core, int begins);

/* Count an OutOfMemoryError that the program got. */
TN_API void tn_refused(tn_core *core);

/* The class of the requests that follow. State beyond `most_hbm` more bytes of HBM than it has now goes to DRAM while
 * that has room. */
TN_API void tn_class(tn_core *core, int lifetime_class, uint64_t most_hbm);
/* From now on (1) the calling thread's requests, to any core, are not part of the program's sequence; or they are again
 * (0). Calls nest. Such requests are not logged. They go where they fit in HBM, also into a layout's region: what is
 * large has to be freed before the sequence goes on. Where HBM has no room for them they are TN_FULL. */
TN_API void tn_off_sequence(int begins);
TN_API int tn_is_off_sequence(void);
/* The most of a tier to make from now on. What is there already stays until it is released to the system. */
TN_API int tn_limit(tn_core *core, int tier, uint64_t bytes);
/* Unmap idle pages, but those of private pools, and release them to the system; unreserve the addresses of retired
 * pools with nothing in use. Waits for what may read them. `keep` bytes of HBM stay: most of what lies idle of these is
 * left mapped where it is. */
TN_API int tn_trim(tn_core *core, uint64_t keep);
/* Unmap and release idle pages of the layout's heap outside of its region, and pages that are mapped nowhere. Waits for
 * what may read them. Does nothing while a graph may be captured, or where there is no layout. */
TN_API int tn_trim_outside(tn_core *core);

/* ---- The sequence of requests, and the layout for it ---- */

typedef struct {
  uint64_t bytes; /* as rounded */
  uint64_t stream;
  int64_t birth; /* event of the period; requests and frees count alike */
  int64_t death; /* event of the period, plus `events` if it died in the next one; -1: alive */
  int64_t lifetime_class;
} tn_request;

/* The few counters that are read after every period. */
typedef struct {
  int64_t mispredicted; /* requests that were not as laid out, since the core was opened */
  int64_t dram_bytes;   /* physical pages */
  int64_t dram_state;   /* of these, those that state has a part of */
  int64_t present;      /* which of the sequences that are laid out came last */
  int64_t came;         /* how many of its requests had come when the last period ended */
  int64_t requests;     /* of the period under way, so far */
  int64_t repeated;     /* whether the last period had the same requests, at the same events, as the one before it */
  int64_t spilled; /* the most bytes in the last period for which there was no room in HBM: in use in DRAM, but those
                      that were moved and of state, and of pages that others took from the layout's region */
  int64_t spilled_so_far; /* the same of the period under way, since anything was moved */
} tn_glance;
/* A period ends and the next begins. Unless `out` is null it gets the counters of that moment. */
TN_API void tn_mark(tn_core *core, tn_glance *out);
/* The log of the period before the present one (0), or the one before that (1), of pool 0. Returns how many requests
 * it has; copies at most `capacity`. A period of more than 32768 has none: it would take too long to lay out. */
TN_API uint64_t tn_log(tn_core *core, int ago, tn_request *out, uint64_t capacity, uint64_t *events);
/* Set the layout. From now on, request k of each period (on `stream`, of `least[k]` to `bytes[k]`), the present one
 * included, lies at `offsets[k]` in a region of `units` units; UINT64_MAX: elsewhere. A period is one of several
 * `sequences`, of `counts` requests each, one after the other in `least`, `bytes` and `offsets`; its first requests
 * tell which. Where HBM does not hold the region, the pages lie in DRAM whose units have the least `costs`. Waits for
 * what may read what is unmapped. TN_FULL: the tiers have no room for the region, and there is no layout any more.
 * TN_BUSY: the layout is what it was.
 */
TN_API int tn_set_layout(tn_core *core, uint64_t stream, uint64_t sequences, const uint64_t *counts,
                         const uint64_t *least, const uint64_t *bytes, const uint64_t *offsets, uint64_t units,
                         const int64_t *costs);
/* From now on there is no layout; what was mapped for it stays mapped, and serves any request. Until the next mark or
 * layout, but for twice as many requests as the last period had at most, the core hardly grows: while pages lie idle,
 * those are mapped anew, and no page is made beyond what is alive, or beyond `expected` bytes if that is more. To map a
 * page anew waits for whoever may read it. */
TN_API void tn_forget_layout(tn_core *core, uint64_t expected);

/* Give each request of a known lifetime an offset, so that no two overlap in both time and space. Births and deaths are
 * events of a period of `events`; a death past them lies in the next period. `most` gets the most bytes that are alive
 * at once. The search soon ends with what takes at most `room` bytes; else it takes half a second. TN_INVALID if one
 * lives longer than a period, as it would overlap itself. Needs no core. */
TN_API int tn_pack(uint64_t count, const uint64_t *bytes, const int64_t *births, const int64_t *deaths, int64_t events,
                   uint64_t room, uint64_t *offsets, uint64_t *most);

/* ---- Where memory lies ---- */

/* Move the pages of a block to `tier`, under the same address; on DRAM it needs no HBM from then on. Those that it has
 * a part of go to HBM; to DRAM only if it is state, as what lies beside it may be read more often. Waits for all
 * streams, or is TN_BUSY, unless all of them lie there already. */
TN_API int tn_move(tn_core *core, uint64_t address, int tier);
/* Wait as that does, and no more. It has little to wait for then, should its caller keep other threads from launching
 * what reads the block: while it moves it is mapped nowhere. */
TN_API int tn_wait_to_move(tn_core *core, uint64_t address, int tier);
/* Bytes of a block that lie on `tier`. */
TN_API uint64_t tn_on(tn_core *core, uint64_t address, int tier);
/* Bytes of the pages on `tier` that `bytes` from `address` on, all of one range of addresses, have a part of. */
TN_API uint64_t tn_pages_on(tn_core *core, uint64_t address, uint64_t bytes, int tier);

/* Let another GPU access all memory of this core, now and later: its kernels, and copies past the host. */
TN_API int tn_share(tn_core *core, int device);

/* ---- Counters ---- */

typedef struct {
  int64_t current, peak, gained, lost;
} tn_stat;
enum { TN_ALL = 0, TN_SMALL = 1, TN_LARGE = 2, TN_SIZES = 3 };
typedef struct {
  tn_stat allocations[3], allocated[3], requested[3], active[3], active_blocks[3];
  int64_t hbm_bytes, hbm_peak, dram_bytes, dram_peak; /* physical pages */
  int64_t hbm_limit, dram_limit;
  int64_t demoted_bytes; /* in use, of state and of blocks that were moved, that lie in DRAM */
  int64_t idle_bytes;    /* mapped, and not in use */
  int64_t largest_idle;
  int64_t maps, unmaps, waits, retries, failures;
  int64_t planned, mispredicted, misplaced; /* requests served where laid out; not as laid out; whose place was taken */
} tn_stats;
TN_API void tn_get_stats(tn_core *core, tn_stats *out);
/* The same of the period under way, without an end to it. */
TN_API void tn_get_glance(tn_core *core, tn_glance *out);
/* `retries` of the statistics alone. */
TN_API int64_t tn_retries(tn_core *core);
/* How many nanoseconds requests have waited so far, in all threads together, while pages were mapped or room was made.
 * A request that is at it now counts once it is over, and is not waited for. */
TN_API int64_t tn_delayed(const tn_core *core);
TN_API void tn_reset_peaks(tn_core *core);
/* The most bytes in use now, or after a request since the last call `of` the same; no other peak begins anew. Those
 * that were demoted do not count. With them counts what lies idle on other streams than the layout's, which it cannot
 * use. To the next peak what is in use now counts only if asked for: `with_present`. */
enum { TN_PARTS = 0, TN_PERIODS = 1, TN_PEAKS = 2 };
TN_API uint64_t tn_take_peak(tn_core *core, int of, int with_present);
TN_API void tn_reset_totals(tn_core *core);

typedef struct {
  uint64_t address, bytes, requested, stream, pool;
  int32_t kind;
  int32_t tier;
  uint64_t segment; /* equal for blocks of one run of mapped pages */
  int64_t lifetime_class;
} tn_block;
/* All mapped blocks, by heap and address. Returns how many there are; copies at most `capacity`. */
TN_API uint64_t tn_blocks(tn_core *core, tn_block *out, uint64_t capacity);

#ifdef __cplusplus
}
#endif
#endif
