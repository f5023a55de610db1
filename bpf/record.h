/* The record that user space reads, the configuration set before loading, the ring, and the counters of losses.
 *
 * `struct record` is RECORD of llmcache/trace/records.py, and `struct config` is CONFIG of llmcache/trace/kernel.py;
 * tests/trace compares the layouts. */
#ifndef LLMCACHE_RECORD_H
#define LLMCACHE_RECORD_H

#include "kernel.h"

enum { READ, WRITE, MAP };
enum { ACCESS, FILL, EVICT, BLOCK, SAMPLED };
enum { DIRECT = 1, AROUND = 2, STORED = 4, MATCHED = 8, COPIED = 16 };
#define UNKNOWN 2

struct record {
	u64 t_ns;
	u64 first;
	u64 inode;
	u64 dev;
	u32 count;
	u32 pid;
	u32 aux;
	u8 op;
	u8 miss;
	u8 kind;
	u8 flags;
};

#define CALLS 6
struct config {
	u64 max_age_ns;		/* maximum age of a run */
	u32 max_blocks;		/* maximum length of a run; 0: nothing is merged */
	u32 follow;		/* children of recorded processes are recorded too */
	u32 page_blocks_log2;	/* a page is 2^this blocks of 4096 bytes */
	u32 total_store_order;	/* stores become visible in order (x86) */
	s32 write_calls[CALLS];	/* numbers of write, pwrite64, writev, pwritev, pwritev2, sendfile */
	s32 read_calls[CALLS];	/* numbers of read, pread64, readv, preadv, preadv2; -1 */
};
const volatile struct config config = {};

static __always_inline bool is_call(const volatile s32 *calls, s64 number)
{
	return number == calls[0] || number == calls[1] || number == calls[2] || number == calls[3] || number == calls[4] ||
	       number == calls[5];
}

static __always_inline s64 current_call(void)
{
	return call_number((struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf()));
}

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 20);
} ring SEC(".maps");

/* Events that were not recorded, by reason: the ring was full; too many threads; too many files; too many requests, or the
 * end of one was missed; the file of a mapping by huge pages was not found. */
enum { LOST_RING, LOST_THREADS, LOST_FILES, LOST_REQUESTS, LOST_HUGE, LOSSES };
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LOSSES);
	__type(key, u32);
	__type(value, u64);
} losses SEC(".maps");

static void lose(u32 reason, u64 events)
{
	u64 *total = bpf_map_lookup_elem(&losses, &reason);

	if (total)
		__sync_fetch_and_add(total, events);
}

/* User space polls, because a wake-up would cost the recorded process more than all the rest. */
static __always_inline void emit(struct record *record)
{
	if (bpf_ringbuf_output(&ring, record, sizeof(*record), BPF_RB_NO_WAKEUP))
		lose(LOST_RING, record->kind == ACCESS && record->aux ? record->aux : 1);
}

#endif
