/* Copies runs that no longer grow to the ring. User space runs this before it reads the ring.
 *
 * The owner of a run sends it too, when it begins another one or ends; user space then drops the blocks that it has from the
 * copy (llmcache/trace/kernel.py). A copy precedes that record in the ring. */
#ifndef LLMCACHE_FLUSH_H
#define LLMCACHE_FLUSH_H

#include "evictions.h"

/* A request that has not grown for this time has ended. Only requests through io_uring need this, because their end has no
 * event. */
#define STALLED_NS 200000000

/* The number of recorded threads. `all` is set at the end, when the programs are detached: then all runs are sent. */
struct flush_result { u32 live, all; };

/* Whether the thread is still in the call of its last request, so that further fills may follow. */
static __always_inline bool in_request(struct thread *thread, u32 tid, u64 now_ns)
{
	struct task_struct *task;
	bool same_call;

	if (thread->request_first >= thread->request_last ||
	    (!thread->request_in_call && now_ns > thread->request_ns + STALLED_NS) || !bpf_task_from_pid)
		return false;
	task = bpf_task_from_pid(tid);
	if (!task)
		return false;
	same_call = read_calls_made(task) == thread->request_call;
	bpf_task_release(task);
	return same_call;
}

/* Removes blocks that the thread may not have read yet: the rest of its request, or the page that it faults on. */
static __always_inline void clip(struct thread *thread, struct record *copy, bool requesting)
{
	u64 first = *(volatile u64 *)&thread->request_first, end = copy->first + copy->count;
	u32 page_blocks = 1 << config.page_blocks_log2;

	if (copy->kind != ACCESS)
		return;
	if (copy->op == READ && requesting && end == thread->request_last + 1 && first < end) {
		copy->count = first > copy->first ? first - copy->first : 0;
	} else if (copy->op == MAP && thread->fault_mapping && !thread->fault_deferred &&
		   end == thread->fault.first + page_blocks && copy->count >= page_blocks) {
		copy->count -= page_blocks;
		copy->aux -= thread->fault.aux;
	}
}

/* Copies the run of a slot (of `thread`, or of a CPU) once. Runs that grew in the last milliseconds are left to their owner
 * or to a later flush; user space waits for that. */
static __always_inline void copy_run(struct slot *slot, struct thread *thread, u32 tid, struct flush_result *result)
{
	u32 live = *(volatile u32 *)&slot->live;
	u64 now_ns = bpf_ktime_get_ns();
	bool requesting = false;
	struct record *copy;

	if (!live || (!result->all && (now_ns <= slot->grown_ns + 4 * config.max_age_ns || slot->copied_ns == slot->run.t_ns)))
		return;
	if (thread)
		requesting = in_request(thread, tid, now_ns);
	copy = bpf_ringbuf_reserve(&ring, sizeof(*copy), 0);
	if (!copy) {
		if (result->all)
			lose(LOST_RING, 1);
		return;
	}
	__sync_lock_test_and_set(&slot->fence, 1);
	*copy = slot->run;
	if (thread)
		clip(thread, copy, requesting);
	__sync_lock_test_and_set(&slot->fence, 0);
	if (!copy->count || *(volatile u32 *)&slot->live != live) {
		bpf_ringbuf_discard(copy, BPF_RB_NO_WAKEUP);
		return;
	}
	if (!result->all) {
		copy->flags |= COPIED;
		slot->copied_ns = copy->t_ns;
	}
	bpf_ringbuf_submit(copy, BPF_RB_NO_WAKEUP);
}

static long flush_thread(void *map, u32 *tid, struct thread *thread, struct flush_result *result)
{
	result->live++;
	copy_run(&thread->slot, thread, *tid, result);
	return 0;
}

static long flush_cpu(void *map, u32 *cpu, struct slot *slot, struct flush_result *result)
{
	copy_run(slot, NULL, 0, result);
	return 0;
}

SEC("syscall")
int flush(struct flush_result *result)
{
	struct flush_result counts = { .all = result->all };

	bpf_for_each_map_elem(&threads, flush_thread, &counts, 0);
	bpf_for_each_map_elem(&evictions, flush_cpu, &counts, 0);
	*result = counts;
	return 0;
}

#endif
